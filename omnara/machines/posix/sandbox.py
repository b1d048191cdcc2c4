"""A machine's own view of this computer, made by bubblewrap and kept by one sleeping process.

Every command of the machine is born into it (see `keeper/namespaces.py`), so all of them share files and process
numbers, as on a computer of their own: a server that one command leaves in the background can be stopped by the next.
It holds the system's programs to read, a workspace and a /tmp of its own to write, and nothing else of the computer:
not the server's files, not its processes, no other machine. It is there until `destroy` or a reboot; its death takes
everything that runs in it along.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from omnara.machines.posix.keeper import files, identity
from omnara.machines.processes import HomeLost

__all__ = ["HOME_INSIDE", "Bubblewrap", "bubblewrap_problem"]

HOME_INSIDE = "/workspace"
_START_S = 20.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "crypto-policies",
    "debian_version", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
    "nsswitch.conf", "os-release", "pki", "profile", "protocols", "python3", "resolv.conf", "services",
    "ssl", "terminfo", "timezone",
)  # fmt: skip
_KERNEL = ("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm")  # noqa: S108 - inside
_HOLD = (
    "echo ready; read -r kept || exit; exec </dev/null; "
    'while sleep "$1"; do [ "$(stat -c %h "$2")" != 0 ] || exit; done'
)
"""It stays only when it is told that it was written down: one that nobody knows of ends with whoever began it. And it
ends some time after its workspace was removed by somebody who knew nothing of sandboxes."""
_DETACHED = '"$@" </dev/fd/{} &'
"""Run by a shell that ends at once, so that the sandbox is nobody's child and nobody's zombie."""
_KEPT = "sandbox.json"
_LOCK = "sandbox.lock"


def bubblewrap_problem(program: str = "bwrap") -> str | None:
    """Try it: None when it works here, otherwise why not. Blocks for some milliseconds."""
    found = shutil.which(program)
    if found is None:
        return "bubblewrap is not installed"
    command = [found, *_unshared(network=True), *_system(), *_KERNEL, "/bin/sh", "-c", ":"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False, env={})
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not run: {error}"
    return None if done.returncode == 0 else f"bubblewrap may not be used here: {done.stderr.strip()[:300]}"


def _unshared(*, network: bool) -> list[str]:
    """Root needs no user namespace, in which it could not become anybody else."""
    kinds = ["ipc", "pid", "uts", "cgroup-try", *([] if os.geteuid() == 0 else ["user"]), *([] if network else ["net"])]
    return [f"--unshare-{kind}" for kind in kinds]


def _system() -> list[str]:
    arguments = ["--perms", "0755", "--dir", "/etc"]
    for path in (*_SYSTEM, *(f"/etc/{name}" for name in _ETC)):
        if os.path.islink(path) and path in _SYSTEM:
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            arguments += ["--ro-bind", os.path.realpath(path), path]
    return arguments


class First(NamedTuple):
    """The first process of a sandbox, with the time of its start, by which it is known again."""

    pid: int
    start: str


class Bubblewrap:
    """One machine's sandbox. Implements `omnara.machines.posix.Sandbox`.

    `state` is a directory of the server's that nobody inside sees; `workspace`, `tmp` and `etc` are shown inside, the
    last one (names for the machine's user) to read. Several openers may share it: a lock decides who begins it.
    """

    def __init__(self, state: Path, *, workspace: Path, tmp: Path, etc: Path, network: bool, look_s: int = 600) -> None:
        """Begin nothing yet. `look_s`: how often it is seen whether the workspace is still there."""
        self._state = state
        self._workspace = workspace
        self._tmp = tmp
        self._etc = etc
        self._network = network
        self._look_s = look_s
        self._first: First | None = None
        self._entering = asyncio.Lock()

    async def enter(self) -> int:
        """Return the first process inside, begun if need be. Raises HomeLost."""
        async with self._entering:  # many may want to at once, and one thread is enough for that
            if self._first is None or not identity.runs(*self._first):
                self._first = await asyncio.to_thread(self._enter)
            return self._first.pid

    def _enter(self) -> First:
        try:
            self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = os.open(self._state, os.O_RDONLY | os.O_DIRECTORY)
            try:
                return self._living(directory) or self._begin(directory)
            finally:
                os.close(directory)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HomeLost(f"the machine's sandbox cannot be started: {error}") from error

    @staticmethod
    def _living(directory: int) -> First | None:
        kept = files.read_json(directory, _KEPT)
        if kept is None or kept["boot"] != identity.boot_id() or not identity.runs(kept["pid"], kept["start"]):
            return None
        return First(int(kept["pid"]), str(kept["start"]))

    def _begin(self, directory: int) -> First:
        lock = os.open(_LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # whoever has it needs milliseconds, and loses it by dying
            living = self._living(directory)
            if living is not None:
                return living
            told, tell = os.pipe()
            with open(tell, "wb", buffering=0) as keep, open(told) as hears:
                pid = self._run(hears.fileno())
                first = First(pid, str(identity.start_time(pid)))
                who = {**first._asdict(), "boot": identity.boot_id()}
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_KEPT, dir_fd=directory)
                files.write_file(directory, _KEPT, json.dumps(who).encode())
                keep.write(b"kept\n")
            return first

    def _run(self, hears: int) -> int:
        told, tell = os.pipe()
        ready, say_ready = os.pipe()
        asked, ask = os.pipe()
        try:
            with open(ask, "wb") as words:  # some kilobytes, which a pipe takes without anybody reading
                words.write(b"\0".join(os.fsencode(word) for word in self._options(tell)))
            begin = ["/bin/sh", "-c", _DETACHED.format(hears), "sh"]
            done = subprocess.run(
                [
                    *begin,
                    _program(),
                    "--args",
                    str(asked),
                    "/bin/sh",
                    "-c",
                    _HOLD,
                    "sh",
                    str(self._look_s),
                    HOME_INSIDE,
                ],
                pass_fds=(tell, asked, hears),
                stdin=subprocess.DEVNULL,
                stdout=say_ready,
                stderr=subprocess.DEVNULL,
                timeout=_START_S,
                start_new_session=True,
                cwd="/",
                env={"PATH": os.defpath},
                check=False,
            )
        finally:
            for fd in (tell, say_ready, asked):
                os.close(fd)
        with open(told) as info, open(ready) as said:
            text = info.read()
            if done.returncode != 0 or not text or said.readline() != "ready\n":
                raise HomeLost("the machine's sandbox could not be started")
        return int(json.loads(text)["child-pid"])

    def _options(self, tell: int) -> list[str]:
        """They go through a pipe: those inside see the command line, and need not know where things are outside."""
        shown = [
            *_KERNEL,
            "--bind", str(self._tmp), "/tmp",  # noqa: S108 - the machine's own
            "--bind", str(self._workspace), HOME_INSIDE,
            "--ro-bind", str(self._etc / "passwd"), "/etc/passwd",
            "--ro-bind", str(self._etc / "group"), "/etc/group",
            "--chdir", "/", "--hostname", "machine",
        ]  # fmt: skip
        return [*_unshared(network=self._network), "--info-fd", str(tell), *_system(), *shown]

    async def destroy(self) -> None:
        """Kill everything inside, and the sandbox itself. One that is not there is fine."""
        await asyncio.to_thread(self._destroy)

    def _destroy(self) -> None:
        try:
            directory = os.open(self._state, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return
        try:
            first = self._living(directory)
            if first is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(first.pid, signal.SIGKILL)
        finally:
            os.close(directory)


def _program() -> str:
    program = shutil.which("bwrap")
    if program is None:
        raise HomeLost("bubblewrap is not installed any more")
    return program
