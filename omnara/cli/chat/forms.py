"""What a person types under a form, as the answer that the server takes. Pure.

Source: api.md §12 (one answer per question, one index unless multiple, text only where an option takes it).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from omnara.client import Interaction

__all__ = ["Answer", "Form", "Problem", "Question", "form_of", "hint", "parse_answer"]

_NUMBERS: Final = re.compile(r"(\d+(?:\s*,\s*\d+)*)(?:[\s.)]+(.*))?", re.DOTALL)
_YES: Final = frozenset({"y", "yes", "allow", "a"})
_NO: Final = frozenset({"n", "no", "deny", "d"})


class Option(msgspec.Struct, frozen=True):
    """A choice; with `allows_text` it takes words."""

    label: str
    allows_text: bool = False


class Question(msgspec.Struct, frozen=True):
    """One question of a form."""

    prompt: str
    options: list[Option] = []
    multiple: bool = False


class _ContextItem(msgspec.Struct, frozen=True):
    label: str
    value: str


class Form(msgspec.Struct, frozen=True):
    """A form as the server describes it."""

    title: str
    questions: list[Question]
    context: list[_ContextItem] = []


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one question, as the server takes it."""

    option_indices: list[int]
    text: str | None = None


class Problem(msgspec.Struct, frozen=True):
    """Why a line is no answer, in words for the person who typed it."""

    text: str


def form_of(interaction: Interaction) -> Form:
    """Return the form of an interaction. Raises msgspec.ValidationError when it is none that this version knows."""
    return msgspec.convert(interaction.request, Form)


def hint(question: Question, *, permission: bool) -> str:
    """Return how a question is answered, in one short line."""
    if permission:
        return "y allows, n denies (n and why: the agent is told)"
    numbers = "numbers, such as 1,3" if question.multiple else "a number"
    return numbers + (", or your own words" if _worded(question.options) is not None else "")


def parse_answer(question: Question, line: str, *, permission: bool) -> Answer | Problem:
    """Return the answer that a line stands for.

    `2`, `1,3` or `4 because` choose by number, a label chooses that option; for a permission `y`, `n` and `n because`;
    anything else is an answer in words, if an option takes words.
    """
    text = line.strip()
    if not text:
        return Problem(f"please answer: {hint(question, permission=permission)}")
    if permission:
        return _permission(text)
    numbered = _NUMBERS.fullmatch(text)
    if numbered is not None:
        return _by_number(question, [int(part) for part in numbered[1].split(",")], (numbered[2] or "").strip())
    for index, option in enumerate(question.options):
        if option.label.casefold() == text.casefold() and not option.allows_text:
            return Answer([index])
    worded = _worded(question.options)
    return Answer([worded], text) if worded is not None else Problem("choose an option by its number")


def _permission(text: str) -> Answer | Problem:
    word, _, rest = text.partition(" ")
    word = word.rstrip(",.:").casefold()
    if (word in _YES or word == "1") and not rest.strip():
        return Answer([0])
    if word in _NO or word == "2":
        return Answer([1], rest.strip() or None)
    return Problem("please answer y or n (n and why: the agent is told)")


def _by_number(question: Question, numbers: Sequence[int], text: str) -> Answer | Problem:
    wrong = next((number for number in numbers if not 1 <= number <= len(question.options)), None)
    if wrong is not None:
        return Problem(f"there is no option {wrong}; they go from 1 to {len(question.options)}")
    indices = sorted({number - 1 for number in numbers})
    if len(indices) > 1 and not question.multiple:
        return Problem("choose one option")
    worded = next((index for index in indices if question.options[index].allows_text), None)
    if text and worded is None:
        return Problem(f"option {numbers[0]} takes no words" + _in_own_words(question))
    if worded is not None and not text:
        return Problem(f"add your words: {worded + 1} followed by them")
    return Answer(indices, text or None)


def _in_own_words(question: Question) -> str:
    worded = _worded(question.options)
    return "" if worded is None else f"; for an answer in words begin with {worded + 1}"


def _worded(options: Sequence[Option]) -> int | None:
    return next((index for index, option in enumerate(options) if option.allows_text), None)


def as_answers(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the answers as `Client.resolve` takes them."""
    return [msgspec.to_builtins(answer) for answer in answers]
