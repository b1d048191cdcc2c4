"""The body of an OpenAI Responses request.

Order of the parts as in the other formats: first what is the same for all requests of an agent, then the settled items,
then the open side; the provider caches by prefix without being told, and a key sends an agent to the machine that has
its prefix. Source: DESIGN §5; contract ModelCacheRetention, ModelAPIVariantOptions; field-reports B01, B04.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from omnara.domain.content import MediaPart, Part, TextBlock
from omnara.domain.context import (
    AnsweredCall,
    AssistantMessage,
    ContextState,
    Message,
    ToolResultsMessage,
    UserMessage,
)
from omnara.domain.events import EventMeta
from omnara.domain.text import is_blank
from omnara.providers.media import slot
from omnara.providers.names import offered_schema, sent_name
from omnara.providers.openai_responses_media import text_part
from omnara.providers.openai_responses_replay import is_sendable_call_id
from omnara.providers.protocol import ModelCall, ModelTarget
from omnara.providers.replay import Replay

_OURS: Final = frozenset({
    "model", "input", "instructions", "stream", "stream_options", "store", "include", "tools", "tool_choice",
    "reasoning", "max_output_tokens", "max_tool_calls", "previous_response_id", "conversation", "background", "prompt",
    "context_management", "truncation", "prompt_cache_key",
})  # fmt: skip
_MIN_OUTPUT: Final = 16
"""The smallest `max_output_tokens` that the provider takes."""

# Which models keep a prefix longer when asked: those up to 5.5 for a day, those after them for twelve hours. Asked in
# the other's way, or where there is none, they refuse the request.
_KEPT_A_DAY: Final = re.compile(r"gpt-(?:4\.1|5|5-codex|5\.[1-5](?:-[a-z-]+)?)(?:-\d{4}-\d\d-\d\d)?\Z")
_KEPT_LONGER: Final = re.compile(r"gpt-(?:5\.[6-9]|[6-9](?:\.\d+)?)(?:-|\Z)")

_encode: Final = msgspec.json.Encoder().encode


def url(target: ModelTarget) -> str:
    """Where to send the request."""
    return target.base_url.rstrip("/") + (target.request_path or "/responses")


def head(call: ModelCall) -> bytes:
    """The body up to the first item of the conversation, with `input` open."""
    target = call.target
    body: dict[str, Any] = {
        "model": target.slug,
        "stream": True,
        "store": False,
        "max_output_tokens": max(_MIN_OUTPUT, target.max_output_tokens),
    }
    body.update(_reasoning(target))
    if target.temperature is not None and (not target.supports_reasoning or target.reasoning_effort == "none"):
        body["temperature"] = target.temperature
    body.update(_cache_hints(call))
    body.update({name: value for name, value in target.options.items() if name not in _OURS and name not in body})
    if call.tools and target.supports_tools:
        body["tools"] = [_tool(spec) for spec in call.tools]
    if not is_blank(call.system):
        body["instructions"] = call.system
    return _encode(body)[:-1] + b',"input":['


def _reasoning(target: ModelTarget) -> dict[str, Any]:
    """Reasoning parameters. Models without reasoning refuse all of them."""
    if not target.supports_reasoning:
        return {}
    asked: dict[str, Any] = {"include": ["reasoning.encrypted_content"]}
    if target.reasoning_effort:
        asked["reasoning"] = {"effort": target.reasoning_effort}
    return asked


def _cache_hints(call: ModelCall) -> dict[str, Any]:
    target = call.target
    if target.cache_retention == "none":
        return {}
    hints: dict[str, Any] = {"prompt_cache_key": _cache_key(call)}
    if target.cache_retention == "long":
        if _KEPT_A_DAY.match(target.slug):
            hints["prompt_cache_retention"] = "24h"
        elif _KEPT_LONGER.match(target.slug):
            hints["prompt_cache_options"] = {"ttl": "12h"}
    return hints


def _cache_key(call: ModelCall) -> str:
    """The same for all requests of a conversation: a digest of what they begin with, which is what is cached."""
    digest = hashlib.blake2b(call.system.encode(), digest_size=16)
    for spec in call.tools:
        digest.update(spec.name.encode())
    digest.update(_first_said(call.context).encode())
    return f"omnara-{digest.hexdigest()}"


def _first_said(context: ContextState) -> str:
    first = context.settled[0] if context.settled else context.tail()[0]
    if isinstance(first, UserMessage):
        part = first.parts[0]
        return part.artifact_id if isinstance(part, MediaPart) else part
    return str(first.sequence)


def _tool(spec: Any) -> dict[str, Any]:
    """A function. Strict mode, the provider's default, refuses most schemas that people write."""
    return {
        "type": "function",
        "name": spec.name,
        "description": spec.description,
        "parameters": offered_schema(spec.input_schema),
        "strict": False,
    }


class ResponsesRenderer:
    """Turns neutral messages into input items, for one target."""

    def __init__(self, target: ModelTarget) -> None:
        self.key = (target.api_format, target.provider, target.slug)

    def same_model(self, meta: EventMeta) -> bool:
        """See `Renderer.same_model`."""
        return (meta.api_format, meta.provider, meta.model) == self.key

    def takes_id(self, call_id: str) -> bool:
        """See `Renderer.takes_id`."""
        return is_sendable_call_id(call_id)

    def group(self, messages: Sequence[Message], ids: dict[str, str], *, marked: bool) -> bytes:
        """See `Renderer.group`. An item per result, then what was said as one; the format has no cache mark."""
        items: list[bytes] = []
        for message in messages:
            if isinstance(message, ToolResultsMessage):
                items.extend(_output(result, ids[result.tool_call_id]) for result in message.results)
            elif isinstance(message, UserMessage):
                items.append(b'{"type":"message","role":"user","content":' + _parts(message.parts) + b"}")
        return b",".join(items)

    def assistant(self, message: AssistantMessage, replay: Replay | None, ids: dict[str, str]) -> bytes:
        """See `Renderer.assistant`. Here it is one or more items, in the order of the answer."""
        if replay is not None and replay.content:
            return b",".join(replay.content)
        return b",".join(
            _said(block.text)
            if isinstance(block, TextBlock)
            else _encode(
                {
                    "type": "function_call",
                    "call_id": ids[block.tool_call_id],
                    "name": sent_name(block.name),
                    "arguments": _encode(block.input).decode(),
                }
            )
            for block in message.blocks
        )


def _output(result: AnsweredCall, call_id: str) -> bytes:
    """The result of a call: its text, or a list of text and files."""
    start = _encode({"type": "function_call_output", "call_id": call_id})[:-1]
    output = _parts((result.text, *result.media)) if result.media else _encode(result.text)
    return start + b',"output":' + output + b"}"


def _parts(parts: Sequence[Part]) -> bytes:
    listed = [slot(part.artifact_id) if isinstance(part, MediaPart) else text_part(part) for part in parts]
    return b"[" + b",".join(listed) + b"]"


def _said(text: str) -> bytes:
    """What an assistant said, as plain text: in parts it would be an item of the provider, with an id."""
    return _encode({"type": "message", "role": "assistant", "content": text})
