"""The fan-out from steps and use cases to the streams that are open in this process, and to those of other replicas.

Within a process everything goes from hand to hand. Other replicas get event hints from the bus; deltas travel there
only while some replica has said that it has a reader for the agent, merged, small and droppable. Nothing here is
needed for correctness: a stream that hears nothing looks into the log on every sweep.
Source: DESIGN §3 (Hints), §6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final
from uuid import UUID

from omnara.clock import monotonic
from omnara.domain.events import Event
from omnara.engine.feed_items import CallState, Delta, Durable, ModelDelta, Subscription
from omnara.engine.feed_remote import Outbox, RemoteNews

__all__ = ["Feed", "ModelDelta", "Subscription"]

ECHO_S: Final = 0.05
"""A hint that this process gave itself comes back within a turn of the event loop; one from elsewhere was sent at least
5 ms after its commit, so what it tells is older than what was told here just now."""

INTEREST_TTL_S: Final = 15.0
"""How long a replica's word that it has a reader counts. It repeats it three times as often."""


class Feed:
    """All subscriptions of this process. For one event loop; no method blocks, and none raises because of a reader."""

    def __init__(self) -> None:
        self._local: dict[UUID, set[Subscription]] = {}
        self._delta_readers: dict[UUID, int] = {}
        self._remote: dict[UUID, float] = {}
        self._remote_deltas: dict[UUID, float] = {}
        self._told: dict[UUID, float] = {}
        self._watchers: list[Callable[[UUID | None], None]] = []
        self.outbox = Outbox()

    # --- readers ------------------------------------------------------------------------------------------

    def subscribe(self, agent_id: UUID, *, deltas: bool, next_sequence: int = 1) -> Subscription:
        """Register a reader. Call `unsubscribe` in a `finally`. Events before `next_sequence` are never handed over."""
        subscription = Subscription(agent_id, wants_deltas=deltas, next_sequence=next_sequence)
        self._local.setdefault(agent_id, set()).add(subscription)
        if deltas:
            self._delta_readers[agent_id] = self._delta_readers.get(agent_id, 0) + 1
        self.outbox.announce(agent_id, deltas=deltas)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget a reader at once, with all that waits for it. Safe to call twice."""
        readers = self._local.get(subscription.agent_id)
        if readers is None or subscription not in readers:
            return
        readers.discard(subscription)
        if not readers:
            del self._local[subscription.agent_id]
        if subscription.wants_deltas:
            left = self._delta_readers[subscription.agent_id] - 1
            if left:
                self._delta_readers[subscription.agent_id] = left
            else:
                del self._delta_readers[subscription.agent_id]

    def subscriptions(self) -> Iterator[Subscription]:
        """Yield every open subscription. Do not subscribe while iterating."""
        for readers in self._local.values():
            yield from readers

    def local_agents(self) -> dict[UUID, bool]:
        """Return the agents that have readers here, and whether any of them wants deltas."""
        return {agent_id: agent_id in self._delta_readers for agent_id in self._local}

    def watch(self, watcher: Callable[[UUID | None], None]) -> None:
        """Call `watcher` with every agent whose log is said to have grown, here or in another replica; None: any may
        have. It must return at once and not raise."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[UUID | None], None]) -> None:
        """End what `watch` began."""
        self._watchers.remove(watcher)

    # --- writers ------------------------------------------------------------------------------------------

    def events(self, agent_id: UUID, rows: Sequence[Event]) -> None:
        """Hand over events after their commit, in order of sequence. A reader that missed one reads the log."""
        readers = self._heard(agent_id)
        if not readers:
            return
        for row in rows:
            durable = Durable(row)
            for reader in readers:
                reader.offer(durable)

    def wake(self, agent_id: UUID) -> None:
        """Tell the readers of one agent that its log has news, or that it was archived."""
        for reader in self._heard(agent_id):
            reader.wake()

    def wake_all(self) -> None:
        """Tell every reader to look: after the connection that carries hints was lost."""
        for watcher in self._watchers:
            watcher(None)
        for reader in self.subscriptions():
            reader.wake()

    def wants_deltas(self, agent_id: UUID) -> bool:
        """Return whether anybody would get a delta of this agent; asked once per delta, so two look-ups at most."""
        if agent_id in self._delta_readers:
            return True
        return bool(self._remote_deltas) and self._interested(self._remote_deltas, agent_id)

    def delta(self, agent_id: UUID, delta: ModelDelta) -> None:
        """Show a delta to the readers that asked for deltas. May be dropped."""
        run: Delta | None = None
        if agent_id in self._delta_readers:
            run = Delta.of(delta)
            for reader in self._local[agent_id]:
                if reader.wants_deltas:
                    reader.preview(run)
        if self._remote_deltas and self._interested(self._remote_deltas, agent_id):
            self.outbox.delta(agent_id, run if run is not None else Delta.of(delta))

    def tool_call(self, agent_id: UUID, call_id: UUID, state: str) -> None:
        """Show a tool call's new state to every reader of the agent. May be dropped."""
        change = CallState(call_id, state)
        self._preview(agent_id, change)
        if self._interested(self._remote, agent_id):
            self.outbox.call_state(agent_id, change)

    # --- other replicas -----------------------------------------------------------------------------------

    def receive_interest(self, agents: Iterable[tuple[UUID, bool]]) -> None:
        """Note that another replica has readers for these agents (and whether they want deltas), for 15 s."""
        until = monotonic() + INTEREST_TTL_S
        for agent_id, deltas in agents:
            self._remote[agent_id] = until
            if deltas:
                self._remote_deltas[agent_id] = until

    def receive_hint(self, agent_id: UUID) -> None:
        """Take a hint from the bus that a log grew. The echo of what was told here a moment ago is no news.

        Without this every save would send every reader of this process to the database for events that it has.
        """
        told = self._told.pop(agent_id, None)
        if told is None or monotonic() - told > ECHO_S:
            for watcher in self._watchers:
                watcher(agent_id)
            for reader in self._local.get(agent_id, ()):
                reader.wake()

    def receive_news(self, news: Iterable[RemoteNews]) -> None:
        """Show what a step in another replica published."""
        for item in news:
            self._preview(item.agent_id, item.item)

    def forget_expired(self) -> None:
        """Drop interests that were not repeated, so that the tables stay as small as what is open."""
        now = monotonic()
        for table in (self._remote, self._remote_deltas, self._told):
            for agent_id in [agent_id for agent_id, until in table.items() if until <= now]:
                del table[agent_id]

    def _heard(self, agent_id: UUID) -> set[Subscription] | tuple[()]:
        """Note that this process knows of an agent's news, tell the watchers, and return the agent's readers."""
        readers = self._local.get(agent_id, ())
        if readers or self._watchers:
            self._told[agent_id] = monotonic()
            for watcher in self._watchers:
                watcher(agent_id)
        return readers

    def _interested(self, table: dict[UUID, float], agent_id: UUID) -> bool:
        until = table.get(agent_id)
        return until is not None and until > monotonic()

    def _preview(self, agent_id: UUID, item: Delta | CallState) -> None:
        for reader in self._local.get(agent_id, ()):
            if reader.wants_deltas or not isinstance(item, Delta):
                reader.preview(item)
