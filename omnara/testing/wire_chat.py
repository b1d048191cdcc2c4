"""OpenAI Chat Completions: reading a request and writing an answer."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from omnara.testing.answer import Answer, Block, Call, Text, Thinking, pieces
from omnara.testing.conversation import Format, Glance, Message, Parsed, ToolCall, ToolResult, ToolSpec, merged
from omnara.testing.faults import StreamError
from omnara.testing.frames import Frame, Kind, encode, unnamed
from omnara.testing.wire import Problem, Reply, counted


class _Role(msgspec.Struct):
    role: str = ""


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Outline(msgspec.Struct):
    model: str = ""
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    messages: list[_Role] = []


_outline = msgspec.json.Decoder(_Outline)

_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "refusal": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "content_filter": "content_filter",
}

STATUS = {
    400: ("invalid_request_error", None, "The request is invalid."),
    401: ("invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
    402: ("insufficient_quota", "insufficient_quota", "Insufficient balance."),
    403: ("invalid_request_error", "unsupported_country_region_territory", "Access denied."),
    404: ("invalid_request_error", "model_not_found", "The model does not exist or you do not have access to it."),
    413: ("invalid_request_error", "request_too_large", "Request body is too large."),
    429: ("requests", "rate_limit_exceeded", "Rate limit reached for requests."),
    500: ("server_error", None, "The server had an error while processing your request. Sorry about that!"),
    503: ("server_error", "overloaded", "The engine is currently overloaded, please try again later."),
}


class ChatWire:
    """`POST /v1/chat/completions`."""

    format: ClassVar[Format] = "chat"
    path: ClassVar[str] = "/v1/chat/completions"
    keepalive: ClassVar[bytes] = b": keep-alive\n\n"
    request_id_header: ClassVar[str] = "x-request-id"

    def glance(self, raw: bytes) -> Glance:
        """Read model, stream flags and turn. Raises `msgspec.DecodeError`."""
        seen = _outline.decode(raw)
        wants_usage = seen.stream_options is not None and seen.stream_options.include_usage
        return Glance(seen.model, _turns(seen.messages), bool(seen.stream), include_usage=wants_usage)

    def parse(self, body: Any) -> Parsed:
        """Turn a decoded body into the neutral form."""
        calls: dict[str, ToolCall] = {}
        system = [_text(item["content"]) for item in body["messages"] if item["role"] in ("system", "developer")]
        spoken = [item for item in body["messages"] if item["role"] not in ("system", "developer")]
        functions = [tool["function"] for tool in body.get("tools") or () if "function" in tool]
        return Parsed(
            model=body.get("model", ""),
            system="\n".join(system),
            tools=tuple(ToolSpec(f["name"], f.get("parameters") or {}, f.get("description") or "") for f in functions),
            messages=merged([_message(item, calls) for item in spoken]),
            stream=bool(body.get("stream")),
            max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        )

    def frames(self, answer: Answer, reply: Reply) -> list[Frame]:
        """Encode an answer as chunks, then `[DONE]`."""
        spoken = any(isinstance(block, Text) for block in answer.blocks)
        opening = {"role": "assistant", "content": "" if spoken else None, "refusal": None}
        out = [Frame(_chunk(reply, opening), "open")]
        number = 0
        for block in answer.blocks:
            for kind, delta in _deltas(block, answer, reply, number):
                out.append(Frame(_chunk(reply, delta), kind))
            number += isinstance(block, Call)
            out.append(Frame(b"", "close"))
        out.append(Frame(_chunk(reply, {}, _FINISH[answer.stop_reason]), "end"))
        if reply.include_usage:
            out.append(Frame(unnamed(_envelope(reply, [], usage=_usage(answer, reply))), "end"))
        out.append(Frame(b"data: [DONE]\n\n", "end"))
        return out

    def document(self, answer: Answer, reply: Reply) -> bytes:
        """Encode an answer as one completion object."""
        refused = answer.stop_reason == "refusal"
        text = answer.text if any(isinstance(block, Text) for block in answer.blocks) else None
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if refused else text,
            "refusal": text if refused else None,
            "annotations": [],
        }
        if answer.calls:
            message["tool_calls"] = [_call(block, reply, at) for at, block in enumerate(answer.calls)]
        thoughts = "".join(block.text for block in answer.blocks if isinstance(block, Thinking))
        if thoughts:
            message["reasoning_content"] = thoughts
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISH[answer.stop_reason]}
        body = _envelope(reply, [choice], usage=_usage(answer, reply))
        body["object"] = "chat.completion"
        return encode(body)

    def error(self, problem: Problem, request_id: str) -> bytes:
        """Encode OpenAI's error body."""
        return encode({"error": _error(problem.message, problem.error_type, problem.param, problem.code)})

    def stream_error(self, error: StreamError, sent: int, reply: Reply) -> bytes:
        """Encode an error chunk."""
        kind = "server_error" if error.error_type == "overloaded_error" else error.error_type
        return unnamed({"error": _error(error.message, kind, None, None)})

    def status_problem(self, status: int) -> Problem:
        """Return OpenAI's usual error for a status."""
        kind, code, message = STATUS.get(status, STATUS[503])
        return Problem(message=message, status=status, error_type=kind, code=code)


