"""Anthropic Messages: reading a request and writing an answer."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from omnara.testing.answer import Answer, Block, Call, Text, Thinking, pieces
from omnara.testing.conversation import Format, Glance, Message, Parsed, ToolCall, ToolResult, ToolSpec, merged
from omnara.testing.faults import StreamError
from omnara.testing.frames import Frame, encode, named
from omnara.testing.wire import Counted, Problem, Reply, counted


class _Role(msgspec.Struct):
    role: str = ""


class _Outline(msgspec.Struct):
    model: str = ""
    stream: bool = False
    messages: list[_Role] = []


_outline = msgspec.json.Decoder(_Outline)

_STATUS = {
    400: ("invalid_request_error", "The request is invalid."),
    401: ("authentication_error", "invalid x-api-key"),
    402: ("billing_error", "Your credit balance is too low to access the Anthropic API."),
    403: ("permission_error", "Your API key does not have permission to use the specified resource."),
    404: ("not_found_error", "Not found"),
    413: ("request_too_large", "Request exceeds the maximum size"),
    429: ("rate_limit_error", "This request would exceed your organization's rate limit."),
    500: ("api_error", "Internal server error"),
    503: ("api_error", "Service unavailable"),
    504: ("timeout_error", "Request timed out"),
    529: ("overloaded_error", "Overloaded"),
}


class AnthropicWire:
    """`POST /v1/messages`."""

    format: ClassVar[Format] = "anthropic"
    path: ClassVar[str] = "/v1/messages"
    keepalive: ClassVar[bytes] = named("ping", {"type": "ping"})
    request_id_header: ClassVar[str] = "request-id"

    def glance(self, raw: bytes) -> Glance:
        """Read model, stream flag and turn. Raises `msgspec.DecodeError`."""
        seen = _outline.decode(raw)
        return Glance(seen.model, _turns(seen.messages), seen.stream)

    def parse(self, body: Any) -> Parsed:
        """Turn a decoded body into the neutral form."""
        calls: dict[str, ToolCall] = {}
        return Parsed(
            model=body.get("model", ""),
            system=flat_text(body.get("system") or ""),
            tools=tuple(
                ToolSpec(tool["name"], tool.get("input_schema", {}), tool.get("description", ""))
                for tool in body.get("tools") or ()
            ),
            messages=merged([_message(message, calls) for message in body["messages"]]),
            stream=bool(body.get("stream", False)),
            max_tokens=body.get("max_tokens"),
        )

    def frames(self, answer: Answer, reply: Reply) -> list[Frame]:
        """Encode an answer as Anthropic's events."""
        usage = counted(answer, reply)
        start = _envelope(reply, [], None, _usage(usage, output=1))
        out = [Frame(named("message_start", {"type": "message_start", "message": start}), "open")]
        number = 0
        for index, block in enumerate(answer.blocks):
            out.extend(_block_frames(index, block, answer, reply, number))
            number += isinstance(block, Call)
            if index == 0:
                out.insert(2, Frame(self.keepalive, "open"))
        delta = {"stop_reason": _stop(answer), "stop_sequence": None, "stop_details": _details(answer)}
        done = {"type": "message_delta", "delta": delta, "usage": _final_usage(usage)}
        out.append(Frame(named("message_delta", done), "end"))
        out.append(Frame(named("message_stop", {"type": "message_stop"}), "end"))
        return out

    def document(self, answer: Answer, reply: Reply) -> bytes:
        """Encode an answer as one message object."""
        content: list[Any] = []
        number = 0
        for block in answer.blocks:
            content.append(_whole_block(block, reply, number))
            number += isinstance(block, Call)
        message = _envelope(reply, content, _stop(answer), _usage(counted(answer, reply)))
        message["stop_details"] = _details(answer)
        return encode(message)

    def error(self, problem: Problem, request_id: str) -> bytes:
        """Encode Anthropic's error body."""
        error = {"type": problem.error_type, "message": problem.message}
        return encode({"type": "error", "error": error, "request_id": request_id})

    def stream_error(self, error: StreamError, sent: int, reply: Reply) -> bytes:
        """Encode an `error` event."""
        body = {"type": "error", "error": {"type": error.error_type, "message": error.message}}
        return named("error", {**body, "request_id": "req_" + reply.token})

    def status_problem(self, status: int) -> Problem:
        """Return Anthropic's usual error for a status."""
        error_type, message = _STATUS.get(status, ("api_error", "Unexpected error"))
        return Problem(message=message, status=status, error_type=error_type)


