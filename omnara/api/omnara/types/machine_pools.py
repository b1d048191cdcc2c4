"""Machine pools and projects' grants of them as the contract has them.

A number that may be null cannot carry its bounds in a type that msgspec checks, so those are checked by `in_bounds`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.machines import Env, MachineMetadata, SecretEnv, refuse_reserved
from omnara.api.omnara.types.scalars import (
    JSONObject,
    MachinePoolID,
    Metadata,
    NonEmpty,
    OrganizationID,
    ProjectID,
    ProjectMachinePoolGrantID,
    SecretID,
    Timestamp,
    Wire,
)
from omnara.api.types import Changes

LARGEST: Final = 2147483647
IDLE_MINUTES: Final = 5
"""The shortest idle time after which a machine may be deleted. Source: machines.md §12."""


def _bounds(minimum: int) -> dict[str, Any]:
    return {"format": "int32", "minimum": minimum, "maximum": LARGEST}


_INT32: Final = {"format": "int32"}
_OFF_OR_LONG: Final = {
    "oneOf": [{"const": 0}, {"type": "integer", "minimum": IDLE_MINUTES, "maximum": LARGEST}],
    **_INT32,
}
Size = Annotated[int, Meta(ge=1, le=LARGEST, extra_json_schema=_INT32)]
Cap = Annotated[int, Meta(ge=0, le=LARGEST, extra_json_schema=_INT32)]
Idle = Annotated[int, Meta(ge=IDLE_MINUTES, le=LARGEST, extra_json_schema=_INT32)]
IdleOrOff = Annotated[int, Meta(ge=0, le=LARGEST, extra_json_schema=_OFF_OR_LONG)]
SomeSize = Annotated[int | None, Meta(extra_json_schema=_bounds(1))]
SomeCap = Annotated[int | None, Meta(extra_json_schema=_bounds(0))]
SomeIdle = Annotated[int | None, Meta(extra_json_schema=_bounds(IDLE_MINUTES))]
SomeIdleOrOff = Annotated[int | None, Meta(extra_json_schema=_bounds(0))]
EnvOverlay = dict[str, str | None]
SecretEnvOverlay = dict[str, Annotated[str | None, Meta(extra_json_schema={"pattern": "^sec_[a-z2-7]{26}$"})]]
ManagementKind = Literal["tenant", "cluster"]

_MINIMA: Final = {
    "default_machine_cpu": 1,
    "default_machine_memory_mb": 1,
    "max_total_machines": 0,
    "max_total_cpu": 0,
    "max_total_memory_mb": 0,
    "min_machine_cpu": 0,
    "min_machine_memory_mb": 0,
    "max_machine_cpu": 1,
    "max_machine_memory_mb": 1,
    "delete_after_idle_minutes": 0,
}


def in_bounds(body: Any, *, idle_may_be_off: bool) -> None:
    """Refuse numbers outside of their bounds. Raises ValueError, which decoding turns into a refusal."""
    for field, minimum in _MINIMA.items():
        value = getattr(body, field)
        if isinstance(value, int) and not minimum <= value <= LARGEST:
            raise ValueError(f"{field} is out of range")
    minutes = body.delete_after_idle_minutes
    if isinstance(minutes, int) and minutes < IDLE_MINUTES and not (idle_may_be_off and minutes == 0):
        raise ValueError("delete_after_idle_minutes is out of range")


class NewSizes(Wire, frozen=True, kw_only=True):
    """Sizes and caps that a pool or a grant of one may state when it is made."""

    default_machine_cpu: Size | UnsetType = UNSET
    default_machine_memory_mb: Size | UnsetType = UNSET
    max_total_cpu: Cap | UnsetType = UNSET
    max_total_memory_mb: Cap | UnsetType = UNSET
    min_machine_cpu: Cap | UnsetType = UNSET
    min_machine_memory_mb: Cap | UnsetType = UNSET
    max_machine_cpu: Size | UnsetType = UNSET
    max_machine_memory_mb: Size | UnsetType = UNSET


class ChangedSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and caps that are to change; null takes one back."""

    default_machine_cpu: SomeSize | UnsetType = UNSET
    default_machine_memory_mb: SomeSize | UnsetType = UNSET
    max_total_cpu: SomeCap | UnsetType = UNSET
    max_total_memory_mb: SomeCap | UnsetType = UNSET
    min_machine_cpu: SomeCap | UnsetType = UNSET
    min_machine_memory_mb: SomeCap | UnsetType = UNSET
    max_machine_cpu: SomeSize | UnsetType = UNSET
    max_machine_memory_mb: SomeSize | UnsetType = UNSET


class Sizes(Wire, frozen=True, kw_only=True):
    """Sizes and caps as they are shown."""

    default_machine_cpu: SomeSize
    default_machine_memory_mb: SomeSize
    max_total_cpu: SomeCap
    max_total_memory_mb: SomeCap
    min_machine_cpu: SomeCap
    min_machine_memory_mb: SomeCap
    max_machine_cpu: SomeSize
    max_machine_memory_mb: SomeSize


