"""The result of a custom tool call, posted by the client that runs the tool: the first one wins.

Source: engine.md §4 (custom result); api.md §8, §12; field-reports B01, B38.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction
from omnara.db import calls
from omnara.db.calls import CallRow
from omnara.db.connection import Connection
from omnara.db.reads import EventRow
from omnara.domain.content import InlineMedia, MediaRefBlock, NewResultBlock, StructuredDataBlock, TextBlock
from omnara.domain.text import clean, clean_text
from omnara.engine.appending import Appending, wake_if_runnable
from omnara.engine.artifacts import NO_FILES, TakenIn, attach, take_in
from omnara.engine.artifacts_overflow import may_spill, spilled
from omnara.engine.deps import Deps, announce
from omnara.engine.inputs import MAX_TEXT_BYTES
from omnara.engine.scope import AgentPath, locate
from omnara.errors import Conflict, InvalidRequest, NotFound, RequestTooLarge


class SubmittedResult(msgspec.Struct, frozen=True):
    """The completed call and its result event; `content` is the stored JSON text of the blocks."""

    call: CallRow
    event: EventRow
    content: str


async def submit_result(
    deps: Deps,
    p: Principal,
    path: AgentPath,
    call_id: UUID,
    outcome: Literal["succeeded", "failed"],
    blocks: Sequence[NewResultBlock],
) -> SubmittedResult:
    """Complete a ready custom call. Own transaction; accepted in every state of the agent in which the call is open.

    Raises NotFound, Forbidden, InvalidRequest, RequestTooLarge (over 1 MiB, files over their limits), and Conflict when
    the call is not custom, not ready, or has a result already, be it the same one.
    """
    stored: list[Any] = list(blocks)
    taken = NO_FILES
    if any(isinstance(block, InlineMedia) for block in blocks) or may_spill(blocks):
        async with deps.db.acquire() as connection:
            agent = await locate(connection, p, path, ProjectAction.OPERATE)
            call = _check_open(await calls.find_call(connection, agent.id, call_id))
        stored, media = await take_in(deps, agent.org_id, clean_result(blocks))
        stored, long = await spilled(deps.db, deps.blobs, agent.org_id, call.name, stored)
        taken = TakenIn(media.files + long.files)

    async def work(connection: Connection) -> SubmittedResult:
        agent = await locate(connection, p, path, ProjectAction.OPERATE)
        cleaned: list[Any] = stored if taken.files else clean_result(stored)
        appending = await Appending.lock(connection, agent.id)
        call = _check_open(await calls.find_call(connection, agent.id, call_id))
        await attach(connection, agent, taken)
        appending.add_result(call, outcome, cleaned)
        events = await appending.write(wake_if_runnable(appending.hot))
        return SubmittedResult(appending.completed[0], events[0], msgspec.json.encode(cleaned).decode())

    done = await deps.db.run(work)
    deps.feed.tool_call(done.call.agent_id, done.call.id, done.call.state)
    announce(deps, done.call.agent_id, events=True, ready=True)
    return done


def _check_open(call: CallRow | None) -> CallRow:
    if call is None:
        raise NotFound("tool call")
    if call.type != "custom":
        raise Conflict("the tool call is not a custom one")
    if call.state != "ready":
        raise Conflict(f"the tool call is {call.state}")
    return call


def clean_result(blocks: Sequence[NewResultBlock]) -> list[TextBlock | StructuredDataBlock | InlineMedia]:
    """Return the blocks without NUL and lone surrogates. Raises InvalidRequest and RequestTooLarge."""
    cleaned: list[TextBlock | StructuredDataBlock | InlineMedia] = []
    for block in blocks:
        if isinstance(block, InlineMedia):
            cleaned.append(block)
            continue
        if isinstance(block, MediaRefBlock):
            raise InvalidRequest("media_ref is not accepted in a result")
        metadata = None if block.metadata is None else clean(block.metadata)
        if isinstance(block, TextBlock):
            cleaned.append(TextBlock(clean_text(block.text), metadata))
        else:
            cleaned.append(StructuredDataBlock(clean(block.value), metadata))
    if len(msgspec.json.encode([block for block in cleaned if not isinstance(block, InlineMedia)])) > MAX_TEXT_BYTES:
        raise RequestTooLarge("a result may take 1 MiB in total")
    return cleaned
