"""Commands in a home on this computer run the same whoever started the process that has the home, and however.

Each test gives the fork server, as it is started, something that it would inherit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnara.descriptors import BEGUN_WITH
from omnara.machines.posix.keeper import identity
from omnara.machines.processes import HomeLost
from tests.support.posix_home import kill, posix_home
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc, and names there need not be text")


@contextlib.contextmanager
def soft_limit(kind: int, value: int) -> Iterator[None]:
    """Have another soft limit for the block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


async def test_the_end_is_seen_although_the_server_was_started_with_signals_blocked(tmp_path: Path) -> None:
    async with posix_home(tmp_path / "home") as home:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
        try:
            home.launcher.warm()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        quiet = await home.start("exec >/dev/null 2>&1; sleep 0.1", 0)
        ended = (await home.ended(quiet.process_id)).exit
        assert ended is not None
        assert ended.state == "exited"


async def test_the_limit_of_open_files_is_the_one_before_the_server_raised_it(tmp_path: Path) -> None:
    async with posix_home(tmp_path / "home") as home:
        with soft_limit(resource.RLIMIT_NOFILE, BEGUN_WITH - 1):
            home.launcher.warm()
        record = await home.run("ulimit -n")
        assert await home.text(record.process_id) == f"{BEGUN_WITH}\n"


async def test_output_beyond_the_largest_file_that_is_allowed_is_as_on_a_full_disk(tmp_path: Path) -> None:
    async with posix_home(tmp_path / "home") as home:
        with soft_limit(resource.RLIMIT_FSIZE, 16 * 1024):
            home.launcher.warm()
        record = await home.run("seq 1 20000; sleep 20")
        assert record.exit is not None
        assert record.exit.reason_code == "machine_storage_exhausted"
        assert record.output_end == 16 * 1024


async def test_directories_may_have_names_that_are_no_text(tmp_path: Path) -> None:
    name = b"caf\xe9 \n"
    async with posix_home(tmp_path / os.fsdecode(name) / "home") as home:
        record = await home.run("pwd")
        assert os.fsencode(tmp_path) + b"/" + name + b"\n" == (await home.home.read(record.process_id, 0, 999)).data


async def test_what_outlives_a_command_is_reaped_though_process_1_may_not(tmp_path: Path) -> None:
    """In a container the daemon itself is process 1, and zombies would use up the numbers of processes."""
    async with posix_home(tmp_path / "home") as home:
        left = "setsid sh -c 'echo $$ > id; exec sleep 60' >/dev/null 2>&1 </dev/null &"
        record = await home.run(f"{left} while [ ! -s id ]; do sleep 0.01; done; cat id")
        pid = int(await home.text(record.process_id))
        try:
            status = Path(f"/proc/{pid}/status")
            await until(lambda: f"PPid:\t{home.launcher.pid}\n" in status.read_text(), "the fork server has it")
        finally:
            kill(pid)
        await until(lambda: not status.exists(), "it is no zombie")


async def test_a_python_that_is_told_where_its_libraries_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" = /of/python ] && exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/python")
    monkeypatch.setattr(sys, "executable", str(python))
    async with posix_home(tmp_path / "home") as home:
        record = await home.run('echo "${LD_LIBRARY_PATH-none}"')
        assert await home.text(record.process_id) == "none\n", "commands do not see it"


def test_a_group_is_signalled_also_where_proc_is_not_mounted() -> None:
    """Nobody is found to be in the session then."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as leader:
        try:
            identity.signal_session(leader.pid, signal.SIGTERM, [])
            assert leader.wait(10) == -signal.SIGTERM
        finally:
            leader.kill()


async def test_a_home_that_was_closed_starts_nothing_any_more(tmp_path: Path) -> None:
    """A thread may still be on its way there when whoever waited for it was cancelled."""
    async with posix_home(tmp_path / "home") as home:
        await home.run("true")
    home.launcher.warm()
    assert home.launcher.pid is None
    with pytest.raises(HomeLost):
        await home.start("true")


FORKS = """
import ctypes, os, socket, sys
sys.path.insert(0, sys.argv[1])
from keeper import namespaces, server
os.setgroups([]); os.setresgid(61234, 61234, 61234); os.setresuid(61234, 61234, 61234)
line, end = socket.socketpair()
end.close()
server.serve(line, None, "none")
libc = ctypes.CDLL(None, use_errno=True)
kept = libc.syscall(248, b"user", b"left-for-others", b"secret", 6, ctypes.c_int(-3)), ctypes.get_errno()
hear, tell = os.pipe()
stay, go = os.pipe()
for _ in range(250):
    if not os.fork():
        os.close(go)
        try:
            namespaces.leave_keyring()
            os.write(tell, b"y")
        except OSError:
            os.write(tell, b"n")
        os.read(stay, 1)
        os._exit(0)
told = b""
while len(told) < 250:
    told += os.read(hear, 250)
print(kept, told.count(b"y"))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls by number, which is another one elsewhere")
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes a user that has no keys yet")
def test_more_commands_run_at_once_than_a_user_has_keys() -> None:
    """200, unless root. And what they share instead of the login's keys is no place to leave something for others."""
    files = Path(identity.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", FORKS, files], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{(-1, errno.EACCES)} 250\n"
