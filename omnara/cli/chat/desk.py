"""The forms that wait for the user: one at a time, question by question, withdrawn when somebody else was quicker."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import RenderableType

from omnara.cli.chat.forms import Answer, Form, Problem, Question, form_of, hint, parse_answer
from omnara.cli.chat.outbox import Resolution
from omnara.cli.chat.transcript import form_head, notice, question_lines
from omnara.client import Interaction

__all__ = ["Desk"]


class Desk:
    """Holds the open forms. Pure: it returns what to print and, when a form is complete, what to send."""

    def __init__(self) -> None:
        self._waiting: dict[str, Interaction] = {}
        self._answered: set[str] = set()
        self._current: Interaction | None = None
        self._form = Form("", [])
        self._answers: list[Answer] = []

    @property
    def question(self) -> Question | None:
        """The question that the next line answers."""
        return None if self._current is None else self._form.questions[len(self._answers)]

    @property
    def hint(self) -> str:
        """How that question is answered; empty without one."""
        question = self.question
        return "" if question is None else hint(question, permission=self._permission)

    @property
    def _permission(self) -> bool:
        return self._current is not None and self._current.kind == "permission"

    def update(self, open_forms: Sequence[Interaction]) -> list[RenderableType]:
        """Take the forms that are open now; return what to print: withdrawn ones, and the next to be answered."""
        self._waiting = {form.id: form for form in open_forms if form.id not in self._answered}
        self._answered.intersection_update(form.id for form in open_forms)
        parts: list[RenderableType] = []
        if self._current is not None and self._current.id not in self._waiting:
            parts.append(notice("this form is closed: it was answered elsewhere, or its turn is over"))
            self._current = None
        return parts + self._next()

    def answer(self, line: str) -> tuple[list[RenderableType], Resolution | None]:
        """Take a line for the question of `question`; return what to print, and the answers when they are complete."""
        question, current = self.question, self._current
        assert question is not None
        assert current is not None
        answer = parse_answer(question, line, permission=self._permission)
        if isinstance(answer, Problem):
            return [notice(answer.text, "yellow")], None
        self._answers.append(answer)
        parts = [notice(_said(question, answer), "yellow")]
        if len(self._answers) < len(self._form.questions):
            return [*parts, question_lines(self._form.questions[len(self._answers)])], None
        resolution = Resolution(current.id, tuple(msgspec.to_builtins(one) for one in self._answers))
        self._answered.add(current.id)
        del self._waiting[current.id]
        self._current = None
        return parts + self._next(), resolution

    def _next(self) -> list[RenderableType]:
        if self._current is not None or not self._waiting:
            return []
        current = next(iter(self._waiting.values()))
        try:
            form = form_of(current)
        except msgspec.ValidationError as error:
            self._answered.add(current.id)
            del self._waiting[current.id]
            return [notice(f"a form that this version cannot show: {error}", "red"), *self._next()]
        self._current, self._form, self._answers = current, form, []
        return [form_head(form), question_lines(form.questions[0])]


def _said(question: Question, answer: Answer) -> str:
    labels = ", ".join(question.options[index].label for index in answer.option_indices)
    return f"answered: {labels}{f' ({answer.text})' if answer.text else ''}"
