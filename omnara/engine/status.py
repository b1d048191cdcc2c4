"""The flat API's view of an agent: one status word, the last step, the last answer, the tokens.

Source: DESIGN §2, §3 (status words of the view `agents_overview`).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction
from omnara.db import reads as db
from omnara.db.agents import AgentRow
from omnara.db.connection import Connection
from omnara.db.failures import is_unavailability
from omnara.db.reads import StatusRow
from omnara.domain.content import TextBlock
from omnara.domain.events import DamagedEvent, ModelOutputPayload, decode_payload
from omnara.engine.deps import Deps
from omnara.engine.resume import diagnose
from omnara.engine.scope import AgentPath, agent_in_scope
from omnara.errors import NotFound
from omnara.log import get_logger

log = get_logger(__name__)

KEEP_EVERY: Final = 500
"""Steps that a look adds up before it keeps the sum: a write in every few hundred looks, and never 2 ms of reading."""


class AgentStatus(msgspec.Struct, frozen=True):
    """`next_action` says what comes next; `output` is the model's last text; `diagnosis` is of a crashed agent."""

    agent: AgentRow
    row: StatusRow
    next_action: str
    output: str | None
    usage: dict[str, int]
    diagnosis: str | None


async def agent_status(deps: Deps, p: Principal, path: AgentPath) -> AgentStatus:
    """Return the status of an agent. A few reads, no lock: each is right for its own moment."""
    async with deps.db.acquire() as connection:
        agent = await agent_in_scope(connection, p, path, ProjectAction.READ)
        row = await db.agent_status(connection, agent.id)
        if row is None:
            raise NotFound
        payload = await db.last_output(connection, agent.id)
        usage = await _usage(connection, agent.id)
        diagnosis = await diagnose(connection, agent.id) if row.status == "crashed" else None
    return AgentStatus(agent, row, next_action(row), _text(payload), usage, diagnosis)


async def _usage(connection: Connection, agent_id: UUID) -> dict[str, int]:
    """The tokens of all steps. Only what came since the sums were last kept is read, and steps do nothing for it."""
    found = await db.usage_sums(connection, agent_id)
    if found.through is not None and found.steps >= KEEP_EVERY:
        try:
            await db.keep_usage(connection, agent_id, found.through, found.sums)
        except Exception as error:
            if not is_unavailability(error):
                raise
            log.debug("usage_not_kept", error=type(error).__name__)  # read-only or full: the next reader adds up again
    return found.sums


def next_action(row: StatusRow) -> str:
    """Say what the agent does next, in one word of a closed set."""
    match row.status:
        case "archived":
            return "none"
        case "crashed":
            return "operator"
        case "paused" | "pausing":
            return "resume"
        case "waiting":
            return "external_result"
        case "idle":
            return "input"
        case _:
            if row.open_calls > 0:
                return "tools"
            return "retry_model" if row.retry_at is not None else "model"


def _text(payload: str | None) -> str | None:
    if payload is None:
        return None
    try:
        output = decode_payload("model_output", 0, payload)
    except DamagedEvent:
        return None
    if not isinstance(output, ModelOutputPayload):
        return None
    return "\n\n".join(block.text for block in output.content_blocks if isinstance(block, TextBlock)) or None
