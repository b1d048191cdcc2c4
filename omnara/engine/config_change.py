"""Giving a live agent another config: an event in its log, in effect from the next model call on.

It joins the turn that is under way, else it makes a turn of its own, which never calls a model. A pending retry starts
afresh with the new config. Source: engine.md §4 (config change), §1.3; api.md §8, §10.
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import agents, inputs, reads
from omnara.db.agents import AgentRef
from omnara.db.connection import Connection
from omnara.db.inputs import InputRow, ResolvedInput
from omnara.domain.config_check import Draft
from omnara.domain.config_source import SourceFormat
from omnara.domain.events import AgentInputPayload
from omnara.engine.actors import actor_for
from omnara.engine.appending import Appending
from omnara.engine.configs import ConfigView, draft_of, store_draft, view
from omnara.engine.deps import Deps, announce
from omnara.engine.machines.bindings import lock_for_change, reconcile
from omnara.engine.machines.sources import resolve_sources
from omnara.engine.scope import AgentPath, locate
from omnara.errors import IdempotencyKeyConflict, StateTransitionConflict
from omnara.ids import IdKind, encode, new_uuid


class ChangedConfig(msgspec.Struct, frozen=True):
    """The agent's new config, with the input and the event that record the change."""

    agent_id: UUID
    config: ConfigView
    input: InputRow
    event_id: UUID
    replayed: bool
    machines: frozenset[UUID] = frozenset()
    """Machines that have something to do or to end."""


async def change_agent_config(
    deps: Deps,
    p: Principal,
    path: AgentPath,
    source: str,
    source_format: SourceFormat,
    *,
    expected_current_config_id: UUID | None = None,
    key: str | None = None,
) -> ChangedConfig:
    """Compile a source and make it the agent's config, or return the change that used `key` before. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest (the source), StateTransitionConflict (archived, or another config is
    current than expected), IdempotencyKeyConflict.
    """
    agent = await _check(deps, p, path)
    draft = draft_of(deps, source, source_format)

    async def work(connection: Connection) -> ChangedConfig:
        return await _change(
            deps, connection, p, agent, draft, (source, source_format), expected_current_config_id, key
        )

    changed = await deps.db.run(work)
    if not changed.replayed:
        announce(deps, changed.agent_id, events=True, ready=True)
        if changed.machines:
            deps.hints.machines(changed.machines)
    return changed


async def _check(deps: Deps, p: Principal, path: AgentPath) -> AgentRef:
    async with deps.db.acquire() as connection:
        return await locate(connection, p, path, ProjectAction.MANAGE)


async def _change(
    deps: Deps,
    connection: Connection,
    p: Principal,
    agent: AgentRef,
    draft: Draft,
    source: tuple[str, SourceFormat],
    expected: UUID | None,
    key: str | None,
) -> ChangedConfig:
    project = ProjectScope(agent.org_id, agent.project_id)
    sources = await resolve_sources(connection, project, draft.machine_sources, deps.places)
    await lock_for_change(connection, agent.id, sources)
    appending = await Appending.lock(connection, agent.id)
    hot = appending.hot
    config = (await store_draft(deps, connection, project, draft, *source)).config
    actor_id = await actor_for(connection, p, project, None)
    used = None if key is None else await inputs.find_by_key(connection, agent.id, key)
    if used is not None:
        return await _replay(connection, agent, used, config, actor_id)
    if hot.gate == "archived":
        raise StateTransitionConflict("the agent is archived")
    if expected is not None and expected != hot.config_id:
        raise StateTransitionConflict("the agent has another config by now")
    joins = hot.turn_open or hot.open_calls > 0
    new = await add_config_change(
        connection, appending, config.row.id, actor_id=actor_id, key=key, opens_turn=not joins
    )
    machines = await reconcile(connection, project, appending, config.machine_sources)
    hot.config_id = config.row.id
    hot.attempt = 0
    hot.retry_at = None
    events = await appending.write("wake" if joins and hot.open_calls == 0 else "keep")
    await agents.touch_agent(connection, agent.id, config.row.id)
    return ChangedConfig(agent.id, config, new, events[0].id, replayed=False, machines=frozenset(machines))


async def add_config_change(
    connection: Connection,
    appending: Appending,
    config_id: UUID,
    *,
    actor_id: UUID | None,
    key: str | None,
    opens_turn: bool,
) -> InputRow:
    """Add the input and the event of a config change to a locked agent; the caller writes `appending`."""
    if opens_turn:
        appending.open_turn()
    input_id = new_uuid()
    payload = AgentInputPayload(
        agent_input_id=encode(IdKind.AGENT_INPUT, input_id),
        input_kind="config_change",
        content_blocks=[],
        actor_id=None if actor_id is None else encode(IdKind.ACTOR, actor_id),
        agent_config_id=encode(IdKind.AGENT_CONFIG, config_id),
    )
    event = appending.add_input(payload, opening=opens_turn, semantic=True)
    new = ResolvedInput(
        id=input_id,
        kind="config_change",
        event_sequence=event.sequence,
        actor_id=actor_id,
        config_id=config_id,
        key=key,
    )
    return await inputs.insert_resolved(connection, appending.hot.agent_id, new)


async def _replay(
    connection: Connection, agent: AgentRef, used: InputRow, config: ConfigView, actor_id: UUID | None
) -> ChangedConfig:
    """Return the earlier change with the same key. Source: api.md §8 (compares config and actor)."""
    if used.kind != "config_change" or used.config_id != config.row.id or used.actor_id != actor_id:
        raise IdempotencyKeyConflict
    sequence = used.event_sequence
    assert sequence is not None, "a config change enters the log when it is accepted"
    event = (await reads.events_at(connection, agent.id, [sequence]))[0]
    same = await view(connection, agent.project_id, config.row.id)
    return ChangedConfig(agent.id, same, used, event.id, replayed=True)
