"""Bearer tokens: the credential format that clients hold, checked without touching the database.

The checksum lets a server refuse typing errors and random guesses before any query, and lets secret scanners
recognise a leaked token. Only the SHA-256 of the whole text is ever stored. Source: api.md §2.
"""

from __future__ import annotations

import hashlib
import secrets
import zlib
from enum import StrEnum
from typing import Final

import msgspec

__all__ = [
    "CHECKSUM_LENGTH",
    "SECRET_LENGTH",
    "BearerToken",
    "InvalidToken",
    "TokenKind",
    "bearer_from_header",
    "checksum",
    "encode_checksum",
    "format_token",
    "generate",
    "hash_token",
    "new_token_id",
    "parse",
]

SECRET_LENGTH: Final = 43
"""Base62 characters of the random part: a little over 256 bits. Source: api.md §2."""

CHECKSUM_LENGTH: Final = 6
"""Base62 characters that hold any CRC-32. Source: api.md §2."""

_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ALPHABET_SET: Final = frozenset(_ALPHABET)
_HEADER_PREFIX: Final = "Bearer "


class TokenKind(StrEnum):
    """Whose credential it is; the text appears inside the token. Source: api.md §2."""

    PERSONAL = "pat"
    ORG = "org"
    DAEMON = "daemon"


_PREFIXES: Final = {kind: f"omnara_{kind.value}_v1_" for kind in TokenKind}


class InvalidToken(ValueError):
    """The text has not the shape or the checksum of a token. The message never repeats any of it."""


class BearerToken(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A well-formed token. Whether anybody issued it is for the database to say, by its hash."""

    kind: TokenKind
    text: str

    def __repr__(self) -> str:
        """Show the kind only: a token in a log line is a leak."""
        return f"BearerToken(kind={self.kind.value!r}, text=<hidden>)"

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the full text, the only form that is stored. Source: api.md §2."""
        return hash_token(self.text)


def encode_checksum(value: int) -> str:
    """Return a 32-bit number as six base62 digits, most significant first, padded with zeros.

    Raises ValueError outside 0..2**32-1. Source: api.md §2 (4294967295 is `4gfFC3`).
    """
    if not 0 <= value <= 0xFFFFFFFF:
        raise ValueError("a checksum has 32 bits")
    digits = []
    for _ in range(CHECKSUM_LENGTH):
        value, digit = divmod(value, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


def checksum(body: str) -> str:
    """Return the checksum of everything before a token's last underscore. Source: api.md §2."""
    return encode_checksum(zlib.crc32(body.encode("ascii")))


def format_token(kind: TokenKind, secret: str) -> BearerToken:
    """Return the token of `kind` around a 43-character secret. Raises ValueError for any other secret."""
    if len(secret) != SECRET_LENGTH or not _ALPHABET_SET.issuperset(secret):
        raise ValueError("a token secret has 43 base62 characters")
    body = _PREFIXES[kind] + secret
    return BearerToken(kind, f"{body}_{checksum(body)}")


def generate(kind: TokenKind) -> BearerToken:
    """Return a new random token, every character drawn evenly from the system's secure source."""
    return format_token(kind, "".join(secrets.choice(_ALPHABET) for _ in range(SECRET_LENGTH)))


def parse(text: str) -> BearerToken:
    """Check shape and checksum. Raises InvalidToken; never reads the database. Source: api.md §2 (401 without it)."""
    for kind, prefix in _PREFIXES.items():
        if text.startswith(prefix):
            return _parse_rest(kind, text, len(prefix))
    raise InvalidToken("not a token of a known kind and version")


def _parse_rest(kind: TokenKind, text: str, start: int) -> BearerToken:
    if len(text) != start + SECRET_LENGTH + 1 + CHECKSUM_LENGTH:
        raise InvalidToken("wrong length")
    body, separator, tail = text[: start + SECRET_LENGTH], text[start + SECRET_LENGTH], text[-CHECKSUM_LENGTH:]
    if separator != "_" or not _ALPHABET_SET.issuperset(body[start:]):
        raise InvalidToken("wrong characters")
    if checksum(body) != tail:
        raise InvalidToken("wrong checksum")
    return BearerToken(kind, text)


def hash_token(text: str) -> str:
    """Return the hex SHA-256 of a token's full text. Source: api.md §2."""
    return hashlib.sha256(text.encode()).hexdigest()


def new_token_id() -> str:
    """Return the identifier that users see for a token: ten random bytes in hex, unrelated to the secret.

    Source: api.md §2.
    """
    return secrets.token_hex(10)


def bearer_from_header(header: str | None) -> str | None:
    """Return what follows exactly `Bearer ` in an Authorization header, or None when it is not such a header.

    The scheme is compared with its case and its single blank. Source: api.md §2.
    """
    if header is None or not header.startswith(_HEADER_PREFIX):
        return None
    return header[len(_HEADER_PREFIX) :]
