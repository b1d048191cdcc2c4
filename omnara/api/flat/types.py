"""Requests and answers of the flat routes: agents for people who start with one HTTP call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.scalars import AgentID, NonEmpty, Timestamp, Wire

Status = Literal["running", "waiting", "idle", "pausing", "paused", "crashed", "archived"]
NextAction = Literal["model", "retry_model", "tools", "external_result", "input", "resume", "operator", "none"]


ToolPermission = Literal["allow", "ask", "deny", "always_allow", "always_ask", "always_deny"]
"""Short words for people; the long ones are those of a config."""


class FlatTool(Wire, frozen=True, kw_only=True):
    """A tool that the caller runs: its calls wait until a result is posted."""

    name: NonEmpty
    description: NonEmpty
    input_schema: dict[str, Any]
    permission: ToolPermission = "allow"


class LaunchFlatRequest(Wire, frozen=True, kw_only=True):
    """What an agent is, and optionally its first message.

    `model` is a configured model's name or `provider/slug`; `tools` are names of built-in tools or tools of the
    caller's own; `machine_sources` is as in a config.
    """

    system_prompt: NonEmpty
    model: NonEmpty
    tools: list[NonEmpty | FlatTool] | UnsetType = UNSET
    machine_sources: list[dict[str, Any]] | UnsetType = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType = UNSET
    message: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class Links(Wire, frozen=True, kw_only=True):
    """Where the same agent is found in the scoped API."""

    inputs: str
    events: str
    stream: str
    tool_calls: str
    interactions: str


class FlatLaunchResponse(Wire, frozen=True, kw_only=True):
    """The new agent, or the one that the Idempotency-Key launched before."""

    id: AgentID
    name: str
    links: Links
    created_at: Timestamp


class FlatStep(Wire, frozen=True, kw_only=True):
    """The agent's last step."""

    number: int
    kind: Literal["model", "tools", "compaction"]
    status: Literal["started", "succeeded", "failed", "canceled", "released", "interrupted"]
    attempt: int
    started_at: Timestamp
    finished_at: Timestamp | UnsetType = UNSET
    retry_at: Timestamp | UnsetType = UNSET
    error: Any = UNSET


class FlatAgent(Wire, frozen=True, kw_only=True):
    """How an agent is doing. `output` is the last text of the model; `diagnosis` says why it crashed."""

    id: AgentID
    name: str
    status: Status
    model: str
    system_prompt: str
    temperature: float | UnsetType = UNSET
    last_step: FlatStep | None
    next_action: NextAction
    output: str | None
    usage: dict[str, int]
    diagnosis: str | UnsetType = UNSET
    links: Links
    created_at: Timestamp
    updated_at: Timestamp
    archived_at: Timestamp | UnsetType = UNSET


class FlatAgentSummary(Wire, frozen=True, kw_only=True):
    """An agent in a list: which one it is and how it is doing, without what it said or used."""

    id: AgentID
    name: str
    status: Status
    model: str
    steps: int
    turns: int
    open_calls: int
    links: Links
    created_at: Timestamp
    updated_at: Timestamp
    archived_at: Timestamp | UnsetType = UNSET


class ListFlatAgentsResponse(Wire, frozen=True, kw_only=True):
    """A page of agents, newest first."""

    data: list[FlatAgentSummary]
    next_cursor: str | None


class ResumeRequest(Wire, frozen=True, kw_only=True):
    """How a crashed agent goes on: from its last valid step, or again from the last message."""

    force: bool = False
    restart: bool = False
