"""When is a turn over? One rule for every reader of the log."""

from __future__ import annotations

from collections.abc import Iterable

from omnara.client.types import Event

__all__ = ["turn_is_over"]


def turn_is_over(events: Iterable[Event]) -> bool:
    """Whether the agent has nothing left to say, judged from its events so far (oldest first; a tail is enough).

    The last event, ignoring tool results and checkpoints, decides: a model output without tool calls, a control
    input or an opening config change ends a turn. No such event: not over. An output that was cut at the length limit
    ends nothing: it goes on in the next output, or an error output follows. Source: api.md §15.
    """
    last: Event | None = None
    for event in events:
        if event.kind not in ("tool_result", "context_checkpoint"):
            last = event
    if last is None:
        return False
    if last.kind == "model_output":
        return not last.tool_calls and last.stop_reason != "max_tokens"
    if last.kind != "agent_input":
        return False
    return last.input_kind == "control" or (last.input_kind == "config_change" and last.is_opening_event)
