"""A home when something around a command is killed: its opener, the fork server, the keeper, or all of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from omnara.machines.posix.keeper import files
from omnara.machines.processes import ProcessSpec
from tests.support.posix_home import HomeOfTest, alive, kill, living_session, posix_home
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")

OPENER = textwrap.dedent("""
    import asyncio, sys
    from pathlib import Path
    from omnara.machines.posix import PosixHome
    from omnara.machines.processes import ProcessSpec

    async def main(root, work, wait_s):
        home = PosixHome(Path(root), base_env={"PATH": "/usr/bin:/bin"}, default_cwd=work)
        command = "echo began >> began; echo up; read line; echo got $line; echo ended >> ended; exit 6"
        await home.prepare(ProcessSpec(process_id="prc_long", command=command))
        print("prepared", flush=True)
        await home.execute("prc_long", float(wait_s))
        print("running", home._launcher.pid, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main(*sys.argv[1:]))
""")


@pytest_asyncio.fixture
async def home(tmp_path: Path) -> AsyncIterator[HomeOfTest]:
    async with posix_home(tmp_path / "home") as found:
        yield found


def opener(home: HomeOfTest, wait_s: float) -> subprocess.Popen[str]:
    """Another process that opens the home and starts a command there."""
    command = [sys.executable, "-c", OPENER, str(home.root), str(home.work), str(wait_s)]
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


async def told(process: subprocess.Popen[str], word: str) -> list[str]:
    """The next line that it prints."""
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 20)
    assert line.startswith(word), line
    return line.split()


async def test_a_command_survives_whoever_started_it(home: HomeOfTest) -> None:
    process = opener(home, 10)
    await told(process, "prepared")
    fork_server = int((await told(process, "running"))[1])
    process.kill()
    process.communicate()
    await until(lambda: not alive(fork_server), "the fork server goes with its opener")
    [record] = await home.home.processes()
    assert (record.phase, record.supervisor_live, record.execution_committed) == ("accepted", True, True)
    assert record.started_at is not None
    assert (await home.home.execute("prc_long", 0)).supervisor_live
    assert (await home.home.write("prc_long", "pac_1", 1, b"word\n", close=False)).state == "applied"
    ended = await home.ended("prc_long")
    assert ended.exit is not None
    assert (ended.exit.exit_code, ended.exit.started_at) == (6, record.started_at)
    assert await home.text("prc_long") == "up\ngot word\n"
    assert (home.work / "began").read_text() == "began\n"


@pytest.mark.parametrize("late_ms", [0, 1, 2, 4, 8, 16])
async def test_a_kill_at_any_moment_of_the_start_runs_it_at_most_once(home: HomeOfTest, late_ms: int) -> None:
    """Whatever the dead opener had reached, the next one either finds it begun or begins it. Never both."""
    process = opener(home, 10)
    await told(process, "prepared")
    ready = asyncio.get_running_loop().time() + late_ms / 1000
    await until(lambda: asyncio.get_running_loop().time() >= ready, "the moment")
    process.kill()
    process.communicate()
    await home.home.execute("prc_long", 10)
    await home.home.write("prc_long", "pac_1", 1, b"x\n", close=False)
    ended = await home.ended("prc_long")
    assert ended.exit is not None
    assert ended.exit.exit_code == 6
    assert (home.work / "began").read_text() == "began\n"
    assert (home.work / "ended").read_text() == "ended\n"


async def test_the_fork_server_is_replaced(home: HomeOfTest) -> None:
    running = await home.start("echo up; cat")
    first = home.launcher.pid
    assert first is not None
    kill(first)
    done = await home.run("exit 4")
    assert done.exit is not None
    assert done.exit.exit_code == 4
    assert home.launcher.pid != first
    assert (await home.home.write(running.process_id, "pac_1", 1, b"on\n", close=True)).state == "applied"
    assert (await home.ended(running.process_id)).exit is not None
    assert await home.text(running.process_id) == "up\non\n"


async def test_a_killed_keeper_leaves_an_unknown_end_and_no_command(home: HomeOfTest, tmp_path: Path) -> None:
    child = tmp_path / "child"
    command = f"echo up; sh -c 'echo $$ > {child}; while :; do sleep 0.05; done' & while :; do sleep 0.05; done"
    record = await home.start(command)
    await until(child.exists, "the child runs")
    leader = await home.leader(record.process_id)
    watching = asyncio.create_task(home.home.watch(record.process_id, 1 << 60, 20))
    kill(await home.keeper(record.process_id))
    ended = (await watching).exit
    assert ended is not None
    assert (ended.state, ended.reason_code, ended.exit_code) == ("unknown", "supervisor_lost", None)
    assert ended.started_at == record.started_at
    await until(lambda: not living_session(leader), "nothing is left of it")
    again = await home.home.execute(record.process_id, 1)
    assert again.exit == ended
    late = await home.home.signal(record.process_id, "pac_1", 1, "terminate")
    assert (late.state, late.reason_code) == ("failed", "process_state_unknown")
    assert await home.text(record.process_id) == "up\n"


async def test_what_was_begun_when_the_keeper_died_is_claimed_as_dead(home: HomeOfTest) -> None:
    """A new opener is told the truth by `processes`, which changes nothing: the server has the word."""
    record = await home.start("echo up; sleep 600")
    kill(await home.keeper(record.process_id))
    await until(lambda: _dead(home, record.process_id), "the lock is let go")
    [claimed] = await home.opened().processes()
    assert (claimed.phase, claimed.execution_committed, claimed.exit) == ("accepted", True, None)
    await home.home.stop(record.process_id, "server_resolved")
    ended = await home.ended(record.process_id)
    assert ended.exit is not None
    assert (ended.exit.state, ended.exit.reason_code) == ("unknown", "server_resolved")


async def _dead(home: HomeOfTest, process_id: str) -> bool:
    return not (await home.home.processes())[0].supervisor_live


async def test_an_effect_that_was_begun_when_the_keeper_died_is_unknown(home: HomeOfTest) -> None:
    record = await home.start("echo up; sleep 600")
    writing = asyncio.create_task(home.home.write(record.process_id, "pac_1", 1, b"x" * 131_072, close=False))
    mark = home.directory(record.process_id) / files.action_file("pac_1")
    await until(mark.exists, "the effect is marked")
    kill(await home.keeper(record.process_id))
    outcome = await writing
    assert outcome.state == "unknown"
    assert outcome.reason_code in ("local_action_outcome_unrecoverable", "stdin_write_unknown")
    assert await home.home.write(record.process_id, "pac_1", 1, b"x" * 131_072, close=False) == outcome


async def test_another_process_with_the_number_of_the_leader_is_left_alone(home: HomeOfTest) -> None:
    """Only the boot and the start time make a number mean somebody."""
    record = await home.start("echo up; sleep 600")
    keeper, leader = await home.keeper(record.process_id), await home.leader(record.process_id)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        try:
            os.kill(keeper, 19)
            fd = os.open(home.directory(record.process_id), os.O_RDONLY)
            try:
                files.fill_bit(fd, {"boot": _boot(), "pid": stranger.pid, "start": "1"})
            finally:
                os.close(fd)
            kill(keeper)
            await home.home.stop(record.process_id, "server_resolved")
            assert alive(stranger.pid)
        finally:
            stranger.kill()
            for pid in living_session(leader):
                kill(pid)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def test_fifty_at_once_run_once_each(home: HomeOfTest) -> None:
    async def one(number: int) -> int | None:
        spec = ProcessSpec(process_id=f"prc_many_{number}", command=f"echo {number} >> ran; exit {number}")
        await home.home.prepare(spec)
        await home.home.execute(spec.process_id, 0)
        ended = (await home.ended(spec.process_id, 30)).exit
        return None if ended is None else ended.exit_code

    assert await asyncio.gather(*(one(number) for number in range(50))) == list(range(50))
    assert sorted(map(int, (home.work / "ran").read_text().split())) == list(range(50))
