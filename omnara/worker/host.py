"""What a run needs from the worker around it, so that a run can be read, and tested, without the whole worker."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Protocol
from uuid import UUID

from omnara.db.connection import Connection
from omnara.domain.claim import Claim
from omnara.engine.deps import Deps
from omnara.engine.plan import PlanSource
from omnara.tools.protocol import ToolContext
from omnara.worker.context_cache import ContextCache
from omnara.worker.counters import StepCounters
from omnara.worker.saver import Saver


class RunHost(Protocol):
    """What a run needs from the worker around it."""

    deps: Deps
    saver: Saver
    plans: PlanSource
    cache: ContextCache
    tools: ToolContext
    counters: StepCounters
    worker_id: UUID
    visits: asyncio.Semaphore
    """Turns at the pool, of which runs have half: for use cases of a step that take a connection themselves."""

    def reading(self) -> AbstractAsyncContextManager[Connection]:
        """Lend a connection for reads; runs wait here for each other, without a limit, and leave room for the API."""

    def must_yield(self, claim: Claim) -> bool:
        """Whether the claim should be given back after the running step."""

    async def may_start_effects(self) -> None:
        """Wait while the worker's identity is detached: no new effects meanwhile."""

    def cleared(self, claim: Claim) -> None:
        """An agent whose worker had died has saved a step: it is no suspect any more."""

    def released(self, claim: Claim, *, ready: bool, ready_s: float | None) -> None:
        """The claim was given back; `ready`: somebody should claim the agent now, else after `ready_s` if not None."""
