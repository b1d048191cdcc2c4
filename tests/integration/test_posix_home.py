"""Commands in a home on this computer: how they begin, what they see, how they end. Real processes throughout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from omnara.machines.posix.keeper.talk import message
from omnara.machines.processes import HomeFull, ProcessSpec
from tests.support.posix_home import HomeOfTest, alive, kill, living_session, posix_home
from tests.support.small_disk import small_disk
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")


@pytest_asyncio.fixture
async def home(tmp_path: Path) -> AsyncIterator[HomeOfTest]:
    async with posix_home(tmp_path / "home") as found:
        yield found


@pytest.mark.parametrize(
    ("command", "state", "reason", "code", "signal"),
    [
        ("true", "exited", "", 0, None),
        ("exit 7", "failed", "nonzero_exit", 7, None),
        ("kill -9 $$", "failed", "signal", -1, "killed"),
        ("kill -TERM $$", "failed", "signal", -1, "terminated"),
        ("kill -SEGV $$", "failed", "signal", -1, "segmentation fault"),
        ("no-such-program", "failed", "nonzero_exit", 127, None),
    ],
)
async def test_the_end_is_told_as_it_was(
    home: HomeOfTest, command: str, state: str, reason: str, code: int, signal: str | None
) -> None:
    record = await home.run(command)
    ended = record.exit
    assert ended is not None
    assert (ended.state, ended.reason_code, ended.exit_code, ended.exit_signal) == (state, reason, code, signal)
    assert (record.phase, record.supervisor_live, record.execution_committed) == ("terminal", False, True)
    assert ended.started_at is not None
    assert ended.ended_at is not None
    assert ended.started_at <= ended.ended_at


async def test_both_outputs_arrive_in_order(home: HomeOfTest) -> None:
    record = await home.run("for i in 1 2 3; do echo out$i; echo err$i >&2; done")
    assert await home.text(record.process_id) == "out1\nerr1\nout2\nerr2\nout3\nerr3\n"


@pytest.mark.parametrize("mode", ["pipe", "pty"])
async def test_a_command_gets_its_environment_and_nothing_else(home: HomeOfTest, mode: str) -> None:
    os.environ["OMNARA_TEST_LEAK"] = "leak"
    try:
        record = await home.run("env | sort; umask; pwd", env={"CI": "1", "HOME": "/tmp"}, io_mode=mode)
    finally:
        del os.environ["OMNARA_TEST_LEAK"]
    lines = (await home.text(record.process_id)).split()
    assert lines == [
        "CI=1",
        "HOME=/tmp",
        "PATH=/usr/local/bin:/usr/bin:/bin",
        f"PWD={home.work}",
        "0022",
        str(home.work),
    ]


async def test_no_descriptor_and_no_ignored_signal_comes_with_it(tmp_path: Path) -> None:
    """As with a server that was started with nohup and in the background, whose signals are ignored."""
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGQUIT)}
    try:
        async with posix_home(tmp_path / "home") as home:
            record = await home.run(
                "ls /proc/self/fd | tr '\\n' ' '; grep -E 'Sig(Blk|Ign)' /proc/self/status; ps -o sid= -p $$"
            )
            words = (await home.text(record.process_id)).split()
            leader = await home.leader(record.process_id)
    finally:
        for number, before in ignored.items():
            signal.signal(number, before)
    assert words[:4] == ["0", "1", "2", "3"], "3 is the directory that ls reads"
    assert words[4:8] == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]
    assert int(words[8]) == leader


def open_files(pid: int) -> set[str]:
    """What the descriptors of a process lead to; one that it closes meanwhile is not among them."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(descriptor))
    return found


