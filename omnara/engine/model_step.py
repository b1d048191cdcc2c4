"""The model step: what is written when it begins, and what is written when the provider has answered or failed.

Pure functions from a claim and an outcome to an `Advance`; the worker makes the call in between. An accepted output,
its calls, the results of calls that are over at once, the forms for people and the next step are one statement.
Source: engine.md §4, §5 (decision and budget); DESIGN §4.
"""

from __future__ import annotations

from typing import Final, Literal
from uuid import UUID

import msgspec

from omnara.domain.advance import CLEAR_RETRY, Admission, Advance, BeginStep, CloseStep, NewEvent
from omnara.domain.claim import Claim
from omnara.domain.content import ErrorBlock, OutputBlock, ToolCallBlock
from omnara.domain.events import (
    AgentInputPayload,
    EventMeta,
    ModelOutputPayload,
    StopReason,
    ToolResultPayload,
    encode_payload,
)
from omnara.domain.step import WaitingInput
from omnara.domain.text import clean_text
from omnara.engine.authorize import AuthorizedCall, authorize, cut_off, result_blocks
from omnara.engine.plan import StepPlan
from omnara.ids import IdKind, encode, new_uuid
from omnara.providers.protocol import Completed, Failed, RequestedCall

MAX_CONTINUATIONS: Final = 4
"""How often in a row an answer that the length limit cut goes on by itself."""


class Begun(msgspec.Struct, frozen=True):
    """A model or compaction step that is open in the database: its call id, turn, attempt and what it may see.

    `attempt` counts over all models of the config: see `StepPlan.at`.
    """

    call_id: UUID
    turn_id: UUID
    turn_sequence: int
    step_number: int
    attempt: int
    frontier: int
    kind: Literal["model", "compaction"] = "model"


class Next(msgspec.Struct, frozen=True):
    """What follows a save: a step to begin, or the claim given back, ready after `ready_s` (None: when woken)."""

    action: str
    begin: BeginStep | None = None
    ready_s: float | None = None


def advance_for(claim: Claim, following: Next, *, hold: bool = False) -> Advance:
    """An `Advance` of this claim that saves nothing yet: `msgspec.structs.replace` adds what a step produced."""
    return Advance(
        agent_id=claim.agent_id,
        claim_token=claim.claim_token,
        epoch=claim.epoch,
        gen=claim.inputs_gen,
        turn_id=claim.turn_id,
        turn_sequence=claim.turn_sequence,
        step_number=claim.step_number,
        known_next_sequence=claim.next_sequence,
        mode="hold" if hold else "begin" if following.begin is not None else "release",
        begin=following.begin,
        ready_s=following.ready_s,
    )


def begin_model(claim: Claim, plan: StepPlan, admit: tuple[WaitingInput, ...], attempt: int) -> BeginStep:
    """The model step that comes next; the inputs it admits open a new turn together."""
    turn_id = new_uuid() if admit or claim.turn_id is None else claim.turn_id
    return BeginStep(
        kind="model",
        attempt=attempt,
        config_id=plan.config_id,
        revision_id=plan.revision_id,
        turn_id=turn_id,
        new_turn=bool(admit),
        call_id=new_uuid(),
        secrets=",".join(plan.secrets),
        admit=tuple(Admission(item.id, _admission_event(item, turn_id)) for item in admit),
    )


def begin_tools(claim: Claim, plan: StepPlan) -> BeginStep:
    """The tools step that comes next, over the runnable calls of the open batch."""
    assert claim.turn_id is not None, "calls belong to a turn"
    return BeginStep(kind="tools", attempt=1, config_id=plan.config_id, turn_id=claim.turn_id)


