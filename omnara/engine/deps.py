"""What the use cases and the worker share in one process: built once in `app`, passed everywhere, never changed.

`announce` is here because every use case ends with it: hints go out after the commit, and only then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from omnara.db.pool import ApiPool
from omnara.engine.artifacts_store import Blobs
from omnara.engine.feed import Feed
from omnara.machines.providers.places import PLACES, Place
from omnara.metrics import Metrics
from omnara.settings import Settings
from omnara.tools.protocol import Tool
from omnara.vault import KeyRing

if TYPE_CHECKING:
    from omnara.engine.catalog import ModelCatalog
    from omnara.providers.gateway import ModelGateway


class Hints(Protocol):
    """Tells other workers and replicas, after a commit. Every call returns at once and may be lost without harm."""

    def ready(self, agent_ids: Iterable[UUID]) -> None:
        """These agents may have work."""

    def events(self, agent_ids: Iterable[UUID]) -> None:
        """The logs of these agents grew."""

    def cancel(self, agent_ids: Iterable[UUID]) -> None:
        """Work of these agents was taken away."""

    def machines(self, machine_ids: Iterable[UUID]) -> None:
        """These machines have work, are to be made, woken or removed, or are free to be driven."""

    def commands(self, machine_ids: Iterable[UUID]) -> None:
        """These machines, which are there, have work: nobody but their channels needs to look."""


@dataclass(frozen=True, slots=True)
class Deps:
    """Everything with a life of its own that the engine uses. `registry`: the built-in tools by name.

    `blobs`: the contents of files. `places`: where machines of pools can be, by the names that pools give.
    """

    db: ApiPool
    ring: KeyRing
    feed: Feed
    hints: Hints
    registry: Mapping[str, Tool]
    gateway: ModelGateway
    models: ModelCatalog
    settings: Settings
    metrics: Metrics
    blobs: Blobs = field(default_factory=Blobs)
    places: Mapping[str, Place] = field(default_factory=lambda: PLACES)


def announce(deps: Deps, agent_id: UUID, *, events: bool = False, ready: bool = False, taken: bool = False) -> None:
    """Say what a committed transaction did to an agent: its log grew, it may have work, its claim was taken away."""
    if events:
        deps.feed.wake(agent_id)
        deps.hints.events((agent_id,))
    if taken:
        deps.hints.cancel((agent_id,))
    if ready:
        deps.hints.ready((agent_id,))
