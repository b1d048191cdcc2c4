"""What an agent is about, folded from its events: working or not, and which calls are open. Pure."""

from __future__ import annotations

from typing import Final

from omnara.client import Event

__all__ = ["HELD", "Activity"]

HELD: Final = {
    "paused": "the agent is paused; messages wait until it is resumed",
    "crashed": "the agent has crashed; see `omnara agents resume --help`",
    "archived": "the agent is archived; this conversation is over",
}
"""States that no event tells, in which nothing will be answered."""


class Activity:
    """Follows one agent's log. `working`: a turn is running, as far as the events say. Source: api.md §15."""

    def __init__(self) -> None:
        self.working = False
        self.open_calls: dict[str, str] = {}
        """Names of the calls without a result, by id."""

    def note(self, event: Event) -> None:
        """Take the next event."""
        if event.kind == "tool_result":
            self.open_calls.pop(event.tool_call_id or "", None)
        elif event.kind == "model_output":
            self.open_calls = {str(call["tool_call_id"]): str(call["name"]) for call in event.tool_calls}
            # An answer that was cut at the length limit goes on by itself.
            self.working = bool(self.open_calls) or event.stop_reason == "max_tokens"
        elif event.kind == "agent_input" and event.input_kind != "config_change":
            self.working = event.input_kind != "control"
            if not self.working:
                self.open_calls.clear()
