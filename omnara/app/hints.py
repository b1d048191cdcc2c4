"""Hints between the processes as one service: the sender, the listener, and their shared bus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from prometheus_client import Histogram

from omnara.clock import Deadline, monotonic
from omnara.db.bus import LocalBus
from omnara.db.connection import ConnectSettings
from omnara.db.dedicated import Dedicated, OnConnect
from omnara.db.hints import HEARTBEAT_S, HintListener, HintSender, new_origin
from omnara.db.hintwire import Hint
from omnara.metrics import Metrics
from omnara.service import Tasks

__all__ = ["HintService"]


class _TimedSender(HintSender):
    """Remembers when its last hints left, until they have come back over Postgres."""

    sent_at: float | None = None

    async def _send(self, hints: list[Hint]) -> None:
        self.sent_at = monotonic()
        await super()._send(hints)


class _TimedListener(HintListener):
    """Hears its own process too, which is the one way to know how long a hint takes without comparing clocks."""

    def __init__(
        self, database: ConnectSettings, sender: _TimedSender, lag_s: Histogram, bus: LocalBus, origin: str,
        on_connect: OnConnect | None, heartbeat_s: float,
    ) -> None:  # fmt: skip
        super().__init__(database, bus, origin=origin, on_connect=on_connect, heartbeat_s=heartbeat_s)
        self._sender = sender
        self._lag_s = lag_s
        self._mark = f'"{origin}"'

    def _heard(self, conn: Any, pid: int, channel: str, payload: object) -> None:
        sent_at = self._sender.sent_at
        if sent_at is not None and self._mark in str(payload):
            self._sender.sent_at = None
            self._lag_s.observe(monotonic() - sent_at)
        super()._heard(conn, pid, channel, payload)


class HintService:
    """A `Service`, and the `Hints` of the engine. Hints are words of the moment: nothing is kept for a drain.

    `session` carries the sends; whoever owns it closes it after `stop`. `on_connect` is run on each new LISTEN
    connection, which is how the worker's identity puts its second lock there.
    """

    name = "hints"

    def __init__(
        self,
        database: ConnectSettings,
        session: Dedicated,
        metrics: Metrics,
        *,
        on_connect: OnConnect | None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.bus = LocalBus()
        origin = new_origin()
        self.sender = _TimedSender(session, self.bus, origin=origin)
        self.listener = _TimedListener(
            database, self.sender, metrics.hint_lag_s, self.bus, origin, on_connect, heartbeat_s
        )
        self._tasks = Tasks()

    # --- what the engine says -----------------------------------------------------------------------------

    def ready(self, agent_ids: Iterable[UUID]) -> None:
        """These agents may have work."""
        self.sender.ready(str(agent_id) for agent_id in agent_ids)

    def events(self, agent_ids: Iterable[UUID]) -> None:
        """The logs of these agents grew."""
        self.sender.events(str(agent_id) for agent_id in agent_ids)

    def cancel(self, agent_ids: Iterable[UUID]) -> None:
        """Work of these agents was taken away."""
        self.sender.cancel(str(agent_id) for agent_id in agent_ids)

    def machines(self, machine_ids: Iterable[UUID]) -> None:
        """These machines have work, are to be made, woken or removed, or are free to be driven."""
        self.sender.machines(str(machine_id) for machine_id in machine_ids)

    def commands(self, machine_ids: Iterable[UUID]) -> None:
        """These machines, which are there, have work."""
        self.sender.commands(str(machine_id) for machine_id in machine_ids)

    # --- what the identity says ---------------------------------------------------------------------------

    def attached(self, worker_id: UUID, *, is_new: bool) -> None:
        """Another identity needs its lock on the LISTEN connection too, or one lost session would be its death."""
        if is_new:
            self.listener.reconnect()

    def detached(self) -> None:
        """The LISTEN connection may still be there; the identity says when it matters."""

    def declared_dead(self, worker_id: UUID) -> None:
        """A new identity follows."""

    def deaths(self, worker_ids: Sequence[UUID]) -> None:
        """Of no concern here."""

    # --- service ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to send and to listen. Does not wait for the database: hints may be lost, sweeps find everything."""
        self._tasks.spawn(self.sender.run(), "hint-sender")
        self._tasks.spawn(self.listener.run(), "hint-listener")

    async def watch(self) -> None:
        """Raise what ended the sender or the listener."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Nothing to finish."""

    async def stop(self) -> None:
        """End both; the LISTEN connection is closed."""
        await self._tasks.close()
