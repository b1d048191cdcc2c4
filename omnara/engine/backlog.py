"""Rearranging the messages that wait for an agent: cancel, move, to the steering lane and back.

Every change locks the hot row first, as admission does, so a message is either still waiting when it is touched or has
become an event and is refused; and every change moves the generation, so a worker that has read the queue reads again.
Source: engine.md §8 (backlog, cancel_open_interactions); api.md §3 (operate), §10.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Literal
from uuid import UUID

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction
from omnara.db import backlog as db
from omnara.db.agents import Wake
from omnara.db.backlog import Gap, Queued
from omnara.db.connection import Connection
from omnara.engine.appending import Appending, wake_if_runnable
from omnara.engine.deps import Deps, announce
from omnara.engine.inputs import RANK_STRIDE
from omnara.engine.reads import Page
from omnara.engine.scope import AgentPath, locate
from omnara.engine.supersede import cancel_open_forms
from omnara.errors import InvalidRequest, NotFound, StateTransitionConflict

Position = Literal["front", "back", "before", "after"]

_START: Final = (0, UUID(int=0))
_NOT_WAITING: Final = "the input is no longer waiting there"

Change = Callable[[Connection, Appending], Awaitable[Wake]]


async def list_queued(
    deps: Deps, p: Principal, path: AgentPath, *, after: tuple[int, UUID] | None = None, limit: int = 50
) -> Page[Queued]:
    """Return the queued messages of an agent in the order of their admission, after a (rank, id) key.

    Raises NotFound. Between two pages the queue may be rearranged; a page shows it as it is then.
    """
    async with deps.db.acquire() as connection:
        agent = await locate(connection, p, path, ProjectAction.READ)
        rows = await db.list_queue(connection, agent.id, after or _START, limit + 1)
    return Page(rows[:limit], len(rows) > limit)


async def cancel(deps: Deps, p: Principal, path: AgentPath, input_id: UUID) -> None:
    """Take a queued message back. Own transaction.

    Raises NotFound, Forbidden, StateTransitionConflict when it is not queued: admitted, canceled or steering.
    """

    async def change(connection: Connection, appending: Appending) -> Wake:
        if not await db.cancel(connection, appending.hot.agent_id, input_id):
            raise StateTransitionConflict(_NOT_WAITING)
        return "keep"

    await _change(deps, p, path, input_id, "queued", change)


async def move(
    deps: Deps, p: Principal, path: AgentPath, input_id: UUID, position: Position, anchor_id: UUID | None = None
) -> None:
    """Move a queued message to an end of the queue or next to another one. Own transaction; moves are serialised.

    Raises NotFound, Forbidden, InvalidRequest (no anchor where one is needed, or one where none belongs) and
    StateTransitionConflict when the message or its anchor is not queued, or both are the same.
    """

    async def change(connection: Connection, appending: Appending) -> Wake:
        if (anchor_id is None) != (position in {"front", "back"}):
            raise InvalidRequest("anchor_input_id goes with the positions before and after")
        await _move(connection, appending, input_id, position, anchor_id)
        return "keep"

    await _change(deps, p, path, input_id, "queued", change)


async def promote(
    deps: Deps, p: Principal, path: AgentPath, input_id: UUID, *, cancel_open_interactions: bool = False
) -> None:
    """Make a queued message steer the running turn, behind the steering that waits already. Own transaction.

    `cancel_open_interactions` ends the current batch's open forms as canceled. Raises NotFound, Forbidden,
    StateTransitionConflict when the message is not queued.
    """

    async def change(connection: Connection, appending: Appending) -> Wake:
        await _append(connection, appending, input_id, "steering")
        if cancel_open_interactions:
            await cancel_open_forms(connection, appending, input_id, reason="superseded_by_input")
        return wake_if_runnable(appending.hot)

    await _change(deps, p, path, input_id, "queued", change)


async def demote(deps: Deps, p: Principal, path: AgentPath, input_id: UUID) -> None:
    """Put a steering message that still waits at the end of the queue. Own transaction.

    Raises NotFound, Forbidden, StateTransitionConflict when it is no steering that waits.
    """

    async def change(connection: Connection, appending: Appending) -> Wake:
        await _append(connection, appending, input_id, "queued")
        return wake_if_runnable(appending.hot)

    await _change(deps, p, path, input_id, "steering", change)


async def _change(deps: Deps, p: Principal, path: AgentPath, input_id: UUID, lane: str, change: Change) -> None:
    """Run a change of a message that waits in `lane`, under the lock of its agent."""

    async def work(connection: Connection) -> tuple[UUID, Wake, bool]:
        agent = await locate(connection, p, path, ProjectAction.OPERATE)
        appending = await Appending.lock(connection, agent.id)
        found = await db.find(connection, agent.id, input_id)
        if found is None:
            raise NotFound("input")
        if not found.in_lane(lane):
            raise StateTransitionConflict(_NOT_WAITING)
        wake = await change(connection, appending)
        await appending.write(wake)
        return agent.id, wake, appending.grew

    agent_id, wake, grew = await deps.db.run(work)
    announce(deps, agent_id, events=grew, ready=wake == "wake")


async def _append(connection: Connection, appending: Appending, input_id: UUID, lane: str) -> None:
    hot = appending.hot
    if not await db.place(connection, hot.agent_id, input_id, hot.next_rank, lane):
        raise StateTransitionConflict(_NOT_WAITING)
    hot.next_rank += RANK_STRIDE


async def _move(
    connection: Connection, appending: Appending, input_id: UUID, position: Position, anchor_id: UUID | None
) -> None:
    agent_id = appending.hot.agent_id
    if position == "back":
        await _append(connection, appending, input_id, "queued")
        return
    if position == "front":
        anchor_id = await db.head(connection, agent_id, input_id)
        if anchor_id is None:
            return
    if anchor_id is None or anchor_id == input_id:
        raise StateTransitionConflict("the input and its anchor are the same")
    rank = await _rank_beside(connection, appending, input_id, anchor_id, after=position == "after")
    if rank is None:
        await db.renumber(connection, agent_id, RANK_STRIDE)
        rank = await _rank_beside(connection, appending, input_id, anchor_id, after=position == "after")
        if rank is None:
            raise RuntimeError("a queue that was just renumbered has no gap")
    await db.place(connection, agent_id, input_id, rank, "queued")


async def _rank_beside(
    connection: Connection, appending: Appending, input_id: UUID, anchor_id: UUID, *, after: bool
) -> int | None:
    """Return the rank in the middle of the gap next to the anchor, or None when the gap is used up."""
    gap = await db.gap(connection, appending.hot.agent_id, anchor_id, input_id)
    if gap is None:
        raise StateTransitionConflict("the anchor is no longer queued")
    low, high = _bounds(gap, appending.hot.next_rank, after=after)
    middle = (low + high) // 2
    return middle if low < middle else None


def _bounds(gap: Gap, next_rank: int, *, after: bool) -> tuple[int, int]:
    # Renumbering never passes `next_rank`: every message that waits once took a rank from it, a stride each.
    if after:
        return gap.rank, next_rank if gap.above is None else gap.above
    return gap.below or 0, gap.rank
