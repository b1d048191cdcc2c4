"""The in-process side of hints: who wants to hear what, with queues that cannot grow.

Whoever writes wakes waiters of its own process here at once, and other processes through `omnara.db.hints`. Nothing
is correct only because something arrived here: every subscriber also sweeps. Source: DESIGN §2.6, §3, §6.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final, Self

import msgspec

from omnara.db.hintwire import Hint, Kind

__all__ = ["Batch", "Hint", "Kind", "LocalBus", "Subscription"]

DEFAULT_IDS: Final = 10_000
DEFAULT_DELTAS: Final = 512


class Batch(msgspec.Struct, frozen=True):
    """What gathered since the last `get`, by kind and without repeats.

    `everything` names the kinds of which too much gathered to list, or all wanted kinds after a reconnect: look at
    all of it again. `deltas` are in order of arrival; `dropped` counts those that did not fit.
    """

    ids: dict[Kind, frozenset[str]]
    everything: frozenset[Kind]
    deltas: tuple[Hint, ...]
    dropped: int

    def wants(self, kind: Kind, agent_id: str) -> bool:
        """Whether this batch asks to look at `agent_id` for `kind`."""
        return kind in self.everything or agent_id in self.ids.get(kind, frozenset())


class Subscription:
    """One subscriber's coalescing queue. Close it (or leave its `with` block) to be forgotten at once.

    Overflow: more than `max_ids` ids of one kind collapse into "everything" of that kind; when more than `max_deltas`
    deltas wait, the oldest are dropped and counted. For one consumer task.
    """

    def __init__(self, bus: LocalBus, kinds: frozenset[Kind], key: str | None, max_ids: int, max_deltas: int) -> None:
        self.kinds = kinds
        self.key = key
        self._bus = bus
        self._max_ids = max_ids
        self._ids: dict[Kind, set[str]] = {}
        self._everything: set[Kind] = set()
        self._deltas: deque[Hint] = deque(maxlen=max_deltas)
        self._dropped = 0
        self._filled = asyncio.Event()

    async def get(self) -> Batch:
        """Wait until there is something, and take all of it. Cancellation loses nothing: the queue keeps it."""
        await self._filled.wait()
        return self.take()

    def take(self) -> Batch:
        """Take what is there without waiting; may be empty."""
        batch = Batch(
            {kind: frozenset(ids) for kind, ids in self._ids.items()},
            frozenset(self._everything),
            tuple(self._deltas),
            self._dropped,
        )
        self._ids, self._everything, self._dropped = {}, set(), 0
        self._deltas.clear()
        self._filled.clear()
        return batch

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._bus.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def put(self, hint: Hint) -> None:
        """Add a hint; called by the bus, never blocks."""
        if hint.kind is Kind.DELTAS:
            self._dropped += len(self._deltas) == self._deltas.maxlen
            self._deltas.append(hint)
        elif hint.everything:
            self._look_at_everything(hint.kind)
        elif hint.kind not in self._everything:
            ids = self._ids.setdefault(hint.kind, set())
            ids.update(hint.ids if self.key is None else (self.key,))
            if len(ids) > self._max_ids:
                self._look_at_everything(hint.kind)
        self._filled.set()

    def _look_at_everything(self, kind: Kind) -> None:
        self._ids.pop(kind, None)
        self._everything.add(kind)


class LocalBus:
    """Delivers hints to the subscribers of this process. For one event loop; every call returns at once.

    A subscriber with a key hears of that agent only, found by a lookup: ten thousand streams cost one wake-up each
    for their own agent, and nothing for others.
    """

    def __init__(self) -> None:
        self._all: dict[Kind, set[Subscription]] = {kind: set() for kind in Kind}
        self._keyed: dict[Kind, dict[str, set[Subscription]]] = {kind: {} for kind in Kind}

    def subscribe(
        self,
        kinds: Iterable[Kind],
        *,
        key: str | None = None,
        max_ids: int = DEFAULT_IDS,
        max_deltas: int = DEFAULT_DELTAS,
    ) -> Subscription:
        """Return a new subscription to `kinds`, of the agent `key` alone or of all agents."""
        subscription = Subscription(self, frozenset(kinds), key, max_ids, max_deltas)
        for kind in subscription.kinds:
            if key is None:
                self._all[kind].add(subscription)
            else:
                self._keyed[kind].setdefault(key, set()).add(subscription)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        """Remove a subscription and every trace of its key."""
        for kind in subscription.kinds:
            self._all[kind].discard(subscription)
            if subscription.key is not None:
                peers = self._keyed[kind].get(subscription.key, set())
                peers.discard(subscription)
                if not peers:
                    self._keyed[kind].pop(subscription.key, None)

    def has_key(self, kind: Kind, agent_id: str) -> bool:
        """Whether somebody here subscribed to `kind` of that very agent, for example to its deltas."""
        return agent_id in self._keyed[kind]

    def publish(self, hint: Hint) -> None:
        """Hand `hint` to everyone in this process who wants it."""
        for subscription in self._all[hint.kind]:
            subscription.put(hint)
        keyed = self._keyed[hint.kind]
        if not keyed:
            return
        for agent_id in keyed if hint.everything else hint.ids:
            for subscription in keyed.get(agent_id, ()):
                subscription.put(hint)

    def look_again(self) -> None:
        """Tell everyone to look at everything: hints may have been lost while the listener was cut off."""
        for kind in Kind:
            if kind is not Kind.DELTAS:
                self.publish(Hint(kind, everything=True))
