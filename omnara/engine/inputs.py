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
from omnara.domain.content import InlineMedia, MediaRefBlock, NewInputBlock, TextBlock
from omnara.domain.text import clean, clean_text, is_blank
from omnara.engine.actors import ExternalActor, actor_for, check_actor, known_actor
from omnara.engine.appending import Appending, wake_if_runnable
from omnara.engine.artifacts import NO_FILES, TakenIn, attach, same_content, take_in
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


class _Message(msgspec.Struct, frozen=True):
    """A message with the files that it brings."""

    new: NewMessage
    taken: TakenIn

    def by(self, actor_id: UUID | None) -> _Message:
        """The same message of a known actor."""
        return _Message(msgspec.structs.replace(self.new, actor_id=actor_id), self.taken)


async def create_input(
    deps: Deps,
    p: Principal,
    path: AgentPath,
    blocks: Sequence[NewInputBlock],
    *,
    mode: DeliveryMode = "queued",
    actor: ExternalActor | None = None,
    cancel_open_interactions: bool = False,
    key: str | None = None,
) -> CreatedInput:
    """Accept a message for an agent, or return the one that used `key` before.

    Own transaction. Paused and crashed agents accept messages too. Raises NotFound, Forbidden, InvalidRequest (blank
    text, a file that cannot be taken, actor of a user, interactions to cancel without steering), RequestTooLarge (text
    over 1 MiB, files over their limits), IdempotencyKeyConflict (the key was used for something else),
    StateTransitionConflict (archived).
    """
    taken = NO_FILES
    if any(isinstance(block, InlineMedia) for block in blocks):
        async with deps.db.acquire() as connection:
            agent = await locate(connection, p, path, ProjectAction.OPERATE)
        _check_request(p, actor, mode, cancel_open_interactions)
        blocks, taken = await take_in(deps, agent.org_id, clean_input(blocks))

    async def work(connection: Connection) -> _Accepted:
        agent = await locate(connection, p, path, ProjectAction.OPERATE)
        _check_request(p, actor, mode, cancel_open_interactions)
        content = encode_blocks(blocks, taken)
        message = _Message(NewMessage(id=new_uuid(), delivery_mode=mode, content=content, key=key), taken)
        known = await known_actor(connection, p, ProjectScope(agent.org_id, agent.project_id), actor)
        if known is not None and not cancel_open_interactions:
            return await _receive(connection, agent, message.by(known.id))
        return await _receive_locked(connection, p, agent, message, actor, cancel_forms=cancel_open_interactions)

    accepted = await deps.db.run(work)
    if accepted.result.created:
        announce(deps, accepted.agent_id, events=accepted.grew, ready=True)
    return accepted.result


def clean_input(blocks: Sequence[NewInputBlock]) -> list[TextBlock | InlineMedia]:
    """Return the blocks of a message, their texts cleaned. Raises InvalidRequest and RequestTooLarge."""
    if not blocks:
        raise InvalidRequest("content_blocks must not be empty")
    cleaned: list[TextBlock | InlineMedia] = []
    for block in blocks:
        if isinstance(block, InlineMedia):
            cleaned.append(block)
        elif isinstance(block, MediaRefBlock):
            raise InvalidRequest("media_ref is not accepted as input")
        elif is_blank(block.text):
            raise InvalidRequest("text must not be blank")
        else:
            metadata = None if block.metadata is None else clean(block.metadata)
            cleaned.append(TextBlock(clean_text(block.text), metadata))
    if len(msgspec.json.encode([block for block in cleaned if isinstance(block, TextBlock)])) > MAX_TEXT_BYTES:
        raise RequestTooLarge("text may take 1 MiB in total")
    return cleaned


def encode_blocks(blocks: Sequence[NewInputBlock], taken: TakenIn = NO_FILES) -> str:
    """Return the stored JSON of a message's blocks, cleaned unless their files were `taken` in and they with them.

    Raises InvalidRequest and RequestTooLarge.
    """
    stored = blocks if taken.files else clean_input(blocks)
    return msgspec.json.encode(stored).decode()


def _check_request(p: Principal, actor: ExternalActor | None, mode: DeliveryMode, cancel_forms: bool) -> None:
    check_actor(p, actor)
    if cancel_forms and mode != "steering":
        raise InvalidRequest("cancel_open_interactions needs delivery_mode steering")


async def _receive(connection: Connection, agent: AgentRef, message: _Message) -> _Accepted:
    row = await inputs.receive(connection, agent.id, message.new)
    if row is not None:
        await attach(connection, agent, message.taken)
        return _Accepted(CreatedInput(True, row), agent.id)
    return _Accepted(await _replay(connection, agent, message), agent.id)


async def _receive_locked(
    connection: Connection,
    p: Principal,
    agent: AgentRef,
    message: _Message,
    actor: ExternalActor | None,
    *,
    cancel_forms: bool,
) -> _Accepted:
    appending = await Appending.lock(connection, agent.id)
    actor_id = await actor_for(connection, p, ProjectScope(agent.org_id, agent.project_id), actor)
    message = message.by(actor_id)
    hot, new = appending.hot, message.new
    used = new.key is not None and await inputs.find_by_key(connection, agent.id, new.key) is not None
    if used or hot.gate == "archived":
        return _Accepted(await _replay(connection, agent, message), agent.id)
    if cancel_forms:
        await cancel_open_forms(connection, appending, new.id, reason="superseded_by_input")
    row = await inputs.insert_received(connection, agent.id, new, hot.next_rank)
    await attach(connection, agent, message.taken)
    hot.next_rank += RANK_STRIDE
    await appending.write(wake_if_runnable(hot))
    return _Accepted(CreatedInput(True, row), agent.id, grew=appending.grew)


async def _replay(connection: Connection, agent: AgentRef, message: _Message) -> CreatedInput:
    """Answer a request that wrote nothing: its key was used, or the agent is archived.

    An exact replay succeeds even on an archived agent. Source: engine.md §4.
    """
    new = message.new
    found = None if new.key is None else await inputs.find_by_key(connection, agent.id, new.key)
    if found is None:
        raise StateTransitionConflict("the agent is archived")
    same = (
        found.kind == "content"
        and found.delivery_mode == new.delivery_mode
        and found.actor_id == new.actor_id
        and await same_content(connection, agent.id, found.content, new.content, message.taken)
    )
    if not same:
        raise IdempotencyKeyConflict
    return CreatedInput(False, found)
