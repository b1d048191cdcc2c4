"""Machines, their grants and their daemons' tokens as the contract has them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.scalars import (
    MachineDaemonTokenID,
    MachineID,
    MachinePoolID,
    Metadata,
    NonEmpty,
    OrganizationID,
    ProjectID,
    ProjectMachineGrantID,
    ProjectMachinePoolGrantID,
    SecretID,
    Timestamp,
    Wire,
)
from omnara.api.types import Changes

RESERVED_KEY = "observed_platform"
"""The pair of a machine's metadata that the server writes itself."""

MachineMetadata = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=15, extra_json_schema={"not": {"required": [RESERVED_KEY]}}),
]
MachineSourceKind = Literal["byo", "pool"]
MachineLifecycleState = Literal["provisioning", "provision_failed", "active", "deleting", "delete_failed", "deleted"]
MachineConnectionState = Literal["online", "asleep", "offline"]
ProjectMachineGrantSourceKind = Literal["explicit", "pool"]
MachineAccessSourceKind = Literal["org_role", "project_machine_grant"]
FailureStage = Literal["startup_script", "daemon_install", "daemon_update", "daemon_uninstall", "daemon_uninstalled"]
Env = dict[str, str]
SecretEnv = dict[str, SecretID]


def refuse_reserved(metadata: dict[str, str] | UnsetType) -> None:
    """Refuse a pair that the server writes itself. Raises ValueError, which decoding turns into a refusal."""
    if not isinstance(metadata, UnsetType) and RESERVED_KEY in metadata:
        raise ValueError(f"{RESERVED_KEY} is reserved")


class CreateMachineRequest(Wire, frozen=True, kw_only=True):
    """A machine that somebody will connect."""

    display_name: NonEmpty
    description: str | UnsetType = UNSET
    cwd: str | UnsetType = UNSET
    env: Env | UnsetType = UNSET
    secret_env: SecretEnv | UnsetType = UNSET
    metadata: MachineMetadata | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Refuse reserved metadata. Raises ValueError."""
        refuse_reserved(self.metadata)


class UpdateMachineRequest(Changes, frozen=True, kw_only=True):
    """What commands on a machine find from now on."""

    cwd: str | UnsetType = UNSET
    env: Env | UnsetType = UNSET
    secret_env: SecretEnv | UnsetType = UNSET


class ConnectBYOMachineRequest(Wire, frozen=True, kw_only=True):
    """A machine to connect at once, and the projects that may use it."""

    display_name: NonEmpty
    project_ids: Annotated[list[ProjectID], Meta(max_length=100, extra_json_schema={"uniqueItems": True})]

    def __post_init__(self) -> None:
        """Refuse a project that is named twice. Raises ValueError."""
        if len(set(self.project_ids)) != len(self.project_ids):
            raise ValueError("project_ids must be unique")


class MachineFailureReport(Wire, frozen=True, kw_only=True):
    """What a daemon reported last of its troubles."""

    stage: FailureStage
    exit_status: int | UnsetType = UNSET
    output_tail: str
    output_truncated: bool
    daemon_version: str | UnsetType = UNSET
    target_version: str | UnsetType = UNSET
    reported_at: Timestamp


class MachineSummary(Wire, frozen=True, kw_only=True):
    """A machine in lists."""

    id: MachineID
    org_id: OrganizationID
    source_kind: MachineSourceKind
    display_name: str
    description: str
    provider: str
    lifecycle_state: MachineLifecycleState
    connection_state: MachineConnectionState
    last_observed_at: Timestamp | None
    deleted_at: Timestamp | None
    created_at: Timestamp
    updated_at: Timestamp


class Machine(MachineSummary, frozen=True, kw_only=True):
    """A machine."""

    machine_pool_id: MachinePoolID | UnsetType | None = UNSET
    connection_state_reason: str | UnsetType = UNSET
    cwd: str
    env: Env
    secret_env: SecretEnv
    lifecycle_reason_code: str
    lifecycle_reason_message: str
    failure_report: MachineFailureReport | UnsetType = UNSET
    next_reconcile_after: Timestamp | None
    provision_attempts: Annotated[int, Meta(extra_json_schema={"format": "int32"})]
    delete_attempts: Annotated[int, Meta(extra_json_schema={"format": "int32"})]
    metadata: Metadata


class MachineAccessSource(Wire, frozen=True, kw_only=True):
    """One reason why the caller sees a machine."""

    kind: MachineAccessSourceKind
    project_id: ProjectID | UnsetType = UNSET
    grant_id: ProjectMachineGrantID | UnsetType = UNSET
    grant_source_kind: ProjectMachineGrantSourceKind | UnsetType = UNSET


class MachineAccess(Wire, frozen=True, kw_only=True):
    """What the caller may do with a machine, and why it sees it."""

    can_manage: bool
    sources: list[MachineAccessSource]


class VisibleMachine(MachineSummary, frozen=True, kw_only=True):
    """A machine that the caller sees."""

    access: MachineAccess


class ListVisibleMachinesResponse(Wire, frozen=True, kw_only=True):
    """A page of machines."""

    data: list[VisibleMachine]
    next_cursor: str | None


class ProjectMachineGrant(Wire, frozen=True, kw_only=True):
    """A project's right to use a machine."""

    id: ProjectMachineGrantID
    org_id: OrganizationID
    project_id: ProjectID
    machine_id: MachineID
    source_kind: ProjectMachineGrantSourceKind
    project_machine_pool_grant_id: ProjectMachinePoolGrantID | UnsetType | None = UNSET
    description: str
    metadata: Metadata
    created_at: Timestamp
    updated_at: Timestamp


class CreateProjectMachineGrantRequest(Wire, frozen=True, kw_only=True):
    """Which machine a project is to use."""

    machine_id: MachineID
    description: str | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET


class CreateProjectMachineGrantResponse(Wire, frozen=True, kw_only=True):
    """A grant with its machine."""

    grant: ProjectMachineGrant
    machine: Machine


class ProjectMachineGrantListItem(Wire, frozen=True, kw_only=True):
    """A grant in a list."""

    grant: ProjectMachineGrant
    machine: MachineSummary


class ListProjectMachineGrantsResponse(Wire, frozen=True, kw_only=True):
    """A page of grants."""

    data: list[ProjectMachineGrantListItem]
    next_cursor: str | None


class CreateMachineDaemonTokenRequest(Wire, frozen=True, kw_only=True):
    """What a new token is called."""

    name: str | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET


class MachineDaemonToken(Wire, frozen=True, kw_only=True):
    """A token without its text."""

    id: MachineDaemonTokenID
    org_id: OrganizationID
    machine_id: MachineID
    name: str
    metadata: Metadata
    created_at: Timestamp
    last_used_at: Timestamp | None
    revoked_at: Timestamp | None
    revoke_reason: str


class CreateMachineDaemonTokenResponse(Wire, frozen=True, kw_only=True):
    """A new token, shown this once."""

    token: NonEmpty
    token_record: MachineDaemonToken


class ListMachineDaemonTokensResponse(Wire, frozen=True, kw_only=True):
    """A page of tokens."""

    data: list[MachineDaemonToken]
    next_cursor: str | None


class ConnectBYOMachineResponse(Wire, frozen=True, kw_only=True):
    """A machine that a daemon can join, with its token and grants."""

    machine: Machine
    token: NonEmpty
    token_record: MachineDaemonToken
    project_grants: list[ProjectMachineGrant]
