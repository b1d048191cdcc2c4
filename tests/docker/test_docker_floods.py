"""Twenty floods in one container: each ends at its own time limit, and a command among them is answered meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.docker_engine import Box

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLOODS = (
    "yes",
    "cat /dev/zero",
    "yes 'a line of some length' >&2",
    "while :; do echo a; done",
    "head -c 3G /dev/zero; sleep 600",
)
LIMIT_S = 10


async def test_time_limits_fire_under_twenty_floods(machine: Box) -> None:
    began = time.monotonic()
    floods = [await machine.start(command, 0.0, timeout_seconds=LIMIT_S) for command in FLOODS * 4]
    _, output = await machine.run("echo here")
    assert output == "here\n"
    assert time.monotonic() - began < LIMIT_S + 10
    ended = await asyncio.gather(*(machine.end(flood.process_id, 60) for flood in floods))
    assert {(one.exit.state, one.exit.reason_code) for one in ended if one.exit} == {("failed", "timeout")}
    assert time.monotonic() - began < LIMIT_S + 40
    _, left = await machine.run("ps -o args | grep -c -E '^(yes|cat|head)' || true")
    assert left.strip() == "0"
    _, used = await machine.run("du -sm /home/.omnara | cut -f1")
    assert int(used) < len(floods) * 140
