"""An agent's log without an engine: makes events in order, and drives a model over them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from omnara.domain.content import (
    ErrorBlock,
    InputBlock,
    OutputBlock,
    ReasoningBlock,
    ResultBlock,
    TextBlock,
    ToolCallBlock,
)
from omnara.domain.context import ContextState
from omnara.domain.events import (
    AgentInputPayload,
    CheckpointPayload,
    Event,
    EventKind,
    EventMeta,
    InputKind,
    ModelOutputPayload,
    Outcome,
    Payload,
    StopReason,
    ToolResultPayload,
)
from omnara.domain.stream import StreamDelta
from omnara.domain.text import clean
from omnara.ids import IdKind, encode, new_uuid
from omnara.providers import (
    Completed,
    Failed,
    ModelCall,
    ModelGateway,
    ModelTarget,
    RenderedHistory,
    RequestedCall,
    ToolSpec,
)

TURN = UUID(int=1)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LOOK = ToolSpec("look", "Looks at a path.", {"type": "object", "properties": {"path": {"type": "string"}}})


def new_call_id() -> tuple[UUID, str]:
    """As the engine makes them."""
    value = new_uuid()
    return value, encode(IdKind.TOOL_CALL, value)


class Log:
    """Events 1, 2, 3, …; every method appends one and returns it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def last(self) -> int:
        """The highest sequence."""
        return len(self.events)

    def user(self, *texts: str) -> Event:
        """A message."""
        return self._input("content", [TextBlock(text) for text in texts])

    def said(self, *blocks: InputBlock) -> Event:
        """A message with files in it."""
        return self._input("content", blocks)

    def config_change(self) -> Event:
        """Another config."""
        return self._input("config_change", [], agent_config_id="acfg_x")

    def cancel(self) -> Event:
        """A stop by the user."""
        return self._input("control", [], control_type="cancel_current")

    def answer(self) -> Event:
        """An answer to a question or permission."""
        return self._input("interaction_response", [TextBlock("Allow")], interaction_id="int_x")

    def output(
        self,
        *blocks: OutputBlock,
        stop: StopReason | None = None,
        meta: EventMeta | None = None,
        replay: bytes | None = None,
    ) -> Event:
        """A model output; its stop reason follows from its blocks."""
        calls = any(isinstance(block, ToolCallBlock) for block in blocks)
        stop = stop or ("tool_use" if calls else "end_turn")
        payload = ModelOutputPayload("mcc_x", stop, list(blocks))
        return self._add("model_output", payload, meta or EventMeta(frontier=self.last), replay)

    def error(self, text: str) -> Event:
        """A model call that ended for good."""
        return self.output(ErrorBlock(text), stop="error")

    def result(self, call_id: str, *blocks: ResultBlock, outcome: Outcome = "succeeded") -> Event:
        """The result of a call."""
        return self._add("tool_result", ToolResultPayload(call_id, outcome, list(blocks)))

    def checkpoint(self, through: int, summary: str, meta: EventMeta | None = None) -> Event:
        """A summary of everything up to `through`."""
        return self._add("context_checkpoint", CheckpointPayload("ccp_x", through, summary), meta)

    def _input(self, kind: InputKind, blocks: Sequence[Any], **more: Any) -> Event:
        return self._add("agent_input", AgentInputPayload("ain_x", kind, list(blocks), **more))

    def _add(
        self, kind: EventKind, payload: Payload, meta: EventMeta | None = None, replay: bytes | None = None
    ) -> Event:
        event = Event(
            sequence=self.last + 1,
            id=new_uuid(),
            kind=kind,
            turn_id=TURN,
            turn_sequence=1,
            is_opening=kind == "agent_input",
            payload=payload,
            meta=meta or EventMeta(),
            replay=replay,
            created_at=NOW,
        )
        self.events.append(event)
        return event


def call_block(name: str = "look", call_id: str | None = None, **arguments: Any) -> ToolCallBlock:
    """A call as the log has it."""
    return ToolCallBlock(call_id or new_call_id()[1], "custom", name, arguments)


class Driver:
    """A conversation with a model: what the engine does, without durability."""

    def __init__(self, gateway: ModelGateway, target: ModelTarget, *, system: str = "Be brief.") -> None:
        self.gateway = gateway
        self.target = target
        self.system = system
        self.tools: tuple[ToolSpec, ...] = (LOOK,)
        self.log = Log()
        self.context = ContextState()
        self.history = RenderedHistory()
        self.deltas: list[StreamDelta] = []
        self.log.config_change()

    async def attempt(self, *, suppress_replay: bool = False) -> Completed | Failed:
        """One attempt on the whole log; a completed one is appended to it."""
        self.context.extend(self.log.events)
        frontier = self.log.last
        call = ModelCall(
            target=self.target,
            system=self.system,
            tools=self.tools,
            context=self.context,
            history=self.history,
            new_call_id=new_call_id,
            suppress_replay=suppress_replay,
        )
        outcome = await self.gateway.call(call, self.deltas.append)
        if isinstance(outcome, Completed):
            target = self.target
            meta = EventMeta(frontier, target.provider, target.api_format, target.slug, target.revision_id)
            blocks = [stored(block) for block in outcome.blocks]
            self.log.output(*blocks, stop=outcome.stop_reason, meta=meta, replay=outcome.replay)
        return outcome

    async def run(self, text: str, *, results: str = "ok") -> Completed:
        """Say something and go on until the model stops asking for tools."""
        self.log.user(text)
        while True:
            outcome = await self.attempt()
            assert isinstance(outcome, Completed), outcome
            for call in outcome.calls:
                self.log.result(call.public_id, TextBlock(results))
            if not outcome.calls:
                return outcome


def stored(block: TextBlock | ReasoningBlock | RequestedCall) -> OutputBlock:
    """A block as the engine saves it."""
    if isinstance(block, RequestedCall):
        return ToolCallBlock(block.public_id, "custom", block.name, clean(block.input))
    return block
