"""The grant: the one moment at which work becomes a machine's, and nobody else's, to do.

Everything before it may be repeated or taken back, nothing after it is done twice. Each grant is one conditional update
that whoever cancels, sweeps or registers races for the same row. Source: machines.md §4; DESIGN §2, invariant 4.
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.db import processes as db
from omnara.engine.deps import Deps


class Granted(msgspec.Struct, frozen=True):
    """The process is the machine's to run."""


class GrantedAction(msgspec.Struct, frozen=True):
    """The action is the machine's to perform. `default_output_cursor` is where a read without a cursor begins."""

    process_state: str
    default_output_cursor: int


class NotAvailable(msgspec.Struct, frozen=True):
    """There is nothing to grant: taken back, granted already, not its turn, or not for this channel."""


async def accept_process(deps: Deps, runtime_id: UUID, session_id: UUID, process_id: UUID) -> Granted | NotAvailable:
    """Grant a queued process to the machine of a live channel. One statement, committed when it returns.

    Raises Unavailable when the outcome is not known: the next registration finds out.
    """
    async with deps.db.acquire() as connection:
        machine_id = await db.accept_process(connection, runtime_id, session_id, process_id)
    return NotAvailable() if machine_id is None else Granted()


async def accept_action(
    deps: Deps, runtime_id: UUID, session_id: UUID, process_id: UUID, action_id: UUID
) -> GrantedAction | NotAvailable:
    """Grant an action whose turn it is. As `accept_process`."""
    async with deps.db.acquire() as connection:
        found = await db.accept_action(connection, runtime_id, session_id, process_id, action_id)
    return NotAvailable() if found is None else GrantedAction(*found)
