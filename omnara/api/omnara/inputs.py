"""Routes that tell an agent something: a message, or to stop."""

from __future__ import annotations

from typing import Final

from aiohttp import web
from msgspec import UNSET

from omnara.api.body import MEDIA_BODY_LIMIT
from omnara.api.omnara import decode, encode
from omnara.api.omnara.decode import AGENT, AGENT_PATH, agent_path, given
from omnara.api.omnara.events import owner_of
from omnara.api.omnara.types.agents import (
    AgentInputEnvelope,
    CancelAgentRequest,
    CancelAgentResponse,
    CreateAgentInputRequest,
)
from omnara.api.routing import Call, Route, reply
from omnara.engine import cancel, inputs, reads
from omnara.ids import IdKind


async def create_input(call: Call) -> web.StreamResponse:
    """A message: 201 when it is new, 200 when its Idempotency-Key was used for the same one."""
    body: CreateAgentInputRequest = call.body
    made = await inputs.create_input(
        call.context.deps,
        call.principal,
        agent_path(call),
        decode.input_blocks(body.content_blocks),
        mode=given(body.delivery_mode) or "queued",
        actor=decode.actor(body.actor),
        cancel_open_interactions=given(body.cancel_open_interactions) or False,
        key=call.key,
    )
    return reply(201 if made.created else 200, AgentInputEnvelope(agent_input=encode.agent_input(made.input)))


async def cancel_agent(call: Call) -> web.StreamResponse:
    """Cancel the current turn; queued messages start next."""
    body: CancelAgentRequest | None = call.body
    deps, p, path = call.context.deps, call.principal, agent_path(call)
    actor = None if body is None else decode.actor(body.actor)
    done = await cancel.cancel_agent(deps, p, path, actor=actor)
    event = None
    if done.event is not None:
        event = encode.event(owner_of(await reads.get_agent(deps, p, path)), done.event)
    return reply(
        200,
        CancelAgentResponse(
            event=event,
            runtime_cancel_requested=done.taken,
            affected=done.affected,
            actor_id=UNSET if done.actor_id is None else encode.public(IdKind.ACTOR, done.actor_id),
        ),
    )


ROUTES: Final = (
    Route(
        method="POST",
        path=f"{AGENT_PATH}/inputs",
        operation_id="createAgentInput",
        handler=create_input,
        path_ids=AGENT,
        body=CreateAgentInputRequest,
        body_limit=MEDIA_BODY_LIMIT,
        idempotent=True,
        responses={200: AgentInputEnvelope, 201: AgentInputEnvelope},
    ),
    Route(
        method="POST",
        path=f"{AGENT_PATH}/cancel",
        operation_id="cancelAgent",
        handler=cancel_agent,
        path_ids=AGENT,
        body=CancelAgentRequest,
        body_required=False,
        responses={200: CancelAgentResponse},
    ),
)