def _admission_event(item: WaitingInput, turn_id: UUID) -> NewEvent:
    payload = AgentInputPayload(
        agent_input_id=encode(IdKind.AGENT_INPUT, item.id),
        input_kind="content",
        content_blocks=[],
        actor_id=encode(IdKind.ACTOR, item.actor_id) if item.actor_id is not None else None,
        input_idempotency_key=item.idempotency_key,
    )
    # The stored blocks go into the log byte for byte, without being decoded and encoded again.
    text = encode_payload(payload).replace('"content_blocks":[]', f'"content_blocks":{item.content}', 1)
    return NewEvent(
        id=new_uuid(),
        kind="agent_input",
        turn_id=turn_id,
        turn_sequence=None,
        payload=text,
        is_opening=True,
        is_semantic=True,
    )


class SavedOutput(msgspec.Struct, frozen=True):
    """The parts of an accepted output, and which calls the engine runs next.

    `goes_on`: the turn is not over, whether for its calls or because the answer was cut.
    """

    events: tuple[NewEvent, ...]
    calls: tuple[AuthorizedCall, ...]
    goes_on: bool

    @property
    def open_calls(self) -> int:
        """How many calls have no result yet."""
        return sum(1 for entry in self.calls if entry.result is None)

    @property
    def runnable(self) -> tuple[AuthorizedCall, ...]:
        """Calls that the engine runs itself, now."""
        return tuple(entry for entry in self.calls if entry.runs)


def accept_output(begun: Begun, plan: StepPlan, done: Completed, truncations: int = 0, answers: int = 0) -> SavedOutput:
    """Turn a provider's answer into the events and calls that are saved. `truncations`: cut answers right before it;
    `answers`: all before it in its turn.

    An answer that the length limit cut goes on in the next step, unless too many in a row were: then an error says so.
    None of its calls runs: which of them was cut in mid-arguments cannot be told for sure.
    """
    cut = done.stop_reason == "max_tokens"
    cuts = truncations + 1 if cut else 0
    calls = tuple(
        authorize(call, number, plan) for number, call in enumerate(cut_off(done.calls) if cut else done.calls)
    )
    by_id = {entry.call.id: entry for entry in calls}
    blocks = [block for raw in done.blocks if (block := _output_block(raw, by_id)) is not None]
    payload = ModelOutputPayload(encode(IdKind.MODEL_CALL, begun.call_id), _stop_reason(done, calls), blocks)
    goes_on = cuts <= MAX_CONTINUATIONS and (cut or bool(calls))
    meta = msgspec.structs.replace(_meta(begun, plan), truncations=cuts, continues=goes_on and cut, answers=answers + 1)
    output = NewEvent(
        id=new_uuid(),
        kind="model_output",
        turn_id=begun.turn_id,
        turn_sequence=begun.turn_sequence,
        payload=encode_payload(payload),
        is_semantic=not goes_on,
        meta=encode_payload(meta),
        replay=None if cut else done.replay,
    )
    events = [output]
    positioned = []
    for entry in calls:
        if entry.result is None:
            positioned.append(entry)
            continue
        call = msgspec.structs.replace(entry.call, result_position=len(events))
        positioned.append(msgspec.structs.replace(entry, call=call))
        events.append(_result_event(begun, entry))
    if cuts > MAX_CONTINUATIONS:
        text = f"output_limit_reached: {cuts} answers in a row were cut off, each at the limit of its length"
        events.append(_error_event(begun, plan, new_uuid(), text))
    return SavedOutput(tuple(events), tuple(positioned), goes_on)


def save_output(
    claim: Claim, begun: Begun, output: SavedOutput, usage: str, following: Next, attempt: int = 0
) -> Advance:
    """The statement's values for an accepted output and what follows it.

    `attempt`: what the attempts of the next call of this turn count from (see `StepPlan.at`).
    """
    return msgspec.structs.replace(
        advance_for(claim, following),
        close=CloseStep(begun.step_number, "succeeded", following.action, usage=usage),
        events=output.events,
        calls=tuple(entry.call for entry in output.calls),
        asked=tuple(entry.form for entry in output.calls if entry.form is not None),
        turn_open=output.goes_on,
        output_position=0,
        opened=output.open_calls if output.calls else None,
        attempt=attempt if output.goes_on else 0,
        retry_s=CLEAR_RETRY,
    )


