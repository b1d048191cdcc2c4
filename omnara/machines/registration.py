"""The JSON bodies by which a machine's runtime introduces itself: what it claims to have, and what it is to do with it.

They travel by HTTP for a daemon and as values inside one process for a pool machine, so both sides share these types.
Source: machines.md §2 (bodies), §5 (claims and directives).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

__all__ = [
    "MAX_BODY_BYTES",
    "ActionClaim",
    "ActionDirective",
    "BootstrapResponse",
    "Platform",
    "ProcessClaim",
    "ProcessDirective",
    "Reconciliation",
    "RegisterRequest",
    "RegisterResponse",
    "RuntimeBody",
    "Seq",
]

MAX_BODY_BYTES: Final = 1_048_576
"""Largest body of a registration and of its answer. Source: machines.md §2."""

Seq = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """Operating system and processor as a daemon sees them, such as `linux` and `amd64`."""

    os: str = ""
    arch: str = ""


class ActionClaim(msgspec.Struct, frozen=True, kw_only=True):
    """An action with an effect of which the machine has a mark: begun, or begun and over (`terminal`)."""

    process_action_id: str
    seq: Seq
    action_kind: Literal["write", "interrupt", "terminate"]
    position: Literal["effect_committed", "terminal"]


class ProcessClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A process of which the machine has anything. `actions` are those above `resolved_action_seq`."""

    process_id: str
    supervisor_instance_id: Annotated[str, msgspec.Meta(min_length=1)]
    phase: Literal["preparing", "prepared", "accepted", "terminal"]
    supervisor_live: bool
    execution_committed: bool
    action_admission_closed: bool
    resolved_action_seq: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    actions: Sequence[ActionClaim] = ()


class ActionDirective(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to become of one action; `payload` is there when it is to be applied now, otherwise empty."""

    process_action_id: str
    seq: Seq
    action_kind: Literal["write", "read", "interrupt", "terminate"]
    disposition: Literal["apply", "retain", "settle", "release"]
    payload: msgspec.Raw = msgspec.Raw()


class ProcessDirective(msgspec.Struct, frozen=True, kw_only=True):
    """What is to become of one claimed process; names the claim's supervisor, so that a newer launch is never meant."""

    process_id: str
    supervisor_instance_id: Annotated[str, msgspec.Meta(min_length=1)]
    disposition: Literal["close_preparation", "start", "retain", "release"]
    actions: Sequence[ActionDirective] = ()


class RegisterRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /runtimes`: a runtime says who it is and claims every process it has anything of."""

    daemon_instance_id: str
    daemon_version: Annotated[str, msgspec.Meta(min_length=1)]
    processes: Sequence[ProcessClaim]
    observed_platform: Platform | None = None
    capacity: Mapping[str, Any] | None = None


class RuntimeBody(msgspec.Struct, frozen=True, kw_only=True):
    """A runtime as the server tells it. A daemon needs `id` and `next_heartbeat_after_ms`; the rest may be missing."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    next_heartbeat_after_ms: Annotated[int, msgspec.Meta(gt=0)]
    org_id: str = ""
    machine_id: str = ""
    daemon_instance_id: str = ""
    daemon_version: str = ""
    state: str = "active"
    state_reason_code: str = ""
    state_reason_message: str = ""
    created_at: str = ""
    last_seen_at: str = ""
    lease_expires_at: str = ""
    ended_at: str | None = None
    capacity: Mapping[str, Any] = {}


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one directive for each claim."""

    processes: Sequence[ProcessDirective] = ()


class RegisterResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a registration."""

    runtime: RuntimeBody
    reconciliation: Reconciliation


class BootstrapResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /bootstrap`: which machine of which installation a token stands for."""

    installation_id: Annotated[str, msgspec.Meta(min_length=1)]
    machine_id: Annotated[str, msgspec.Meta(min_length=1)]
