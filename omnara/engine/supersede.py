"""Cancelling open forms: their calls end as canceled, the turn and every other call go on.

Used by steering that makes the questions pointless. Source: engine.md §8 (cancel_open_interactions).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from omnara.db import calls, interactions
from omnara.db.connection import Connection
from omnara.domain.content import StructuredDataBlock
from omnara.engine.appending import Appending

ASKING: Final = frozenset({"awaiting_permission", "waiting"})
"""States of a call that a form owns: nobody else may complete it."""


async def cancel_open_forms(connection: Connection, appending: Appending, input_id: UUID, *, reason: str) -> None:
    """Cancel the open forms of the current batch, naming the input that did it; their calls complete as canceled.

    The agent is locked by `appending`, which the caller writes.
    """
    hot = appending.hot
    if hot.batch_sequence is None:
        return
    open_forms = {form.tool_call_id for form in await interactions.open_forms(connection, hot.agent_id)}
    if not open_forms:
        return
    asked = [
        call
        for call in await calls.open_calls(connection, hot.agent_id, hot.batch_sequence)
        if call.id in open_forms and call.state in ASKING
    ]
    if not asked:
        return
    await interactions.cancel(
        connection, hot.agent_id, calls=[call.id for call in asked], input_id=input_id, reason=reason
    )
    for call in asked:
        appending.add_result(call, "canceled", [StructuredDataBlock({"reason": reason})])
