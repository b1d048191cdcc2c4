"""Which machine a tool means, whether it can be reached, and what a command finds in its environment there.

Source: engine.md §7 (machine choice); machines.md §4 (which machines take work), §7 (environment), §8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from omnara.db.bindings import BoundMachine
from omnara.ids import IdKind, encode
from omnara.tools.protocol import ToolResult, failed

__all__ = ["choose", "connection_of", "environment", "overlaid", "unreachable", "usable"]

LIVE_STATES: Final = ("provisioning", "provision_failed", "active")
"""Lifecycle states in which a machine may be given work. One that is being made takes it when it is ready."""


def usable(machine: BoundMachine) -> bool:
    """Whether work may be queued for it: not being deleted, and still granted to the agent's project."""
    return machine.granted and machine.lifecycle_state in LIVE_STATES


def choose(machines: Sequence[BoundMachine], tool_input: dict[str, Any]) -> BoundMachine | ToolResult:
    """Return the machine that a call means, or the result that says why there is none. Source: engine.md §7."""
    ref, public_id = tool_input.get("machine_ref"), tool_input.get("machine_id")
    candidates = [machine for machine in machines if usable(machine)]
    refs = [machine.machine_ref for machine in candidates]
    if ref is None and public_id is None:
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            return failed("Say which machine: there are several.", "machine_selection_required", machine_refs=refs)
        return failed("There is no machine to do this on.", "no_active_agent_machine_binding")
    for machine in candidates:
        # A model that is told both names may give either in the place of the other.
        names = (machine.machine_ref, encode(IdKind.MACHINE, machine.machine_id))
        if (ref is None or ref in names) and (public_id is None or public_id in names):
            return machine
    return failed("You have no such machine, or it is gone.", "machine_ref_unavailable", machine_refs=refs)


def connection_of(machine: BoundMachine) -> str:
    """online, asleep or offline. Source: machines.md §8."""
    if machine.lifecycle_state != "active":
        return "offline"
    return "asleep" if machine.asleep else "online" if machine.offline_s is None else "offline"


def unreachable(machine: BoundMachine, grace_s: float) -> ToolResult | None:
    """The result of a call for a machine that has been away for longer than work would wait for it; else None.

    A machine that is still being made, or was just made, is waited for. So is every machine after an outage of ours: it
    has not been away for as long as nobody could hear it.
    """
    if machine.lifecycle_state != "active" or machine.offline_s is None:
        return None
    if min(machine.offline_s, machine.served_s) <= grace_s:
        return None
    if machine.binding_kind == "pool" and not machine.seen:
        return None
    return failed(
        "The machine cannot be reached now. Try again later, or use another one.",
        "machine_unreachable",
        retryable=True,
        machine_ref=machine.machine_ref,
        offline_for_s=round(machine.offline_s),
    )


def environment(machine: BoundMachine) -> tuple[str, str]:
    """Return variables and secrets (names to UUIDs) of a command, as JSON text: the machine's under the binding's.

    A snapshot: later changes concern later commands. Source: machines.md §7.
    """
    env, secret_env = overlaid(
        (_object(machine.env), _object(machine.secret_env)),
        (_object(machine.env_overlay), _object(machine.secret_env_overlay)),
    )
    return msgspec.json.encode(env).decode(), msgspec.json.encode(secret_env).decode()


Layer = tuple[dict[str, Any], dict[str, Any]]


def overlaid(*layers: Layer) -> Layer:
    """Put layers of (variables, secrets) over each other.

    A name of a later layer, in any case, replaces the earlier one of either kind; null removes it. Source: machines.md
    §7 (null removes; names are unique ignoring case).
    """
    env: dict[str, Any] = {}
    secret_env: dict[str, Any] = {}
    for variables, secrets in layers:
        named = {name.upper() for name in (*variables, *secrets)}
        env = {name: value for name, value in env.items() if name.upper() not in named}
        secret_env = {name: value for name, value in secret_env.items() if name.upper() not in named}
        env |= {name: value for name, value in variables.items() if value is not None}
        secret_env |= {name: value for name, value in secrets.items() if value is not None}
    return env, secret_env


def _object(text: str) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.json.decode(text)
    return value