def save_fallback(claim: Claim, begun: Begun, failure: Failed, following: Next, attempt: int) -> Advance:
    """The statement's values for a failed attempt whose work another model takes over, as attempt number `attempt`."""
    return msgspec.structs.replace(
        advance_for(claim, following),
        close=CloseStep(begun.step_number, "failed", "fallback", error=error_json(failure)),
        attempt=attempt - 1,
        retry_s=CLEAR_RETRY,
    )


def save_retry(claim: Claim, begun: Begun, failure: Failed, delay_s: float) -> Advance:
    """The statement's values for a failed attempt that is tried again after `delay_s`; the slot is given back."""
    return msgspec.structs.replace(
        advance_for(claim, Next("retry", ready_s=delay_s)),
        close=CloseStep(begun.step_number, "failed", "retry", error=error_json(failure)),
        attempt=begun.attempt,
        retry_s=delay_s,
    )


def save_failure(claim: Claim, begun: Begun, plan: StepPlan, failure: Failed, following: Next) -> Advance:
    """The statement's values for a call that ended for good: the turn is over, the reason is in the log."""
    text = clean_text(failure.message) or failure.kind
    return msgspec.structs.replace(
        advance_for(claim, following),
        close=CloseStep(begun.step_number, "failed", following.action, error=error_json(failure)),
        events=(_error_event(begun, plan, begun.call_id, text),),
        turn_open=False,
        output_position=0,
        attempt=0,
        retry_s=CLEAR_RETRY,
    )


def _error_event(begun: Begun, plan: StepPlan, call_id: UUID, text: str) -> NewEvent:
    payload = ModelOutputPayload(encode(IdKind.MODEL_CALL, call_id), "error", [ErrorBlock(text)])
    return NewEvent(
        id=new_uuid(),
        kind="model_output",
        turn_id=begun.turn_id,
        turn_sequence=begun.turn_sequence,
        payload=encode_payload(payload),
        is_semantic=True,
        meta=encode_payload(_meta(begun, plan)),
    )


def _output_block(raw: object, calls: dict[UUID, AuthorizedCall]) -> OutputBlock | None:
    if isinstance(raw, RequestedCall):
        entry = calls.get(raw.id)
        if entry is None:
            return None
        return ToolCallBlock(raw.public_id, entry.tool_type, raw.name, entry.input)  # type: ignore[arg-type]
    return raw  # type: ignore[return-value]  # text and reasoning have the stored shape already


def _stop_reason(done: Completed, calls: tuple[AuthorizedCall, ...]) -> StopReason:
    told = "tool_use" if calls else "end_turn" if done.stop_reason == "tool_use" else done.stop_reason
    return "max_tokens" if done.stop_reason == "max_tokens" else told


def _meta(begun: Begun, plan: StepPlan) -> EventMeta:
    target = plan.target
    return EventMeta(begun.frontier, target.provider, target.api_format, target.slug, str(plan.revision_id))


def _result_event(begun: Begun, entry: AuthorizedCall) -> NewEvent:
    assert entry.result is not None
    payload = ToolResultPayload(
        encode(IdKind.TOOL_CALL, entry.call.id), entry.result.outcome, result_blocks(entry.result)
    )
    return NewEvent(
        id=new_uuid(),
        kind="tool_result",
        turn_id=begun.turn_id,
        turn_sequence=begun.turn_sequence,
        payload=encode_payload(payload),
    )


def error_json(failure: Failed) -> str:
    """What the journal says about a failed attempt."""
    return msgspec.json.encode(
        {
            "kind": failure.kind,
            "message": clean_text(failure.message),
            "status": failure.status,
            "code": failure.provider_code,
            "ambiguous": failure.ambiguous,
            "retry_after_s": failure.retry_after_s,
        }
    ).decode()
