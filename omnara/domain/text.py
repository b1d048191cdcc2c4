"""Cleaning of text at the entrances: what Postgres and the providers refuse must never enter history.

NUL and lone surrogates become U+FFFD in *values*; the six literal characters of an escaped NUL stay as they are.
Source: field-reports B13.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

_encode: Final = msgspec.json.Encoder().encode
_BAD = re.compile("[\x00\ud800-\udfff]")
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def clean_text(text: str) -> str:
    """Return `text` with NUL and lone surrogates replaced; pairs of surrogates are joined first."""
    if text.isascii():
        return text.replace("\x00", "\ufffd") if "\x00" in text else text
    if _BAD.search(text) is None:
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return joined.replace("\x00", "\ufffd")


def clean(value: Any) -> Any:
    """Clean every string inside a JSON-like value, keys included. Returns the same object when nothing was bad."""
    if isinstance(value, (list, dict)) and _is_clean(value):
        return value
    return _cleaned(value)


def _is_clean(value: Any) -> bool:
    """Whether nothing inside is bad, asked of the encoder: item by item, megabytes would hold up everybody else."""
    try:
        return b"\\u0000" not in _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return False


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        items = [_cleaned(item) for item in value]
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        pairs = [(clean_text(key), _cleaned(item)) for key, item in value.items()]
        same = all(k is key and v is item for (k, v), (key, item) in zip(pairs, value.items(), strict=True))
        return value if same else dict(pairs)
    return value


def has_controls(text: str) -> bool:
    """True when a line of text has what a terminal or a log would take for a command or for the end of the line."""
    return _CONTROLS.search(text) is not None


def is_blank(text: str) -> bool:
    """True when a provider would refuse the text as empty (Source: field-reports B04)."""
    return not text.strip()
