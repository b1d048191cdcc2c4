"""A container as a home of processes: each method is one request to the shim, and news wakes whoever waits.

Requests may be repeated: what has an effect leaves a mark in the container first. So a line that broke (the agent
killed what it found, another replica took over for a moment) is opened once more before anything is told to be lost.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

from aiodocker.containers import DockerContainer

from omnara.machines.docker.channel import ENGINE_ERRORS, Channel
from omnara.machines.docker.launchscript import launch_script
from omnara.machines.docker.records import Reply, actions_of, process_of, processes_of, slice_of
from omnara.machines.processes import (
    ActionOutcome,
    HomeLost,
    OutputSlice,
    ProcessRecord,
    ProcessSpec,
    StartFailed,
)

__all__ = ["BASE_ENV", "DIRECTORY", "DockerHome"]

DIRECTORY: Final = "/home/agent"
BASE_ENV: Final[Mapping[str, str]] = {
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",  # noqa: S108 - the container's own
}
"""What a command sees beside PATH and HOME. TERM is given by a PTY. Source: machines.md §7."""

FIRST_POLL_S: Final = 0.03
OUTPUT_POLL_S: Final = 0.25
NEWS_POLL_S: Final = 10.0
"""News may be lost with the line: whoever waits looks for himself so often. Only the first output is announced."""
WRITE_LIMIT_S: Final = 10.0
"""How long the bytes of a write may wait for the command to read them. Source: machines.md §7."""
ENDLESS: Final = 1 << 62
COUNT_S: Final = 15.0
"""How long the engine may take to count a container's processes. It looks twice, a second apart, so one or two seconds
when all is well. This is asked only when a container does not answer, when what runs in it may keep the whole computer
busy: ten times that. An engine that takes longer has not said that the container is full, and nothing is killed."""
LINE_PIDS: Final = 8
"""Processes that a line needs at most, with what it does for a request."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}\Z")
_REFUSALS: Final[Mapping[str, str]] = {
    "! nopty": "this machine has no `script` program, without which there is no terminal; use pipes",
    "! notools": "this machine has no `setsid` or no `mkfifo` program, without which no command can be kept",
}


