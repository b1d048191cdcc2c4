"""The messages that wait for an agent, and what can be done with them."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from omnara.api.omnara.types.agents import AgentInput
from omnara.api.omnara.types.scalars import AgentInputID, Wire


class ListAgentInputsResponse(Wire, frozen=True, kw_only=True):
    """A page of the queue."""

    data: list[AgentInput]
    next_cursor: str | None


class MoveQueuedBacklogInputRequest(Wire, frozen=True, kw_only=True):
    """Where a message goes; `anchor_input_id` belongs to `before` and `after`."""

    position: Literal["front", "back", "before", "after"]
    anchor_input_id: AgentInputID | UnsetType = UNSET


class PromoteQueuedInputToSteeringRequest(Wire, frozen=True, kw_only=True):
    """How a message becomes steering."""

    cancel_open_interactions: bool | UnsetType = UNSET


class OKResponse(Wire, frozen=True, kw_only=True):
    """It is done."""

    ok: bool
