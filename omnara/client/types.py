"""What the server answers, as far as callers need it. Fields that a newer server adds are ignored."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

__all__ = [
    "Agent",
    "AgentStatus",
    "Delta",
    "Event",
    "Input",
    "Interaction",
    "Launched",
    "Links",
    "ToolCall",
    "ToolCallUpdate",
]


class Links(msgspec.Struct, frozen=True):
    """Paths of one agent in the scoped API."""

    inputs: str
    events: str
    stream: str
    tool_calls: str
    interactions: str


class Launched(msgspec.Struct, frozen=True):
    """A new agent, or the one that the same Idempotency-Key made before."""

    id: str
    links: Links


class AgentStatus(msgspec.Struct, frozen=True):
    """What an agent is doing. `output` is the last text that the model said."""

    id: str
    status: str
    links: Links | None = None
    name: str | None = None
    last_step: Any = None
    next_action: str | None = None
    output: str | None = None
    usage: dict[str, Any] | None = None
    diagnosis: Any = None


class Agent(msgspec.Struct, frozen=True):
    """One line of the list of agents. `status` is a word such as `AgentStatus` has."""

    id: str
    name: str
    status: str
    model: str
    links: Links
    created_at: datetime


class Event(msgspec.Struct, frozen=True, rename={"kind": "event_kind"}):
    """One entry of an agent's log; which fields are set depends on `kind`. Source: api.md §10."""

    id: str
    sequence: int
    kind: str
    turn_id: str
    turn_sequence: int
    created_at: datetime
    is_opening_event: bool = False
    content_blocks: list[dict[str, Any]] = []
    input_kind: str | None = None
    control_type: str | None = None
    stop_reason: str | None = None
    tool_call_id: str | None = None
    outcome: str | None = None
    interaction_id: str | None = None
    input_idempotency_key: str | None = None
    model_call_context_id: str | None = None
    summary: str | None = None

    @property
    def text(self) -> str:
        """The text blocks, joined by line breaks."""
        return "\n".join(block.get("text", "") for block in self.content_blocks if block.get("type") == "text")

    @property
    def values(self) -> list[Any]:
        """The JSON values that a tool told, such as what became of a command."""
        return [block.get("value") for block in self.content_blocks if block.get("type") == "structured_data"]

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls that a model output asks for: `tool_call_id`, `tool_type`, `name`, `input`."""
        return [block for block in self.content_blocks if block.get("type") == "tool_call"]


class Delta(msgspec.Struct, frozen=True):
    """A piece of a model's answer before it is saved. Best effort: show it, never rely on it."""

    turn_id: str
    model_call_context_id: str
    seq: int
    event: dict[str, Any]


class ToolCallUpdate(msgspec.Struct, frozen=True):
    """A tool call's new state. Best effort: the list of tool calls is what counts."""

    tool_call_id: str
    state: str


class Input(msgspec.Struct, frozen=True):
    """A message that was accepted; `state` is `received` until it enters the log."""

    id: str
    agent_id: str
    state: str
    delivery_mode: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call that a model asked for, with its present state."""

    id: str
    name: str
    type: str
    state: str
    input: Any
    outcome: str | None = None


class Interaction(msgspec.Struct, frozen=True, rename={"kind": "interaction_kind"}):
    """A question or a request for permission. `request` is the form: title, context, questions with options."""

    id: str
    kind: str
    state: str
    request: dict[str, Any]
    resolution: dict[str, Any] | None = None
