"""Keeping plaintext out of what people read: a wrapper that does not print, and a filter for foreign text.

Errors of SDKs and servers quote headers and URLs; what they quote must not travel on into events and logs.
"""

from __future__ import annotations

import base64
import hmac
import html
import json
from collections.abc import Iterable
from typing import Final, NoReturn
from urllib.parse import quote, quote_plus

__all__ = ["MIN_REDACTABLE", "REDACTED", "Secret", "redact"]

REDACTED: Final = "[redacted]"

MIN_REDACTABLE: Final = 4
"""Characters below which a value is not searched for: replacing single letters would destroy the text and, by the
pattern of what is gone, give the value away."""

MIN_PART: Final = 8
"""Characters of a part of a value (a line, or what base64 keeps of it) that are searched for: shorter ones are as
likely something else."""


class Secret:
    """A secret string in memory. `reveal()` is the only way to its value; printing, formatting and pickling are not."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the plaintext. Call it where the value is used, and keep the result in no other object."""
        return self._value

    def __repr__(self) -> str:
        return f"Secret({REDACTED})"

    def __str__(self) -> str:
        return REDACTED

    def __format__(self, spec: str) -> str:
        return format(REDACTED, spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(_bytes(self._value), _bytes(other._value))

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __bool__(self) -> bool:
        return bool(self._value)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not serialised")


def redact(text: str, secrets: Iterable[Secret | str]) -> str:
    """Return `text` with each secret replaced, also as programs commonly write it: escaped for JSON, HTML, a shell or
    Python, URL-quoted, in hexadecimal, with a terminal's line ends, line by line, and in base64, there also as a part
    of something longer such as `user:password`.

    Longer forms are replaced first, so that a secret inside another leaves no rest. Values shorter than
    MIN_REDACTABLE characters are left alone.
    """
    forms: set[str] = set()
    for secret in secrets:
        value = secret.reveal() if isinstance(secret, Secret) else secret
        if len(value) >= MIN_REDACTABLE:
            forms.update(_forms(value))
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, REDACTED)
    return text


def _forms(value: str) -> set[str]:
    raw = _bytes(value)
    written = {
        value,
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        html.escape(value),
        html.escape(value, quote=False),
        value.replace("'", "'\\''"),
        value.replace("'", "'\"'\"'"),
        quote(raw, safe=""),
        quote(raw),
        quote_plus(raw),
        raw.hex(),
        raw.hex().upper(),
        base64.b64encode(raw).decode().rstrip("="),
        base64.urlsafe_b64encode(raw).decode().rstrip("="),
    }
    written.update(form.replace("\n", "\r\n") for form in tuple(written))
    lines = value.splitlines()
    if len(lines) > 1:
        written.update(line.strip() for line in lines if len(line.strip()) >= MIN_PART)
    for before in range(3):
        written.update(core for core in _base64_within(raw, before) if len(core) >= MIN_PART)
    return written


def _base64_within(raw: bytes, before: int) -> tuple[str, str]:
    """Return what base64 makes of a value with `before` (modulo 3) bytes ahead, as far as no neighbour changes it."""
    padded = bytes(before) + raw
    first, end = -(-before * 8 // 6), len(padded) * 8 // 6
    return base64.b64encode(padded)[first:end].decode(), base64.urlsafe_b64encode(padded)[first:end].decode()


def _bytes(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")
