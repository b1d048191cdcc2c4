"""What OpenAI Responses must get back unchanged: encrypted reasoning, in order, with the items that it led to.

The provider refuses reasoning whose item is missing, an item whose reasoning is missing, and reasoning without its
encrypted content (nothing is stored there to look it up in). So an answer goes back whole, item by item in the bytes
that came, or, where one item cannot, in neutral words without any item's id.
Source: field-reports B02.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from omnara.domain.text import clean, is_blank
from omnara.providers.names import sent_name
from omnara.providers.output import OutputBuilder

MAX_ID: Final = 64
"""Longest id, of an item or a call, that a request may repeat: the provider itself has given out longer ones."""

_PREFIXES: Final = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
_PLAIN: Final = frozenset({"id", "type", "status", "role", "content"})
_encode: Final = msgspec.json.Encoder().encode


class WireItem(msgspec.Struct):
    """An item of the stream. `blocks` are those of the output by the item's part, `call` is a call's (-1: none yet).

    `raw` is the whole item as it came; `held` are arguments that came before their call's name, `part` the part of some
    reasoning that is being told.
    """

    index: int
    kind: str
    blocks: dict[int, int] = msgspec.field(default_factory=dict)
    call: int = -1
    held: list[str] = msgspec.field(default_factory=list)
    part: int = 0
    raw: bytes | None = None


def is_sendable_call_id(call_id: str) -> bool:
    """Whether a request may carry this id of a call."""
    return 0 < len(call_id) <= MAX_ID


def exact_items(items: Sequence[WireItem], output: OutputBuilder) -> tuple[tuple[bytes, ...], tuple[str, ...]]:
    """JSON of the items as a request may repeat them, and the ids that they have there.

    Nothing when one of them cannot go back, or when they say no more than the neutral blocks.
    """
    sent: list[tuple[str, bytes, str]] = []
    worth = False
    for item in items:
        repeated = _repeated(item, output)
        if repeated is None:
            return (), ()
        value, raw = repeated
        if not value:
            continue
        worth = worth or item.kind != "message" or not value.keys() <= _PLAIN
        sent.append((item.kind, raw, value.get("id") or ""))
    while sent and sent[-1][0] == "reasoning":
        sent.pop()  # it must be followed by what it led to
    ids = tuple(name for _, _, name in sent if name)
    if not worth or len(set(ids)) < len(ids):
        return (), ()
    return tuple(raw for _, raw, _ in sent), ids


def _repeated(item: WireItem, output: OutputBuilder) -> tuple[dict[str, Any], bytes] | None:
    """The item as value and bytes; an empty value when it is to be left out, None when it cannot be repeated."""
    try:
        given = msgspec.json.decode(item.raw or b"", type=dict[str, Any])
        wanted = _sendable(item, clean(given), output)
        if wanted is None or (item.kind == "reasoning" and wanted != given):
            return None
        return wanted, (item.raw or b"") if wanted == given else _encode(wanted)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _sendable(item: WireItem, value: dict[str, Any], output: OutputBuilder) -> dict[str, Any] | None:
    name = value.get("id")
    known = isinstance(name, str) and len(name) <= MAX_ID and name.startswith(_PREFIXES.get(item.kind, "\0"))
    if item.kind == "reasoning":
        sealed = value.get("encrypted_content")
        whole = known and isinstance(sealed, str) and bool(sealed) and isinstance(value.get("summary"), list)
        return value if whole else None
    if not known:
        value = {key: field for key, field in value.items() if key != "id"}
    if item.kind == "function_call":
        call = {"call_id": output.call_id(item.call), "name": sent_name(output.call_name(item.call))}
        return {**value, **call, "arguments": _arguments(item, output)}
    if item.kind == "message" and value.get("role") == "assistant":
        return _message(value)
    return None


def _arguments(item: WireItem, output: OutputBuilder) -> str:
    """The arguments as the model wrote them, if that is JSON of what the log has; else what the log has."""
    arguments, _ = output.arguments(item.call)
    written = output.raw(item.call)
    try:
        same = msgspec.json.decode(written) == arguments
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        same = False
    return written if same else _encode(arguments).decode()


def _message(value: dict[str, Any]) -> dict[str, Any] | None:
    parts = value.get("content")
    if not isinstance(parts, list):
        return None
    kept = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("output_text", "refusal"):
            return None
        text = part.get("text" if kind == "output_text" else "refusal")
        if not isinstance(text, str):
            return None
        if not is_blank(text):
            kept.append(part)
    return {**value, "content": kept} if kept else {}
