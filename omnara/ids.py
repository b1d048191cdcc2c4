"""Identifiers: UUIDv7 keys for rows and the prefixed text that clients see.

They live in one module because both are on the hot path of every event: a saved step makes several keys and
a streamed event encodes about six of them. Public ids are never translated between kinds, so decoding always
names the kind that is expected. Source: api.md §1.
"""

from __future__ import annotations

import os
import re
import threading
import time
from enum import StrEnum
from typing import Final
from uuid import UUID

__all__ = ["IdKind", "InvalidPublicId", "decode", "decode_any", "encode", "new_uuid", "uuid_time_ms"]


class IdKind(StrEnum):
    """The prefix of each kind of public id. Source: api.md §1."""

    ORG = "org"
    USER = "usr"
    PROJECT = "proj"
    ACTOR = "actr"
    AGENT = "agt"
    AGENT_CONFIG = "acfg"
    AGENT_PROFILE = "aprf"
    CRON_TRIGGER = "cron"
    AGENT_INPUT = "ain"
    MACHINE_BINDING = "amb"
    TURN = "trn"
    EVENT = "evt"
    INTERACTION = "int"
    MODEL_CALL = "mcc"
    CHECKPOINT = "ccp"
    TOOL_CALL = "tcl"
    ARTIFACT = "art"
    PROVIDER_CONFIG = "mpc"
    CONFIGURED_MODEL = "mdl"
    MODEL_REVISION = "mrev"
    MODEL_GRANT = "pmog"
    SECRET = "sec"  # noqa: S105 - a prefix, not a password
    SECRET_GRANT = "sgr"  # noqa: S105
    SKILL = "skl"
    SKILL_REVISION = "skr"
    SKILL_GRANT = "skg"
    MACHINE_POOL = "mpo"
    MACHINE = "mch"
    DAEMON_TOKEN = "mdt"  # noqa: S105
    DAEMON_RUNTIME = "drt"
    MACHINE_GRANT = "pmg"
    POOL_GRANT = "pmpg"
    PROCESS = "prc"
    PROCESS_ACTION = "pac"
    PERSONAL_ACCESS_TOKEN = "pat"  # noqa: S105
    ORG_API_KEY = "oak"
    INVITATION = "oinv"
    INTEGRATION_INSTALL = "iin"
    INTEGRATION_TARGET = "itgt"
    MCP_OAUTH_FLOW = "moaf"
    INTEGRATION_OAUTH_FLOW = "ioaf"
    INSTANCE = "inst"


class InvalidPublicId(ValueError):
    """The text is not an id of the expected kind. The message names the fault and never repeats the text."""


# --- public text ------------------------------------------------------------------------------------------

_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"
_BODY: Final = re.compile("[a-z2-7]{26}")
# Two characters per look-up: half as many shifts of a 128-bit number as one character at a time.
_PAIRS: Final = tuple(a + b for a in _ALPHABET for b in _ALPHABET)
_TO_INT_DIGITS: Final = str.maketrans(_ALPHABET, "0123456789abcdefghijklmnopqrstuv")
_KINDS: Final = {kind.value: kind for kind in IdKind}


def encode(kind: IdKind, value: UUID) -> str:
    """Return the public id of `value`: prefix, underscore, 26 characters of lower-case base32 without padding.

    Raises ValueError for the zero UUID, which names nothing. Source: api.md §1.
    """
    number = int.from_bytes(value.bytes, "big")
    if not number:
        raise ValueError("the zero UUID has no public id")
    pairs = _PAIRS
    # 64-bit halves keep most shifts within machine-sized numbers; 130 bits = 26 characters, the last two bits zero.
    high = number >> 58  # 70 bits: characters 0..13
    low = (number & 0x3FFFFFFFFFFFFFF) << 2  # 60 bits: characters 14..25
    return (
        f"{kind.value}_{pairs[high >> 60]}{pairs[high >> 50 & 1023]}{pairs[high >> 40 & 1023]}"
        f"{pairs[high >> 30 & 1023]}{pairs[high >> 20 & 1023]}{pairs[high >> 10 & 1023]}{pairs[high & 1023]}"
        f"{pairs[low >> 50]}{pairs[low >> 40 & 1023]}{pairs[low >> 30 & 1023]}"
        f"{pairs[low >> 20 & 1023]}{pairs[low >> 10 & 1023]}{pairs[low & 1023]}"
    )


