"""The seam between scripts and wire formats: what each format must be able to do, and what it is told."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import msgspec

from omnara.testing.answer import Answer, count_tokens
from omnara.testing.conversation import Format, Glance, Parsed
from omnara.testing.faults import StreamError
from omnara.testing.frames import Frame
from omnara.testing.prompt_cache import Cached
from omnara.testing.signatures import Signer

TOKEN_CHARS = 20


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What an encoder needs beside the answer. Every id in the response is derived from `token`."""

    token: str
    model: str
    created: int
    input_tokens: int
    signer: Signer
    cached: Cached = Cached()
    include_usage: bool = False
    encrypted_reasoning: bool = False


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request is refused, in the provider's words."""

    message: str
    status: int = 400
    error_type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None


class Counted(msgspec.Struct, frozen=True):
    """Token counts as reported."""

    input: int
    output: int
    cache_read: int
    cache_write: int
    reasoning: int


class Wire(Protocol):
    """One provider wire format."""

    format: ClassVar[Format]
    path: ClassVar[str]
    keepalive: ClassVar[bytes]
    request_id_header: ClassVar[str]

    def glance(self, raw: bytes) -> Glance:
        """Read the outline of a request. Raises `msgspec.DecodeError` on what is no such request."""
        ...

    def parse(self, body: Any) -> Parsed:
        """Turn a decoded body into the neutral form. Its shape has been checked, or the caller accepts errors."""
        ...

    def frames(self, answer: Answer, reply: Reply) -> list[Frame]:
        """Encode an answer as a stream."""
        ...

    def document(self, answer: Answer, reply: Reply) -> bytes:
        """Encode an answer as one JSON document."""
        ...

    def error(self, problem: Problem, request_id: str) -> bytes:
        """Encode the body of an error status."""
        ...

    def stream_error(self, error: StreamError, sent: int, reply: Reply) -> bytes:
        """Encode an error inside a stream of which `sent` frames have left."""
        ...

    def status_problem(self, status: int) -> Problem:
        """Return what this provider usually says with an HTTP status."""
        ...


def counted(answer: Answer, reply: Reply) -> Counted:
    """Return the usage to report: what the answer states, and estimates for what it leaves open."""
    usage = answer.usage
    if usage is not None and usage.input is not None and usage.output is not None:
        return Counted(usage.input, usage.output, usage.cache_read, usage.cache_write, usage.reasoning)
    output = count_tokens(" ".join(_said(answer)))
    if usage is None:
        read, write = reply.cached.read, reply.cached.write
        return Counted(max(0, reply.input_tokens - read - write), output, read, write, 0)
    return Counted(
        reply.input_tokens if usage.input is None else usage.input,
        output if usage.output is None else usage.output,
        usage.cache_read,
        usage.cache_write,
        usage.reasoning,
    )


def _said(answer: Answer) -> list[str]:
    said = [answer.text]
    said.extend(call.name + " " + call.encoded() for call in answer.calls)
    return said