async def test_keepers_hold_nothing_of_whoever_opened_the_home(home: HomeOfTest, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    with secret.open() as file, socket.create_server(("127.0.0.1", 0)) as server:
        os.set_inheritable(file.fileno(), True)
        os.set_inheritable(server.fileno(), True)
        record = await home.start("cat", 0)
        keeper = await home.keeper(record.process_id)
        held = open_files(keeper)
        mine = os.readlink(f"/proc/self/fd/{server.fileno()}")
        assert str(secret) not in held
        assert mine not in held
        assert os.getsid(keeper) == keeper
        assert Path(f"/proc/{keeper}/environ").read_bytes().strip(b"\0") in (b"", b"LC_CTYPE=C.UTF-8")


async def test_of_many_descriptors_a_command_gets_none_of_the_fork_servers(tmp_path: Path) -> None:
    """The line by which keepers get their jobs would let a command take the next one, with its files."""
    with contextlib.ExitStack() as many:
        for _ in range(150):
            many.enter_context(socket.socket())
        async with posix_home(tmp_path / "home") as home:
            record = await home.start("ls /proc/self/fd; cat", 0)
            await home.said(record.process_id, "3\n")
            keeper = await home.keeper(record.process_id)
            server = home.launcher.pid
            lines, held = open_files(server), open_files(keeper)
            own = (await home.text(record.process_id)).split()
            assert own == ["0", "1", "2", "3"], "3 is the directory that ls reads"
            assert lines & held == {os.devnull}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shell": "zsh-of-tomorrow"}, "not available"),
        ({"shell": "cmd"}, "not available"),
        ({"shell": "pwsh"}, "There is no pwsh"),
        ({"cwd": "/no/such/place"}, "does not exist"),
        ({"cwd": "/etc/passwd"}, "cannot be entered"),
        ({"cwd": "no/such/place"}, "does not exist"),
        ({"cwd": "/" + "\N{PILE OF POO}" * 400}, "cannot be entered"),
        ({"command": "echo a\0b"}, "NUL"),
        ({"command": "echo \ud800"}, "Unicode"),
        ({"env": {"A=B": "c"}}, "environment variable"),
        ({"env": {f"V{i}": "x" * 120_000 for i in range(60)}}, "too long"),
    ],
)
async def test_what_cannot_be_started_says_why(home: HomeOfTest, fields: dict[str, object], words: str) -> None:
    record = await home.run(**{"command": "true", **fields})  # type: ignore[arg-type]
    assert record.exit is not None
    assert (record.exit.state, record.exit.reason_code) == ("failed", "start_failed")
    assert words in record.exit.reason_message
    assert record.exit.started_at is None
    assert record.started_at is None


async def test_a_relative_directory_is_below_the_homes(home: HomeOfTest) -> None:
    await home.run("mkdir -p here/now")
    record = await home.run("pwd", cwd="here/now")
    assert await home.text(record.process_id) == f"{home.work}/here/now\n"


@pytest.mark.parametrize("shell", ["default", "sh", "bash"])
async def test_a_command_of_a_megabyte_runs(home: HomeOfTest, shell: str) -> None:
    command = "x='" + "y" * 1_000_000 + "'\necho ${#x}; cat; ls /proc/self/fd | wc -l"
    record = await home.start(command, 0, shell=shell)
    await home.home.write(record.process_id, "pac_1", 1, b"typed\n", close=True)
    await home.ended(record.process_id)
    assert (await home.text(record.process_id)).split()[:2] == ["1000000", "typed"]


async def test_a_command_is_executed_once_however_often_it_is_asked(home: HomeOfTest, tmp_path: Path) -> None:
    spec = ProcessSpec(process_id="prc_once", command=f"echo ran >> {tmp_path}/count; cat")
    first = await home.home.prepare(spec)
    again = await home.home.prepare(ProcessSpec(process_id="prc_once", command="echo other"))
    assert again == first
    assert (first.phase, first.execution_committed, first.supervisor_live) == ("prepared", False, True)
    homes = [home.opened() for _ in range(4)]
    records = await asyncio.gather(*(one.execute("prc_once", 0.0) for one in homes for _ in range(3)))
    assert {record.execution_committed for record in records} == {True}
    await home.home.write("prc_once", "pac_1", 1, b"", close=True)
    await home.ended("prc_once")
    await home.home.execute("prc_once", 5)
    assert (tmp_path / "count").read_text() == "ran\n"


