"""Signatures of reasoning: issued with an answer, checked when a client replays it.

They are keyed hashes of the model and of what was signed, so the server need not remember anything and a
signature stays good when the server restarts in the middle of a conversation.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

_DEFAULT_KEY = b"omnara scripted model server"


class Signer:
    """Issues and checks signatures. Servers made with the same `key` accept each other's."""

    def __init__(self, key: bytes = _DEFAULT_KEY) -> None:
        self._key = key

    def sign(self, model: str, text: str) -> str:
        """Return the signature of thinking `text` by `model`."""
        return base64.b64encode(b"\x12\x40" + self._digest(model, text.encode(errors="surrogatepass"))).decode()

    def verify(self, model: str, text: str, signature: str) -> bool:
        """Return whether `signature` was issued for exactly this text by exactly this model."""
        return hmac.compare_digest(self.sign(model, text).encode(), signature.encode(errors="surrogatepass"))

    def seal(self, model: str, label: str = "") -> str:
        """Return opaque data (redacted thinking, encrypted reasoning) bound to `model` and `label`."""
        nonce = secrets.token_bytes(32)
        return base64.b64encode(nonce + self._digest(model, nonce + label.encode())).decode()

    def unseal(self, model: str, data: str, label: str = "") -> bool:
        """Return whether `data` was sealed for this model and label and is unchanged."""
        try:
            raw = base64.b64decode(data, validate=True)
        except ValueError:
            return False
        return hmac.compare_digest(raw[32:], self._digest(model, raw[:32] + label.encode()))

    def _digest(self, model: str, content: bytes) -> bytes:
        return hmac.new(self._key, model.encode() + b"\0" + content, hashlib.sha512).digest()
