"""The ring of key-encryption keys, and the proof that it is the ring of this database.

A server started with the wrong ring would write secrets that the others cannot read and fail on every stored one,
late and one by one. So the database keeps a check value of each key, and start is refused when one differs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from omnara.errors import ConfigurationError

__all__ = [
    "KEY_BYTES",
    "InvalidKeyRing",
    "KeyRing",
    "WrongKeyRing",
    "check_value",
    "generate_ring",
    "parse_ring",
    "verify_check_value",
]

KEY_BYTES: Final = 32
"""AES-256."""

_KEY_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CHECK_PREFIX: Final = "v1"
_CHECK_LABEL: Final = b"omnara key ring check v1"


class InvalidKeyRing(ConfigurationError):
    """The text of the ring cannot be used. Names ids and positions, never key material."""


class WrongKeyRing(ConfigurationError):
    """The ring is well-formed, but not the one with which this database was set up."""


class KeyRing(msgspec.Struct, frozen=True):
    """Key-encryption keys by id; new secrets are sealed with the active one, old ones stay readable."""

    keys: Mapping[str, bytes]
    active: str

    def __post_init__(self) -> None:
        """Check ids, key sizes and the active id. Raises InvalidKeyRing."""
        for key_id, key in self.keys.items():
            if _KEY_ID.fullmatch(key_id) is None:
                raise InvalidKeyRing("key ids are 1 to 64 letters, digits, dots, underscores or hyphens")
            if len(key) != KEY_BYTES:
                raise InvalidKeyRing(f"key {key_id!r} has {len(key)} bytes; {KEY_BYTES} are needed")
        if self.active not in self.keys:
            raise InvalidKeyRing("the active key id is not in the ring")

    def __repr__(self) -> str:
        """Show ids only."""
        return f"KeyRing(ids={sorted(self.keys)!r}, active={self.active!r})"

    def serialise(self) -> str:
        """Return the ring as text for a private file: `id:base64,…`. The result is a secret."""
        return ",".join(f"{key_id}:{base64.b64encode(key).decode()}" for key_id, key in self.keys.items())


def parse_ring(text: str, active: str | None = None) -> KeyRing:
    """Read `id:base64key[,id:base64key…]`. Without `active` the ring must have exactly one key.

    Standard and URL-safe base64 are read, padded or not. Raises InvalidKeyRing, with the entry's position and the
    id at most: a mistyped entry may hold a key where the id should be, so an id is only named when it is well-formed.
    """
    keys: dict[str, bytes] = {}
    for position, entry in enumerate(text.split(","), start=1):
        key_id, separator, encoded = entry.strip().partition(":")
        if not separator or _KEY_ID.fullmatch(key_id) is None:
            raise InvalidKeyRing(f"entry {position} is not of the form id:base64key")
        if key_id in keys:
            raise InvalidKeyRing(f"entry {position} repeats the id of an earlier one")
        keys[key_id] = _decode_key(encoded, position)
    if active is None:
        if len(keys) != 1:
            raise InvalidKeyRing("a ring with several keys needs an active key id")
        active = next(iter(keys))
    return KeyRing(keys, active)


def _decode_key(encoded: str, position: int) -> bytes:
    standard = encoded.strip().rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        key = base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    # The cause is dropped on purpose: a decoder's message may quote its input.
    if len(key) != KEY_BYTES:
        raise InvalidKeyRing(f"entry {position}: the key must be {KEY_BYTES} bytes in base64")
    return key


def generate_ring(key_id: str = "k1") -> KeyRing:
    """Return a ring with one new random key. Raises InvalidKeyRing for an unusable id."""
    return KeyRing({key_id: secrets.token_bytes(KEY_BYTES)}, key_id)


def check_value(ring: KeyRing) -> str:
    """Return the text that the database keeps to recognise this ring. It reveals nothing about the keys."""
    return _format({key_id: _fingerprint(key_id, key) for key_id, key in ring.keys.items()})


def verify_check_value(stored: str, ring: KeyRing) -> str:
    """Compare a ring with the stored check value; return the check value to store from now on.

    The result differs from `stored` only when the ring brings a new key. Every key that the database knows must be
    in the ring and be the same: to retire one, re-seal its secrets and take its entry out of the stored text.
    Raises WrongKeyRing, saying which id is missing or differs.
    """
    known = _parse(stored)
    for key_id, fingerprint in known.items():
        key = ring.keys.get(key_id)
        if key is None:
            raise WrongKeyRing(f"the key ring lacks the key {key_id!r}, which secrets in this database may need")
        if not hmac.compare_digest(fingerprint, _fingerprint(key_id, key)):
            raise WrongKeyRing(f"the key {key_id!r} is not the key with which this database was set up")
    return _format(known | {key_id: _fingerprint(key_id, key) for key_id, key in ring.keys.items()})


def _fingerprint(key_id: str, key: bytes) -> str:
    # HMAC under the key itself: without the key nobody can tell it from a random number.
    return hmac.new(key, _CHECK_LABEL + b"\x00" + key_id.encode(), hashlib.sha256).hexdigest()


def _format(fingerprints: Mapping[str, str]) -> str:
    return " ".join([_CHECK_PREFIX, *(f"{key_id}={value}" for key_id, value in sorted(fingerprints.items()))])


def _parse(stored: str) -> dict[str, str]:
    version, *entries = stored.split(" ")
    pairs = [entry.partition("=") for entry in entries]
    if version != _CHECK_PREFIX or not pairs or any(not separator for _, separator, _ in pairs):
        raise WrongKeyRing("the check value in the database is not readable by this release")
    return {key_id: value for key_id, _, value in pairs}
