"""Keepers that wait for the word to begin: they have done nothing, hold nothing, and go when they should."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from omnara.machines.processes import ProcessSpec
from tests.support.posix_home import HomeOfTest, alive, kill, posix_home
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")

BOTH = 2
"""A keeper, and the process that will be the command."""
MOST = 16


@pytest_asyncio.fixture
async def home(tmp_path: Path) -> AsyncIterator[HomeOfTest]:
    async with posix_home(tmp_path / "home") as found:
        yield found


def there(directory: Path) -> list[int]:
    """Who works in a directory, or below it: what waits for a command does in that command's."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            where = os.readlink(f"/proc/{name}/cwd").removesuffix(" (deleted)")
        except OSError:
            continue
        if Path(where).is_relative_to(directory) and alive(int(name)):
            found.append(int(name))
    return sorted(found)


async def prepared(home: HomeOfTest, process_id: str = "prc_1", command: str = "echo ran >> ran") -> Path:
    """Prepare a command and wait until all that can be ready is."""
    await home.home.prepare(ProcessSpec(process_id=process_id, command=command))
    directory = home.directory(process_id)
    await until(lambda: len(there(directory)) == BOTH, "keeper and child wait")
    return directory


async def once(home: HomeOfTest) -> None:
    """What was prepared runs, once."""
    assert (await home.home.execute("prc_1", 10)).execution_committed
    ended = await home.ended("prc_1")
    assert ended.exit is not None
    assert ended.exit.exit_code == 0
    assert (home.work / "ran").read_text() == "ran\n"


async def test_what_waits_has_done_nothing_and_is_used(home: HomeOfTest) -> None:
    directory = await prepared(home)
    [record] = await home.home.processes()
    assert (record.execution_committed, record.exit) == (False, None)
    waiting = there(directory)
    await home.home.execute("prc_1", 0)
    leader = await home.leader("prc_1")
    assert leader in waiting
    await once(home)
    await until(lambda: not there(home.root), "nobody stays")


async def test_a_home_that_is_closed_leaves_nobody_waiting(home: HomeOfTest) -> None:
    directory = await prepared(home)
    await home.home.close()
    await until(lambda: not there(directory), "keeper and child are gone")
    assert sorted(os.listdir(directory)) == ["launch.json", "process"]
    await once(home)


@pytest.mark.parametrize("end", ["forget", "stop"])
async def test_what_will_not_be_executed_is_not_waited_for(home: HomeOfTest, end: str) -> None:
    await prepared(home)
    if end == "forget":
        await home.home.forget("prc_1")
    else:
        await home.home.stop("prc_1", "server_resolved")
    await until(lambda: not there(home.root), "keeper and child are gone")
    assert not (home.work / "ran").exists()


async def test_two_openers_have_keepers_ready_and_one_runs(home: HomeOfTest) -> None:
    directory = await prepared(home)
    other = home.opened()
    await other.prepare(ProcessSpec(process_id="prc_1", command="not looked at"))
    await until(lambda: len(there(directory)) == 2 * BOTH, "two of each wait")
    records = await asyncio.gather(home.home.execute("prc_1", 10), other.execute("prc_1", 10))
    assert all(record.execution_committed for record in records)
    await once(home)
    await until(lambda: not there(home.root), "the other two are gone")
    await other.close()


async def test_whoever_waits_behind_a_frozen_opener_holds_up_nobody(home: HomeOfTest) -> None:
    """The first opener neither says the word nor goes: nothing of its is held, so another one is not kept waiting."""
    directory = await prepared(home)
    other = home.opened()
    record = await other.execute("prc_1", 10)
    assert record.execution_committed
    await once(home)
    await home.home.forget("prc_1")
    await until(lambda: not there(directory), "all are gone")
    await other.close()


@pytest.mark.parametrize("which", ["keeper", "child"])
async def test_what_is_killed_while_it_waits_is_replaced(home: HomeOfTest, which: str) -> None:
    directory = await prepared(home)
    keeper, child = there(directory)
    kill(keeper if which == "keeper" else child)
    gone = BOTH if which == "keeper" else 1
    await until(lambda: len(there(directory)) == BOTH - gone, "it is gone, a keeper with its child")
    assert sorted(os.listdir(directory)) == ["launch.json", "process"]
    await once(home)


async def test_only_so_many_wait_and_all_run(home: HomeOfTest) -> None:
    count = MOST + 4
    for number in range(count):
        spec = ProcessSpec(process_id=f"prc_many_{number}", command=f"echo {number} >> all")
        await home.home.prepare(spec)
    await until(lambda: len(there(home.root)) == MOST * BOTH, "as many as may wait")
    await asyncio.gather(*(home.home.execute(f"prc_many_{number}", 10) for number in range(count)))
    for number in range(count):
        await home.ended(f"prc_many_{number}")
    assert sorted((home.work / "all").read_text().split(), key=int) == [str(number) for number in range(count)]


async def test_a_directory_that_is_made_after_the_preparation_is_found(home: HomeOfTest) -> None:
    """What is checked when a command begins is not checked ahead."""
    late = home.work / "late"
    await home.home.prepare(ProcessSpec(process_id="prc_1", command="pwd >> ../ran", cwd=str(late)))
    await until(lambda: len(there(home.directory("prc_1"))) == BOTH, "keeper and child wait")
    late.mkdir()
    assert (await home.home.execute("prc_1", 10)).execution_committed
    ended = await home.ended("prc_1")
    assert ended.exit is not None
    assert ended.exit.exit_code == 0
    assert (home.work / "ran").read_text() == f"{late}\n"