def decode(kind: IdKind, text: str) -> UUID:
    """Return the UUID behind a public id of exactly this `kind`.

    Raises InvalidPublicId for another prefix, a wrong length or character, padding bits that are set (a second
    spelling of the same id), and the zero UUID. Source: api.md §1.
    """
    prefix, separator, body = text.partition("_")
    if not separator or prefix != kind.value:
        raise InvalidPublicId(f"expected an id that starts with {kind.value}_")
    return _decode_body(body)


def decode_any(text: str) -> tuple[IdKind, UUID]:
    """Return kind and UUID of a public id of any kind, for tools that show what an id is.

    Raises InvalidPublicId as `decode` does, and for an unknown prefix.
    """
    prefix, separator, body = text.partition("_")
    kind = _KINDS.get(prefix)
    if not separator or kind is None:
        raise InvalidPublicId("the prefix is not that of any kind of id")
    return kind, _decode_body(body)


def _decode_body(body: str) -> UUID:
    if _BODY.fullmatch(body) is None:
        raise InvalidPublicId("the part after the prefix must be 26 characters of a-z and 2-7")
    # int() in base 32 is the only base32 reader in C; the pattern above has excluded the signs and blanks it takes.
    number = int(body.translate(_TO_INT_DIGITS), 32)
    if number & 3:
        raise InvalidPublicId("the last character carries padding bits that are not zero")
    if not number:
        raise InvalidPublicId("the zero UUID is not an id")
    return UUID(int=number >> 2)


# --- UUIDv7 -----------------------------------------------------------------------------------------------

_POOL_BYTES: Final = 4096
_RANDOM_BITS: Final = 74
_RANDOM_MASK: Final = (1 << _RANDOM_BITS) - 1


class _Generator:
    """UUIDv7 in strictly growing order within the process, also when the wall clock is set back.

    In one millisecond the 74 random bits grow by a random step, so that ids stay unguessable; when they run out,
    or the clock stands behind the last id, the millisecond of the last id is kept or advanced instead.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = b""
        self._offset = 0
        self._last_ms = 0
        self._last_random = 0

    def reset_after_fork(self) -> None:
        """Drop the pool and the lock that a forked child shares with its parent."""
        self._lock = threading.Lock()
        self._pool = b""
        self._offset = 0

    def _take(self, count: int) -> int:
        if self._offset + count > len(self._pool):
            self._pool = os.urandom(_POOL_BYTES)
            self._offset = 0
        start = self._offset
        self._offset = start + count
        return int.from_bytes(self._pool[start : start + count], "big")

    def next(self) -> UUID:
        with self._lock:
            now_ms = time.time_ns() // 1_000_000
            if now_ms > self._last_ms:
                self._last_ms = now_ms
                # The top bit starts at zero, which leaves room for half of the space to grow in one millisecond.
                self._last_random = self._take(10) & (_RANDOM_MASK >> 1)
            else:
                self._last_random += self._take(4) + 1
                if self._last_random > _RANDOM_MASK:
                    self._last_ms += 1
                    self._last_random = self._take(10) & (_RANDOM_MASK >> 1)
            millis, random_bits = self._last_ms, self._last_random
        number = (
            (millis & 0xFFFFFFFFFFFF) << 80
            | 0x7000 << 64
            | (random_bits >> 62) << 64
            | 0x8000000000000000
            | random_bits & 0x3FFFFFFFFFFFFFFF
        )
        return UUID(int=number)


_generator: Final = _Generator()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_generator.reset_after_fork)


def new_uuid() -> UUID:
    """Return a new UUIDv7, greater than every one this process returned before. Safe to call from any thread."""
    return _generator.next()


def uuid_time_ms(value: UUID) -> int:
    """Return the Unix time in milliseconds at which a UUIDv7 was made. Raises ValueError for other versions."""
    if value.version != 7:
        raise ValueError("not a UUID of version 7")
    return value.int >> 80