def _error(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": param, "code": code}


def _turns(roles: list[_Role]) -> int:
    turns, before = 0, ""
    for item in roles:
        turns += item.role == "assistant" and before != "assistant"
        before = item.role
    return turns


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if part.get("type") in ("text", "input_text"))


def _message(item: Any, calls: dict[str, ToolCall]) -> Message:
    if item["role"] == "tool":
        made = calls.get(item["tool_call_id"], ToolCall(item["tool_call_id"], "", {}))
        return Message("user", results=(ToolResult(made.id, made.name, made.arguments, _text(item["content"])),))
    text = _text(item.get("content"))
    if item["role"] == "user":
        return Message("user", text)
    asked = tuple(
        ToolCall(call["id"], call["function"]["name"], loose_json(call["function"]["arguments"]))
        for call in item.get("tool_calls") or ()
    )
    calls.update((call.id, call) for call in asked)
    return Message("assistant", text, asked)


def loose_json(text: str) -> Any:
    """Decode a JSON text; return the text itself when it is not JSON, as cut arguments are."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _envelope(reply: Reply, choices: list[Any], **more: Any) -> dict[str, Any]:
    body = {
        "id": "chatcmpl-" + reply.token,
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": reply.model,
        "service_tier": "default",
        "system_fingerprint": "fp_scripted",
        "choices": choices,
    }
    body.update(more)
    return body


def _chunk(reply: Reply, delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    # With include_usage every chunk carries the field, null until the last one.
    more = {"usage": None} if reply.include_usage else {}
    return unnamed(_envelope(reply, [choice], **more))


def _deltas(block: Block, answer: Answer, reply: Reply, number: int) -> list[tuple[Kind, dict[str, Any]]]:
    tokens = answer.timing.tokens if answer.timing else None
    if isinstance(block, Text):
        field = "refusal" if answer.stop_reason == "refusal" else "content"
        return [("text", {field: part}) for part in list(block.chunks) or pieces(block.text, tokens)]
    if isinstance(block, Thinking):
        return [("thinking", {"reasoning_content": part}) for part in pieces(block.text, None)]
    opening = _call(block, reply, number)
    opening["function"]["arguments"] = ""
    first: tuple[Kind, dict[str, Any]] = ("open", {"tool_calls": [{"index": number, **opening}]})
    parts = pieces(block.encoded(), None)
    rest = [{"tool_calls": [{"index": number, "function": {"arguments": part}}]} for part in parts]
    return [first, *(("arguments", delta) for delta in rest)]


def _call(block: Call, reply: Reply, number: int) -> dict[str, Any]:
    name = block.id or f"call_{reply.token}{number:02d}"
    return {"id": name, "type": "function", "function": {"name": block.name, "arguments": block.encoded()}}


def _usage(answer: Answer, reply: Reply) -> dict[str, Any]:
    usage = counted(answer, reply)
    prompt = usage.input + usage.cache_read + usage.cache_write
    return {
        "prompt_tokens": prompt,
        "completion_tokens": usage.output,
        "total_tokens": prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
