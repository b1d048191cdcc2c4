"""What has happened between user and agent, turned into parts to print: the one place where the stream is interpreted.

Pure apart from its own state, so that a test can hold every order of deltas, events and disconnects against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

import msgspec
from rich.console import RenderableType

from omnara.cli.chat.activity import Activity
from omnara.cli.chat.draft import Draft, Piece, Restart
from omnara.cli.chat.outbox import Message
from omnara.cli.chat.transcript import Transcript, markdown, notice
from omnara.client import Delta, Event, StreamItem, ToolCallUpdate

__all__ = ["Part", "View"]

Kind = Literal["message", "answer", "tool", "notice", "form"]


class Part(msgspec.Struct, frozen=True):
    """Something to print. Parts of different kinds are set apart by an empty line."""

    kind: Kind
    body: RenderableType


class View:
    """Follows the stream and the user's own messages that are on their way."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.draft = Draft()
        self.waiting: dict[str, Message] = {}
        """Messages of this user that are not in the log yet, by their keys, oldest first."""
        self.taken: set[str] = set()
        """Keys of those among them that the server has."""
        self._transcript = Transcript()

    @property
    def working(self) -> bool:
        """Whether the agent is in a turn, as far as one can see."""
        return self.activity.working or bool(self.draft.open_text or self.draft.doing)

    def past(self, events: Sequence[Event], shown: int) -> list[Part]:
        """Take events from before the stream; return the parts of the last `shown` messages and what followed them."""
        starts = [index for index, event in enumerate(events) if _is_message(event)]
        first = starts[-shown] if len(starts) >= shown else 0
        parts: list[Part] = []
        for index, event in enumerate(events):
            self.activity.note(event)
            event_parts = [Part(_kind(event), body) for body in self._transcript.whole(event)]
            if index >= first:
                parts.extend(event_parts)
        return parts

    def take(self, item: StreamItem) -> list[Part]:
        """Take the next item of the stream; return what it completes."""
        match item:
            case Delta():
                return [_piece(piece) for piece in self.draft.delta(item)]
            case Event():
                return self._event(item)
            case ToolCallUpdate():
                return []
            case _:
                assert_never(item)

    def forget(self, key: str) -> None:
        """A message waits no longer: it is in the log, or will never be."""
        self.waiting.pop(key, None)
        self.taken.discard(key)

    def _event(self, event: Event) -> list[Part]:
        self.activity.note(event)
        if event.kind == "model_output":
            pieces = [_piece(piece) for piece in self.draft.saved(event)]
            return [*pieces, *(Part("tool", body) for body in self._transcript.around(event))]
        parts: list[Part] = []
        if event.kind == "agent_input":
            self.forget(event.input_idempotency_key or "")
            if event.input_kind == "control":
                parts = [_piece(piece) for piece in self.draft.abandoned()]
        parts.extend(Part(_kind(event), body) for body in self._transcript.whole(event))
        if event.input_kind == "control":
            parts.extend(self._undelivered())
        return parts

    def _undelivered(self) -> list[Part]:
        """Stopping a turn cancels what was to steer it. Source: api.md §10."""
        lost = [message for message in self.waiting.values() if message.steering and message.key in self.taken]
        for message in lost:
            self.forget(message.key)
        return [Part("notice", notice(f"not delivered: {message.text}", "yellow")) for message in lost]


def _piece(piece: Piece | Restart) -> Part:
    if isinstance(piece, Restart):
        return Part("notice", notice("the answer was interrupted; it begins again", "yellow"))
    return Part("answer", markdown(piece.source))


def _is_message(event: Event) -> bool:
    return event.kind == "agent_input" and event.input_kind == "content"


def _kind(event: Event) -> Kind:
    if event.kind == "model_output":
        return "answer"
    if event.kind == "tool_result":
        return "tool"
    return "message" if _is_message(event) else "notice"
