"""Which machine a call means, and what a command's environment is made of."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.db.bindings import BoundMachine
from omnara.engine.machines.targets import choose, connection_of, environment, overlaid, unreachable
from omnara.ids import IdKind, encode
from omnara.tools.protocol import ToolResult


def bound(number: int = 1, **changes: Any) -> BoundMachine:
    machine = BoundMachine(
        binding_id=UUID(int=100 + number),
        machine_id=UUID(int=number),
        machine_ref=f"ref{number}",
        binding_kind="explicit",
        source_key="",
        description="",
        cwd="",
        env_overlay="{}",
        secret_env_overlay="{}",
        display_name="box",
        machine_description="",
        provider="byo",
        machine_cwd="",
        env="{}",
        secret_env="{}",
        observed_platform=None,
        cpu=None,
        memory_mb=None,
        lifecycle_state="active",
        reason_code="",
        reason_message="",
        failure_report=None,
        pool_id=None,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        asleep=False,
        offline_s=None,
        served_s=3600.0,
        bound_at=datetime(2026, 1, 1, tzinfo=UTC),
        seen=True,
        granted=True,
    )
    return msgspec.structs.replace(machine, **changes)


def code(found: BoundMachine | ToolResult) -> str | int:
    return found.error_code or "" if isinstance(found, ToolResult) else found.machine_id.int


@pytest.mark.parametrize(
    ("machines", "tool_input", "expected"),
    [
        ([], {}, "no_active_agent_machine_binding"),
        ([bound(1)], {}, 1),
        ([bound(1), bound(2)], {}, "machine_selection_required"),
        ([bound(1), bound(2, lifecycle_state="deleting")], {}, 1),
        ([bound(1), bound(2, granted=False)], {}, 1),
        ([bound(1), bound(2)], {"machine_ref": "ref2"}, 2),
        ([bound(1), bound(2)], {"machine_id": encode(IdKind.MACHINE, UUID(int=2))}, 2),
        ([bound(1), bound(2)], {"machine_ref": encode(IdKind.MACHINE, UUID(int=2))}, 2),
        ([bound(1), bound(2)], {"machine_id": "ref1", "machine_ref": "ref2"}, "machine_ref_unavailable"),
        ([bound(1, lifecycle_state="deleted")], {"machine_ref": "ref1"}, "machine_ref_unavailable"),
        ([bound(1, lifecycle_state="provisioning")], {}, 1),
    ],
)
def test_the_choice(machines: list[BoundMachine], tool_input: dict[str, str], expected: str | int) -> None:
    assert code(choose(machines, tool_input)) == expected


@pytest.mark.parametrize(
    ("machine", "away", "connection"),
    [
        (bound(), False, "online"),
        (bound(asleep=True), False, "asleep"),
        (bound(offline_s=29.0), False, "offline"),
        (bound(offline_s=31.0), True, "offline"),
        (bound(offline_s=900.0, served_s=29.0), False, "offline"),
        (bound(offline_s=900.0, lifecycle_state="provisioning"), False, "offline"),
        (bound(offline_s=900.0, binding_kind="pool", seen=False), False, "offline"),
        (bound(offline_s=900.0, binding_kind="pool"), True, "offline"),
        (bound(offline_s=900.0, seen=False), True, "offline"),
    ],
)
def test_who_is_out_of_reach(machine: BoundMachine, away: bool, connection: str) -> None:
    assert (unreachable(machine, 30.0) is not None) is away
    assert connection_of(machine) == connection


def test_layers_of_an_environment() -> None:
    pool = ({"A": "1", "Path": "/bin"}, {"KEY": "s1", "OTHER": "s2"})
    grant = ({"key": "plain", "PATH": "/usr/bin"}, {"a": "s3"})
    agent = ({"OTHER": None}, {"A": None})
    assert overlaid(pool, grant) == ({"key": "plain", "PATH": "/usr/bin"}, {"OTHER": "s2", "a": "s3"})
    assert overlaid(pool, grant, agent) == ({"key": "plain", "PATH": "/usr/bin"}, {})
    machine = bound(env='{"A":"1","B":"2"}', secret_env='{"K":"s"}', env_overlay='{"K":"x","B":null}')
    assert environment(machine) == ('{"A":"1","K":"x"}', "{}")
