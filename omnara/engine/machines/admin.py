"""Machines that people connect themselves: made, shown, changed and deleted.

Making one only makes its row: a daemon joins with a token of it (`daemon_tokens`). Machines of pools are made for
agents and end with their pool; here they are shown, and what commands find on them is changed.
Source: api.md §3, §8; machines.md §8; contract (createMachine, connectBYOMachine, deleteMachine).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import OrgAction, ProjectAction, ProjectScope
from omnara.access.tokens import BearerToken
from omnara.db import machine_grants, machines, orgs
from omnara.db.connection import Connection
from omnara.db.daemon_tokens import DaemonTokenRow
from omnara.db.listing import ListOrder
from omnara.db.machine_grants import MachineGrantRow, NewMachineGrant
from omnara.db.machines import Access, MachineRow, MachineScope, MachineSummaryRow, NewMachine
from omnara.engine.deps import Deps
from omnara.engine.machines.access import SeenMachine, locked, manages, projects_of, seen
from omnara.engine.machines.daemon_tokens import add_token
from omnara.engine.machines.environment import (
    check_env,
    checked_cwd,
    checked_description,
    keep_secrets,
    stored_env,
    stored_metadata,
    stored_secret_env,
)
from omnara.engine.naming import checked_name
from omnara.engine.scope import org_in_scope, project_in_scope
from omnara.errors import Conflict, NotFound
from omnara.ids import new_uuid

MAX_MACHINES: Final = 10_000
"""Connected by one organization. Source: api.md §8 (resource caps)."""


class MachineFields(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody says of a new machine."""

    display_name: str
    description: str = ""
    cwd: str = ""
    env: Mapping[str, str] = {}
    secret_env: Mapping[str, UUID] = {}
    metadata: Mapping[str, str] = {}


class CreatedMachine(msgspec.Struct, frozen=True):
    """A machine; not `created` when the key had made it before."""

    created: bool
    row: MachineRow


class ConnectedMachine(msgspec.Struct, frozen=True):
    """A new machine that a daemon can join with `token`, which is shown this once."""

    row: MachineRow
    token: BearerToken
    token_row: DaemonTokenRow
    grants: Sequence[MachineGrantRow]


class ListedMachine(msgspec.Struct, frozen=True):
    """A machine with what the caller may do and through which grants it sees it."""

    row: MachineSummaryRow
    can_manage: bool
    grants: Sequence[Access]


async def create_machine(
    deps: Deps, p: Principal, org_id: UUID, fields: MachineFields, key: str | None
) -> CreatedMachine:
    """Make a machine. Own transaction; a used key returns what it made, whatever it asks for now.

    Raises NotFound, Forbidden, InvalidRequest, Conflict at the cap.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    new = _checked(org_id, fields, key)

    async def work(connection: Connection) -> CreatedMachine:
        made = None if key is None else await machines.by_key(connection, org_id, key)
        if made is None:
            await keep_secrets(connection, org_id, fields.secret_env.values())
            if await _insert(connection, new):
                return CreatedMachine(True, await _read(connection, org_id, new.id))
            made = await machines.by_key(connection, org_id, key or "")
            assert made is not None, "another request used the key meanwhile"
        return CreatedMachine(False, await _read(connection, org_id, made))

    return await deps.db.run(work)


async def connect_machine(
    deps: Deps, p: Principal, org_id: UUID, display_name: str, project_ids: Sequence[UUID]
) -> ConnectedMachine:
    """Make a machine, a token for its daemon, and grants for some projects. Own transaction.

    Raises NotFound (also for a project that the caller does not see), Forbidden, InvalidRequest, Conflict at the cap.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    for project_id in project_ids:
        project_in_scope(p, ProjectScope(org_id, project_id), ProjectAction.ACCESS)
    new = _checked(org_id, MachineFields(display_name=display_name), None)

    async def work(connection: Connection) -> ConnectedMachine:
        await _insert(connection, new)
        token, token_row = await add_token(connection, org_id, new.id, new.display_name, {})
        grants = [await _grant(connection, org_id, project_id, new.id) for project_id in project_ids]
        return ConnectedMachine(await _read(connection, org_id, new.id), token, token_row, grants)

    return await deps.db.run(work)


