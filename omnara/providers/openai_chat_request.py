"""The body of a Chat Completions request.

Order of the parts as in the other formats: first what is the same for all requests of an agent, then the settled
messages, then the open side; these servers cache by prefix without being told.
Source: DESIGN §5; field-reports B01, B04.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from omnara.domain.content import MediaPart, Part, TextBlock
from omnara.domain.context import AssistantMessage, Message, ToolResultsMessage, UserMessage
from omnara.domain.events import EventMeta
from omnara.domain.text import is_blank
from omnara.providers.media import slot
from omnara.providers.names import offered_schema, sent_name
from omnara.providers.openai_chat_media import text_part
from omnara.providers.protocol import ModelCall, ModelTarget
from omnara.providers.replay import Replay

_OURS: Final = frozenset({
    "model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "tools", "tool_choice",
    "reasoning_effort", "reasoning", "functions", "function_call", "n",
})  # fmt: skip

_encode: Final = msgspec.json.Encoder().encode


def url(target: ModelTarget) -> str:
    """Where to send the request."""
    return target.base_url.rstrip("/") + (target.request_path or "/chat/completions")


def head(call: ModelCall) -> bytes:
    """The body up to the first message of the conversation, with `messages` open."""
    target = call.target
    body: dict[str, Any] = {"model": target.slug, "stream": True, "stream_options": {"include_usage": True}}
    body["max_tokens" if target.api_variant == "openrouter" else "max_completion_tokens"] = target.max_output_tokens
    reasoning = _reasoning(target)
    body.update(reasoning)
    if target.temperature is not None and not reasoning:
        body["temperature"] = target.temperature
    body.update({name: value for name, value in target.options.items() if name not in _OURS and name not in body})
    if call.tools and target.supports_tools:
        body["tools"] = [_tool(spec) for spec in call.tools]
    start = _encode(body)[:-1] + b',"messages":['
    if is_blank(call.system):
        return start
    return start + _encode({"role": "system", "content": call.system}) + b","


def _reasoning(target: ModelTarget) -> dict[str, Any]:
    effort = target.reasoning_effort
    if not target.supports_reasoning or not effort:
        return {}
    if target.api_variant == "openrouter":
        return {"reasoning": {"effort": effort}}
    return {"reasoning_effort": effort}


def _tool(spec: Any) -> dict[str, Any]:
    function = {"name": spec.name, "description": spec.description, "parameters": offered_schema(spec.input_schema)}
    return {"type": "function", "function": function}


class ChatRenderer:
    """Turns neutral messages into Chat Completions messages, for one target."""

    def __init__(self, target: ModelTarget) -> None:
        self.key = (target.api_format, target.provider, target.slug)

    def same_model(self, meta: EventMeta) -> bool:
        """See `Renderer.same_model`."""
        return (meta.api_format, meta.provider, meta.model) == self.key

    def takes_id(self, call_id: str) -> bool:
        """See `Renderer.takes_id`: this format has no rule for ids."""
        return True

    def group(self, messages: Sequence[Message], ids: dict[str, str], *, marked: bool) -> bytes:
        """See `Renderer.group`. A message per result, then the texts as one; the format has no cache mark."""
        objects: list[bytes] = []
        parts: list[Part] = []
        for message in messages:
            if isinstance(message, ToolResultsMessage):
                objects.extend(
                    _encode({"role": "tool", "tool_call_id": ids[result.tool_call_id], "content": result.text})
                    for result in message.results
                )
                # A result is text in this format; the next to speak brings its files.
                parts += [media for result in message.results for media in result.media]
            elif isinstance(message, UserMessage):
                parts += message.parts
        if parts:
            objects.append(_user(parts))
        return b",".join(objects)

    def assistant(self, message: AssistantMessage, replay: Replay | None, ids: dict[str, str]) -> bytes:
        """See `Renderer.assistant`."""
        if replay is not None and replay.content:
            return replay.content[0]
        calls = [(ids[call.tool_call_id], call.name, call.input) for call in message.calls]
        texts = [block.text for block in message.blocks if isinstance(block, TextBlock)]
        return _encode(assistant_message(texts, [call_value(*call) for call in calls]))


def _user(parts: Sequence[Part]) -> bytes:
    """A user's message: one text where there is nothing else, since many servers take only that."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return _encode({"role": "user", "content": "\n\n".join(texts)})
    items = [slot(part.artifact_id) if isinstance(part, MediaPart) else text_part(part) for part in parts]
    return b'{"role":"user","content":[' + b",".join(items) + b"]}"


def assistant_message(texts: Sequence[str], calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """An assistant message of these texts and calls. `content` is null, not empty, when there are only calls."""
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts) or None}
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call_value(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call inside an assistant message; its arguments travel as JSON text."""
    function = {"name": sent_name(name), "arguments": _encode(arguments).decode()}
    return {"id": call_id, "type": "function", "function": function}
