"""Hints between the processes as one service: the sender, the listener, and their shared bus."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from omnara.clock import Deadline
from omnara.db.bus import LocalBus
from omnara.db.connection import ConnectSettings
from omnara.db.dedicated import Dedicated, OnConnect
from omnara.db.hints import HintListener, HintSender, new_origin
from omnara.service import Tasks

__all__ = ["HintService"]


class HintService:
    """A `Service`, and the `Hints` of the engine. Hints are words of the moment: nothing is kept for a drain.

    `session` carries the sends; whoever owns it closes it after `stop`. `on_connect` is run on each new LISTEN
    connection, which is how the worker's identity puts its second lock there.
    """

    name = "hints"

    def __init__(self, database: ConnectSettings, session: Dedicated, *, on_connect: OnConnect | None) -> None:
        self.bus = LocalBus()
        origin = new_origin()
        self.sender = HintSender(session, self.bus, origin=origin)
        self.listener = HintListener(database, self.bus, origin=origin, on_connect=on_connect)
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
