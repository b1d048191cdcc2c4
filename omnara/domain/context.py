"""From the log to a conversation: the fold that decides what a model is told, independent of any wire format.

Providers refuse a conversation over one misplaced record, and then refuse it for ever, since the record stays in the
log. So the order is made here, once, for every provider: the results of an output stand together, in call order, right
after it and before any other text; nothing blank is said; what is missing is filled in. The fold is incremental (a step
costs its new events) and gives the same conversation whether events came one by one or all at once.
Source: engine.md §6 (layout); field-reports B01, B02, B04; DESIGN §4 (void ranges).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import dropwhile
from types import MappingProxyType
from typing import assert_never

import msgspec

from omnara.domain.content import ErrorBlock, MediaPart, OutputBlock, Part, TextBlock, ToolCallBlock
from omnara.domain.context_text import (
    CANCEL_NOTICE,
    CONFIG_NOTICE,
    LOST_NOTICE,
    checkpoint_text,
    error_notice,
    input_parts,
    interrupted_text,
    result_media,
    result_text,
)
from omnara.domain.events import (
    AgentInputPayload,
    CheckpointPayload,
    Event,
    ModelOutputPayload,
    ToolResultPayload,
)
from omnara.domain.message import (
    OVERHEAD,
    AnsweredCall,
    AssistantMessage,
    Message,
    ToolResultsMessage,
    UserMessage,
    media_of,
    part_size,
    size_of,
)
from omnara.domain.text import is_blank

__all__ = ["AnsweredCall", "AssistantMessage", "ContextState", "Message", "ToolResultsMessage", "UserMessage"]


class _Said(msgspec.Struct, frozen=True):
    """One part of the open side, with the event that it came from."""

    sequence: int
    part: Part


class ContextState:
    """The conversation up to `sequence`, open at its end.

    `settled` holds messages that no later event changes, except that a checkpoint replaces them (`generation` then
    moves on, and whatever was derived from `settled` has to be derived anew). What came after the last output is kept
    apart until the next output shows where it belongs: see `tail`.
    """

    __slots__ = (
        "_answers",
        "_calls",
        "_said",
        "_shown",
        "_size",
        "_void",
        "generation",
        "media",
        "sequence",
        "settled",
    )

    def __init__(
        self, void: Sequence[tuple[int, int]] = (), shown_chars: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """`void`: ranges of sequences to skip, both ends included. `shown_chars`: how much of a text result of these
        built-in tools a model is shown (the log keeps all of it).
        """
        self.sequence = 0
        self.generation = 0
        self.settled: list[Message] = []
        self._void = tuple(void)
        self._shown = shown_chars
        self._calls: tuple[ToolCallBlock, ...] = ()
        self._answers: dict[str, tuple[int, AnsweredCall]] = {}
        self._said: list[_Said] = []
        self._size = 0
        self.media: list[MediaPart] = []
        """Every file of the conversation, oldest first."""

    @property
    def bytes_size(self) -> int:
        """Estimate of the memory held, in bytes; kept up to date at no cost."""
        return self._size

    def extend(self, events: Iterable[Event]) -> None:
        """Apply events in order of sequence. Those at or below `sequence` are skipped, so overlaps are harmless."""
        for event in events:
            if event.sequence > self.sequence:
                self.apply(event)

    def apply(self, event: Event) -> None:
        """Advance by one event."""
        self.sequence = event.sequence
        if any(low <= event.sequence <= high for low, high in self._void):
            return
        payload = event.payload
        if isinstance(payload, AgentInputPayload):
            self._apply_input(event.sequence, payload)
        elif isinstance(payload, ModelOutputPayload):
            self._apply_output(event, payload)
        elif isinstance(payload, ToolResultPayload):
            self._apply_result(event.sequence, payload)
        elif isinstance(payload, CheckpointPayload):
            self._apply_checkpoint(payload)
        else:
            assert_never(payload)

    def tail(self) -> tuple[Message, ...]:
        """Messages after `settled`, as a call would send them now; they may still grow.

        Never empty and never an assistant's: a call without anything new to say gets a notice, because providers
        take a conversation that ends with the assistant for a request to continue its sentence.
        """
        messages = self._open_side(self.sequence)
        return tuple(messages) if messages else (UserMessage(self.sequence, (LOST_NOTICE,)),)

    def messages(self) -> tuple[Message, ...]:
        """The whole conversation: `settled`, then `tail()`."""
        return (*self.settled, *self.tail())

    # --- events -------------------------------------------------------------------------------------------

    def _apply_input(self, sequence: int, payload: AgentInputPayload) -> None:
        if payload.input_kind == "content":
            for part in input_parts(payload.content_blocks):
                self._say(sequence, part)
        elif payload.input_kind == "control":
            self._say(sequence, CANCEL_NOTICE)
        elif payload.input_kind == "config_change":
            if sequence > 1:  # the first event of a log is the config it was launched with
                self._say(sequence, CONFIG_NOTICE)
        elif payload.input_kind == "interaction_response":
            return  # its answer reaches the model as the result of the call that asked
        else:
            assert_never(payload.input_kind)

    def _apply_output(self, event: Event, payload: ModelOutputPayload) -> None:
        if payload.stop_reason == "error":
            texts = (block.text for block in payload.content_blocks if isinstance(block, ErrorBlock))
            self._say(event.sequence, error_notice("\n".join(texts)))
            return
        truncated = payload.stop_reason == "max_tokens"
        blocks = tuple(block for block in payload.content_blocks if _is_told(block, truncated))
        if not blocks:
            return  # providers refuse an empty turn; the next one follows what was said before it
        self._settle(event.meta.frontier or event.sequence)
        message = AssistantMessage(
            event.sequence,
            blocks,  # type: ignore[arg-type]  # _is_told lets only these two through
            event.meta,
            None if truncated else event.replay,
        )
        self._push(message)
        self._calls = message.calls

    def _apply_result(self, sequence: int, payload: ToolResultPayload) -> None:
        call = next((call for call in self._calls if call.tool_call_id == payload.tool_call_id), None)
        if call is None or payload.tool_call_id in self._answers:
            return  # its call is void or summarised; providers refuse an answer to nothing
        shown_chars = self._shown.get(call.name) if call.tool_type == "built_in" else None
        text = result_text(payload.outcome, payload.content_blocks, shown_chars)
        media = result_media(payload.content_blocks)
        answer = AnsweredCall(payload.tool_call_id, text, payload.outcome != "succeeded", media)
        self._answers[payload.tool_call_id] = (sequence, answer)
        self.media.extend(media)
        self._size += len(text) + OVERHEAD

    def _apply_checkpoint(self, payload: CheckpointPayload) -> None:
        through = payload.summarized_through_event_sequence
        # A cut, not a filter: an output stands before what it had not seen, so sequences may step back.
        kept = list(dropwhile(lambda message: message.sequence <= through, self.settled))
        if kept and isinstance(kept[0], ToolResultsMessage):
            kept.pop(0)
        self._said = [said for said in self._said if said.sequence > through]
        if not kept:
            self._calls, self._answers = (), {}
        summary = checkpoint_text(payload.summary)
        if kept and isinstance(kept[0], UserMessage):
            kept[0] = UserMessage(kept[0].sequence, (summary, *kept[0].parts))
        elif kept:
            kept.insert(0, UserMessage(through, (summary,)))
        else:
            self._said.insert(0, _Said(through + 1, summary))
        self.settled = kept
        self.generation += 1
        parts: list[Part] = [said.part for said in self._said]
        answers = [answer for _, answer in self._answers.values()]
        self._size = sum(map(size_of, kept)) + sum(map(part_size, [*parts, *(answer.text for answer in answers)]))
        self.media = [media for message in kept for media in media_of(message)]
        self.media += [media for answer in answers for media in answer.media]
        self.media += [part for part in parts if isinstance(part, MediaPart)]

    # --- the open side ------------------------------------------------------------------------------------

    def _say(self, sequence: int, part: Part) -> None:
        self._said.append(_Said(sequence, part))
        self._size += part_size(part)
        if isinstance(part, MediaPart):
            self.media.append(part)

    def _open_side(self, frontier: int) -> list[Message]:
        messages: list[Message] = []
        if self._calls:
            answers = tuple(self._answer_to(call) for call in self._calls)
            last = max((sequence for sequence, _ in self._answers.values()), default=self.settled[-1].sequence)
            messages.append(ToolResultsMessage(last, answers))
        parts = tuple(said.part for said in self._said if said.sequence <= frontier)
        if parts:
            last = max(said.sequence for said in self._said if said.sequence <= frontier)
            messages.append(UserMessage(last, parts))
        return messages

    def _answer_to(self, call: ToolCallBlock) -> AnsweredCall:
        found = self._answers.get(call.tool_call_id)
        return found[1] if found else AnsweredCall(call.tool_call_id, interrupted_text(), failed=True)

    def _settle(self, frontier: int) -> None:
        """Close the open side at what the output had seen; later texts wait for the output after it."""
        side = self._open_side(frontier)
        if not side:
            side = [UserMessage(frontier, (LOST_NOTICE,))]  # two answers in a row, or one at the start, are refused
        self.settled.extend(side)
        self._said = [said for said in self._said if said.sequence > frontier]
        self._calls, self._answers = (), {}

    def _push(self, message: AssistantMessage) -> None:
        self.settled.append(message)
        self._size += size_of(message)


def _is_told(block: OutputBlock, truncated: bool) -> bool:
    """True for what is repeated to any model. Reasoning lives in the replay; a cut output's calls were never real."""
    if isinstance(block, TextBlock):
        return not is_blank(block.text)
    return isinstance(block, ToolCallBlock) and not truncated