async def test_background_children_end_with_the_shell(home: HomeOfTest) -> None:
    started = time.monotonic()
    record = await home.run("sleep 600 & echo hi")
    assert time.monotonic() - started < 15
    assert await home.text(record.process_id) == "hi\n"
    assert not living_session(await home.leader(record.process_id))


async def test_children_in_other_groups_end_too_and_stubborn_ones_are_killed(home: HomeOfTest, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stubborn = f"trap '' TERM; echo $$ > {pid_file}; while :; do sleep 0.05; done"
    record = await home.run(
        f'set -m; sh -c "{stubborn.replace("$", chr(92) + "$")}" & until [ -s {pid_file} ]; do :; done', shell="bash"
    )
    pid = int(pid_file.read_text())
    assert pid != await home.leader(record.process_id)
    assert not alive(pid)
    assert not living_session(await home.leader(record.process_id))


async def test_only_a_child_in_its_own_session_outlives_the_command(home: HomeOfTest, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    record = await home.run(
        f"setsid sh -c 'echo $$ > {pid_file}; exec sleep 600' & until [ -s {pid_file} ]; do :; done"
    )
    survivor = int(pid_file.read_text())
    try:
        assert record.exit is not None
        assert record.exit.state == "exited"
        assert alive(survivor)
    finally:
        kill(survivor)


async def test_the_grace_runs_before_the_kill(home: HomeOfTest, tmp_path: Path) -> None:
    """SIGTERM comes first, so a child can tidy up; one that ignores it is gone after the grace."""
    tidy = tmp_path / "tidied"
    tidies = f"trap 'echo t > {tidy}; exit' TERM; echo up; while :; do sleep 0.05; done"
    ignores = "trap '' TERM; while :; do sleep 0.05; done"
    command = f"({tidies}) & ({ignores}) & read go"
    record = await home.start(command)
    await home.said(record.process_id, "up")
    await home.home.write(record.process_id, "pac_1", 1, b"go\n", close=False)
    await home.ended(record.process_id)
    assert tidy.read_text() == "t\n"
    assert not living_session(await home.leader(record.process_id))


async def test_interrupt_reaches_the_group(home: HomeOfTest) -> None:
    record = await home.start("trap 'echo caught; exit 4' INT; echo ready; while :; do sleep 0.05; done")
    await home.said(record.process_id, "ready")
    assert (await home.home.signal(record.process_id, "pac_1", 1, "interrupt")).state == "applied"
    ended = await home.ended(record.process_id)
    assert ended.exit is not None
    assert (ended.exit.reason_code, ended.exit.exit_code) == ("nonzero_exit", 4)
    assert "caught" in await home.text(record.process_id)


@pytest.mark.parametrize("command", ["echo up; sleep 600", "trap '' TERM; echo up; while :; do sleep 0.05; done"])
async def test_terminate_is_told_as_killed(home: HomeOfTest, command: str) -> None:
    record = await home.start(command)
    assert (await home.home.signal(record.process_id, "pac_1", 1, "terminate")).state == "applied"
    ended = (await home.ended(record.process_id)).exit
    assert ended is not None
    assert (ended.state, ended.reason_code, ended.exit_code, ended.exit_signal) == (
        "killed",
        "terminate_requested",
        None,
        None,
    )
    after = await home.home.signal(record.process_id, "pac_2", 2, "terminate")
    assert (after.state, after.reason_code) == ("applied", "already_stopped")
    for number, late in enumerate(
        [
            await home.home.write(record.process_id, "pac_3", 3, b"x", close=False),
            await home.home.signal(record.process_id, "pac_4", 4, "interrupt"),
        ]
    ):
        assert (late.state, late.reason_code) == ("failed", "process_terminal"), number


async def test_a_time_limit_is_kept(home: HomeOfTest) -> None:
    ended = (await home.run("sleep 600", timeout_seconds=1)).exit
    assert ended is not None
    assert (ended.state, ended.reason_code) == ("failed", "timeout")


async def test_an_administrative_stop_is_unknown_and_final(home: HomeOfTest) -> None:
    record = await home.start("sleep 600", 0)
    await home.home.stop(record.process_id, "machine_decommissioned")
    ended = (await home.ended(record.process_id)).exit
    assert ended is not None
    assert (ended.state, ended.reason_code, ended.exit_code) == ("unknown", "machine_decommissioned", None)
    done = await home.run("exit 3")
    await home.home.stop(done.process_id, "machine_decommissioned")
    assert (await home.ended(done.process_id)).exit == done.exit
    await home.home.stop("prc_nobody", "x")


async def test_what_was_stopped_before_it_began_never_begins(home: HomeOfTest, tmp_path: Path) -> None:
    await home.home.prepare(ProcessSpec(process_id="prc_no", command=f"touch {tmp_path}/ran"))
    await home.home.stop("prc_no", "server_resolved")
    record = await home.home.execute("prc_no", 1)
    assert record.exit is not None
    assert record.exit.state == "unknown"
    assert not (tmp_path / "ran").exists()


async def test_writing_and_closing(home: HomeOfTest) -> None:
    record = await home.start("wc -c", 0)
    data = bytes(range(256)) * 512
    assert len(data) == 131_072
    assert (await home.home.write(record.process_id, "pac_1", 1, data, close=False)).state == "applied"
    assert (await home.home.write(record.process_id, "pac_2", 2, b"end", close=True)).state == "applied"
    late = await home.home.write(record.process_id, "pac_2b", 3, b"more", close=False)
    assert (late.state, late.reason_code) in {("failed", "stdin_closed"), ("failed", "process_terminal")}
    await home.ended(record.process_id)
    assert int(await home.text(record.process_id)) == 131_075


async def test_an_action_is_done_once(home: HomeOfTest) -> None:
    record = await home.start("cat", 0)
    outcomes = [await home.home.write(record.process_id, "pac_1", 1, b"once\n", close=False) for _ in range(3)]
    assert {outcome.state for outcome in outcomes} == {"applied"}
    both = await asyncio.gather(
        *(one.write(record.process_id, "pac_2", 2, b"twice\n", close=True) for one in (home.home, home.opened()))
    )
    assert {outcome.state for outcome in both} == {"applied"}
    ended = await home.ended(record.process_id)
    assert await home.text(record.process_id) == "once\ntwice\n"
    assert [(action.action_id, action.kind, action.seq) for action in ended.actions] == [
        ("pac_1", "write", 1),
        ("pac_2", "write", 2),
    ]


async def test_a_blocked_write_is_unknown_and_not_repeated(home: HomeOfTest) -> None:
    record = await home.start("sleep 600", 0)
    first = await home.home.write(record.process_id, "pac_1", 1, b"x" * 131_072, close=False)
    assert (first.state, first.reason_code) == ("unknown", "stdin_write_unknown")
    assert "65536 of 131072" in first.reason_message
    assert await home.home.write(record.process_id, "pac_1", 1, b"x" * 131_072, close=False) == first
    assert (await home.home.signal(record.process_id, "pac_2", 2, "terminate")).state == "applied"


async def test_input_that_nobody_reads_any_more(home: HomeOfTest) -> None:
    record = await home.start("exec <&-; echo closed; sleep 600")
    outcome = await home.home.write(record.process_id, "pac_1", 1, b"x", close=False)
    assert (outcome.state, outcome.reason_code) == ("failed", "stdin_closed")


async def test_a_terminal(home: HomeOfTest) -> None:
    record = await home.start("stty size; tty; read line; echo got $line; seq 1 3000", io_mode="pty")
    unsupported = await home.home.write(record.process_id, "pac_1", 1, b"", close=True)
    assert (unsupported.state, unsupported.reason_code) == ("failed", "close_stdin_unsupported")
    assert (await home.home.write(record.process_id, "pac_2", 2, b"hello\n", close=False)).state == "applied"
    ended = await home.ended(record.process_id)
    assert ended.exit is not None
    assert ended.exit.exit_code == 0
    lines = (await home.text(record.process_id)).split("\r\n")
    assert lines[0] == "24 80"
    assert lines[1].startswith("/dev/pts/")
    assert "got hello" in lines
    assert lines[-2] == "3000", "the last bytes of a terminal are not lost"


async def test_a_blocked_write_to_a_terminal_ends_the_command(home: HomeOfTest) -> None:
    record = await home.start("stty raw -echo; echo up; sleep 600", io_mode="pty")
    outcome = await home.home.write(record.process_id, "pac_1", 1, b"x" * 131_072, close=False)
    assert (outcome.state, outcome.reason_code) == ("unknown", "stdin_write_unknown")
    ended = (await home.ended(record.process_id)).exit
    assert ended is not None
    assert (ended.state, ended.reason_code) == ("unknown", "stdin_write_unknown")


async def test_watching_hears_output_and_the_end_at_once(home: HomeOfTest) -> None:
    record = await home.start("read a; echo one; read b; exit 5", 0)
    watching = asyncio.create_task(home.home.watch(record.process_id, 0, 10))
    await home.home.write(record.process_id, "pac_1", 1, b"\n", close=False)
    assert (await watching).output_end == 4
    quiet = await home.home.watch(record.process_id, 4, 0.05)
    assert (quiet.output_end, quiet.exit) == (4, None)
    watching = asyncio.create_task(home.home.watch(record.process_id, 4, 10))
    await home.home.write(record.process_id, "pac_2", 2, b"\n", close=False)
    ended = (await watching).exit
    assert ended is not None
    assert ended.exit_code == 5


async def test_reading_while_it_runs_beyond_the_end_and_after_it(home: HomeOfTest) -> None:
    record = await home.start("echo first; cat")
    part = await home.home.read(record.process_id, 2, 2)
    assert (part.data, part.cursor, part.next_cursor, part.end) == (b"rs", 2, 4, 6)
    assert (part.dropped, part.closed) == (False, False)
    beyond = await home.home.read(record.process_id, 100, 10)
    assert (beyond.data, beyond.cursor, beyond.next_cursor, beyond.end) == (b"", 100, 100, 6)
    await home.home.write(record.process_id, "pac_1", 1, b"second\n", close=True)
    await home.ended(record.process_id)
    rest = await home.home.read(record.process_id, 6, 100)
    assert (rest.data, rest.end, rest.closed) == (b"second\n", 13, True)


async def test_a_flood_is_bounded_on_disk_and_in_memory(home: HomeOfTest) -> None:
    record = await home.start("head -c 40000000 /dev/zero; echo end; read go", 0)
    await until(lambda: _ends_at(home, record.process_id, 40_000_004), "all of it")
    memory = Path(f"/proc/{await home.keeper(record.process_id)}/status").read_text()
    peak = next(line for line in memory.splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) < 40_000, peak
    kept = sum(file.stat().st_size for file in home.directory(record.process_id).glob("output-*"))
    assert kept <= 5 * 64 * 1024
    old = await home.home.read(record.process_id, 10, 100)
    assert old.dropped
    assert old.cursor >= 40_000_004 - 5 * 64 * 1024
    new = await home.home.read(record.process_id, 40_000_000, 100)
    assert (new.data, new.dropped) == (b"end\n", False)


@pytest.mark.parametrize("io_mode", ["pipe", "pty"])
async def test_a_flood_does_not_keep_a_command_from_being_stopped(home: HomeOfTest, io_mode: str) -> None:
    record = await home.start("yes", io_mode=io_mode)
    assert (await home.home.signal(record.process_id, "pac_1", 1, "terminate")).state == "applied"
    ended = (await home.ended(record.process_id)).exit
    assert ended is not None
    assert ended.state == "killed"
    limited = (await home.run("yes", io_mode=io_mode, timeout_seconds=1)).exit
    assert limited is not None
    assert limited.reason_code == "timeout"


async def _ends_at(home: HomeOfTest, process_id: str, end: int) -> bool:
    return (await home.home.watch(process_id, 0, 0)).output_end == end


async def test_the_files_are_for_the_owner_only_and_secrets_leave_them(home: HomeOfTest) -> None:
    spec = ProcessSpec(process_id="prc_secret", command="cat", env={"TOKEN": "s3cr3t"})
    await home.home.prepare(spec)
    directory = home.directory("prc_secret")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "launch.json").stat().st_mode) == 0o600
    await home.home.execute("prc_secret", 0)
    await until(lambda: not (directory / "launch.json").exists(), "the environment leaves the disk")
    for file in directory.iterdir():
        if file.is_file():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
            assert b"s3cr3t" not in file.read_bytes()


