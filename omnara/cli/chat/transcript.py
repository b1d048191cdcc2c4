"""Events as a person reads them: messages, tool calls and results on a line each, answers as Markdown.

Everything here was written by others, so it passes `visible` before it reaches a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from omnara.cli.chat.draft import answer_text
from omnara.cli.chat.forms import Form, Question
from omnara.client import Event
from omnara.visible import visible

__all__ = ["Transcript", "form_head", "markdown", "notice", "question_lines"]

MAX_LINE: Final = 200
"""More of an argument or a result is not shown; a narrower terminal shows less."""

MAX_FACT: Final = 2000
"""Of what a permission is asked for, most should be seen."""
HIDDEN: Final = "omnara_hidden"
"""Metadata of a block that is meant for the model alone. Source: api.md §15."""


def markdown(source: str) -> RenderableType:
    """Return Markdown source, ready to print. Links are spelled out: what is shown is where they lead."""
    return _Trimmed(Markdown(visible(source, lines=True), hyperlinks=False, code_theme="ansi_dark"))


class _Trimmed:
    """Markdown without the blanks around it: blocks are printed one by one, and set apart by whoever prints them."""

    def __init__(self, inner: Markdown) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [_without_end(line) for line in console.render_lines(self._inner, options, pad=False)]
        while lines and not lines[-1]:
            lines.pop()
        begun = False
        for line in lines:
            begun = begun or bool(line)
            if begun:
                yield from line
                yield Segment.line()


def _without_end(line: list[Segment]) -> list[Segment]:
    """Return a line without the blanks at its end, which would be copied along and wrapped by a narrower window."""
    kept = list(line)
    while kept and not kept[-1].text.strip() and not (kept[-1].style and kept[-1].style.bgcolor):
        kept.pop()
    if kept and not (kept[-1].style and kept[-1].style.bgcolor):
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept


def notice(text: str, style: str = "dim") -> RenderableType:
    """Return a remark of this program, told apart from what agent and user say."""
    return Text(f"· {visible(text)}", style)


def message(text: str) -> RenderableType:
    """Return what somebody told the agent."""
    body = visible(text, lines=True).replace("\n", "\n  ")
    return Text.assemble(("> ", "bold cyan"), (body, "bold"))


def form_head(form: Form) -> RenderableType:
    """Return the title of a form and the facts above its questions."""
    facts = [f"  {visible(item.label)}: {visible(item.value)}" for item in form.context]
    title = Text.assemble(("? ", "bold yellow"), (visible(form.title), "bold"))
    return Group(title, *(_line(fact, "", limit=MAX_FACT, fold=True) for fact in facts))


def question_lines(question: Question) -> RenderableType:
    """Return a question with its numbered options."""
    lines = [Text(f"  {visible(question.prompt, lines=True)}")]
    for number, option in enumerate(question.options, 1):
        words = " (in your words)" if option.allows_text else ""
        lines.append(Text.assemble((f"  {number:>3}  ", "yellow"), visible(option.label), (words, "dim")))
    return Group(*lines)


class Transcript:
    """Turns events into lines. Remembers the names of calls, which their results do not repeat."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def whole(self, event: Event) -> list[RenderableType]:
        """Return everything that an event shows, its answer included."""
        text = answer_text(event) if event.kind == "model_output" else ""
        return [*([markdown(text)] if text.strip() else []), *self.around(event)]

    def around(self, event: Event) -> list[RenderableType]:
        """Return what an event shows besides the text of an answer."""
        match event.kind:
            case "agent_input":
                return _input(event)
            case "model_output":
                return [*self._calls(event), *_stop(event)]
            case "tool_result":
                return [self._result(event)]
            case "context_checkpoint":
                return [notice("the conversation so far was summarised")]
            case _:
                return [notice(f"{event.kind}: a kind of event that this version does not know")]

    def _calls(self, event: Event) -> list[RenderableType]:
        lines: list[RenderableType] = []
        for call in event.tool_calls:
            name = str(call.get("name"))
            self._names[str(call.get("tool_call_id"))] = name
            lines.append(_line(f"● {visible(name)} {visible(_arguments(call.get('input')))}", "magenta"))
        return lines

    def _result(self, event: Event) -> RenderableType:
        name = self._names.get(event.tool_call_id or "", "tool")
        outcome = event.outcome or "unknown"
        style = "dim" if outcome == "succeeded" else "red"
        return _line(f"  ↳ {visible(name)} {visible(outcome)}{_shown_blocks(event.content_blocks)}", style)


def _input(event: Event) -> list[RenderableType]:
    if event.input_kind == "content":
        return [message("\n".join(part for part in _input_parts(event.content_blocks) if part))]
    if event.input_kind == "control":
        return [notice("stopped", "yellow")]
    if event.input_kind == "config_change" and not event.is_opening_event:
        return [notice("the configuration was changed")]
    return []


def _input_parts(blocks: Sequence[dict[str, Any]]) -> list[str]:
    shown = [block for block in blocks if not (block.get("metadata") or {}).get(HIDDEN)]
    return [str(block["text"]) if block.get("type") == "text" else f"[{_file_name(block)}]" for block in shown]


def _stop(event: Event) -> list[RenderableType]:
    errors = [str(block.get("text", "")) for block in event.content_blocks if block.get("type") == "error"]
    if event.stop_reason == "error":
        return [Text(f"✗ {visible(error, lines=True)}", "red") for error in errors or ["the model call failed"]]
    remarks = {
        "max_tokens": "the answer was cut at the length limit and goes on",
        "refusal": "the model refused to answer",
        "content_filter": "the provider's filter stopped the answer",
    }
    remark = remarks.get(event.stop_reason or "")
    return [notice(remark, "yellow")] if remark else []


def _arguments(value: Any) -> str:
    if isinstance(value, dict):
        parts = (f"{name}={item if isinstance(item, str) else _json(item)}" for name, item in value.items())
        return " ".join(parts)
    return "" if value is None else _json(value)


def _shown_blocks(blocks: Sequence[dict[str, Any]]) -> str:
    parts = [_result_part(block) for block in blocks]
    text = "\n".join(part for part in parts if part).strip()
    if not text:
        return ""
    lines = text.splitlines()
    more = f" (+{len(lines) - 1} lines)" if len(lines) > 1 else ""
    return f": {visible(lines[0][:MAX_LINE])}{more}"


def _result_part(block: dict[str, Any]) -> str:
    if block.get("type") == "text":
        return str(block.get("text", ""))
    if block.get("type") == "structured_data":
        return _json(block.get("value"))
    return f"[{_file_name(block)}]"


def _file_name(block: dict[str, Any]) -> str:
    named = (block.get("metadata") or {}).get("filename")
    return str(named or block.get("filename") or block.get("artifact_id") or block.get("type") or "file")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _line(text: str, style: str, *, limit: int = MAX_LINE, fold: bool = False) -> Text:
    shown = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return Text(shown, style) if fold else Text(shown, style, no_wrap=True, overflow="ellipsis")