async def get_machine(deps: Deps, p: Principal, org_id: UUID, machine_id: UUID) -> SeenMachine:
    """Return a machine that the caller sees. Raises NotFound."""
    async with deps.db.acquire() as connection:
        return await seen(connection, p, org_id, machine_id)


async def list_machines(
    deps: Deps, p: Principal, org_id: UUID, source_kind: str | None, order: ListOrder
) -> list[tuple[str, ListedMachine]]:
    """Return the machines that the caller sees, with sort values; one more than the page when there are more."""
    org_in_scope(p, org_id, OrgAction.READ)
    scope = MachineScope(
        org_id=org_id, whole_org=manages(p, org_id), project_ids=projects_of(p, org_id), source_kind=source_kind
    )
    return await _listed(deps, scope, order)


async def list_project_machines(
    deps: Deps, p: Principal, project: ProjectScope, source_kind: str | None, order: ListOrder
) -> list[tuple[str, ListedMachine]]:
    """Return the machines that a project may use, with sort values; one more than the page when there are more."""
    project_in_scope(p, project, ProjectAction.READ)
    scope = MachineScope(
        org_id=project.org_id,
        whole_org=manages(p, project.org_id),
        project_ids=[project.project_id],
        source_kind=source_kind,
        granted_only=True,
    )
    return await _listed(deps, scope, order)


async def update_machine(
    deps: Deps,
    p: Principal,
    org_id: UUID,
    machine_id: UUID,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    secret_env: Mapping[str, UUID] | None = None,
) -> MachineRow:
    """Change what commands find from now on; None leaves a part as it is. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest.
    """

    async def work(connection: Connection) -> MachineRow:
        row = await locked(connection, p, org_id, machine_id)
        stated = {} if secret_env is None else secret_env
        old_env = msgspec.json.decode(row.env, type=dict[str, str])
        old_secrets = msgspec.json.decode(row.secret_env, type=dict[str, UUID])
        check_env(old_env if env is None else env, old_secrets if secret_env is None else secret_env)
        await keep_secrets(connection, org_id, stated.values())
        await machines.change(
            connection,
            machine_id,
            None if cwd is None else checked_cwd(cwd),
            None if env is None else stored_env(env),
            None if secret_env is None else stored_secret_env(secret_env),
        )
        return await _read(connection, org_id, machine_id)

    return await deps.db.run(work)


def _checked(org_id: UUID, fields: MachineFields, key: str | None) -> NewMachine:
    check_env(fields.env, fields.secret_env)
    return NewMachine(
        id=new_uuid(),
        org_id=org_id,
        display_name=checked_name(fields.display_name, field="display_name"),
        description=checked_description(fields.description),
        cwd=checked_cwd(fields.cwd),
        env=stored_env(fields.env),
        secret_env=stored_secret_env(fields.secret_env),
        metadata=stored_metadata(fields.metadata),
        idempotency_key=key,
    )


async def _insert(connection: Connection, new: NewMachine) -> bool:
    if await machines.count(connection, new.org_id) >= MAX_MACHINES:
        raise Conflict(f"an organization may have {MAX_MACHINES} machines")
    return await machines.add(connection, new)


async def _grant(connection: Connection, org_id: UUID, project_id: UUID, machine_id: UUID) -> MachineGrantRow:
    if await orgs.project_of_org(connection, org_id, project_id) is None:
        raise NotFound("project")
    new = NewMachineGrant(id=new_uuid(), org_id=org_id, project_id=project_id, machine_id=machine_id)
    await machine_grants.add(connection, new)
    row = await machine_grants.find(connection, project_id, grant_id=new.id)
    assert row is not None, "nobody else knows the machine yet"
    return row


async def _listed(deps: Deps, scope: MachineScope, order: ListOrder) -> list[tuple[str, ListedMachine]]:
    async with deps.db.acquire() as connection:
        rows = await machines.list_visible(connection, scope, order)
    return [(key, ListedMachine(row, scope.whole_org, grants)) for key, row, grants in rows]


async def _read(connection: Connection, org_id: UUID, machine_id: UUID) -> MachineRow:
    row = await machines.find(connection, org_id, machine_id)
    assert row is not None, "it was written in this transaction, or its row is locked"
    return row