async def test_acknowledging_forgetting_and_order(home: HomeOfTest) -> None:
    ids = [(await home.run(f"echo {n}")).process_id for n in range(4)]
    await home.home.acknowledge(ids[0], "started")
    await home.home.acknowledge(ids[0], "exit")
    await home.home.acknowledge(ids[0], "exit")
    found = await home.opened().processes()
    assert [record.process_id for record in found] == ids
    assert [record.exit_acknowledged for record in found] == [True, False, False, False]
    running = await home.start("sleep 600", 0)
    with pytest.raises(ValueError, match="still running"):
        await home.home.forget(running.process_id)
    await home.home.forget(ids[0])
    await home.home.forget(ids[0])
    assert [record.process_id for record in await home.home.processes()] == [*ids[1:], running.process_id]
    assert not list((home.root / "gone").iterdir())


async def test_a_process_can_be_forgotten_the_moment_its_end_is_known(home: HomeOfTest) -> None:
    for _ in range(15):
        record = await home.run("true")
        await home.home.forget(record.process_id)
    assert await home.home.processes() == []


async def test_a_half_made_process_is_not_there(home: HomeOfTest) -> None:
    await home.home.prepare(ProcessSpec(process_id="prc_1", command="true"))
    half = home.root / "new" / "prc_2.abc"
    shutil.copytree(home.directory("prc_1"), half)
    removed = home.root / "gone" / "prc_3.abc"
    shutil.copytree(home.directory("prc_1"), removed)
    assert [record.process_id for record in await home.home.processes()] == ["prc_1"]
    assert not removed.exists()


