"""Accepting a message. It waits, outside the log, until a worker admits it; so it is accepted in every state but one.

The usual case is a single statement that locks, ranks, wakes and inserts. Source: engine.md §4 (content input), §8
(cancel_open_interactions); api.md §8, §10; field-reports B04 (nothing blank), B40 (messages are always accepted).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import inputs
from omnara.db.agents import AgentRef
from omnara.db.connection import Connection
from omnara.db.inputs import InputRow, NewMessage
from omnara.domain.content import InputBlock, TextBlock
from omnara.domain.text import clean, clean_text, is_blank
from omnara.engine.actors import ExternalActor, actor_for, check_actor, known_actor
from omnara.engine.appending import Appending, wake_if_runnable
from omnara.engine.deps import Deps, announce
from omnara.engine.scope import AgentPath, locate
from omnara.engine.supersede import cancel_open_forms
from omnara.errors import IdempotencyKeyConflict, InvalidRequest, RequestTooLarge, StateTransitionConflict
from omnara.ids import new_uuid

DeliveryMode = Literal["queued", "steering"]

MAX_TEXT_BYTES: Final = 1024 * 1024
"""Everything but media of one submission. Source: contract, CreateAgentInputRequest."""

RANK_STRIDE: Final = 1024
"""Distance of the ranks of two inputs. Source: engine.md §1.1."""


class CreatedInput(msgspec.Struct, frozen=True):
    """`created` is False for a replay of an earlier request with the same key."""

    created: bool
    input: InputRow


class _Accepted(msgspec.Struct, frozen=True):
    result: CreatedInput
    agent_id: UUID
    grew: bool = False


async def create_input(
    deps: Deps,
    p: Principal,
    path: AgentPath,
    blocks: Sequence[InputBlock],
    *,
    mode: DeliveryMode = "queued",
    actor: ExternalActor | None = None,
    cancel_open_interactions: bool = False,
    key: str | None = None,
) -> CreatedInput:
    """Accept a message for an agent, or return the one that used `key` before.

    Own transaction. Paused and crashed agents accept messages too. Raises NotFound, Forbidden, InvalidRequest (blank
    text, actor of a user, interactions to cancel without steering), RequestTooLarge (text over 1 MiB),
    IdempotencyKeyConflict (the key was used for something else), StateTransitionConflict (archived).
    """

    async def work(connection: Connection) -> _Accepted:
        agent = await locate(connection, p, path, ProjectAction.OPERATE)
        _check_request(p, actor, mode, cancel_open_interactions)
        message = NewMessage(id=new_uuid(), delivery_mode=mode, content=encode_blocks(blocks), key=key)
        known = await known_actor(connection, p, ProjectScope(agent.org_id, agent.project_id), actor)
        if known is not None and not cancel_open_interactions:
            return await _receive(connection, agent, msgspec.structs.replace(message, actor_id=known.id))
        return await _receive_locked(connection, p, agent, message, actor, cancel_forms=cancel_open_interactions)

    accepted = await deps.db.run(work)
    if accepted.result.created:
        announce(deps, accepted.agent_id, events=accepted.grew, ready=True)
    return accepted.result


def encode_blocks(blocks: Sequence[InputBlock]) -> str:
    """Return the stored JSON of a message's blocks, cleaned. Raises InvalidRequest and RequestTooLarge."""
    if not blocks:
        raise InvalidRequest("content_blocks must not be empty")
    cleaned: list[InputBlock] = []
    for block in blocks:
        metadata = None if block.metadata is None else clean(block.metadata)
        if not isinstance(block, TextBlock):
            raise InvalidRequest("media_ref is not accepted as input")
        if is_blank(block.text):
            raise InvalidRequest("text must not be blank")
        cleaned.append(TextBlock(clean_text(block.text), metadata))
    encoded = msgspec.json.encode(cleaned)
    if len(encoded) > MAX_TEXT_BYTES:
        raise RequestTooLarge("text may take 1 MiB in total")
    return encoded.decode()


def _check_request(p: Principal, actor: ExternalActor | None, mode: DeliveryMode, cancel_forms: bool) -> None:
    check_actor(p, actor)
    if cancel_forms and mode != "steering":
        raise InvalidRequest("cancel_open_interactions needs delivery_mode steering")


async def _receive(connection: Connection, agent: AgentRef, message: NewMessage) -> _Accepted:
    row = await inputs.receive(connection, agent.id, message)
    if row is not None:
        return _Accepted(CreatedInput(True, row), agent.id)
    return _Accepted(await _replay(connection, agent, message), agent.id)


async def _receive_locked(
    connection: Connection,
    p: Principal,
    agent: AgentRef,
    message: NewMessage,
    actor: ExternalActor | None,
    *,
    cancel_forms: bool,
) -> _Accepted:
    appending = await Appending.lock(connection, agent.id)
    actor_id = await actor_for(connection, p, ProjectScope(agent.org_id, agent.project_id), actor)
    message = msgspec.structs.replace(message, actor_id=actor_id)
    hot = appending.hot
    used = message.key is not None and await inputs.find_by_key(connection, agent.id, message.key) is not None
    if used or hot.gate == "archived":
        return _Accepted(await _replay(connection, agent, message), agent.id)
    if cancel_forms:
        await cancel_open_forms(connection, appending, message.id, reason="superseded_by_input")
    row = await inputs.insert_received(connection, agent.id, message, hot.next_rank)
    hot.next_rank += RANK_STRIDE
    await appending.write(wake_if_runnable(hot))
    return _Accepted(CreatedInput(True, row), agent.id, grew=appending.grew)


async def _replay(connection: Connection, agent: AgentRef, message: NewMessage) -> CreatedInput:
    """Answer a request that wrote nothing: its key was used, or the agent is archived.

    An exact replay succeeds even on an archived agent. Source: engine.md §4.
    """
    found = None if message.key is None else await inputs.find_by_key(connection, agent.id, message.key)
    if found is None:
        raise StateTransitionConflict("the agent is archived")
    same = (
        found.kind == "content"
        and found.delivery_mode == message.delivery_mode
        and found.actor_id == message.actor_id
        and msgspec.json.decode(found.content) == msgspec.json.decode(message.content)
    )
    if not same:
        raise IdempotencyKeyConflict
    return CreatedInput(False, found)