def flat_text(content: Any) -> str:
    """Return the text of a string or of a list of content parts; parts without text are left out."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if "text" in part)


def _turns(roles: list[_Role]) -> int:
    turns, before = 0, ""
    for item in roles:
        turns += item.role == "assistant" and before != "assistant"
        before = item.role
    return turns


def _message(message: Any, calls: dict[str, ToolCall]) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return Message(message["role"], content)
    asked: list[ToolCall] = []
    results: list[ToolResult] = []
    thinking = 0
    for block in content:
        kind = block["type"]
        if kind == "tool_use":
            calls[block["id"]] = ToolCall(block["id"], block["name"], block["input"])
            asked.append(calls[block["id"]])
        elif kind == "tool_result":
            results.append(_result(block, calls))
        thinking += kind in ("thinking", "redacted_thinking")
    text = flat_text([block for block in content if block["type"] == "text"])
    return Message(message["role"], text, tuple(asked), tuple(results), thinking)


def _result(block: Any, calls: dict[str, ToolCall]) -> ToolResult:
    made = calls.get(block["tool_use_id"], ToolCall(block["tool_use_id"], "", {}))
    text = flat_text(block.get("content") or "")
    return ToolResult(made.id, made.name, made.arguments, text, bool(block.get("is_error", False)))


def _envelope(reply: Reply, content: list[Any], stop: str | None, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "msg_" + reply.token,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(usage: Counted, output: int | None = None) -> dict[str, Any]:
    return {
        "input_tokens": usage.input,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cache_read,
        "cache_creation": {"ephemeral_5m_input_tokens": usage.cache_write, "ephemeral_1h_input_tokens": 0},
        "output_tokens": usage.output if output is None else output,
        "service_tier": "standard",
    }


def _final_usage(usage: Counted) -> dict[str, int]:
    return {
        "input_tokens": usage.input,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": usage.output,
    }


def _stop(answer: Answer) -> str:
    return "refusal" if answer.stop_reason == "content_filter" else answer.stop_reason


def _details(answer: Answer) -> dict[str, Any] | None:
    return {"type": "refusal", "category": None, "explanation": None} if _stop(answer) == "refusal" else None


def _block_frames(index: int, block: Block, answer: Answer, reply: Reply, number: int) -> list[Frame]:
    opening, deltas = _opening(block, reply, number), _deltas(block, answer, reply)
    start = {"type": "content_block_start", "index": index, "content_block": opening}
    out = [Frame(named("content_block_start", start), "open")]
    for kind, delta in deltas:
        event = {"type": "content_block_delta", "index": index, "delta": delta}
        out.append(Frame(named("content_block_delta", event), kind))
    stop = {"type": "content_block_stop", "index": index}
    out.append(Frame(named("content_block_stop", stop), "close"))
    return out


def _opening(block: Block, reply: Reply, number: int) -> dict[str, Any]:
    if isinstance(block, Text):
        return {"type": "text", "text": ""}
    if isinstance(block, Call):
        return {"type": "tool_use", "id": call_id(block, reply, number), "name": block.name, "input": {}}
    if block.redacted:
        return {"type": "redacted_thinking", "data": reply.signer.seal(reply.model)}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _deltas(block: Block, answer: Answer, reply: Reply) -> list[tuple[Any, dict[str, Any]]]:
    tokens = answer.timing.tokens if answer.timing else None
    if isinstance(block, Text):
        parts = list(block.chunks) or pieces(block.text, tokens)
        return [("text", {"type": "text_delta", "text": part}) for part in parts]
    if isinstance(block, Thinking):
        if block.redacted:
            return []
        parts = pieces(block.text, None)
        signature = {"type": "signature_delta", "signature": reply.signer.sign(reply.model, block.text)}
        thoughts = [("thinking", {"type": "thinking_delta", "thinking": part}) for part in parts]
        return [*thoughts, ("signature", signature)]
    # A call without arguments gets one empty delta, never "{}": clients must read that as an empty object.
    text = block.encoded()
    parts = ["", *pieces("" if text == "{}" else text, None)]
    return [("arguments", {"type": "input_json_delta", "partial_json": part}) for part in parts]


def call_id(block: Call, reply: Reply, number: int) -> str:
    """Return the id of the answer's `number`-th call."""
    return block.id or f"toolu_{reply.token}{number:02d}"


def _whole_block(block: Block, reply: Reply, number: int) -> dict[str, Any]:
    whole = _opening(block, reply, number)
    if isinstance(block, Text):
        whole["text"] = block.full()
    elif isinstance(block, Call):
        whole["input"] = _whole_arguments(block)
    elif not block.redacted:
        whole["thinking"] = block.text
        whole["signature"] = reply.signer.sign(reply.model, block.text)
    return whole


def _whole_arguments(block: Call) -> Any:
    try:
        arguments = msgspec.json.decode(block.encoded())
    except msgspec.DecodeError:
        # The real endpoint cannot put half a JSON text into an object either.
        return {}
    return arguments if isinstance(arguments, dict) else {}
