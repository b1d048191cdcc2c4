"""What daemons and the server tell each other by HTTP, as the contract names it."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.scalars import JSONObject, MachineID, NonEmpty, OrganizationID, Timestamp, Wire

InstallationID = Annotated[str, Meta(pattern="^inst_[a-z2-7]{26}$")]
DaemonRuntimeID = Annotated[str, Meta(pattern="^drt_[a-z2-7]{26}$")]
ProcessID = Annotated[str, Meta(pattern="^prc_[a-z2-7]{26}$")]
ProcessActionID = Annotated[str, Meta(pattern="^pac_[a-z2-7]{26}$")]
Int64 = Annotated[int, Meta(extra_json_schema={"format": "int64"})]
ActionSeq = Annotated[int, Meta(ge=1, extra_json_schema={"format": "int64"})]
ResolvedSeq = Annotated[int, Meta(ge=0, extra_json_schema={"format": "int64"})]
Version = Annotated[str, Meta(max_length=100)]
FailureStage = Literal["startup_script", "daemon_install", "daemon_update", "daemon_uninstall", "daemon_uninstalled"]

FAILURE_BYTES = 4097
"""One more than is kept, so that a report that was cut can be told. Source: machines.md §2, §8."""


class BootstrapDaemonResponse(Wire, frozen=True, kw_only=True):
    """Whom a daemon's token stands for."""

    installation_id: InstallationID
    machine_id: MachineID


class ProcessActionReconciliationClaim(Wire, frozen=True, kw_only=True):
    """An action of which the machine has a mark."""

    process_action_id: ProcessActionID
    seq: ActionSeq
    action_kind: Literal["write", "interrupt", "terminate"]
    position: Literal["effect_committed", "terminal"]


class ProcessReconciliationClaim(Wire, frozen=True, kw_only=True):
    """A process of which the machine has anything."""

    process_id: ProcessID
    supervisor_instance_id: NonEmpty
    phase: Literal["preparing", "prepared", "accepted", "terminal"]
    supervisor_live: bool
    execution_committed: bool
    action_admission_closed: bool
    resolved_action_seq: ResolvedSeq
    actions: list[ProcessActionReconciliationClaim]


class RegisterDaemonRuntimeRequest(Wire, frozen=True, kw_only=True):
    """A runtime introduces itself."""

    daemon_instance_id: UUID
    daemon_version: NonEmpty
    processes: list[ProcessReconciliationClaim]
    capacity: JSONObject | UnsetType = UNSET
    observed_platform: JSONObject | UnsetType = UNSET


class ProcessActionReconciliationDirective(Wire, frozen=True, kw_only=True):
    """What is to become of an action."""

    process_action_id: ProcessActionID
    seq: ActionSeq
    action_kind: Literal["write", "read", "interrupt", "terminate"]
    disposition: Literal["apply", "retain", "settle", "release"]
    payload: Any | UnsetType = UNSET


class ProcessReconciliationDirective(Wire, frozen=True, kw_only=True):
    """What is to become of a claimed process."""

    process_id: ProcessID
    supervisor_instance_id: NonEmpty
    disposition: Literal["close_preparation", "start", "retain", "release"]
    actions: list[ProcessActionReconciliationDirective]


class DaemonRuntimeReconciliation(Wire, frozen=True, kw_only=True):
    """One directive for each claim."""

    processes: list[ProcessReconciliationDirective]


class DaemonRuntime(Wire, frozen=True, kw_only=True):
    """A runtime, as it stands."""

    id: DaemonRuntimeID
    org_id: OrganizationID
    machine_id: MachineID
    daemon_instance_id: UUID
    daemon_version: str
    state: Literal["active", "ended"]
    state_reason_code: str
    state_reason_message: str
    created_at: Timestamp
    last_seen_at: Timestamp
    lease_expires_at: Timestamp
    next_heartbeat_after_ms: Int64
    ended_at: Timestamp | None
    capacity: JSONObject


class RegisterDaemonRuntimeResponse(Wire, frozen=True, kw_only=True):
    """The answer to a registration."""

    runtime: DaemonRuntime
    reconciliation: DaemonRuntimeReconciliation


class FailureQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What failed on a machine. Source: machines.md §8."""

    stage: FailureStage
    exit_status: Annotated[int, Meta(ge=1, le=255)] | UnsetType = UNSET
    capture_status: Annotated[int, Meta(ge=0, le=255)] | UnsetType = UNSET
    daemon_version: Version | UnsetType = UNSET
    target_version: Version | UnsetType = UNSET
