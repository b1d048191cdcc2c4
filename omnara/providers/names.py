"""Tool names, call ids and schemas in a form that every provider takes.

A model may ask for a tool under a name or an id that the provider itself would refuse in the next request; left as it
is, that one name would end the conversation.
Source: field-reports B01 (one bad record blocks the agent for good).
"""

from __future__ import annotations

import re
from typing import Any, Final

_BAD: Final = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_NAME: Final = 64


def sent_name(name: str) -> str:
    """The name as a request may repeat it: letters, digits, `_` and `-`, 1 to 64 of them."""
    if name.isidentifier() and name.isascii() and len(name) <= _MAX_NAME:
        return name
    return _BAD.sub("_", name)[:_MAX_NAME] or "unknown_tool"


def is_sendable_id(call_id: str) -> bool:
    """Whether a strict endpoint takes the id of a call back: letters, digits, `_` and `-`, at least one of them."""
    return bool(call_id) and _BAD.search(call_id) is None


def offered_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the `type` that providers insist on."""
    return schema if schema.get("type") == "object" else {**schema, "type": "object"}
