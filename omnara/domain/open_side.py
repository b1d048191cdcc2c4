"""The open end of a conversation: what came after the last output, whose place only the next output shows."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from omnara.domain.content import MediaPart, Part, ToolCallBlock
from omnara.domain.context_size import answer_bytes, parts_bytes
from omnara.domain.context_text import interrupted_text
from omnara.domain.message import OVERHEAD, AnsweredCall, Message, ToolResultsMessage, UserMessage, part_size


class Said(msgspec.Struct, frozen=True):
    """One part, with the event that it came from. `awaits`: a person waits for an answer to it."""

    sequence: int
    part: Part
    awaits: bool = False


class OpenSide:
    """The calls of the last output with the answers so far, and what has been said since."""

    __slots__ = ("answers", "asked_at", "calls", "said")

    def __init__(self) -> None:
        self.calls: tuple[ToolCallBlock, ...] = ()
        self.asked_at = 0
        self.answers: dict[str, tuple[int, AnsweredCall]] = {}
        self.said: list[Said] = []

    def ask(self, sequence: int, calls: tuple[ToolCallBlock, ...]) -> None:
        """The output of event `sequence` has been settled; these are its calls."""
        self.calls = calls
        self.asked_at = sequence

    def wants(self, call_id: str) -> ToolCallBlock | None:
        """Return the call that still lacks an answer under this id, if there is one."""
        if call_id in self.answers:
            return None
        return next((call for call in self.calls if call.tool_call_id == call_id), None)

    @property
    def results_at(self) -> int:
        """The last event of the calls and their answers; 0 without calls."""
        if not self.calls:
            return 0
        return max((sequence for sequence, _ in self.answers.values()), default=self.asked_at)

    def messages(self, frontier: int) -> list[Message]:
        """All calls answered (what is missing is filled in), then what had been said up to `frontier`."""
        messages: list[Message] = []
        if self.calls:
            messages.append(ToolResultsMessage(self.results_at, tuple(self._answer_to(call) for call in self.calls)))
        said = [item for item in self.said if item.sequence <= frontier]
        if said:
            messages.append(UserMessage(max(item.sequence for item in said), tuple(item.part for item in said)))
        return messages

    def close(self, frontier: int) -> None:
        """The next output has been made having seen `frontier`: what was said later waits for the output after it."""
        self.said = [said for said in self.said if said.sequence > frontier]
        self.calls, self.answers = (), {}

    def forget(self, through: int, *, calls: bool) -> None:
        """A checkpoint stands for everything up to `through`, `calls` among it."""
        self.said = [said for said in self.said if said.sequence > through]
        if calls:
            self.calls, self.answers = (), {}

    def told_bytes(self, frontier: int) -> int:
        """Size of answers, and of what had been said up to `frontier`, in a request."""
        parts = [said.part for said in self.said if said.sequence <= frontier]
        return parts_bytes(parts) + sum(answer_bytes(answer) for _, answer in self.answers.values())

    @property
    def bytes_size(self) -> int:
        """Estimate of the memory held, in bytes."""
        answers = sum(len(answer.text) + OVERHEAD for _, answer in self.answers.values())
        return answers + sum(part_size(said.part) for said in self.said)

    def media(self) -> Iterator[MediaPart]:
        """The files in it, answers first."""
        for _, answer in self.answers.values():
            yield from answer.media
        yield from (said.part for said in self.said if isinstance(said.part, MediaPart))

    def _answer_to(self, call: ToolCallBlock) -> AnsweredCall:
        found = self.answers.get(call.tool_call_id)
        return found[1] if found else AnsweredCall(call.tool_call_id, interrupted_text(), failed=True)