async def test_damaged_files_of_one_process_do_not_hide_the_others(home: HomeOfTest) -> None:
    """A disk that lost what it had confirmed: the server is not told of that process, and settles it as unknown."""
    whole = await home.run("echo whole")
    for number, damage in enumerate([slice(0, None), None, slice(4096, 8192), slice(8192, 12288)]):
        damaged = await home.run(f"echo {number}")
        file = home.directory(damaged.process_id) / "process"
        if damage is None:
            file.unlink()
        else:
            content = bytearray(file.read_bytes())
            content[damage] = b"" if damage.stop is None else b"{".ljust(4096, b"\0")
            file.write_bytes(content)
    found = await home.opened().processes()
    assert found[0] == whole
    assert [record.exit is None for record in found[1:]] == [False, True]
    assert len(list((home.root / "damaged").iterdir())) == 2
    for record in found:
        await home.home.stop(record.process_id, "server_resolved")
        assert (await home.home.execute(record.process_id, 0)).exit is not None


async def test_nonsense_on_a_keepers_socket_hurts_nobody(home: HomeOfTest) -> None:
    record = await home.start("echo up; cat")
    for request in [
        b"GET / HTTP/1.1\r\n\r\n",
        message([1]),  # type: ignore[arg-type]
        message({"op": "watch", "end": "x"}),
        message({"op": "write", "id": "pac_x", "seq": 1, "size": 1 << 30, "close": False}),
        message({"op": "terminate", "id": 5, "seq": 1}),
        message({"op": ["stop"]}),
        b"\0\0",
    ]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"{home.directory(record.process_id)}/control")
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            assert await asyncio.to_thread(sock.recv, 10) == b""
    with pytest.raises(ValueError, match="too many"):
        await home.home.write(record.process_id, "pac_1", 1, b"x" * 131_073, close=False)
    assert (await home.home.write(record.process_id, "pac_1", 1, b"on\n", close=True)).state == "applied"
    assert (await home.ended(record.process_id)).exit is not None
    assert await home.text(record.process_id) == "up\non\n"


