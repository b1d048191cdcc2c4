"""Hints between processes, over LISTEN/NOTIFY: sent after commit, merged, droppable; heard on one connection.

A NOTIFY inside the saving transaction would take a cluster-wide lock at every commit, so hints travel in transactions
of their own, few and asynchronous. Losing any of them costs one sweep. Source: DESIGN §3, coordination §6.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import structlog

from omnara.db.bus import LocalBus
from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.dedicated import Dedicated, OnConnect
from omnara.db.failures import CONNECT_ERRORS
from omnara.db.hintwire import CHANNEL, DELTA_LIMIT, Hint, Kind, decode, encode
from omnara.db.sqlfiles import Queries

_log = structlog.get_logger(__name__)
_SQL: Final = Queries("hints")

QUIET_WINDOW_S: Final = 0.005
BUSY_WINDOW_S: Final = 0.05
"""At most 20 notifying commits a second and process: their number is what costs. Source: coordination §6."""
MAX_IDS: Final = 5_000
MAX_DELTA_BYTES: Final = 256_000
MAX_PAYLOADS: Final = 64
_SEND_LIMIT_S: Final = 2.0
HEARTBEAT_S: Final = 5.0
_MIN_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 1.0


def new_origin() -> str:
    """Return a mark for one process, so that it does not hear its own hints twice."""
    return secrets.token_urlsafe(6)


class HintSender:
    """Collects hints and sends them over the session connection. Every method but `run` returns at once.

    Call only after the commit that the hint is about. Also wakes waiters of this process through `bus`. Overflow: over
    `MAX_IDS` ids of one kind become "everything"; deltas over `MAX_DELTA_BYTES` are dropped and counted.
    """

    def __init__(self, session: Dedicated, bus: LocalBus, *, origin: str) -> None:
        self._session = session
        self._bus = bus
        self._origin = origin
        self._ids: dict[Kind, dict[str, None]] = {}
        self._everything: set[Kind] = set()
        self._deltas: list[Hint] = []
        self._delta_bytes = 0
        self._pending = asyncio.Event()
        self.commits = 0
        self.dropped = 0
        """Deltas and failed sends that nobody will hear of, for metrics."""

    def ready(self, agent_ids: Iterable[str]) -> None:
        """These agents may have work. Leave it out when a free slot of this process will take them anyway."""
        self._tell(Kind.READY, agent_ids)

    def events(self, agent_ids: Iterable[str]) -> None:
        """The logs of these agents grew."""
        self._tell(Kind.EVENTS, agent_ids)

    def cancel(self, agent_ids: Iterable[str]) -> None:
        """Work of these agents was taken away; whoever runs it should look at its claim."""
        self._tell(Kind.CANCEL, agent_ids)

    def machines(self, machine_ids: Iterable[str]) -> None:
        """These machines have work, or are free to be driven by another replica."""
        self._tell(Kind.MACHINES, machine_ids)

    def commands(self, machine_ids: Iterable[str]) -> None:
        """These machines, which are there, have work."""
        self._tell(Kind.COMMANDS, machine_ids)

    def subscribers(self, agent_ids: Iterable[str]) -> None:
        """This replica streams these agents; repeat it for as long as it does."""
        self._tell(Kind.SUBSCRIBERS, agent_ids)

    def delta(self, agent_id: str, text: str) -> None:
        """Send opaque text to the streams of one agent on other replicas. Local streams are not served from here."""
        size = len(text.encode("utf-8", "replace"))
        if size > DELTA_LIMIT or self._delta_bytes + size > MAX_DELTA_BYTES:
            self.dropped += 1
            return
        self._deltas.append(Hint(Kind.DELTAS, (agent_id,), text))
        self._delta_bytes += size
        self._pending.set()

    async def run(self) -> None:
        """Send until cancelled: 5 ms after the first hint when quiet, at most every 50 ms when busy.

        A send that fails or takes over 2 s is dropped with a log line; sweeps make up for it.
        """
        loop = asyncio.get_running_loop()
        last = float("-inf")
        while True:
            await self._pending.wait()
            await asyncio.sleep(max(QUIET_WINDOW_S, last + BUSY_WINDOW_S - loop.time()))
            last = loop.time()
            await self._send(self._take())

    def _tell(self, kind: Kind, agent_ids: Iterable[str]) -> None:
        ids = tuple(agent_ids)
        if not ids:
            return
        self._bus.publish(Hint(kind, ids))
        if kind not in self._everything:
            waiting = self._ids.setdefault(kind, {})
            waiting.update(dict.fromkeys(ids))
            if len(waiting) > MAX_IDS:
                del self._ids[kind]
                self._everything.add(kind)
        self._pending.set()

    def _take(self) -> list[Hint]:
        hints = [Hint(kind, everything=True) for kind in self._everything]
        hints += [Hint(kind, tuple(ids)) for kind, ids in self._ids.items()]
        hints += self._deltas
        self._ids, self._everything, self._deltas, self._delta_bytes = {}, set(), [], 0
        self._pending.clear()
        return hints

    async def _send(self, hints: list[Hint]) -> None:
        payloads = list(encode(self._origin, hints))
        for start in range(0, len(payloads), MAX_PAYLOADS):
            part = payloads[start : start + MAX_PAYLOADS]
            try:
                async with self._session.use(wait_s=_SEND_LIMIT_S) as conn:
                    await conn.fetch(_SQL["notify"], CHANNEL, part, timeout=_SEND_LIMIT_S)
            except CONNECT_ERRORS as exc:
                self.dropped += len(part)
                _log.warning("hints were dropped", payloads=len(part), error=type(exc).__name__)
                return
            self.commits += 1


class HintListener:
    """Holds the LISTEN connection and hands what other processes say to `bus`. Never opens a transaction.

    `on_connect(conn)` runs on each new connection before it listens (the worker takes its identity lock there);
    `on_lost()` when it ends. After every connect, the first one included, everyone is told to look again.
    """

    def __init__(
        self,
        settings: ConnectSettings,
        bus: LocalBus,
        *,
        origin: str,
        on_connect: OnConnect | None = None,
        on_lost: Callable[[], None] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._origin = origin
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._heartbeat_s = heartbeat_s
        self._conn: Connection | None = None
        self._listening = asyncio.Event()
        self.connects = 0
        self.unreadable = 0

    @property
    def connected(self) -> bool:
        """Whether notifications can arrive at this moment, as far as is known."""
        return self._listening.is_set()

    def reconnect(self) -> None:
        """Drop the connection and make a new one, for which `on_connect` runs again. Returns at once."""
        if self._conn is not None:
            self._conn.terminate()

    async def wait_listening(self) -> None:
        """Wait until the connection listens; for start-up and tests."""
        await self._listening.wait()

    async def run(self) -> None:
        """Listen until cancelled, reconnecting with a back-off of at most 1 s."""
        pause = _MIN_BACKOFF_S
        try:
            while True:
                try:
                    await self._listen_once()
                except CONNECT_ERRORS as exc:
                    _log.warning("the hint connection was lost", error=type(exc).__name__)
                pause = _MIN_BACKOFF_S if self._listening.is_set() else min(pause * 2, _MAX_BACKOFF_S)
                self._end()
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        finally:
            self._listening.clear()

    async def _listen_once(self) -> None:
        """Connect, listen, and return or raise when the connection is no longer any good."""
        conn = self._conn = await connect(self._settings, ConnKind.LISTEN)
        try:
            ended = asyncio.Event()
            conn.add_termination_listener(lambda _conn: ended.set())
            if self._on_connect is not None:
                await self._on_connect(conn)
            await conn.add_listener(CHANNEL, self._heard)
            self.connects += 1
            self._listening.set()
            self._bus.look_again()
            await self._heartbeat(conn, ended)
        finally:
            conn.terminate()

    async def _heartbeat(self, conn: Connection, ended: asyncio.Event) -> None:
        """Ask the server at intervals, on this very connection, whether it still listens (field report B48)."""
        while not conn.is_closed():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), self._heartbeat_s)
            if ended.is_set() or not await conn.fetchval(_SQL["is_listening"], CHANNEL, timeout=self._heartbeat_s):
                return

    def _end(self) -> None:
        if self._listening.is_set():
            self._listening.clear()
            if self._on_lost is not None:
                self._on_lost()

    def _heard(self, _conn: Any, _pid: int, _channel: str, payload: object) -> None:
        try:
            origin, hints = decode(str(payload))
        except msgspec.DecodeError:
            # Somebody else's text on our channel, or a newer release's: a hint that is not understood is a lost hint.
            self.unreadable += 1
            return
        if origin != self._origin:
            for hint in hints:
                self._bus.publish(hint)
