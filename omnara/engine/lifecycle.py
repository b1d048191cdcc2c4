"""Pausing, archiving and deleting an agent. Resuming is in `resume`.

Pausing changes nothing but the gate: the running step is saved as usual and then nothing is claimed, while messages,
results and answers are still accepted. Archiving is final. Source: engine.md §8; api.md §8, §10; DESIGN §4.
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import agents, inputs
from omnara.db.agents import AgentRow
from omnara.db.connection import Connection
from omnara.engine.actors import actor_for
from omnara.engine.appending import Appending
from omnara.engine.cancel import stop_turn, turn_is_open
from omnara.engine.deps import Deps, announce
from omnara.engine.machines.bindings import lock_for_release, release_all
from omnara.engine.machines.closing import close_agent
from omnara.engine.scope import AgentPath, locate
from omnara.errors import NotFound, StateTransitionConflict


async def pause(deps: Deps, p: Principal, path: AgentPath) -> UUID:
    """Close the gate of an agent; return its id. Own transaction; pausing twice changes nothing.

    Raises NotFound, Forbidden, StateTransitionConflict for a crashed or archived agent.
    """

    async def work(connection: Connection) -> UUID:
        agent = await locate(connection, p, path, ProjectAction.OPERATE)
        appending = await Appending.lock(connection, agent.id)
        if appending.hot.gate == "paused":
            return agent.id
        if appending.hot.gate != "open":
            raise StateTransitionConflict(f"the agent is {appending.hot.gate}")
        appending.hot.gate = "paused"
        await appending.write("keep")
        return agent.id

    agent_id = await deps.db.run(work)
    announce(deps, agent_id, ready=True)
    return agent_id


async def archive(deps: Deps, p: Principal, path: AgentPath) -> AgentRow:
    """Stop an agent for good and return it. Own transaction; archiving twice returns it unchanged.

    Cancels the current turn and every waiting input; the log stays readable. Raises NotFound, Forbidden.
    """

    async def work(connection: Connection) -> tuple[AgentRow, _Closed | None]:
        agent = await locate(connection, p, path, ProjectAction.MANAGE)
        await lock_for_release(connection, agent.id)
        appending = await Appending.lock(connection, agent.id)
        if appending.hot.gate == "archived":
            return await _read(connection, agent.id), None
        actor_id = None
        if turn_is_open(appending):
            actor_id = await actor_for(connection, p, ProjectScope(agent.org_id, agent.project_id), None)
        closed = await _close(connection, appending, actor_id)
        return await _read(connection, agent.id), closed

    agent, closed = await deps.db.run(work)
    _tell(deps, agent.id, closed)
    return agent


async def archive_for_good(deps: Deps, agent_id: UUID) -> None:
    """Archive an agent in nobody's name, because what it belongs to is deleted. Own transaction; may be repeated."""

    async def work(connection: Connection) -> _Closed | None:
        await lock_for_release(connection, agent_id)
        appending = await Appending.lock(connection, agent_id)
        return None if appending.hot.gate == "archived" else await _close(connection, appending, None)

    _tell(deps, agent_id, await deps.db.run(work))


async def delete(deps: Deps, p: Principal, path: AgentPath) -> None:
    """Stop, tear down and archive an agent: what the flat API calls deletion. As `archive`."""
    await archive(deps, p, path)


class _Closed(msgspec.Struct, frozen=True):
    """What closing an agent did: whether a worker held it, and the machines that have something to end."""

    taken: bool
    machines: frozenset[UUID]


async def _close(connection: Connection, appending: Appending, actor_id: UUID | None) -> _Closed:
    """Stop a locked agent for good."""
    agent_id = appending.hot.agent_id
    taken = appending.hot.worker_id is not None
    machines: set[UUID] = set()
    if turn_is_open(appending):
        machines = await stop_turn(connection, appending, actor_id)
    await inputs.cancel_waiting(connection, agent_id, ["queued", "steering"])
    appending.hot.gate = "archived"
    await appending.write("sleep", release=taken)
    # After the results are written: no call waits any more, so all that is left on machines is to be ended.
    machines |= await close_agent(connection, agent_id)
    machines |= await release_all(connection, appending)
    await agents.archive_agent(connection, agent_id)
    return _Closed(taken, frozenset(machines))


def _tell(deps: Deps, agent_id: UUID, closed: _Closed | None) -> None:
    if closed is None:
        return
    announce(deps, agent_id, events=True, taken=closed.taken)
    if closed.machines:
        deps.hints.machines(closed.machines)


async def _read(connection: Connection, agent_id: UUID) -> AgentRow:
    agent = await agents.find_agent(connection, agent_id)
    if agent is None:
        raise NotFound
    return agent
