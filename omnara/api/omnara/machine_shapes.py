"""Machines, their grants and tokens as clients see them, made from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import UNSET

from omnara.api.omnara.decode import id_in_body
from omnara.api.omnara.encode import public, raw
from omnara.api.omnara.types.machines import (
    RESERVED_KEY,
    Machine,
    MachineAccessSource,
    MachineDaemonToken,
    MachineSummary,
    ProjectMachineGrant,
)
from omnara.db.daemon_tokens import DaemonTokenRow
from omnara.db.machine_grants import MachineGrantRow
from omnara.db.machines import Access, MachineRow, MachineSummaryRow
from omnara.ids import IdKind, encode

_MAX_PAIRS: Final = 16
"""Source: contract (Metadata)."""
_DIRECTORY: Final = "directory"
_ADDRESS: Final = "ip_address"
"""What providers write into the metadata of a machine's row."""


def secret_ids(env: Mapping[str, str]) -> dict[str, UUID]:
    """The secrets that an environment names."""
    return {name: id_in_body(IdKind.SECRET, text) for name, text in env.items()}


def public_secret_ids(stored: str) -> dict[str, Any]:
    """The secrets of a stored environment or overlay, as clients know them."""
    found = msgspec.json.decode(stored, type=dict[str, UUID | None])
    return {name: None if value is None else encode(IdKind.SECRET, value) for name, value in found.items()}


def machine(row: MachineRow) -> Machine:
    """A machine."""
    return Machine(
        **summary_fields(row),
        machine_pool_id=public(IdKind.MACHINE_POOL, row.pool_id),
        connection_state_reason=row.connection_reason or UNSET,
        cwd=row.cwd,
        env=raw(row.env),
        secret_env=public_secret_ids(row.secret_env),
        lifecycle_reason_code=row.lifecycle_reason_code,
        lifecycle_reason_message=row.lifecycle_reason_message,
        failure_report=UNSET if row.failure_report is None else raw(row.failure_report),
        next_reconcile_after=row.next_reconcile_after,
        provision_attempts=row.provision_attempts,
        delete_attempts=row.delete_attempts,
        metadata=_metadata(row),
    )


def _metadata(row: MachineRow) -> dict[str, str]:
    """What people said, what the place of a pool machine adds where there is room, and what the daemon told of itself.

    Where on the server's own disk a machine is, is nobody's business.
    """
    found = msgspec.json.decode(row.metadata, type=dict[str, str])
    if row.pool_id is not None:
        found.pop(_DIRECTORY, None)
        if len(found) >= _MAX_PAIRS:
            found.pop(_ADDRESS, None)
    if row.observed_platform:
        found[RESERVED_KEY] = row.observed_platform
    return found


def machine_summary(row: MachineSummaryRow) -> MachineSummary:
    """A machine in a list."""
    return MachineSummary(**summary_fields(row))


def machine_grant(row: MachineGrantRow) -> ProjectMachineGrant:
    """A project's right to use a machine."""
    source_kind: Any = row.source_kind
    return ProjectMachineGrant(
        id=encode(IdKind.MACHINE_GRANT, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        project_id=encode(IdKind.PROJECT, row.project_id),
        machine_id=encode(IdKind.MACHINE, row.machine_id),
        source_kind=source_kind,
        project_machine_pool_grant_id=public(IdKind.POOL_GRANT, row.pool_grant_id),
        description=row.description,
        metadata=raw(row.metadata),
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def token_record(row: DaemonTokenRow) -> MachineDaemonToken:
    """A token without its text."""
    return MachineDaemonToken(
        id=encode(IdKind.DAEMON_TOKEN, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        machine_id=encode(IdKind.MACHINE, row.machine_id),
        name=row.name,
        metadata=raw(row.metadata),
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
        revoke_reason=row.revoke_reason,
    )


def summary_fields(row: MachineSummaryRow) -> dict[str, Any]:
    """What every shape of a machine has."""
    return {
        "id": encode(IdKind.MACHINE, row.id),
        "org_id": encode(IdKind.ORG, row.org_id),
        "source_kind": row.source_kind,
        "display_name": row.display_name,
        "description": row.description,
        "provider": row.provider,
        "lifecycle_state": row.lifecycle_state,
        "connection_state": row.connection_state,
        "last_observed_at": row.last_observed_at,
        "deleted_at": row.deleted_at,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
    }


def access_sources(grants: Sequence[Access], can_manage: bool) -> list[MachineAccessSource]:
    """Why a caller sees a machine."""
    found = [MachineAccessSource(kind="org_role")] if can_manage else []
    for grant in grants:
        source_kind: Any = grant.source_kind
        found.append(
            MachineAccessSource(
                kind="project_machine_grant",
                project_id=encode(IdKind.PROJECT, grant.project_id),
                grant_id=encode(IdKind.MACHINE_GRANT, grant.grant_id),
                grant_source_kind=source_kind,
            )
        )
    return found
