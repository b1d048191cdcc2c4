"""What the API shows, with the caller's rights applied. Pages are keyset pages: a cursor is the last row's key.

Every function asks for one row more than it returns, so that `more` is known without counting.
Source: api.md §7 (lists), §10 (events, turns).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, Generic, TypeVar
from uuid import UUID

import msgspec

from omnara.access.principals import Principal, PrincipalKind
from omnara.access.roles import OrgAction, ProjectAction, ProjectScope
from omnara.db import accounts, calls, interactions
from omnara.db import reads as db
from omnara.db.accounts import MembershipRow, ProjectRow, UserRow
from omnara.db.agents import AgentRow
from omnara.db.bindings import list_bindings
from omnara.db.calls import CallRow
from omnara.db.connection import Connection
from omnara.db.interactions import InteractionRow
from omnara.db.reads import AgentSort, EventRow, OverviewRow, StepRow, TurnRow
from omnara.engine.deps import Deps
from omnara.engine.scope import AgentPath, agent_in_scope, locate, org_in_scope, project_in_scope
from omnara.errors import Forbidden, InvalidRequest, NotFound

T = TypeVar("T")
NEWEST: Final = 2**63 - 1
TimeKey = tuple[datetime, UUID]


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Rows, and whether there are more in the direction of paging."""

    rows: list[T]
    more: bool


class EventPage(msgspec.Struct, frozen=True):
    """Events in chronological order, whichever way the page was reached."""

    agent: AgentRow
    rows: list[EventRow]
    more: bool


class Turn(msgspec.Struct, frozen=True):
    """A turn with its noteworthy events."""

    row: TurnRow
    event_count: int
    openings: list[EventRow]
    latest: EventRow | None
    latest_semantic: EventRow | None


class TurnPage(msgspec.Struct, frozen=True):
    """Turns, newest first."""

    agent: AgentRow
    rows: list[Turn]
    more: bool


class Me(msgspec.Struct, frozen=True):
    """The calling user and its organizations by name."""

    user: UserRow
    orgs: list[MembershipRow]


async def me(deps: Deps, p: Principal) -> Me:
    """Return the calling user. Raises Forbidden for an organization key. Source: api.md §3."""
    if p.kind is not PrincipalKind.USER:
        raise Forbidden("organization keys are not users")
    async with deps.db.acquire() as connection:
        user = await accounts.user_identity(connection, p.id)
        orgs = await accounts.user_orgs(connection, p.id)
    if user is None:
        raise NotFound
    return Me(user, orgs)


async def list_projects(
    deps: Deps, p: Principal, org_id: UUID, *, after: TimeKey | None = None, limit: int = 50
) -> Page[ProjectRow]:
    """Return the projects of an organization that the caller has a role in, newest first."""
    org_in_scope(p, org_id, OrgAction.READ)
    visible = [project_id for project_id, grant in p.project_grants.items() if grant.org_id == org_id]
    async with deps.db.acquire() as connection:
        return _page(await accounts.list_projects(connection, org_id, visible, after, limit + 1), limit)


async def get_agent(
    deps: Deps, p: Principal, path: AgentPath, *, action: ProjectAction = ProjectAction.READ
) -> AgentRow:
    """Return an agent, archived or not. Also the check before a stream opens."""
    async with deps.db.acquire() as connection:
        return await agent_in_scope(connection, p, path, action)


async def get_agent_machines(deps: Deps, p: Principal, path: AgentPath) -> tuple[AgentRow, list[UUID]]:
    """Return an agent and the machines attached to it, in the order in which they were."""
    async with deps.db.acquire() as connection:
        agent = await agent_in_scope(connection, p, path, ProjectAction.READ)
        return agent, [row.machine_id for row in await list_bindings(connection, agent.id)]


async def list_agents(
    deps: Deps,
    p: Principal,
    project: ProjectScope,
    *,
    sort: AgentSort = "-created_at",
    name: str | None = None,
    after: tuple[datetime | str, UUID] | None = None,
    limit: int = 50,
) -> Page[AgentRow]:
    """Return active agents. `name` is a case-insensitive glob. Raises InvalidRequest for a glob without a literal."""
    project_in_scope(p, project, ProjectAction.READ)
    pattern = None if name is None else glob_pattern(name)
    async with deps.db.acquire() as connection:
        rows = await db.list_agents(
            connection, project.project_id, sort=sort, pattern=pattern, after=after, limit=limit + 1
        )
    return _page(rows, limit)


async def list_overview(
    deps: Deps,
    p: Principal,
    project: ProjectScope,
    *,
    status: str | None = None,
    after: TimeKey | None = None,
    limit: int = 50,
) -> Page[OverviewRow]:
    """Return agents with their status, newest first: those in `status`, or all that are not archived."""
    project_in_scope(p, project, ProjectAction.READ)
    async with deps.db.acquire() as connection:
        rows = await db.list_overview(connection, project.project_id, status=status, after=after, limit=limit + 1)
    return _page(rows, limit)


async def events_after(deps: Deps, p: Principal, path: AgentPath, sequence: int, limit: int) -> EventPage:
    """Return events after `sequence` (exclusive), oldest first."""
    async with deps.db.acquire() as connection:
        agent = await agent_in_scope(connection, p, path, ProjectAction.READ)
        page = await db.events_after(connection, agent.id, sequence, limit)
    return EventPage(agent, page.rows, page.more)


