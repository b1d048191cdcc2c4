"""The runs of this process, by agent: never two for one agent, never more than the capacity."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from uuid import UUID

from omnara.worker.reconcile import Key, Place
from omnara.worker.run import AgentRun

SUSPECT_DEATHS = 2
"""From so many worker deaths in a row on, an agent runs alone among its like until it has saved a step.

One death says nothing: it takes along every agent that ran in that process, and serving those one at a time would make
each wait for the model calls of all before it. Two in a row leave the one that kills and few beside it; innocents clear
themselves with their next step, and only the one that kills goes on to the limit.
"""


class Runs:
    """Agents with their runs and tasks. For one event loop."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._runs: dict[UUID, tuple[AgentRun, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[tuple[AgentRun, asyncio.Task[None]]]:
        return iter(list(self._runs.values()))

    def get(self, agent_id: UUID) -> tuple[AgentRun, asyncio.Task[None]] | None:
        """The latest run of an agent and its task, if it has not ended."""
        return self._runs.get(agent_id)

    def add(self, run: AgentRun, task: asyncio.Task[None]) -> None:
        """Enter a run in the place of an earlier one of the same agent, which it waits for."""
        self._runs[run.claim.agent_id] = (run, task)

    def discard(self, run: AgentRun) -> bool:
        """Strike an ended run off. True when it may have kept somebody waiting: no room, or it was a suspect."""
        waited_for = self.room() <= 0 or run.claim.deaths >= SUSPECT_DEATHS
        current = self._runs.get(run.claim.agent_id)
        if current is not None and current[0] is run:
            del self._runs[run.claim.agent_id]
        return waited_for

    def room(self) -> int:
        """How many more agents may run here."""
        return self._capacity - len(self._runs)

    def suspects_ok(self) -> bool:
        """Whether a suspect may start: none runs that has not saved a step yet."""
        return not any(
            run.claim.deaths >= SUSPECT_DEATHS and not run.claim.steps_done for run, _ in self._runs.values()
        )

    def places(self) -> dict[Key, Place]:
        """The claims that run here, and how far each has come."""
        return {
            (agent_id, run.claim.claim_token): (run.claim.step_number, run.claim.next_sequence)
            for agent_id, (run, _) in self._runs.items()
        }

    def keys(self) -> list[Key]:
        """The claims that run here."""
        return [(agent_id, run.claim.claim_token) for agent_id, (run, _) in self._runs.items()]

    async def cancel(self) -> None:
        """Cancel all runs and wait until they have ended."""
        tasks = [task for _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
