"""Keeping plaintext out of what people read: a wrapper that does not print, and a filter for foreign text.

Errors of SDKs and servers quote headers and URLs; what they quote must not travel on into events and logs.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Iterable
from typing import Final, NoReturn
from urllib.parse import quote, quote_plus

__all__ = ["MIN_REDACTABLE", "REDACTED", "Secret", "redact"]

REDACTED: Final = "[redacted]"

MIN_REDACTABLE: Final = 4
"""Characters below which a value is not searched for: replacing single letters would destroy the text and, by the
pattern of what is gone, give the value away."""


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
    """Return `text` with each secret replaced, also where it stands JSON-escaped, URL-quoted or in base64.

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
    return {
        value,
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        quote(raw, safe=""),
        quote_plus(raw),
        base64.b64encode(raw).decode().rstrip("="),
        base64.urlsafe_b64encode(raw).decode().rstrip("="),
    }


def _bytes(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")