class DockerHome:
    """The processes of one running container. For one event loop; `close` when its claim is given up.

    `ready` is awaited before each line into it is opened.
    """

    def __init__(
        self,
        container: DockerContainer,
        *,
        base_env: Mapping[str, str] = BASE_ENV,
        write_limit_s: float = WRITE_LIMIT_S,
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._container = container
        self._ready = ready
        self._env = base_env
        self._write_limit_s = write_limit_s
        self._channel: Channel | None = None
        self._left = False
        self._opening = asyncio.Lock()
        self._news: dict[str, set[asyncio.Event]] = {}

    async def close(self) -> None:
        """Let go of the container; what runs there runs on. Who is on the way to it gets no line any more."""
        self._left = True
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def processes(self) -> list[ProcessRecord]:
        """See `Home`."""
        return processes_of(await self._ask("list -"))

    async def prepare(self, spec: ProcessSpec) -> ProcessRecord:
        """See `Home`. The environment waits in the container's memory until the command begins."""
        script = launch_script(spec, DIRECTORY, self._env)
        line = (
            f"prepare {_token(spec.process_id)} {uuid.uuid4()} {spec.io_mode} {max(0, spec.timeout_seconds)} {_now()}"
        )
        reply = await self._ask(line, script)
        if reply.lines and (refusal := _REFUSALS.get(reply.lines[0])) is not None:
            raise StartFailed(refusal)
        return process_of(reply, spec.process_id)

    async def execute(self, process_id: str, wait_s: float) -> ProcessRecord:
        """See `Home`. The execution bit is a directory: only one `mkdir` makes it."""
        with self._interest(process_id) as news:
            reply = await self._ask(f"execute {_token(process_id)} {_now()}")
            if reply.lines != ("new",):
                news.set()
            return await self._wait(process_id, news, 0, wait_s)

    async def watch(self, process_id: str, known_end: int, wait_s: float) -> ProcessRecord:
        """See `Home`. With a `known_end` that no output reaches, waiting for the end alone costs nothing."""
        with self._interest(process_id) as news:
            record = await self._record(process_id)
            if record.exit is not None or record.output_end > known_end:
                return record
            return await self._wait(process_id, news, known_end, wait_s)

    async def _wait(self, process_id: str, news: asyncio.Event, known_end: int, wait_s: float) -> ProcessRecord:
        deadline = time.monotonic() + wait_s
        # The first output and the end are told; more output is looked for.
        pause = FIRST_POLL_S if 0 < known_end < ENDLESS else NEWS_POLL_S
        while True:
            try:
                async with asyncio.timeout(max(0.0, min(pause, deadline - time.monotonic()))):
                    await news.wait()
            except TimeoutError:
                pause = min(pause * 2, OUTPUT_POLL_S) if pause < NEWS_POLL_S else pause
            news.clear()
            record = await self._record(process_id)
            if record.exit is not None or record.output_end > known_end or time.monotonic() >= deadline:
                return record
            if record.execution_committed and not record.supervisor_live:
                return record

    async def read(self, process_id: str, cursor: int, max_bytes: int) -> OutputSlice:
        """See `Home`. Never more than one slice is held."""
        reply = await self._ask(f"slice {_token(process_id)} {max(0, cursor)} {max(0, max_bytes)}")
        return slice_of(reply, cursor)

    async def write(self, process_id: str, action_id: str, seq: int, data: bytes, close: bool) -> ActionOutcome:
        """See `Home`. The bytes wait in the container's memory, and a shell there has ten seconds for them."""
        with self._interest(process_id) as news:
            line = f"write {_token(process_id)} {_token(action_id)} {int(seq)} {int(close)}"
            outcome = _outcome(await self._ask(line, data))
            deadline = time.monotonic() + self._write_limit_s + 2
            while outcome is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return ActionOutcome(state="unknown", reason_code="stdin_write_unknown")
                try:
                    async with asyncio.timeout(min(left, 1.0)):
                        await news.wait()
                except TimeoutError:
                    pass
                news.clear()
                outcome = _outcome(await self._ask(f"action {_token(process_id)} {_token(action_id)}"))
            return outcome

    async def signal(
        self, process_id: str, action_id: str, seq: int, kind: Literal["interrupt", "terminate"]
    ) -> ActionOutcome:
        """See `Home`."""
        line = f"signal {_token(process_id)} {_token(action_id)} {int(seq)} {kind}"
        reply = await self._ask(line, kill=kind == "terminate")
        # A mark without an outcome is that of an attempt which was cut off: what came of it is not known.
        return _outcome(reply) or ActionOutcome(state="unknown", reason_code="local_action_outcome_unrecoverable")

    async def stop(self, process_id: str, reason_code: str) -> None:
        """See `Home`."""
        await self._ask(f"stop {_token(process_id)} {_token(reason_code)}", kill=True)

    async def acknowledge(self, process_id: str, slot: str) -> None:
        """See `Home`."""
        await self._ask(f"ack {_token(process_id)} {_token(slot)}")

    async def forget(self, process_id: str) -> None:
        """See `Home`. One that still runs stays."""
        await self._ask(f"forget {_token(process_id)}")

    async def _record(self, process_id: str) -> ProcessRecord:
        return process_of(await self._ask(f"record {_token(process_id)}"), process_id)

    async def _ask(self, line: str, body: bytes = b"", *, kill: bool = False) -> Reply:
        """Ask over the open line, and once more over a new one when that breaks.

        `kill`: the last resort for a container that is too full of processes to run one more, a fork bomb for one:
        it is killed, and what ran in it is lost, as when it crashes. Only when the engine counts them so, before and
        after another attempt: one that is merely slow is left alone, and whoever drives it sees to it in the end.
        """
        try:
            return await self._asked(line, body)
        except HomeLost:
            if not (kill and await self._full()):
                raise
        try:
            return await self._asked(line, body)
        except HomeLost:
            if await self._full():
                await self._kill()
            raise

    async def _asked(self, line: str, body: bytes) -> Reply:
        try:
            return await (await self._line()).request(line, body)
        except HomeLost:
            return await (await self._line()).request(line, body)

    async def _line(self) -> Channel:
        async with self._opening:
            if self._left:
                raise _let_go()
            if self._channel is None or self._channel.closed:
                broken, self._channel = self._channel, None
                if broken is not None:
                    await broken.close()
                if self._ready is not None:
                    await self._ready()
                opened = await Channel.open(self._container, self._hear, self._wake_all, self._write_limit_s)
                if self._left:
                    await opened.close()
                    raise _let_go()
                self._channel = opened
            return self._channel

    async def _full(self) -> bool:
        """True when the container may have no more processes, by the engine's count. Takes it a second or two."""
        try:
            async with asyncio.timeout(COUNT_S):
                (counted,) = await self._container.stats(stream=False)
        except (*ENGINE_ERRORS, ValueError):
            return False
        pids = counted.get("pids_stats") or {}
        return bool(pids.get("limit")) and pids["limit"] - pids.get("current", 0) < LINE_PIDS

    async def _kill(self) -> None:
        try:
            await self._container.kill()
        except ENGINE_ERRORS as error:
            raise HomeLost(f"the container cannot be ended: {error}") from error

    def _hear(self, tiding: str) -> None:
        words = tiding.split(" ")
        if len(words) > 1:
            for news in self._news.get(words[1], ()):
                news.set()

    def _wake_all(self) -> None:
        for waiting in self._news.values():
            for news in waiting:
                news.set()

    @contextmanager
    def _interest(self, process_id: str) -> Iterator[asyncio.Event]:
        """Yield an event of the caller's own that news of a process sets, so that none is lost between two looks."""
        news = asyncio.Event()
        waiting = self._news.setdefault(process_id, set())
        waiting.add(news)
        try:
            yield news
        finally:
            waiting.discard(news)
            if not waiting and self._news.get(process_id) is waiting:
                del self._news[process_id]


def _outcome(reply: Reply) -> ActionOutcome | None:
    found = actions_of(reply)
    if not found:
        return ActionOutcome(state="failed", reason_code="process_terminal")
    return found[0].outcome


def _let_go() -> HomeLost:
    return HomeLost("the container was let go of")


def _token(text: str) -> str:
    if not _TOKEN.match(text):
        raise ValueError(f"not a name that a shell may be given: {text!r}")
    return text


def _now() -> int:
    """Microseconds of the wall clock: the container's records carry the server's time, advanced by its own uptime."""
    return time.time_ns() // 1000
