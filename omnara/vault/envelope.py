"""Envelope encryption of stored secrets: AES-256-GCM under a key of their own, which the ring's key wraps.

Each sealing makes a new data key, so that no key encrypts two secrets and moving to a new ring key re-wraps
32 bytes instead of every secret. Both layers are bound to the secret's identity: a row copied over another
one does not open.
"""

from __future__ import annotations

import os
from typing import Final
from uuid import UUID

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from omnara.vault.keyring import KEY_BYTES, KeyRing

__all__ = ["Sealed", "SecretUnreadable", "open_sealed", "reseal", "seal", "secret_aad"]

_NONCE_BYTES: Final = 12
_WRAP_LABEL: Final = b"omnara wrap v1\x00"
_DATA_LABEL: Final = b"omnara data v1\x00"


class SecretUnreadable(Exception):
    """A sealed secret does not open: missing key, changed bytes, or another secret's row. Holds no plaintext."""


class Sealed(msgspec.Struct, frozen=True):
    """What is stored of a secret. `wrapped_key` carries its own nonce in front."""

    key_id: str
    wrapped_key: bytes
    nonce: bytes
    ciphertext: bytes

    def __repr__(self) -> str:
        """Show the key id and the size: ciphertext in a log serves nobody."""
        return f"Sealed(key_id={self.key_id!r}, {len(self.ciphertext)} bytes)"


def secret_aad(secret_id: UUID, version: int) -> bytes:
    """Return the bytes that bind a sealed value to one version of one secret."""
    return secret_id.bytes + version.to_bytes(8, "big")


def seal(ring: KeyRing, plaintext: bytes, aad: bytes) -> Sealed:
    """Encrypt `plaintext` under a fresh data key, wrapped by the ring's active key. `aad` must be given to open it."""
    data_key = os.urandom(KEY_BYTES)
    nonce = os.urandom(_NONCE_BYTES)
    ciphertext = AESGCM(data_key).encrypt(nonce, plaintext, _DATA_LABEL + aad)
    return Sealed(ring.active, _wrap(ring, data_key, aad), nonce, ciphertext)


def open_sealed(ring: KeyRing, sealed: Sealed, aad: bytes) -> bytes:
    """Return the plaintext. Raises SecretUnreadable when the key is unknown or anything was changed."""
    data_key = _unwrap(ring, sealed, aad)
    try:
        return AESGCM(data_key).decrypt(sealed.nonce, sealed.ciphertext, _DATA_LABEL + aad)
    except (InvalidTag, ValueError):
        raise SecretUnreadable("the stored secret was changed or belongs to another record") from None


def reseal(ring: KeyRing, sealed: Sealed, aad: bytes) -> Sealed:
    """Return `sealed` with its data key wrapped by the active key; the ciphertext stays. The same if it already is.

    Raises SecretUnreadable like `open_sealed`.
    """
    if sealed.key_id == ring.active:
        return sealed
    data_key = _unwrap(ring, sealed, aad)
    return Sealed(ring.active, _wrap(ring, data_key, aad), sealed.nonce, sealed.ciphertext)


def _wrap(ring: KeyRing, data_key: bytes, aad: bytes) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(ring.keys[ring.active]).encrypt(nonce, data_key, _wrap_aad(ring.active, aad))


def _unwrap(ring: KeyRing, sealed: Sealed, aad: bytes) -> bytes:
    key = ring.keys.get(sealed.key_id)
    if key is None:
        raise SecretUnreadable(f"the key ring lacks the key {sealed.key_id!r}")
    nonce, wrapped = sealed.wrapped_key[:_NONCE_BYTES], sealed.wrapped_key[_NONCE_BYTES:]
    try:
        return AESGCM(key).decrypt(nonce, wrapped, _wrap_aad(sealed.key_id, aad))
    except (InvalidTag, ValueError):
        raise SecretUnreadable("the stored data key was changed or belongs to another record") from None


def _wrap_aad(key_id: str, aad: bytes) -> bytes:
    return _WRAP_LABEL + key_id.encode() + b"\x00" + aad
