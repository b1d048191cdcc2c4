"""The three formats and their rules in one table, and the way from raw bytes to an accepted request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from omnara.testing import strict_anthropic, strict_chat, strict_responses
from omnara.testing.conversation import Conversation, Glance, Parsed
from omnara.testing.signatures import Signer
from omnara.testing.strict import Check, Context, Refused, Strictness, refuse
from omnara.testing.wire import Problem, Wire
from omnara.testing.wire_anthropic import AnthropicWire
from omnara.testing.wire_chat import ChatWire
from omnara.testing.wire_responses import ResponsesWire

CONVERSATION_HEADER = "x-conversation-key"
"""Names the conversation in the log; without it the first user text does."""

_KEY_CHARS = 200
_BYTES_PER_TOKEN = 4
_FILE_BYTES = 4096
_FILE_TOKENS = 1600
_ENCODED = b"base64"
_FILE = re.compile(rb"[A-Za-z0-9+/=]{%d,}" % _FILE_BYTES)

HeaderCheck = Callable[[Mapping[str, str], frozenset[str] | None], Refused | None]


class Rules(msgspec.Struct, frozen=True):
    """A format with what it refuses."""

    wire: Wire
    headers: HeaderCheck
    check: Check


RULES: Mapping[str, Rules] = {
    AnthropicWire.path: Rules(AnthropicWire(), strict_anthropic.check_headers, strict_anthropic.check),
    ChatWire.path: Rules(ChatWire(), strict_chat.check_headers, strict_chat.check),
    ResponsesWire.path: Rules(ResponsesWire(), strict_responses.check_headers, strict_responses.check),
}


def estimate_tokens(raw: bytes) -> int:
    """Return a request's size in tokens as this server counts: four bytes each, and a fixed number for each file."""
    if len(raw) < _FILE_BYTES or _ENCODED not in raw:
        return max(1, len(raw) // _BYTES_PER_TOKEN)
    files = [len(match) for match in _FILE.findall(raw)]
    return (len(raw) - sum(files)) // _BYTES_PER_TOKEN + len(files) * _FILE_TOKENS


def decode_body(raw: bytes) -> Any:
    """Decode a body. Raises `Refused` for invalid UTF-8, lone surrogates and whatever else is no JSON."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise refuse(f"The request body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise refuse("The request body is not valid JSON: recursion limit exceeded") from error


def accept(
    rules: Rules, raw: bytes, headers: Mapping[str, str], strictness: Strictness | None, signer: Signer
) -> Conversation:
    """Turn a request into a conversation. Raises `Refused`: always for what cannot be read, for the rest if strict."""
    body: Any = None
    if strictness is not None:
        body = decode_body(raw)
        _check(rules, body, raw, headers, strictness, signer)
    glance = _glance(rules.wire, raw)
    known = body
    return Conversation(
        rules.wire.format,
        glance,
        lambda: decode_body(raw) if known is None else known,
        lambda found: _parse(rules.wire, found),
        key=headers.get(CONVERSATION_HEADER) or "",
    )


def key_of(conversation: Conversation) -> str:
    """Return the conversation's key; reads the history when no header named it."""
    return conversation.key or conversation.first_user_text[:_KEY_CHARS]


def _check(
    rules: Rules, body: Any, raw: bytes, headers: Mapping[str, str], strictness: Strictness, signer: Signer
) -> None:
    refused = rules.headers(headers, strictness.keys)
    if refused is not None:
        raise refused
    name = body.get("model") if isinstance(body, dict) else None
    if not isinstance(name, str) or not name:
        raise _no_model(rules.wire)
    spec = strictness.model(name)
    if spec is None:
        raise unknown_model(rules.wire, name)
    rules.check(body, Context(strictness, spec, signer, estimate_tokens(raw)))


def _no_model(wire: Wire) -> Refused:
    if wire.format == "anthropic":
        return refuse("model: Field required")
    return refuse("you must provide a model parameter")


def unknown_model(wire: Wire, name: str) -> Refused:
    """Return the refusal of a model that does not exist."""
    if wire.format == "anthropic":
        return Refused(Problem(message=f"model: {name}", status=404, error_type="not_found_error"))
    text = f"The model `{name}` does not exist or you do not have access to it."
    return Refused(Problem(message=text, status=404, code="model_not_found"))


def _glance(wire: Wire, raw: bytes) -> Glance:
    try:
        return wire.glance(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refuse(f"The request body is not valid JSON: {error}") from error


def _parse(wire: Wire, body: Any) -> Parsed:
    try:
        return wire.parse(body)
    except (KeyError, TypeError, AttributeError) as error:
        raise refuse(f"The request cannot be understood: {error!r}") from error
