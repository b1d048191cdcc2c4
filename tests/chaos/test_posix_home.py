"""Commands on this computer while everything around them is killed at random."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from omnara.machines.processes import HomeLost, ProcessSpec
from tests.support.posix_home import HomeOfTest, kill, posix_home

WORKERS, EACH = 6, 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_no_command_runs_twice_and_none_stays_without_an_end(tmp_path: Path, seed: int) -> None:
    """Keepers, waiting ones among them, and fork servers die all the time. What is said to have exited has run."""
    chance = random.Random(seed)
    async with posix_home(tmp_path / "home") as home:
        killing = asyncio.create_task(_kill_at_random(home, chance))
        try:
            ended = [end for ends in await asyncio.gather(*(_work(home, n) for n in range(WORKERS))) for end in ends]
        finally:
            killing.cancel()
        kills = await asyncio.gather(killing, return_exceptions=True)
        assert isinstance(kills[0], asyncio.CancelledError), kills
    ran = (tmp_path / "ran").read_text().split()
    assert len(ran) == len(set(ran)), "a command ran twice"
    assert len(ended) == WORKERS * EACH
    exited = {process_id for process_id, state in ended if state == "exited"}
    assert exited <= set(ran)
    assert {state for _, state in ended} <= {"exited", "unknown", "failed"}
    assert len(exited) > WORKERS, "the killing left nothing to see"


async def _work(home: HomeOfTest, number: int) -> list[tuple[str, str]]:
    ends = []
    for turn in range(EACH):
        process_id = f"prc_{number}_{turn}"
        await home.home.prepare(
            ProcessSpec(process_id=process_id, command=f"echo {process_id} >> ran; sleep 0.0{turn % 3}")
        )
        while True:
            try:
                await home.home.execute(process_id, 0)
                break
            except HomeLost:
                continue
        record = await home.ended(process_id, 30)
        assert record.exit is not None
        ends.append((process_id, record.exit.state))
    return ends


async def _kill_at_random(home: HomeOfTest, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(chance.uniform(0.0, 0.1))
        servers = await asyncio.to_thread(_processes_of, home)
        if servers:
            kill(chance.choice(servers))


def _processes_of(home: HomeOfTest) -> list[int]:
    """The fork server and all that it forked for this home: those that wait, and keepers."""
    first = home.launcher.pid
    found = [] if first is None else [first]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            here = os.readlink(entry / "cwd").startswith(str(home.root))
        except (OSError, ValueError):
            continue
        if here or parent == first:
            found.append(int(entry.name))
    return found
