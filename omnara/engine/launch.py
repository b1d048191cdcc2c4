"""Launching an agent: event 1 is its config, alone in turn 1; a first message waits like any other.

With an Idempotency-Key the first write wins: later requests get the agent as it is now, whatever they say.
Source: engine.md §4 (launch); api.md §8, §10.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import agents, inputs
from omnara.db.agents import AgentRow
from omnara.db.bindings import BindingRow, list_bindings
from omnara.db.connection import Connection
from omnara.db.inputs import InputRow, NewMessage
from omnara.domain.content import TextBlock
from omnara.domain.text import clean_text, has_controls
from omnara.engine.actors import actor_for
from omnara.engine.appending import Appending
from omnara.engine.config_change import add_config_change
from omnara.engine.configs import ConfigView, view
from omnara.engine.deps import Deps, announce
from omnara.engine.inputs import RANK_STRIDE, encode_blocks
from omnara.engine.machines.bindings import add_at_launch
from omnara.engine.scope import project_in_scope
from omnara.errors import InvalidRequest, NotFound
from omnara.ids import new_uuid

DEFAULT_NAME: Final = "Agent"
MAX_NAME_CHARS: Final = 256


class Launched(msgspec.Struct, frozen=True):
    """The agent as it is now. `config`, `input` and `bindings` only when this request created it.

    `machines` are to be provisioned.
    """

    created: bool
    agent: AgentRow
    config: ConfigView | None = None
    input: InputRow | None = None
    bindings: tuple[BindingRow, ...] = ()
    machines: frozenset[UUID] = frozenset()


class NewAgent(msgspec.Struct, frozen=True, kw_only=True):
    """What to launch. `message` is the stored JSON of the first message's blocks."""

    name: str
    message: str | None
    key: str | None


async def launch_agent(
    deps: Deps,
    p: Principal,
    project: ProjectScope,
    config_id: UUID,
    *,
    name: str | None = None,
    message: str | None = None,
    key: str | None = None,
) -> Launched:
    """Launch an agent with a config of the project. Own transaction.

    Raises NotFound (project or config), Forbidden, InvalidRequest (blank message), RequestTooLarge.
    """
    project_in_scope(p, project, ProjectAction.OPERATE)
    existing = await find_launched(deps, project, key)
    if existing is not None:
        return existing
    new = new_agent(name, message, key)

    async def work(connection: Connection) -> Launched:
        config = await view(connection, project.project_id, config_id)
        return await launch(connection, p, project, config, new)

    return announce_launch(deps, await deps.db.run(work))


def new_agent(name: str | None, message: str | None, key: str | None) -> NewAgent:
    """Check and clean the parts of a launch. Raises InvalidRequest, RequestTooLarge."""
    if name is not None and has_controls(name):
        raise InvalidRequest("name must not have control characters or line breaks")
    shown = clean_text(name).strip() if name is not None else ""
    if len(shown) > MAX_NAME_CHARS:
        raise InvalidRequest(f"name must not be longer than {MAX_NAME_CHARS} characters")
    blocks = None if message is None else encode_blocks([TextBlock(message)])
    return NewAgent(name=shown or DEFAULT_NAME, message=blocks, key=key)


async def find_launched(deps: Deps, project: ProjectScope, key: str | None) -> Launched | None:
    """Return the agent that `key` launched before, if any."""
    if key is None:
        return None
    async with deps.db.acquire() as connection:
        agent = await agents.find_agent_by_key(connection, project.project_id, key)
    return None if agent is None else Launched(False, agent)


def announce_launch(deps: Deps, launched: Launched) -> Launched:
    """Tell the workers of an agent that was just committed; return it."""
    if launched.created and launched.input is not None:
        announce(deps, launched.agent.id, ready=True)
    if launched.machines:
        deps.hints.machines(launched.machines)
    return launched


async def launch(
    connection: Connection, p: Principal, project: ProjectScope, config: ConfigView, new: NewAgent
) -> Launched:
    """Write a new agent in the caller's transaction, or return the one that took the key meanwhile.

    Keeps the project from being deleted until the transaction ends. Raises NotFound when it was, InvalidRequest when it
    may no longer use a machine source, Conflict when a pool has no room.
    """
    agent_id = new_uuid()
    inserted = await agents.insert_agent(
        connection,
        agent_id,
        project.org_id,
        project.project_id,
        name=new.name,
        config_id=config.row.id,
        key=new.key,
    )
    if not inserted:
        found = None if new.key is None else await agents.find_agent_by_key(connection, project.project_id, new.key)
        if found is None:
            raise NotFound("project")  # it was deleted
        return Launched(False, found)
    actor_id = await actor_for(connection, p, project, None)
    appending = await Appending.lock(connection, agent_id)
    await add_config_change(connection, appending, config.row.id, actor_id=actor_id, key=None, opens_turn=True)
    machines, bindings = await _machines(connection, project, agent_id, config)
    message = await _first_message(connection, appending, new, actor_id)
    await appending.write("sleep" if message is None else "wake")
    agent = await agents.find_agent(connection, agent_id)
    assert agent is not None, "it was inserted in this transaction"
    return Launched(True, agent, config, message, bindings, machines)


async def _machines(
    connection: Connection, project: ProjectScope, agent_id: UUID, config: ConfigView
) -> tuple[frozenset[UUID], tuple[BindingRow, ...]]:
    sources = config.machine_sources
    if not sources:
        return frozenset(), ()
    made = await add_at_launch(connection, project, agent_id, sources)
    return frozenset(made), tuple(await list_bindings(connection, agent_id))


async def _first_message(
    connection: Connection, appending: Appending, new: NewAgent, actor_id: UUID | None
) -> InputRow | None:
    if new.message is None:
        return None
    hot = appending.hot
    message = NewMessage(
        id=new_uuid(),
        delivery_mode="queued",
        content=new.message,
        actor_id=actor_id,
        key=None if new.key is None else f"launch:{new.key}:content-input",
    )
    row = await inputs.insert_received(connection, hot.agent_id, message, hot.next_rank)
    hot.next_rank += RANK_STRIDE
    return row
