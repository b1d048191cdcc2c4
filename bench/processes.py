"""Child processes that cannot outlive a bench: a process group each, ended by id, killed with their parent.

A measured child speaks lines of JSON: a request on its standard input, one answer on its standard output. The end of
its input is its order to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from bench.machine import ROOT
from omnara.settings import child_environment

__all__ = ["Child", "ChildFailed", "Process", "die_with_parent", "start_child", "work_directory"]

START_LIMIT_S: Final = 120.0
STOP_LIMIT_S: Final = 40.0
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class ChildFailed(Exception):
    """A child did not start, answered with an error, or went away; the message ends with the end of its log."""


def die_with_parent() -> None:
    """Ask the kernel, between fork and exec, to kill this child when its parent is gone, however that ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A child in a process group of its own; its output goes to a log file. `outlives`: not killed with its parent."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, *, outlives: bool = False
    ) -> None:
        self._arguments = arguments
        self._environment = child_environment(environment)
        self._log = log
        self._outlives = outlives
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the group. Raises RuntimeError when none runs."""
        if self._process is None:
            raise RuntimeError("the process does not run")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether a process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self, *, piped: bool = False) -> asyncio.subprocess.Process:
        """Start the program; with `piped` the caller owns its input and output."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._arguments,
                stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if piped else log,
                stderr=log,
                cwd=ROOT,
                env=self._environment,
                start_new_session=True,
                preexec_fn=None if self._outlives else die_with_parent,
                limit=2**24,
            )
        return self._process

    async def kill(self) -> None:
        """Kill the whole group with SIGKILL and reap the process; nothing happens when it has ended."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def stop(self) -> int:
        """Ask the process to end (SIGTERM), kill it after 40 s; return its exit code."""
        process = self._process
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                return await process.wait()
        except TimeoutError:
            await self.kill()
            return -signal.SIGKILL

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines that the process wrote."""
        if not self._log.exists():
            return "(no log)"
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


class Child:
    """A measured child (`bench.child`): `ask` sends one request and waits for its answer."""

    def __init__(self, kind: str, process: Process, pipes: asyncio.subprocess.Process) -> None:
        self.kind = kind
        self._process = process
        self._pipes = pipes
        self.hello: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """The child's process id, for a profiler."""
        return self._process.pid

    async def run(self, seconds: float, *, alone: bool = True) -> dict[str, Any]:
        """Let a contestant work for so long; the answer holds its steps, its seconds and its own processor time.

        When it is `alone`, the answer comes once all its agents wait again; otherwise agents may have moved.
        """
        return await self.ask("run", within_s=seconds + START_LIMIT_S, seconds=seconds, alone=alone)

    async def ask(self, what: str, *, within_s: float = START_LIMIT_S, **values: Any) -> dict[str, Any]:
        """Send a request and return its answer. Raises ChildFailed when it fails, takes longer or the child ends."""
        assert self._pipes.stdin is not None
        self._pipes.stdin.write(msgspec.json.encode({"ask": what, **values}) + b"\n")
        return await self.answer(what, within_s)

    async def answer(self, what: str, within_s: float) -> dict[str, Any]:
        """Wait for the next line of the child."""
        assert self._pipes.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                line = await self._pipes.stdout.readline()
        except TimeoutError:
            raise ChildFailed(f"{self.kind}: no answer to {what!r} in {within_s:g} s\n{self._tail()}") from None
        if not line:
            raise ChildFailed(f"{self.kind}: ended while {what!r} was asked\n{self._tail()}")
        found: dict[str, Any] = msgspec.json.decode(line)
        if "error" in found:
            raise ChildFailed(f"{self.kind}: {what!r} failed: {found['error']}\n{self._tail()}")
        return found

    async def close(self) -> None:
        """Close the child's input, wait for its end, kill what is left of its group."""
        assert self._pipes.stdin is not None
        self._pipes.stdin.close()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._pipes.wait()
        except TimeoutError:
            pass
        await self._process.kill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.shield(self.close())

    def _tail(self) -> str:
        return self._process.log_tail()


@contextlib.asynccontextmanager
async def start_child(kind: str, directory: Path, *, outlives: bool = False, **spec: Any) -> AsyncIterator[Child]:
    """Run a measured child for the block; its first answer is in `hello`. Raises ChildFailed when it cannot start."""
    name = f"{kind}-{len(list(directory.iterdir()))}.log"
    process = Process([sys.executable, "-m", "bench.child", kind], {}, directory / name, outlives=outlives)
    try:
        child = Child(kind, process, await process.start(piped=True))
        async with child:
            child.hello = await child.ask("start", **spec)
            yield child
    finally:
        await asyncio.shield(process.kill())


@contextlib.contextmanager
def _temporary() -> Any:
    with tempfile.TemporaryDirectory(prefix="omnara-bench-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@contextlib.asynccontextmanager
async def work_directory() -> AsyncIterator[Path]:
    """A directory for the logs and ledgers of one run, removed afterwards."""
    with _temporary() as path:
        yield path
