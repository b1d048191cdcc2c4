"""Forms that a person answers, as pure functions: permission to run a call, and the questions of an agent.

The engine stores forms and answers; how a form looks, which answers fit it and what the model learns from them
is decided here. Source: api.md §12; contract schemas InteractionForm and InteractionAnswer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omnara.domain.content import StructuredDataBlock
from omnara.errors import InvalidRequest
from omnara.tools.protocol import ToolResult

__all__ = [
    "ALLOW_INDEX",
    "DENIED_CODE",
    "OTHER_LABEL",
    "Answer",
    "ContextItem",
    "Form",
    "Option",
    "Question",
    "canonical_json",
    "check_answers",
    "denied",
    "is_allowed",
    "permission_form",
    "permission_result",
    "question_form",
    "question_result",
]

OTHER_LABEL: Final = "Other"
"""The option added to each question, for an answer in words. Source: api.md §12."""

ALLOW_INDEX: Final = 0
"""Place of the first of the two options of a permission form; the other one denies. Source: engine.md §7."""

DENIED_CODE: Final = "permission_denied"


class ContextItem(msgspec.Struct, frozen=True):
    """A labelled fact shown above the questions. Contract schema InteractionFormContextItem."""

    label: str
    value: str


class Option(msgspec.Struct, frozen=True, omit_defaults=True):
    """A choice. Contract schema InteractionFormOption."""

    label: str
    allows_text: bool = False


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """One question with its options. Contract schema InteractionFormQuestion."""

    prompt: str
    options: tuple[Option, ...]
    multiple: bool = False


class Form(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a person is asked. Contract schema InteractionForm."""

    title: str
    questions: tuple[Question, ...]
    context: tuple[ContextItem, ...] | None = None


class Answer(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The answer to one question. Contract schema InteractionAnswer."""

    option_indices: tuple[int, ...]
    text: str | None = None


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys, no blanks and readable characters: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def permission_form(tool_name: str, tool_input: Mapping[str, Any]) -> Form:
    """Return the form that asks whether a call may run.

    The title names the tool; the input is shown as canonical JSON, unless it is empty. Source: api.md §12.
    """
    context = (ContextItem("Input", canonical_json(tool_input)),) if tool_input else None
    options = (Option("Allow"), Option("Deny", allows_text=True))
    return Form(f"Allow {tool_name}?", (Question("May the agent run this tool?", options),), context)


def question_form(questions: Sequence[Mapping[str, Any]]) -> Form:
    """Return the form for the questions of a valid `ask_question` input.

    Each gets an `Other` option that takes text. Options are labels, bare or as objects. Source: api.md §12.
    """
    asked = tuple(
        Question(
            item["prompt"],
            (*(_option(option) for option in item.get("options", ())), Option(OTHER_LABEL, allows_text=True)),
            item.get("multiple", False),
        )
        for item in questions
    )
    return Form("Question" if len(asked) == 1 else "Questions", asked)


def _option(option: str | Mapping[str, Any]) -> Option:
    return Option(option if isinstance(option, str) else option["label"])


def check_answers(form: Form, answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """Return the answers in the form that is stored and compared: indices sorted, text trimmed, blank text gone.

    Raises InvalidRequest (400) unless there is one answer per question, with exactly one index where a single choice
    is asked, all indices known and named once, and text only where a chosen option takes it. Source: api.md §12.
    """
    if len(answers) != len(form.questions):
        raise InvalidRequest(f"{len(form.questions)} answers are expected, {len(answers)} were given")
    return tuple(
        _check_answer(number, question, answer)
        for number, (question, answer) in enumerate(zip(form.questions, answers, strict=True))
    )


def _check_answer(number: int, question: Question, answer: Answer) -> Answer:
    indices = tuple(sorted(answer.option_indices))
    if not indices or (len(indices) > 1 and not question.multiple):
        wanted = "at least one option" if question.multiple else "exactly one option"
        raise InvalidRequest(f"answer {number} must choose {wanted}")
    if len(set(indices)) != len(indices):
        raise InvalidRequest(f"answer {number} chooses an option twice")
    if indices[0] < 0 or indices[-1] >= len(question.options):
        raise InvalidRequest(f"answer {number} chooses an option that does not exist")
    text = (answer.text or "").strip() or None
    if text is not None and not any(question.options[index].allows_text for index in indices):
        raise InvalidRequest(f"answer {number} has text, which no chosen option takes")
    return Answer(indices, text)


def is_allowed(answers: Sequence[Answer]) -> bool:
    """Return whether checked answers to a permission form allow the call."""
    return answers[0].option_indices == (ALLOW_INDEX,)


def permission_result(tool_name: str, answers: Sequence[Answer]) -> ToolResult | None:
    """Return the result that checked answers to a permission form give the call: None when it may run."""
    if is_allowed(answers):
        return None
    return denied(f"The user did not allow {tool_name} to run.", answers[0].text)


def denied(error: str, reason: str | None = None) -> ToolResult:
    """Return a denied result; what the person wrote becomes `reason`. Source: api.md §12."""
    value = {"error": error, "error_code": DENIED_CODE}
    if reason is not None:
        value["reason"] = reason
    return ToolResult("denied", (StructuredDataBlock(value),), DENIED_CODE)


def question_result(form: Form, answers: Sequence[Answer]) -> ToolResult:
    """Return what the model learns from checked answers to its questions. Source: api.md §12."""
    value = [
        {
            "question_index": number,
            "question": question.prompt,
            "selected_options": [
                {"option_index": index, "label": question.options[index].label} for index in answer.option_indices
            ],
            **({} if answer.text is None else {"text": answer.text}),
        }
        for number, (question, answer) in enumerate(zip(form.questions, answers, strict=True))
    ]
    return ToolResult("succeeded", (StructuredDataBlock({"answers": value}),))
