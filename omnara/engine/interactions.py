"""Answering a form: one answer wins, the same answer by the same caller is a replay, any other one is refused.

The answer enters the log as an input; in the same transaction the call goes on (allowed), asks its question, or ends
(denied, answered). Source: engine.md §4 (interaction resolution); api.md §12; field-reports B38.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import calls, inputs, interactions
from omnara.db.agents import Wake
from omnara.db.calls import CallRow
from omnara.db.connection import Connection
from omnara.db.inputs import ResolvedInput
from omnara.db.interactions import InteractionRow
from omnara.domain.events import AgentInputPayload
from omnara.domain.text import clean_text
from omnara.engine.actors import ExternalActor, actor_for, check_actor
from omnara.engine.appending import Appending
from omnara.engine.deps import Deps, announce
from omnara.engine.scope import AgentPath, locate
from omnara.errors import Conflict, NotFound
from omnara.ids import IdKind, encode, new_uuid
from omnara.tools.interactions import (
    Answer,
    Form,
    check_answers,
    is_allowed,
    permission_result,
    question_form,
    question_result,
)

ASK_QUESTION = "ask_question"


class _Resolution(msgspec.Struct, frozen=True):
    """As stored: contract schema InteractionResolution."""

    answers: tuple[Answer, ...]


class _Done(msgspec.Struct, frozen=True):
    row: InteractionRow
    call_state: str | None = None
    ready: bool = False


async def resolve(
    deps: Deps,
    p: Principal,
    path: AgentPath,
    interaction_id: UUID,
    answers: Sequence[Answer],
    *,
    actor: ExternalActor | None = None,
) -> InteractionRow:
    """Answer a form. Own transaction. The same answers by the same caller return the resolved form again.

    Raises NotFound, Forbidden, InvalidRequest (answers that do not fit, actor of a user), Conflict (other answers,
    another caller, or a canceled form).
    """

    async def work(connection: Connection) -> _Done:
        agent = await locate(connection, p, path, ProjectAction.OPERATE)
        check_actor(p, actor)
        appending = await Appending.lock(connection, agent.id)
        found = await interactions.find(connection, agent.id, interaction_id)
        if found is None:
            raise NotFound("interaction")
        checked = check_answers(msgspec.json.decode(found.request, type=Form), [_cleaned(a) for a in answers])
        if found.state != "open":
            return _Done(_replay(found, checked, p))
        call = await calls.find_call(connection, agent.id, found.tool_call_id)
        if call is None or call.state == "completed":
            raise Conflict("the tool call is over")
        actor_id = await actor_for(connection, p, ProjectScope(agent.org_id, agent.project_id), actor)
        return await _answer(connection, appending, found, call, checked, p, actor_id)

    done = await deps.db.run(work)
    if done.call_state is not None:
        deps.feed.tool_call(done.row.agent_id, done.row.tool_call_id, done.call_state)
        announce(deps, done.row.agent_id, events=True, ready=done.ready)
    return done.row


def _cleaned(answer: Answer) -> Answer:
    return answer if answer.text is None else Answer(answer.option_indices, clean_text(answer.text))


def _replay(found: InteractionRow, checked: tuple[Answer, ...], p: Principal) -> InteractionRow:
    if found.state == "canceled" or found.resolution is None:
        raise Conflict("the interaction was canceled")
    stored = msgspec.json.decode(found.resolution, type=_Resolution)
    if stored.answers != checked or found.resolved_by != p.public_id:
        raise Conflict("the interaction was already resolved")
    return found


async def _answer(
    connection: Connection,
    appending: Appending,
    found: InteractionRow,
    call: CallRow,
    checked: tuple[Answer, ...],
    p: Principal,
    actor_id: UUID | None,
) -> _Done:
    agent_id = found.agent_id
    input_id = new_uuid()
    payload = AgentInputPayload(
        agent_input_id=encode(IdKind.AGENT_INPUT, input_id),
        input_kind="interaction_response",
        content_blocks=[],
        actor_id=None if actor_id is None else encode(IdKind.ACTOR, actor_id),
        interaction_id=encode(IdKind.INTERACTION, found.id),
    )
    event = appending.add_input(payload, semantic=True)
    new = ResolvedInput(
        id=input_id,
        kind="interaction_response",
        event_sequence=event.sequence,
        actor_id=actor_id,
        interaction_id=found.id,
    )
    await inputs.insert_resolved(connection, agent_id, new)
    resolution = msgspec.json.encode(_Resolution(checked)).decode()
    row = await interactions.resolve(
        connection, agent_id, found.id, resolution=resolution, input_id=input_id, principal=p.public_id
    )
    if row is None:
        raise RuntimeError("an open interaction was resolved twice under the lock of its agent")
    state, wake = await _go_on(connection, appending, found, call, checked)
    await appending.write(wake)
    return _Done(row, state, ready=wake == "wake")


async def _go_on(
    connection: Connection, appending: Appending, found: InteractionRow, call: CallRow, checked: tuple[Answer, ...]
) -> tuple[str, Wake]:
    """Let the call follow its answer; return its new state and whether the engine has work."""
    if found.kind == "permission":
        if is_allowed(checked):
            return await _allow(connection, found.agent_id, call)
        result = permission_result(call.name, checked)
    else:
        result = question_result(msgspec.json.decode(found.request, type=Form), checked)
    if result is None:
        raise RuntimeError("an answer that does not allow the call must have a result")
    appending.add_result(call, result.outcome, result.content_blocks)
    return "completed", "wake" if appending.hot.open_calls == 0 else "keep"


async def _allow(connection: Connection, agent_id: UUID, call: CallRow) -> tuple[str, Wake]:
    """A custom call now waits for its client, a question for its person; everything else runs."""
    asks = call.type == "built_in" and call.name == ASK_QUESTION
    state = "waiting" if asks else "ready"
    if not await calls.move(connection, agent_id, call.id, "awaiting_permission", state):
        raise Conflict(f"the tool call is {call.state}")
    if asks:
        form = question_form(msgspec.json.decode(call.input)["questions"])
        request = msgspec.json.encode(form).decode()
        await interactions.insert(connection, agent_id, new_uuid(), call.id, "question", request)
    runs = state == "ready" and call.type != "custom"
    return state, "wake" if runs else "keep"
