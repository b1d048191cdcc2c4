"""OpenAI Responses: reading a request and writing an answer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from omnara.testing.answer import Answer
from omnara.testing.conversation import Format, Glance, Message, Parsed, ToolCall, ToolResult, ToolSpec, merged
from omnara.testing.faults import StreamError
from omnara.testing.frames import Frame, encode, named
from omnara.testing.responses_items import Stream, output_items
from omnara.testing.wire import Problem, Reply, counted
from omnara.testing.wire_chat import STATUS, loose_json


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""


class _Outline(msgspec.Struct):
    model: str = ""
    stream: bool | None = False
    include: list[str] | None = None
    input: str | list[_Item] = ""


_outline = msgspec.json.Decoder(_Outline)

_ENCRYPTED = "reasoning.encrypted_content"
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesWire:
    """`POST /v1/responses`."""

    format: ClassVar[Format] = "responses"
    path: ClassVar[str] = "/v1/responses"
    keepalive: ClassVar[bytes] = b": keep-alive\n\n"
    request_id_header: ClassVar[str] = "x-request-id"

    def glance(self, raw: bytes) -> Glance:
        """Read model, stream flag and turn. Raises `msgspec.DecodeError`."""
        seen = _outline.decode(raw)
        return Glance(
            seen.model, _turns(seen.input), bool(seen.stream), encrypted_reasoning=_ENCRYPTED in (seen.include or ())
        )

    def parse(self, body: Any) -> Parsed:
        """Turn a decoded body into the neutral form."""
        given = body["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        calls: dict[str, ToolCall] = {}
        system = [_text(item["content"]) for item in items if item.get("role") in ("system", "developer")]
        if body.get("instructions"):
            system.insert(0, body["instructions"])
        spoken = [item for item in items if item.get("role") not in ("system", "developer")]
        functions = [tool for tool in body.get("tools") or () if tool.get("type") == "function"]
        return Parsed(
            model=body.get("model", ""),
            system="\n".join(system),
            tools=tuple(ToolSpec(f["name"], f.get("parameters") or {}, f.get("description") or "") for f in functions),
            messages=merged([_message(item, calls) for item in spoken]),
            stream=bool(body.get("stream")),
            max_tokens=body.get("max_output_tokens"),
        )

    def frames(self, answer: Answer, reply: Reply) -> list[Frame]:
        """Encode an answer as the events of Responses, numbered from 0."""
        stream = Stream(answer, reply)
        opened = _response(reply, "in_progress", [], answer)
        stream.add("open", {"type": "response.created", "response": opened})
        stream.add("open", {"type": "response.in_progress", "response": opened})
        items = stream.items()
        status: Status = "incomplete" if _incomplete(answer) else "completed"
        closed = _response(reply, status, items, answer)
        stream.add("end", {"type": "response." + status, "response": closed})
        return stream.frames

    def document(self, answer: Answer, reply: Reply) -> bytes:
        """Encode an answer as one response object."""
        status: Status = "incomplete" if _incomplete(answer) else "completed"
        return encode(_response(reply, status, output_items(answer, reply), answer))

    def error(self, problem: Problem, request_id: str) -> bytes:
        """Encode OpenAI's error body."""
        error = {
            "message": problem.message,
            "type": problem.error_type,
            "param": problem.param,
            "code": problem.code,
        }
        return encode({"error": error})

    def stream_error(self, error: StreamError, sent: int, reply: Reply) -> bytes:
        """Encode an `error` event, or `response.failed`."""
        code = "server_error" if error.error_type == "overloaded_error" else error.error_type
        if error.failed:
            response = _response(reply, "failed", [], Answer())
            response["error"] = {"code": code, "message": error.message}
            body = {"type": "response.failed", "response": response, "sequence_number": sent}
            return named("response.failed", body)
        event = {"type": "error", "code": code, "message": error.message, "param": None, "sequence_number": sent}
        return named("error", event)

    def status_problem(self, status: int) -> Problem:
        """Return OpenAI's usual error for a status."""
        kind, code, message = STATUS.get(status, STATUS[503])
        return Problem(message=message, status=status, error_type=kind, code=code)


def _turns(items: str | list[_Item]) -> int:
    if isinstance(items, str):
        return 0
    turns, before = 0, False
    for item in items:
        spoken = item.type in ("reasoning", "function_call") or item.role == "assistant"
        turns += spoken and not before
        before = spoken
    return turns


def _incomplete(answer: Answer) -> str | None:
    if answer.stop_reason in ("max_tokens", "model_context_window_exceeded"):
        return "max_output_tokens"
    return "content_filter" if answer.stop_reason == "content_filter" else None


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if "text" in part)


def _message(item: Any, calls: dict[str, ToolCall]) -> Message:
    kind = item.get("type", "message")
    if kind == "function_call":
        made = ToolCall(item["call_id"], item["name"], loose_json(item["arguments"]))
        calls[made.id] = made
        return Message("assistant", calls=(made,))
    if kind == "function_call_output":
        made = calls.get(item["call_id"], ToolCall(item["call_id"], "", {}))
        return Message("user", results=(ToolResult(made.id, made.name, made.arguments, _text(item["output"])),))
    if kind == "reasoning":
        return Message("assistant", thinking=1)
    return Message("assistant" if item["role"] == "assistant" else "user", _text(item["content"]))


def _response(reply: Reply, status: Status, items: list[Any], answer: Answer) -> dict[str, Any]:
    done = status in ("completed", "incomplete")
    reason = _incomplete(answer) if status == "incomplete" else None
    return {
        "id": "resp_" + reply.token,
        "object": "response",
        "created_at": reply.created,
        "completed_at": reply.created if status == "completed" else None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "instructions": None,
        "max_output_tokens": None,
        "model": reply.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": _usage(answer, reply) if done else None,
        "user": None,
        "metadata": {},
    }


def _usage(answer: Answer, reply: Reply) -> dict[str, Any]:
    usage = counted(answer, reply)
    total = usage.input + usage.cache_read + usage.cache_write
    return {
        "input_tokens": total,
        "input_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": total + usage.output,
    }