async def events_before(deps: Deps, p: Principal, path: AgentPath, sequence: int, limit: int) -> EventPage:
    """Return the newest events before `sequence` (exclusive; 0 means the end), in chronological order."""
    async with deps.db.acquire() as connection:
        agent = await agent_in_scope(connection, p, path, ProjectAction.READ)
        page = await db.events_before(connection, agent.id, sequence or NEWEST, limit)
    return EventPage(agent, page.rows[::-1], page.more)


async def list_turn_events(
    deps: Deps, p: Principal, path: AgentPath, turn_id: UUID, before: int, limit: int
) -> EventPage:
    """Return the newest events of a turn before `before` (0 means its end), in chronological order."""
    async with deps.db.acquire() as connection:
        agent = await agent_in_scope(connection, p, path, ProjectAction.READ)
        bounds = await db.turn_bounds(connection, agent.id, turn_id)
        if bounds is None:
            raise NotFound("turn")
        until = min(bounds.until or NEWEST, before or NEWEST)
        page = await db.turn_events(connection, agent.id, bounds.first_sequence, until, limit)
    return EventPage(agent, page.rows[::-1], page.more)


async def list_turns(deps: Deps, p: Principal, path: AgentPath, before: int, limit: int) -> TurnPage:
    """Return turns before turn number `before` (0 means all), newest first; fewer when their events are large."""
    async with deps.db.acquire() as connection:
        agent = await agent_in_scope(connection, p, path, ProjectAction.READ)
        page = _page(await db.list_turns(connection, agent.id, before or NEWEST, limit + 1), limit)
        events = await _highlights(connection, agent.id, page.rows)
    # A turn whose events did not fit begins the next page.
    kept = [row for row in page.rows if row.turn_sequence in events]
    more = page.more or len(kept) < len(page.rows)
    return TurnPage(agent, [_turn(row, events[row.turn_sequence]) for row in kept], more)


async def _highlights(
    connection: Connection, agent_id: UUID, turns: Sequence[TurnRow]
) -> dict[int, dict[int, EventRow]]:
    """The noteworthy events of each turn, as far as they fit on a page."""
    wanted: list[tuple[int, int]] = []
    for turn in turns:
        own = {*range(turn.first_sequence, turn.openings_until), turn.until - 1}
        if turn.latest_semantic is not None:
            own.add(turn.latest_semantic)
        wanted += [(sequence, turn.turn_sequence) for sequence in own]
    if not wanted:
        return {}
    sequences, of_turns = zip(*wanted, strict=True)
    return await db.events_of_turns(connection, agent_id, sequences, of_turns)


def _turn(row: TurnRow, events: dict[int, EventRow]) -> Turn:
    openings = [events[n] for n in range(row.first_sequence, row.openings_until) if n in events]
    semantic = None if row.latest_semantic is None else events.get(row.latest_semantic)
    return Turn(row, row.until - row.first_sequence, openings, events.get(row.until - 1), semantic)


async def list_tool_calls(
    deps: Deps,
    p: Principal,
    path: AgentPath,
    *,
    state: str | None = None,
    call_type: str | None = None,
    after: TimeKey | None = None,
    limit: int = 50,
) -> Page[CallRow]:
    """Return tool calls, oldest first."""
    async with deps.db.acquire() as connection:
        agent = await locate(connection, p, path, ProjectAction.READ)
        rows, more = await calls.list_calls(
            connection, agent.id, state=state, call_type=call_type, after=after, limit=limit
        )
    return Page(rows, more)


async def list_interactions(
    deps: Deps,
    p: Principal,
    path: AgentPath,
    *,
    state: str | None = None,
    after: TimeKey | None = None,
    limit: int = 50,
) -> tuple[AgentRow, Page[InteractionRow]]:
    """Return the agent and its forms, oldest first."""
    async with deps.db.acquire() as connection:
        agent = await agent_in_scope(connection, p, path, ProjectAction.READ)
        rows = await interactions.list_forms(connection, agent.id, state=state, after=after, limit=limit + 1)
    return agent, _page(rows, limit)


async def list_steps(deps: Deps, p: Principal, path: AgentPath, *, after: int = 0, limit: int = 100) -> Page[StepRow]:
    """Return the journal after step `after`, oldest first."""
    async with deps.db.acquire() as connection:
        agent = await locate(connection, p, path, ProjectAction.READ)
        rows = await db.list_steps(connection, agent.id, after, limit + 1)
    return _page(rows, limit)


def glob_pattern(glob: str) -> str:
    """Turn a glob (`*`, `?`, backslash escapes) into an ILIKE pattern over the whole value.

    Raises InvalidRequest unless it holds a literal character and every escape has one. Source: api.md §7.
    """
    pattern: list[str] = []
    literals = 0
    characters = iter(glob)
    for character in characters:
        if character in "*?":
            pattern.append("%" if character == "*" else "_")
            continue
        literal = next(characters, "") if character == "\\" else character
        if not literal:
            raise InvalidRequest("name: a backslash must be followed by a character")
        literals += 1
        pattern.append(f"\\{literal}" if literal in "\\%_" else literal)
    if not literals:
        raise InvalidRequest("name: needs at least one literal character")
    return "".join(pattern)


def _page(rows: list[T], limit: int) -> Page[T]:
    return Page(rows[:limit], len(rows) > limit)
