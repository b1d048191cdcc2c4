"""Decoding of one stream event: fast when it is sound, lenient when it is merely odd.

The typed decoder is strict where providers are not: half a surrogate pair, broken UTF-8, or a kind of event that did
not exist when this was written. Only then is the slow path taken.
Source: field-reports B13.
"""

from __future__ import annotations

import json
from typing import Any, Final, Generic, TypeVar

import msgspec

T = TypeVar("T")

_MAX_ODD_BYTES: Final = 4 * 1024 * 1024
"""Largest event that is read leniently: of a larger one the slow path would make gigabytes, with everybody waiting."""

_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BadEvent(Exception):
    """An event is not JSON, or a known kind of event lacks what it must have."""


class EventDecoder(Generic[T]):
    """Decodes a tagged union of structs; unknown tags give None."""

    def __init__(self, union: Any, tags: frozenset[str] | None = None, *, tag_field: str = "type") -> None:
        """`tags`: what the union knows. None: not tagged, every event must fit."""
        self._union = union
        self._tags = tags
        self._tag_field = tag_field
        self._decode = msgspec.json.Decoder(union).decode

    def decode(self, data: bytes) -> T | None:
        """Decode one event's data. Lone surrogates survive, so that halves in neighbouring events can be joined.

        Raises BadEvent.
        """
        try:
            decoded: T = self._decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._slow(data)
        return decoded

    def _slow(self, data: bytes) -> T | None:
        if self._tags is not None and self._is_unknown(data):
            return None
        if len(data) > _MAX_ODD_BYTES:
            raise BadEvent("a large event of the stream does not fit its kind")
        try:
            value = json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            raise BadEvent("an event of the stream is not JSON") from error
        if self._tags is not None and not self._knows(value):
            return None
        try:
            converted: T = msgspec.convert(value, self._union)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadEvent(f"an event of the stream does not fit its kind: {error}") from error
        return converted

    def _is_unknown(self, data: bytes) -> bool:
        """Whether the event is sound and of a kind that is not known: all but its tag is skipped."""
        try:
            return not self._knows({self._tag_field: msgspec.json.decode(_members(data)[self._tag_field])})
        except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False

    def _knows(self, value: Any) -> bool:
        tag = value.get(self._tag_field) if isinstance(value, dict) else None
        return isinstance(tag, str) and tag in (self._tags or ())
