"""Opaque list cursors: where a page ended, bound to the list, its scope, its filters and its order.

A cursor that is used with anything else changed would silently skip or repeat items, so it is refused.
Source: api.md §7 (unpadded base64url JSON, at most 1,024 characters, 400 `invalid_request` on any mismatch).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

import msgspec
from msgspec import Meta

from omnara.errors import InvalidRequest

MAX_LENGTH: Final = 1024
VERSION: Final = 1


class Position(msgspec.Struct, frozen=True):
    """The last item of a page: its sort key (a name, or a time to the microsecond) and its id."""

    key: str
    id: UUID

    @classmethod
    def at(cls, time: datetime, item_id: UUID) -> Position:
        """Return the position of an item in a list ordered by a time."""
        return cls(time.isoformat(), item_id)

    @property
    def time(self) -> datetime:
        """The sort key as a time. Raises InvalidRequest when it is none."""
        try:
            value = datetime.fromisoformat(self.key)
        except ValueError:
            raise InvalidRequest("the cursor is not valid") from None
        if value.tzinfo is None:
            raise InvalidRequest("the cursor is not valid")
        return value


class _Cursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    v: int
    list: str
    bound: str
    key: Annotated[str, Meta(max_length=512)]
    id: UUID


class Binding(msgspec.Struct, frozen=True):
    """What a cursor belongs to. `parts` are scope, filters and sort, as text, in a fixed order."""

    list: str
    parts: tuple[str | None, ...]

    def encode(self, position: Position) -> str:
        """Return the cursor that continues after `position`."""
        raw = msgspec.json.encode(_Cursor(VERSION, self.list, self._hash(), position.key, position.id))
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

    def decode(self, text: str) -> Position:
        """Return the position in a cursor. Raises InvalidRequest for a damaged, foreign or differently bound one."""
        cursor = _read(text)
        if cursor is None or cursor.v != VERSION or cursor.list != self.list or cursor.bound != self._hash():
            raise InvalidRequest("the cursor is not valid for this list, scope, filter and order")
        if "\0" in cursor.key:
            raise InvalidRequest("the cursor is not valid")
        return Position(cursor.key, cursor.id)

    def _hash(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self.parts)).hexdigest()[:32]


def _read(text: str) -> _Cursor | None:
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(raw, type=_Cursor)
    except (UnicodeError, binascii.Error, msgspec.MsgspecError):
        return None
