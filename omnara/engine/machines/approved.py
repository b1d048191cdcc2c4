"""A call that a person allowed is for the machines that the agent had then: one that came later was not meant.

Source: engine.md §7 (an approval pins its target; one that has changed is not used).
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from omnara.db import interactions
from omnara.db.bindings import BoundMachine
from omnara.db.connection import Connection
from omnara.engine.machines.sources import SANDBOX
from omnara.engine.tool_tx import Transaction
from omnara.tools.protocol import ToolResult, failed

__all__ = ["invalidated", "not_meant"]

INVALIDATED = "tool_authorization_invalidated"


async def invalidated(tx: Transaction, machine: BoundMachine) -> ToolResult | None:
    """`not_meant` of a transactional call."""
    return await not_meant(tx.connection, tx.agent_id, tx.call_id, tx.asked_at, machine)


async def not_meant(
    connection: Connection, agent_id: UUID, call_id: UUID, asked_at: datetime, machine: BoundMachine
) -> ToolResult | None:
    """Return the result of a call that was allowed before its agent got this machine; else None. The agent is locked.

    Only for a machine that is newer than the call there is a query. A sandbox is made by its command, so it was meant.
    """
    if machine.bound_at <= asked_at or machine.source_key == SANDBOX:
        return None
    if not await interactions.was_asked(connection, agent_id, call_id):
        return None
    return failed(
        "The machines have changed since this call was allowed. It did not run; ask again.",
        INVALIDATED,
        retryable=True,
        machine_ref=machine.machine_ref,
    )
