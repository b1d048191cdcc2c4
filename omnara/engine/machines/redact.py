"""What commands write, made fit for the log: no values of the secrets they were given, nothing that Postgres refuses.

A command that echoes its environment must not put a secret into the log, where models and readers see it. A value may
be cut by the end of what one read carries, so a part of one at either edge goes as well.
Source: DESIGN §2, invariant 7; field-reports B13.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final
from uuid import UUID

import msgspec

from omnara.db import processes as db
from omnara.db.connection import Connection
from omnara.domain.text import clean_text
from omnara.engine.catalog import open_secret
from omnara.engine.deps import Deps
from omnara.log import get_logger
from omnara.vault import REDACTED, SecretUnreadable, redact

log = get_logger(__name__)

PAST_VALUES: Final = 8
"""Versions of a secret that are looked for: a command keeps the one that it was started with."""

MIN_PART: Final = 8
"""Characters of a cut value that are taken for a part of it; shorter ones are as likely something else."""


async def redacted(deps: Deps, connection: Connection, secret_env: str, output: str) -> str:
    """Return a command's output as it may be stored. `secret_env`: the names of its secrets with their ids, JSON.

    One query, only for a command that has secrets and wrote something.
    """
    secrets = secret_ids(secret_env) if output else {}
    if secrets:
        output = without(output, await _values(deps, connection, secrets.values()))
    return clean_text(output)


def secret_ids(secret_env: str | None) -> dict[str, UUID]:
    """Return the secrets of a stored environment by name."""
    return msgspec.json.decode(secret_env or "{}", type=dict[str, UUID])


def without(output: str, values: Collection[str]) -> str:
    """Return text without these values, and without the parts of them that its edges cut."""
    if len(output) >= MIN_PART and any(output in value for value in values):
        return REDACTED
    output = redact(output, values)
    for value in sorted(values, key=len, reverse=True):
        for size in range(min(len(value) - 1, len(output)), MIN_PART - 1, -1):
            if output.endswith(value[:size]):
                output = output[:-size] + REDACTED
                break
        for size in range(min(len(value) - 1, len(output)), MIN_PART - 1, -1):
            if output.startswith(value[-size:]):
                output = REDACTED + output[size:]
                break
    return output


async def _values(deps: Deps, connection: Connection, ids: Iterable[UUID]) -> list[str]:
    values = []
    for row in await db.past_values(connection, set(ids), PAST_VALUES):
        try:
            values.append(open_secret(deps.ring, row))
        except SecretUnreadable:
            # No command of this ring can have got it: what cannot be opened now could not be handed over either.
            log.warning("secret_not_readable", secret_id=str(row.id), version=row.version)
    return values
