"""The ring of keys that encrypts stored secrets: from the settings, or made once for an embedded database."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from omnara.errors import ConfigurationError
from omnara.log import get_logger
from omnara.settings import Settings
from omnara.vault import KeyRing, generate_ring, parse_ring

__all__ = ["load_ring", "write_private"]

log = get_logger(__name__)

RING_FILE: Final = "secret-encryption-keys"


def load_ring(settings: Settings, *, embedded: bool) -> KeyRing:
    """Return the ring of this installation. With an embedded database a missing one is made, 0600, with a warning.

    Raises ConfigurationError for a ring that cannot be read, and for a missing one with a database of one's own: a ring
    that only one replica knows would make secrets unreadable for the others.
    """
    if settings.secret_encryption_keys is not None:
        return parse_ring(settings.secret_encryption_keys, settings.secret_encryption_active_key)
    if not embedded:
        raise ConfigurationError(
            "OMNARA_SECRET_ENCRYPTION_KEYS is not set, and with OMNARA_DATABASE_URL it must be: set it to "
            "`k1:` and the output of `openssl rand -base64 32`, set OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY to `k1`, "
            "and give every replica the same"
        )
    path = settings.data_dir / RING_FILE
    if not path.exists():
        write_private(path, generate_ring().serialise() + "\n")
        log.warning("made a key ring for stored secrets; without this file they cannot be read", path=str(path))
    return parse_ring(path.read_text(encoding="ascii").strip(), None)


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read, whole or not at all. Raises FileExistsError if it is there."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)
    finally:
        partial.unlink()
