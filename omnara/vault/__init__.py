"""Secrets at rest and in memory: envelope encryption, the key ring's check value, and redaction.

Plaintext never reaches Postgres, logs, events, errors or URLs (DESIGN §2, invariant 7), so everything that
handles it is in this small package and its types do not print what they hold.
"""

from omnara.vault.envelope import Sealed, SecretUnreadable, open_sealed, reseal, seal, secret_aad
from omnara.vault.keyring import (
    InvalidKeyRing,
    KeyRing,
    WrongKeyRing,
    check_value,
    generate_ring,
    parse_ring,
    verify_check_value,
)
from omnara.vault.redaction import REDACTED, Secret, redact

__all__ = [
    "REDACTED",
    "InvalidKeyRing",
    "KeyRing",
    "Sealed",
    "Secret",
    "SecretUnreadable",
    "WrongKeyRing",
    "check_value",
    "generate_ring",
    "open_sealed",
    "parse_ring",
    "redact",
    "reseal",
    "seal",
    "secret_aad",
    "verify_check_value",
]
