"""A long log by SQL: what an agent has after thousands of turns, in a second instead of an hour.

The rows are the ones that the engine would have left, so every check of `sql/checks` holds and a worker goes on from
them.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import asyncpg

from omnara.domain.content import TextBlock, ToolCallBlock
from omnara.domain.events import (
    AgentInputPayload,
    CheckpointPayload,
    EventMeta,
    ModelOutputPayload,
    Payload,
    ToolResultPayload,
    encode_payload,
)
from omnara.ids import IdKind, encode, new_uuid

EVENTS_PER_TURN: Final = 4
"""A message, an output that asks for a tool, its result, and the output that ends the turn."""
STEPS_PER_TURN: Final = 3
_USAGE: Final = '{"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}'
_PAGE: Final = 2500


class LongLog:
    """Adds turns and checkpoints to an agent that is idle."""

    def __init__(self, sql: asyncpg.Connection, agent_id: UUID) -> None:
        self._sql = sql
        self._agent_id = agent_id

    async def grow(self, turns: int, *, text: str = "a few words") -> None:
        """Add whole turns of four events and three steps each; every text of them is `text`."""
        for start in range(0, turns, _PAGE):
            await self._grow(min(_PAGE, turns - start), text)

    async def checkpoint(self, through: int, summary: str = "so far, so good") -> int:
        """Add a checkpoint to the latest turn; return its sequence."""
        hot = await self._hot()
        payload = CheckpointPayload(encode(IdKind.CHECKPOINT, new_uuid()), through, summary)
        rows = _Rows(self._agent_id, hot)
        rows.event("context_checkpoint", payload)
        await self._write(rows)
        return rows.sequence - 1

    async def _grow(self, turns: int, text: str) -> None:
        rows = _Rows(self._agent_id, await self._hot())
        for _ in range(turns):
            rows.turn(text)
        await self._write(rows)

    async def _hot(self) -> asyncpg.Record:
        row = await self._sql.fetchrow("select * from agent_sched where agent_id = $1", self._agent_id)
        assert row is not None
        return row

    async def _write(self, rows: _Rows) -> None:
        async with self._sql.transaction():
            for table, (columns, values) in rows.tables().items():
                await self._sql.copy_records_to_table(table, columns=columns.split(), records=values)
            await self._sql.execute(
                """update agent_sched set next_sequence = $2, turn_id = $3, turn_sequence = $4, step_number = $5,
                          inputs_gen = inputs_gen + 1 where agent_id = $1""",
                self._agent_id,
                rows.sequence,
                rows.turn_id,
                rows.turn_sequence,
                rows.step,
            )


class _Rows:
    """Rows for the tables of the engine, going on from a hot row."""

    def __init__(self, agent_id: UUID, hot: asyncpg.Record) -> None:
        self._agent_id = agent_id
        self._config_id: UUID = hot["config_id"]
        self.sequence: int = hot["next_sequence"]
        self.turn_id: UUID = hot["turn_id"]
        self.turn_sequence: int = hot["turn_sequence"]
        self.step: int = hot["step_number"]
        self._events: list[Any] = []
        self._turns: list[Any] = []
        self._calls: list[Any] = []
        self._steps: list[Any] = []

    def event(self, kind: str, payload: Payload, *, opening: bool = False, semantic: bool = False) -> None:
        """One event at the next sequence."""
        meta = encode_payload(EventMeta(frontier=self.sequence - 1)) if kind == "model_output" else None
        values = (new_uuid(), kind, self.turn_id, self.turn_sequence, opening, semantic, encode_payload(payload), meta)
        self._events.append((self._agent_id, self.sequence, *values))
        self.sequence += 1

    def turn(self, text: str) -> None:
        """A turn with one call of a tool."""
        self.turn_id, self.turn_sequence = new_uuid(), self.turn_sequence + 1
        self._turns.append((self._agent_id, self.turn_sequence, self.turn_id, self.sequence))
        said = AgentInputPayload(encode(IdKind.AGENT_INPUT, new_uuid()), "content", [TextBlock(text)])
        self.event("agent_input", said, opening=True, semantic=True)
        call_id = new_uuid()
        name = encode(IdKind.TOOL_CALL, call_id)
        asked = ModelOutputPayload(_model_call(), "tool_use", [ToolCallBlock(name, "custom", "look", {"path": "/"})])
        output = self.sequence
        self._model_step(output)
        self.event("model_output", asked)
        self._add_step("tools", output)
        call = (call_id, self.turn_id, self.turn_sequence, "call_1", "look", "custom", '{"path":"/"}', "completed")
        self._calls.append((self._agent_id, output, 0, *call, "succeeded", self.step, self.sequence))
        self.event("tool_result", ToolResultPayload(name, "succeeded", [TextBlock(text)]))
        self._model_step(self.sequence)
        self.event("model_output", ModelOutputPayload(_model_call(), "end_turn", [TextBlock(text)]), semantic=True)

    def _model_step(self, output: int) -> None:
        self._add_step("model", output, _USAGE)

    def _add_step(self, kind: str, output: int, usage: str | None = None) -> None:
        self.step += 1
        ids = (self.turn_id, self._config_id, new_uuid())
        self._steps.append((self._agent_id, self.step, kind, 1, self.sequence - 1, *ids, 1, "succeeded", usage, output))

    def tables(self) -> dict[str, tuple[str, list[Any]]]:
        """Columns and rows by table."""
        return {
            "events": (
                "agent_id sequence id kind turn_id turn_sequence is_opening is_semantic payload meta",
                self._events,
            ),
            "turns": ("agent_id turn_sequence id first_sequence", self._turns),
            "tool_calls": (
                "agent_id output_sequence ordinal id turn_id turn_sequence provider_call_id name type input state "
                "outcome step_number result_sequence",
                self._calls,
            ),
            "steps": (
                "agent_id number kind attempt frontier turn_id config_id worker_id epoch state usage output_sequence",
                self._steps,
            ),
        }


def _model_call() -> str:
    return encode(IdKind.MODEL_CALL, new_uuid())