@pytest.mark.parametrize("bad", ["../up", "a/b", "", ".hidden", "x" * 200])
async def test_an_id_never_leads_out_of_the_home(home: HomeOfTest, bad: str) -> None:
    with pytest.raises(ValueError, match="not an id"):
        await home.home.prepare(ProcessSpec(process_id=bad, command="true"))
    record = await home.start("cat", 0)
    with pytest.raises(ValueError, match="not an id"):
        await home.home.write(record.process_id, bad, 1, b"", close=True)


async def test_a_home_at_a_long_path(tmp_path: Path) -> None:
    async with posix_home(tmp_path / ("long" * 40) / "home") as home:
        home.home = home.opened()
        (tmp_path / ("long" * 40)).mkdir()
        record = await home.start("cat; exit 9", 0)
        assert (await home.home.write(record.process_id, "pac_1", 1, b"hi", close=True)).state == "applied"
        assert (await home.ended(record.process_id)).exit is not None
        assert await home.text(record.process_id) == "hi"


async def test_a_full_disk_leaves_no_half_record(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        async with posix_home(disk.path / "home") as home:
            running = await home.start("echo up; cat")
            waiting = await home.home.prepare(ProcessSpec(process_id="prc_waiting", command="echo ran"))
            disk.fill()
            with pytest.raises(HomeFull):
                await home.home.prepare(ProcessSpec(process_id="prc_refused", command="true"))
            with pytest.raises(HomeFull):
                await home.home.execute(waiting.process_id, 1)
            with pytest.raises(HomeFull):
                await home.home.write(running.process_id, "pac_1", 1, b"x", close=False)
            found = {record.process_id: record for record in await home.home.processes()}
            assert set(found) == {running.process_id, waiting.process_id}
            assert not found[waiting.process_id].execution_committed
            assert found[running.process_id].actions == []
            kill(await home.leader(running.process_id))
            ended = (await home.ended(running.process_id)).exit
            assert ended is not None
            assert ended.exit_signal == "killed", "how it ended is kept although the disk is full"
            disk.free()
            assert (await home.home.execute(waiting.process_id, 5)).output_end == 4


async def test_output_for_which_there_is_no_room_ends_the_command(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        async with posix_home(disk.path / "home") as home:
            record = await home.start("echo up; read go; while :; do echo more and more; done")
            disk.fill()
            with pytest.raises(HomeFull):
                await home.home.write(record.process_id, "pac_1", 1, b"go\n", close=False)
            disk.free()
            await home.home.write(record.process_id, "pac_1", 1, b"go\n", close=False)
            await home.said(record.process_id, "more")
            disk.fill()
            ended = (await home.ended(record.process_id)).exit
            assert ended is not None
            assert (ended.state, ended.reason_code) == ("failed", "machine_storage_exhausted")
            disk.free()
