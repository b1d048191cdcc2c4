"""The ring of keys that encrypts stored secrets: from the settings, or made once for an embedded database."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from omnara.app.database import direct_connection
from omnara.db.accounts import installation_value
from omnara.db.connection import ConnectSettings
from omnara.engine.bootstrap import CHECK_NAME
from omnara.errors import ConfigurationError
from omnara.log import get_logger
from omnara.settings import Settings
from omnara.vault import InvalidKeyRing, KeyRing, generate_ring, parse_ring

__all__ = ["load_ring", "ring_of", "ring_source", "write_private"]

log = get_logger(__name__)

RING_FILE: Final = "secret-encryption-keys"


async def ring_of(settings: Settings, database: ConnectSettings) -> KeyRing:
    """Return the ring for a database whose schema is there. Makes one only for a database that has seen none.

    Raises as `load_ring`; ConfigurationError too when the file of an embedded database's ring is gone: a new ring
    would read none of the stored secrets, and stand in the way of the right one.
    """
    path = settings.data_dir / RING_FILE
    if database.embedded and settings.secret_encryption_keys is None and not path.exists():
        async with direct_connection(database) as connection:
            known = await installation_value(connection, CHECK_NAME)
        if known is not None:
            raise ConfigurationError(
                f"the key ring {path} is missing, and the secrets of this database cannot be read without it: "
                "restore the file from a backup, or put its text into OMNARA_SECRET_ENCRYPTION_KEYS"
            )
    return load_ring(settings, embedded=database.embedded)


def ring_source(settings: Settings) -> str:
    """Return where the ring comes from, for messages: the variables or the file."""
    if settings.secret_encryption_keys is not None:
        return "OMNARA_SECRET_ENCRYPTION_KEYS (active key: OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY)"
    return str(settings.data_dir / RING_FILE)


def load_ring(settings: Settings, *, embedded: bool) -> KeyRing:
    """Return the ring of this installation. With an embedded database a missing one is made, 0600, with a warning.

    Raises ConfigurationError for a ring that cannot be read, and for a missing one with a database of one's own: a ring
    that only one replica knows would make secrets unreadable for the others.
    """
    if settings.secret_encryption_keys is not None:
        return _parsed(settings, settings.secret_encryption_keys, settings.secret_encryption_active_key)
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
    return _parsed(settings, _private_text(path), None)


def _parsed(settings: Settings, text: str, active: str | None) -> KeyRing:
    try:
        return parse_ring(text, active)
    except InvalidKeyRing as error:
        raise InvalidKeyRing(f"{ring_source(settings)}: {error.detail}") from error


def _private_text(path: Path) -> str:
    """Read the ring's file; a warning when others may read it too."""
    try:
        if path.stat().st_mode & 0o077:
            log.warning("others may read the key ring; make it private with `chmod 600`", path=str(path))
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigurationError(f"the key ring {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        # Without its cause, which quotes what it could not read.
        raise InvalidKeyRing(f"{path} is no key ring: it is not ASCII text") from None


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
