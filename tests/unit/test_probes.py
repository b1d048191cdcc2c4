"""Probes: tests wait for points; nobody listening costs nothing; a process writes lines to a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from uuid import UUID

import pytest

from omnara import probes


async def test_an_expectation_sees_points_from_its_start_on() -> None:
    probes.hit("saved", agent="a")
    with probes.expect("saved", agent="a") as saved:
        probes.hit("saved", agent="b")
        probes.hit("other", agent="a")
        asyncio.get_running_loop().call_soon(lambda: probes.hit("saved", agent="a", step=7))
        point = await saved.wait(within_s=20)
        assert point.fields["step"] == 7
    probes.hit("saved", agent="a")
    assert len(saved.points) == 1


async def test_what_does_not_happen_is_named() -> None:
    with probes.expect("never") as never, pytest.raises(TimeoutError, match=r"never.*0 of 2"):
        await never.wait(2, within_s=0.01)


def test_points_are_lines_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "probes"
    with probes.to_file(path):
        probes.hit("saved", agent=UUID(int=5), step=1)
        probes.hit("claimed")
    probes.hit("later")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"point": "saved", "agent": str(UUID(int=5)), "step": 1}, {"point": "claimed"}]
