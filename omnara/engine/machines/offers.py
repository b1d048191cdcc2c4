"""What a channel is to hand over to its machine, read in one statement; secrets are put in on the way, kept nowhere.

An offer decides nothing: it may be repeated, and the machine may take it up or not. Source: machines.md §3 (drain,
preparation errors), §4 (order of actions), §7 (environment).
"""

from __future__ import annotations

from typing import Literal, cast
from uuid import UUID

import msgspec

from omnara.db import processes as db
from omnara.db.connection import Connection
from omnara.db.processes import OfferedRow
from omnara.domain.processes import MAX_OFFER_BYTES, OFFERED_ACTIONS, OFFERED_PROCESSES, ActionKind
from omnara.engine.catalog import open_secret
from omnara.engine.deps import Deps
from omnara.engine.machines.redact import secret_ids
from omnara.engine.machines.runtimes import RuntimeEnded, why_ended
from omnara.ids import IdKind, encode
from omnara.machines.frames import ActionOffer, ProcessOffer
from omnara.vault import SecretUnreadable

ENVELOPE_BYTES = 128
"""What a frame adds around an offer."""


class Pending(msgspec.Struct, frozen=True):
    """What waits for a machine: offers of processes and actions, and processes that are to be ended."""

    processes: list[ProcessOffer]
    actions: list[ActionOffer]
    terminations: list[UUID]


async def pending(deps: Deps, runtime_id: UUID, session_id: UUID, skip: set[UUID]) -> Pending | RuntimeEnded:
    """Return what waits for the machine of a channel, but for what is in `skip`; RuntimeEnded when it is none any more.

    One statement, and one more for each command that has secrets. A runtime whose lease has run out gets nothing until
    its next beat. A command whose secrets cannot be had is offered with that as its error. Raises Unavailable.
    """
    async with deps.db.acquire() as connection:
        rows = await db.drain(connection, runtime_id, session_id, skip, OFFERED_PROCESSES, OFFERED_ACTIONS)
        if rows is None:
            ended = await why_ended(connection, runtime_id, session_id)
            return ended if not ended.still_ours else Pending([], [], [])
        found = Pending([], [], [])
        for row in rows:
            if row.kind == "end":
                found.terminations.append(row.process_id)
            elif row.kind == "process":
                found.processes.append(await _process(deps, connection, row))
            else:
                found.actions.append(_action(row))
    return found


async def _process(deps: Deps, connection: Connection, row: OfferedRow) -> ProcessOffer:
    process_id = encode(IdKind.PROCESS, row.process_id)
    env: dict[str, str] = msgspec.json.decode(row.env or "{}", type=dict[str, str])
    if secret_ids(row.secret_env):
        try:
            env |= await _secrets(deps, connection, row)
        except _Missing as missing:
            return ProcessOffer(process_id=process_id, preparation_error=str(missing))
    io_mode: Literal["pipe", "pty"] = "pty" if row.io_mode == "pty" else "pipe"
    offer = ProcessOffer(
        process_id=process_id,
        io_mode=io_mode,
        command=row.command or "",
        shell_selector=row.shell or "default",
        cwd=row.cwd or "",
        env=env,
        wait_ms=row.wait_ms or 0,
        timeout_seconds=row.timeout_seconds or 0,
    )
    if len(msgspec.json.encode(offer)) + ENVELOPE_BYTES > MAX_OFFER_BYTES:
        error = "the command with its environment is larger than 1 MiB"
        return ProcessOffer(process_id=process_id, preparation_error=error)
    return offer


class _Missing(Exception):
    """A secret that the command may not have, or nobody can read any more. The text names the variable only."""


async def _secrets(deps: Deps, connection: Connection, row: OfferedRow) -> dict[str, str]:
    assert row.project_id is not None, "a process has a project"
    wanted = secret_ids(row.secret_env)
    sealed = await db.secrets_for(connection, set(wanted.values()), row.project_id, row.machine_id)
    by_id = {found.id: found for found in sealed}
    env = {}
    for name, secret_id in wanted.items():
        if secret_id not in by_id:
            raise _Missing(f"the secret of {name} does not exist or may not be used by the project")
        try:
            env[name] = open_secret(deps.ring, by_id[secret_id])
        except SecretUnreadable:
            raise _Missing(f"the secret of {name} cannot be read with the server's keys") from None
        if "\0" in env[name]:
            raise _Missing(f"the secret of {name} has a NUL and cannot be a variable")
    return env


def _action(row: OfferedRow) -> ActionOffer:
    assert row.action_id is not None, "an action has an id"
    assert row.place is not None, "an action has a number"
    return ActionOffer(
        process_id=encode(IdKind.PROCESS, row.process_id),
        process_action_id=encode(IdKind.PROCESS_ACTION, row.action_id),
        action_kind=cast("ActionKind", row.kind),
        seq=row.place,
        payload=msgspec.Raw((row.payload or "{}").encode()),
    )
