"""What commands find on a machine: directory, variables, and the secrets among them.

A secret is named here and resolved when a command is handed over, so its value is in no row of machines or pools.
Source: machines.md §7 (environment), §12; the issue's limits of names and sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.db import machines
from omnara.db.connection import Connection
from omnara.domain.text import clean, clean_text, has_controls
from omnara.errors import InvalidRequest

MAX_ENTRIES: Final = 4096
MAX_BYTES: Final = 1024 * 1024
"""Of one environment, names and values, values of secrets not counted. Source: machines.md §7."""

MAX_CWD_CHARS: Final = 4096
MAX_DESCRIPTION_CHARS: Final = 4096
MAX_OBJECT_BYTES: Final = 64 * 1024
"""Of a provider's configuration or options."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_RESERVED: Final = "OMNARA_"


def check_env(env: Mapping[str, str | None], secret_env: Mapping[str, UUID | None]) -> None:
    """Check the names and the size of an environment or of an overlay (None takes a name away).

    Raises InvalidRequest. Names are compared without case, as some systems do.
    """
    if len(env) + len(secret_env) > MAX_ENTRIES:
        raise InvalidRequest(f"an environment may have {MAX_ENTRIES} entries")
    seen: set[str] = set()
    for name in (*env, *secret_env):
        if _NAME.fullmatch(name) is None:
            raise InvalidRequest("names of environment variables are letters, digits and underscores")
        if name.upper().startswith(_RESERVED):
            raise InvalidRequest(f"names of environment variables must not begin with {_RESERVED}")
        if name.upper() in seen:
            raise InvalidRequest(f"the environment names {name} twice")
        seen.add(name.upper())
    _check_values(env)


def _check_values(env: Mapping[str, str | None]) -> None:
    size = 0
    for name, value in env.items():
        if value is not None and ("\0" in value or clean_text(value) != value):
            raise InvalidRequest(f"the value of {name} cannot be a variable's")
        size += len(name) + len((value or "").encode())
    if size > MAX_BYTES:
        raise InvalidRequest(f"an environment may have {MAX_BYTES} bytes")


async def keep_secrets(
    connection: Connection, org_id: UUID, secret_ids: Iterable[UUID | None], *, project_id: UUID | None = None
) -> None:
    """Keep the secrets of an environment from being deleted until the transaction ends.

    They are generic ones that the organization owns or, for what belongs to a project, that the project may use.
    Raises InvalidRequest for any other, in the same words for one that nobody has.
    """
    wanted = {secret_id for secret_id in secret_ids if secret_id is not None}
    if not wanted:
        return
    if wanted != await machines.keep_env_secrets(connection, org_id, wanted, project_id):
        whose = "the organization owns" if project_id is None else "the project may use"
        raise InvalidRequest(f"secret_env names something else than generic secrets that {whose}")


def checked_cwd(text: str) -> str:
    """Return a directory as it is stored; empty means wherever commands start. Raises InvalidRequest."""
    if has_controls(text):
        raise InvalidRequest("cwd must not have control characters")
    if len(text) > MAX_CWD_CHARS:
        raise InvalidRequest(f"cwd must not be longer than {MAX_CWD_CHARS} characters")
    return clean_text(text)


def checked_description(text: str) -> str:
    """Return a description as it is stored. Raises InvalidRequest."""
    if len(text) > MAX_DESCRIPTION_CHARS:
        raise InvalidRequest(f"description must not be longer than {MAX_DESCRIPTION_CHARS} characters")
    return clean_text(text)


def stored_object(value: Mapping[str, Any], field: str) -> str:
    """Return an object as stored JSON text. Raises InvalidRequest when it is too large."""
    text = msgspec.json.encode(clean(dict(value)))
    if len(text) > MAX_OBJECT_BYTES:
        raise InvalidRequest(f"{field} may have {MAX_OBJECT_BYTES} bytes")
    return text.decode()


def stored_env(env: Mapping[str, str | None]) -> str:
    """Return checked variables as stored JSON text."""
    return msgspec.json.encode(dict(env)).decode()


def stored_secret_env(secret_env: Mapping[str, UUID | None]) -> str:
    """Return names and the UUIDs of their secrets as stored JSON text."""
    return msgspec.json.encode(dict(secret_env)).decode()


def stored_metadata(metadata: Mapping[str, str]) -> str:
    """Return metadata, whose limits its type has, as stored JSON text."""
    return msgspec.json.encode(clean(dict(metadata))).decode()
