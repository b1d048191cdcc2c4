"""What becomes of each call that a model asks for, decided before it is saved: run, wait, ask a person, or fail.

The decision and its consequences (a form, a result) are saved in the same statement as the output itself, so there is
no moment at which a call is in the log without its fate.
Source: engine.md §7 (permission order); api.md §12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omnara.domain.advance import NewCall, NewInteraction
from omnara.domain.content import ResultBlock
from omnara.domain.events import Outcome
from omnara.domain.text import clean
from omnara.engine.plan import StepPlan, ToolPolicy
from omnara.ids import new_uuid
from omnara.providers.protocol import RequestedCall
from omnara.tools.interactions import denied, permission_form, question_form
from omnara.tools.protocol import ALWAYS_ASK, ALWAYS_DENY, MALFORMED, UNSUPPORTED, ToolResult, failed

ASK_QUESTION = "ask_question"
"""The built-in whose call is a form for a person."""


class AuthorizedCall(msgspec.Struct, frozen=True):
    """A call with its fate. `result` is set when it is already over; `form` when a person has to act."""

    call: NewCall
    tool_type: str
    input: dict[str, Any]
    form: NewInteraction | None = None
    result: ToolResult | None = None


def authorize(requested: RequestedCall, ordinal: int, plan: StepPlan) -> AuthorizedCall:
    """Decide the fate of one call: unknown and malformed ones fail, then the tool's permission mode decides."""
    policy = plan.policies.get(requested.name)
    tool_input = clean(requested.input)
    tool_type = policy.type if policy is not None else "built_in"
    result = _refusal(requested, tool_input, policy)
    if result is not None:
        call = _call(requested, ordinal, tool_type, tool_input, "completed", outcome=result.outcome)
        return AuthorizedCall(call, tool_type, tool_input, result=result)
    assert policy is not None, "_refusal answers a call without a policy"
    if policy.permission == ALWAYS_ASK:
        form = _form(requested, "permission", permission_form(requested.name, tool_input))
        call = _call(requested, ordinal, tool_type, tool_input, "awaiting_permission")
        return AuthorizedCall(call, tool_type, tool_input, form=form)
    if policy.type == "built_in" and requested.name == ASK_QUESTION:
        form = _form(requested, "question", question_form(tool_input["questions"]))
        return AuthorizedCall(
            _call(requested, ordinal, tool_type, tool_input, "waiting"), tool_type, tool_input, form=form
        )
    run = policy.type != "custom"
    return AuthorizedCall(_call(requested, ordinal, tool_type, tool_input, "ready", run=run), tool_type, tool_input)


def _refusal(requested: RequestedCall, tool_input: dict[str, Any], policy: ToolPolicy | None) -> ToolResult | None:
    if policy is None:
        return failed(f"There is no tool named {requested.name!r}.", UNSUPPORTED)
    if requested.problem is not None:
        return failed(requested.problem, MALFORMED)
    problem = policy.check(tool_input)
    if problem is not None:
        return failed(problem, MALFORMED)
    if policy.permission == ALWAYS_DENY:
        return denied(f"The tool {requested.name} is not allowed in this conversation.")
    return None


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


def _form(requested: RequestedCall, kind: Any, form: msgspec.Struct) -> NewInteraction:
    return NewInteraction(new_uuid(), requested.id, kind, msgspec.json.encode(form).decode())


def result_blocks(result: ToolResult) -> list[ResultBlock]:
    """The blocks of a result, cleaned of what Postgres and providers refuse."""
    return [msgspec.structs.replace(block, **_cleaned(block)) for block in result.content_blocks]


def _cleaned(block: ResultBlock) -> dict[str, Any]:
    fields = {"text": getattr(block, "text", None), "value": getattr(block, "value", None)}
    return {name: clean(value) for name, value in fields.items() if name in block.__struct_fields__}
