"""What becomes of each call that a model asks for, decided before it is saved: run, wait, ask a person, or fail.

The decision and its consequences (a form, a result) are saved in the same statement as the output itself, so there is
no moment at which a call is in the log without its fate.
Source: engine.md §7 (permission order); api.md §12.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, assert_never

import msgspec

from omnara.domain.advance import NewCall, NewInteraction
from omnara.domain.content import ResultBlock, StructuredDataBlock, TextBlock
from omnara.domain.events import Outcome
from omnara.domain.text import clean, clean_text
from omnara.engine.plan import StepPlan, ToolPolicy
from omnara.ids import new_uuid
from omnara.providers.protocol import MAX_CALL_ID_BYTES, RequestedCall
from omnara.tools.interactions import Form, question_form
from omnara.tools.permission import Authorised, Authorization, Completed, NeedsPermission, authorise
from omnara.tools.protocol import ALWAYS_DENY, MALFORMED, Effect, Tool, ToolResult, failed

ASK_QUESTION = "ask_question"
"""The built-in whose call is a form for a person."""

CUT_OFF: Final = "The call was cut off by the length limit of the answer. It did not run."
UNSTORABLE: Final = "The input holds a NUL character or half of a surrogate pair. It did not run."
MAX_NAME_CHARS: Final = 256
_REPLACED: Final = "\\ufffd"


class AuthorizedCall(msgspec.Struct, frozen=True):
    """A call with its fate. `result` is set when it is already over; `form` when a person has to act."""

    call: NewCall
    tool_type: str
    input: dict[str, Any]
    form: NewInteraction | None = None
    result: ToolResult | None = None
    runs: bool = False
    """The engine runs it itself, now. `call.run` says whether it is marked as running meanwhile."""


def authorize(requested: RequestedCall, ordinal: int, plan: StepPlan) -> AuthorizedCall:
    """Decide the fate of one call: unknown and malformed ones fail, then the tool's permission mode decides."""
    policy = plan.policies.get(requested.name)
    tool_type = policy.tool.type if policy is not None else "built_in"
    tool_input = clean(requested.input)
    verdict = _verdict(requested, tool_input, policy)
    if isinstance(verdict, Completed):
        call = _call(requested, ordinal, tool_type, tool_input, "completed", outcome=verdict.result.outcome)
        return AuthorizedCall(call, tool_type, tool_input, result=verdict.result)
    if isinstance(verdict, NeedsPermission):
        form = _form(requested, "permission", verdict.form)
        call = _call(requested, ordinal, tool_type, tool_input, "awaiting_permission")
        return AuthorizedCall(call, tool_type, tool_input, form=form)
    if isinstance(verdict, Authorised):
        return _authorised(requested, ordinal, verdict.tool, tool_input)
    assert_never(verdict)


def cut_off(calls: Iterable[RequestedCall]) -> list[RequestedCall]:
    """The calls of an answer that its length limit cut, made to fail. Of one that hardly began nothing is left to tell.

    Source: field-reports B43 (a call cut in mid-arguments ran as one without arguments).
    """
    return [
        msgspec.structs.replace(call, problem=CUT_OFF)
        for call in calls
        if 0 < len(call.name) <= MAX_NAME_CHARS and len(call.provider_call_id.encode()) <= MAX_CALL_ID_BYTES
    ]


def _authorised(requested: RequestedCall, ordinal: int, tool: Tool, tool_input: dict[str, Any]) -> AuthorizedCall:
    if tool.type == "built_in" and tool.name == ASK_QUESTION:
        form = _form(requested, "question", question_form(tool_input["questions"]))
        call = _call(requested, ordinal, tool.type, tool_input, "waiting")
        return AuthorizedCall(call, tool.type, tool_input, form=form)
    runs = tool.type != "custom"
    marked = runs and tool.effect is not Effect.TRANSACTIONAL
    call = _call(requested, ordinal, tool.type, tool_input, "ready", run=marked)
    return AuthorizedCall(call, tool.type, tool_input, runs=runs)


def _verdict(requested: RequestedCall, tool_input: dict[str, Any], policy: ToolPolicy | None) -> Authorization:
    if policy is None:
        return authorise(None, requested.name, tool_input, ALWAYS_DENY)
    if requested.problem is not None:
        return Completed(failed(requested.problem, MALFORMED))
    if policy.tool.exact and _lost_characters(requested.input, tool_input):
        return Completed(failed(UNSTORABLE, MALFORMED))
    return authorise(policy.tool, requested.name, tool_input, policy.mode)


def _lost_characters(asked: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether characters were replaced, and not only written in another way (two surrogates for one character)."""
    if stored is asked:
        return False
    return json.dumps(asked).count(_REPLACED) != json.dumps(stored).count(_REPLACED)


def _call(
    requested: RequestedCall,
    ordinal: int,
    tool_type: str,
    tool_input: Mapping[str, Any],
    state: str,
    *,
    outcome: Outcome | None = None,
    run: bool = False,
) -> NewCall:
    return NewCall(
        ordinal=ordinal,
        id=requested.id,
        provider_call_id=requested.provider_call_id,
        name=requested.name,
        type=tool_type,
        input=msgspec.json.encode(tool_input).decode(),
        state=state,
        outcome=outcome,
        run=run,
    )


def _form(requested: RequestedCall, kind: Literal["permission", "question"], form: Form) -> NewInteraction:
    return NewInteraction(new_uuid(), requested.id, kind, msgspec.json.encode(form).decode())


def result_blocks(result: ToolResult) -> list[ResultBlock]:
    """The blocks of a result, cleaned of what Postgres and providers refuse."""
    return [_cleaned(block) for block in result.content_blocks]


def _cleaned(block: ResultBlock) -> ResultBlock:
    if isinstance(block, TextBlock):
        text = clean_text(block.text)
        return block if text is block.text else TextBlock(text, block.metadata)
    if isinstance(block, StructuredDataBlock):
        value = clean(block.value)
        return block if value is block.value else StructuredDataBlock(value, block.metadata)
    return block
