"""The body of an Anthropic Messages request.

Order of the parts: what is the same for all requests of an agent, then the settled messages, then the open side with
the cache mark on its last block. So each request begins with the bytes of the one before it, up to that one's mark.
Source: DESIGN §5, §6 of engine.md (layout); field-reports B01, B02, B04.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omnara.domain.content import MediaPart, Part, TextBlock
from omnara.domain.context import AnsweredCall, AssistantMessage, Message, ToolResultsMessage, UserMessage
from omnara.domain.events import EventMeta
from omnara.domain.text import is_blank
from omnara.providers.anthropic_media import parts_of
from omnara.providers.media import ModelFile, fill, mark_last, slot
from omnara.providers.names import is_sendable_id, offered_schema, sent_name
from omnara.providers.protocol import CacheRetention, ModelCall, ModelTarget
from omnara.providers.replay import Replay

_MARKS: Final[dict[CacheRetention, dict[str, str] | None]] = {
    "none": None,
    "short": {"type": "ephemeral"},
    "long": {"type": "ephemeral", "ttl": "1h"},
}
_OURS: Final = frozenset({"model", "max_tokens", "stream", "thinking", "system", "tools", "messages", "tool_choice"})

# Models that take a budget of thinking tokens instead of an effort.
_BUDGETED: Final = re.compile(r"claude-(?:3|(?:opus|sonnet)-4-(?:[015](?!\d)|20)|haiku-4)")
_BUDGETS: Final = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16384, "xhigh": 32768, "max": 32768}
_MIN_BUDGET: Final = 1024
_EFFORTS: Final = {"minimal": "low"}

_encode: Final = msgspec.json.Encoder().encode


def url(target: ModelTarget) -> str:
    """Where to send the request."""
    return target.base_url.rstrip("/") + (target.request_path or "/messages")


def head(call: ModelCall, *, led: bool) -> bytes:
    """The body up to the messages, with its opening brace. `led`: the last output is replayed with its reasoning."""
    target = call.target
    body: dict[str, Any] = {"model": target.slug, "max_tokens": target.max_output_tokens, "stream": True}
    thinking = _thinking(target, continues_unled=_continues(call) and not led)
    body.update(thinking)
    if target.temperature is not None and not thinking:
        body["temperature"] = target.temperature
    body.update({name: value for name, value in target.options.items() if name not in _OURS and name not in body})
    mark = _MARKS[target.cache_retention]
    tools = [_tool(spec) for spec in call.tools] if target.supports_tools else []
    blank = is_blank(call.system)
    if tools:
        if blank and mark:
            tools[-1]["cache_control"] = mark
        body["tools"] = tools
    if not blank:
        body["system"] = [{"type": "text", "text": call.system, **({"cache_control": mark} if mark else {})}]
    return _encode(body)[:-1] + b","


def _continues(call: ModelCall) -> bool:
    return isinstance(call.context.tail()[0], ToolResultsMessage)


def _tool(spec: Any) -> dict[str, Any]:
    return {"name": spec.name, "description": spec.description, "input_schema": offered_schema(spec.input_schema)}


def _thinking(target: ModelTarget, *, continues_unled: bool) -> dict[str, Any]:
    """Reasoning parameters. With a budget, an answer that goes on after tool results must begin with its reasoning;
    where that is gone (another model made it, or it was refused), this one request does without.
    """
    effort = target.reasoning_effort
    if not target.supports_reasoning or effort in ("", "none"):
        return {}
    if not _BUDGETED.search(target.slug):
        return {"thinking": {"type": "adaptive"}, "output_config": {"effort": _EFFORTS.get(effort, effort)}}
    budget = min(_BUDGETS.get(effort, _BUDGETS["medium"]), target.max_output_tokens // 2)
    if budget < _MIN_BUDGET or continues_unled:
        return {}
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


class MessagesRenderer:
    """Turns neutral messages into Anthropic's, for one target."""

    def __init__(self, target: ModelTarget) -> None:
        self.key = (target.api_format, target.provider, target.slug)
        mark = _MARKS[target.cache_retention]
        self._mark = b',"cache_control":' + _encode(mark) if mark else b""

    def same_model(self, meta: EventMeta) -> bool:
        """See `Renderer.same_model`."""
        return (meta.api_format, meta.provider, meta.model) == self.key

    def takes_id(self, call_id: str) -> bool:
        """See `Renderer.takes_id`."""
        return is_sendable_id(call_id)

    def group(self, messages: Sequence[Message], ids: dict[str, str], *, marked: bool) -> bytes:
        """See `Renderer.group`. One user message: roles alternate, and results come first in it."""
        blocks: list[bytes] = []
        said: list[bytes] = []
        for message in messages:
            if isinstance(message, ToolResultsMessage):
                blocks.extend(_result(result, ids[result.tool_call_id]) for result in message.results)
                # A failed result may have text only, and results come before all else: its files follow them.
                failed = (result for result in message.results if result.failed)
                said += [slot(media.artifact_id) for result in failed for media in result.media]
            elif isinstance(message, UserMessage):
                said += [_part(part) for part in message.parts]
        blocks += said
        if marked and self._mark:
            blocks[-1] = mark_last(blocks[-1], self._mark)
        return b'{"role":"user","content":[' + b",".join(blocks) + b"]}"

    def assistant(self, message: AssistantMessage, replay: Replay | None, ids: dict[str, str]) -> bytes:
        """See `Renderer.assistant`."""
        if replay is not None and replay.content:
            blocks = list(replay.content)
        else:
            blocks = [
                _text(block.text)
                if isinstance(block, TextBlock)
                else _encode(
                    {
                        "type": "tool_use",
                        "id": ids[block.tool_call_id],
                        "name": sent_name(block.name),
                        "input": block.input,
                    }
                )
                for block in message.blocks
            ]
        return b'{"role":"assistant","content":[' + b",".join(blocks) + b"]}"

    def with_media(self, body: bytes, media: Mapping[str, ModelFile]) -> bytes:
        """Fill the slots of a body with the files that this request has."""
        return fill(body, media, parts_of, self._mark)


def _result(result: AnsweredCall, call_id: str) -> bytes:
    value = {"type": "tool_result", "tool_use_id": call_id}
    if result.failed:
        return _encode({**value, "content": result.text, "is_error": True})
    if not result.media:
        return _encode({**value, "content": result.text})
    parts = [_text(result.text), *(slot(media.artifact_id) for media in result.media)]
    return _encode(value)[:-1] + b',"content":[' + b",".join(parts) + b"]}"


def _part(part: Part) -> bytes:
    return slot(part.artifact_id) if isinstance(part, MediaPart) else _text(part)


def _text(text: str) -> bytes:
    return _encode({"type": "text", "text": text})