class NewMachinePool(NewSizes, frozen=True, kw_only=True):
    """A new pool.

    The contract knows three providers in the cloud and asks each for a credential and sizes. Ours need neither, so
    what it requires of those alone is optional here.
    """

    name: NonEmpty
    description: str | UnsetType = UNSET
    provider: NonEmpty
    default_machine_env: Env | UnsetType = UNSET
    default_machine_secret_env: SecretEnv | UnsetType = UNSET
    default_machine_provider_options: JSONObject | UnsetType = UNSET
    default_cwd: str | UnsetType = UNSET
    provider_config: JSONObject | UnsetType = UNSET
    provider_auth_secret_id: SecretID | UnsetType = UNSET
    runtime_protection_enabled: bool = False
    max_total_machines: Cap
    delete_after_idle_minutes: Idle | UnsetType = UNSET
    metadata: MachineMetadata | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Refuse reserved metadata. Raises ValueError."""
        refuse_reserved(self.metadata)


class UpdateMachinePoolRequest(ChangedSizes, frozen=True, kw_only=True):
    """What is to change of a pool; the provider never does."""

    name: NonEmpty | UnsetType = UNSET
    description: str | UnsetType = UNSET
    default_machine_env: Env | UnsetType = UNSET
    default_machine_secret_env: SecretEnv | UnsetType = UNSET
    default_machine_provider_options: JSONObject | UnsetType = UNSET
    default_cwd: str | UnsetType = UNSET
    provider_config: JSONObject | UnsetType = UNSET
    provider_auth_secret_id: SecretID | UnsetType = UNSET
    runtime_protection_enabled: bool | UnsetType = UNSET
    max_total_machines: Cap | UnsetType = UNSET
    delete_after_idle_minutes: SomeIdle | UnsetType = UNSET
    metadata: MachineMetadata | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Refuse numbers outside of their bounds and reserved metadata. Raises ValueError."""
        in_bounds(self, idle_may_be_off=False)
        refuse_reserved(self.metadata)


class MachinePoolUsage(Wire, frozen=True, kw_only=True):
    """What the machines of a pool that are not deleted take up."""

    machines: Annotated[int, Meta(ge=0, extra_json_schema=_INT32)]
    cpu: Annotated[int, Meta(ge=0, extra_json_schema={"format": "int64"})]
    memory_mb: Annotated[int, Meta(ge=0, extra_json_schema={"format": "int64"})]


class MachinePool(Sizes, frozen=True, kw_only=True):
    """A pool."""

    id: MachinePoolID
    org_id: OrganizationID
    name: str
    management_kind: ManagementKind
    description: str
    provider: str
    default_machine_env: Env
    default_machine_secret_env: SecretEnv
    default_machine_provider_options: JSONObject
    default_cwd: str
    provider_auth_secret_id: SecretID | UnsetType = UNSET
    provider_config: JSONObject
    runtime_protection_enabled: bool
    max_total_machines: Cap
    delete_after_idle_minutes: SomeIdle
    metadata: Metadata
    created_at: Timestamp
    updated_at: Timestamp
    usage: MachinePoolUsage | UnsetType = UNSET


class ListMachinePoolsResponse(Wire, frozen=True, kw_only=True):
    """A page of pools."""

    data: list[MachinePool]
    next_cursor: str | None


class CreateProjectMachinePoolGrantRequest(NewSizes, frozen=True, kw_only=True):
    """Which pool a project is to use, and what is to differ from the pool."""

    machine_pool_id: MachinePoolID
    description: str | UnsetType = UNSET
    default_machine_env_overlay: EnvOverlay | UnsetType = UNSET
    default_machine_secret_env_overlay: SecretEnvOverlay | UnsetType = UNSET
    default_machine_provider_options_overlay: JSONObject | UnsetType = UNSET
    default_cwd: str | UnsetType = UNSET
    max_total_machines: Cap | UnsetType = UNSET
    delete_after_idle_minutes: IdleOrOff | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Refuse idle times between off and the shortest. Raises ValueError."""
        in_bounds(self, idle_may_be_off=True)


class UpdateProjectMachinePoolGrantRequest(ChangedSizes, Changes, frozen=True, kw_only=True):
    """What is to change of a grant; null leaves a matter to the pool again."""

    description: str | UnsetType = UNSET
    default_machine_env_overlay: EnvOverlay | UnsetType = UNSET
    default_machine_secret_env_overlay: SecretEnvOverlay | UnsetType = UNSET
    default_machine_provider_options_overlay: JSONObject | UnsetType = UNSET
    default_cwd: str | UnsetType = UNSET
    max_total_machines: SomeCap | UnsetType = UNSET
    delete_after_idle_minutes: SomeIdleOrOff | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Refuse numbers outside of their bounds and a body without any change. Raises ValueError."""
        in_bounds(self, idle_may_be_off=True)
        Changes.__post_init__(self)


class ProjectMachinePoolGrant(Sizes, frozen=True, kw_only=True):
    """A project's right to machines of a pool, and what differs from the pool."""

    id: ProjectMachinePoolGrantID
    org_id: OrganizationID
    project_id: ProjectID
    machine_pool_id: MachinePoolID
    description: str
    default_machine_env_overlay: EnvOverlay
    default_machine_secret_env_overlay: SecretEnvOverlay
    default_machine_provider_options_overlay: JSONObject
    default_cwd: str
    max_total_machines: SomeCap
    delete_after_idle_minutes: SomeIdleOrOff
    metadata: Metadata
    created_at: Timestamp
    updated_at: Timestamp


class MachinePoolSummary(Wire, frozen=True, kw_only=True):
    """A pool as a grant shows it."""

    id: MachinePoolID
    org_id: OrganizationID
    name: str
    management_kind: ManagementKind
    description: str
    provider: str
    created_at: Timestamp
    updated_at: Timestamp


class ProjectMachinePoolGrantListItem(Wire, frozen=True, kw_only=True):
    """A grant and its pool."""

    grant: ProjectMachinePoolGrant
    machine_pool: MachinePoolSummary


class ListProjectMachinePoolGrantsResponse(Wire, frozen=True, kw_only=True):
    """A page of grants."""

    data: list[ProjectMachinePoolGrantListItem]
    next_cursor: str | None
