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

from omnara.domain.content import ErrorBlock, OutputBlock, TextBlock, ToolCallBlock
from omnara.domain.context_text import (
    CANCEL_NOTICE,
    CONFIG_NOTICE,
    LOST_NOTICE,
    checkpoint_text,
    error_notice,
    input_texts,
    interrupted_text,
    result_text,
)
from omnara.domain.events import (
    AgentInputPayload,
    CheckpointPayload,
    Event,
    EventMeta,
    ModelOutputPayload,
    ToolResultPayload,
)
from omnara.domain.text import is_blank

_OVERHEAD = 200
"""Bytes that a message costs beside its text: an estimate for the memory bound of a cache, not a measure."""


class UserMessage(msgspec.Struct, frozen=True):
    """What people said, and notices, oldest first. Never empty, no text is blank."""

    sequence: int
    texts: tuple[str, ...]


class AnsweredCall(msgspec.Struct, frozen=True):
    """The one answer to a call. `failed` covers every outcome but success; the text already says which."""

    tool_call_id: str
    text: str
    failed: bool


class ToolResultsMessage(msgspec.Struct, frozen=True):
    """The answers to all calls of the assistant message before it, in call order."""

    sequence: int
    results: tuple[AnsweredCall, ...]


class AssistantMessage(msgspec.Struct, frozen=True):
    """An accepted output: texts that are not blank, and calls. `replay` is opaque and only for the same model."""

    sequence: int
    blocks: tuple[TextBlock | ToolCallBlock, ...]
    meta: EventMeta
    replay: bytes | None

    @property
    def calls(self) -> tuple[ToolCallBlock, ...]:
        """The calls, in order."""
        return tuple(block for block in self.blocks if isinstance(block, ToolCallBlock))


Message = UserMessage | ToolResultsMessage | AssistantMessage


class _Said(msgspec.Struct, frozen=True):
    """One text of the open side, with the event that it came from."""

    sequence: int
    text: str


class ContextState:
    """The conversation up to `sequence`, open at its end.

    `settled` holds messages that no later event changes, except that a checkpoint replaces them (`generation` then
    moves on, and whatever was derived from `settled` has to be derived anew). What came after the last output is kept
    apart until the next output shows where it belongs: see `tail`.
    """

    __slots__ = ("_answers", "_calls", "_said", "_shown", "_size", "_void", "generation", "sequence", "settled")

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
            for text in input_texts(payload.content_blocks):
                self._say(sequence, text)
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
        answer = AnsweredCall(payload.tool_call_id, text, payload.outcome != "succeeded")
        self._answers[payload.tool_call_id] = (sequence, answer)
        self._size += len(text) + _OVERHEAD

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
            kept[0] = UserMessage(kept[0].sequence, (summary, *kept[0].texts))
        elif kept:
            kept.insert(0, UserMessage(through, (summary,)))
        else:
            self._said.insert(0, _Said(through + 1, summary))
        self.settled = kept
        self.generation += 1
        texts = [said.text for said in self._said] + [answer.text for _, answer in self._answers.values()]
        self._size = sum(map(_size_of, kept)) + sum(len(text) + _OVERHEAD for text in texts)

    # --- the open side ------------------------------------------------------------------------------------

    def _say(self, sequence: int, text: str) -> None:
        self._said.append(_Said(sequence, text))
        self._size += len(text) + _OVERHEAD

    def _open_side(self, frontier: int) -> list[Message]:
        messages: list[Message] = []
        if self._calls:
            answers = tuple(self._answer_to(call) for call in self._calls)
            last = max((sequence for sequence, _ in self._answers.values()), default=self.settled[-1].sequence)
            messages.append(ToolResultsMessage(last, answers))
        texts = tuple(said.text for said in self._said if said.sequence <= frontier)
        if texts:
            last = max(said.sequence for said in self._said if said.sequence <= frontier)
            messages.append(UserMessage(last, texts))
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
        self._size += _size_of(message)


def _is_told(block: OutputBlock, truncated: bool) -> bool:
    """True for what is repeated to any model. Reasoning lives in the replay; a cut output's calls were never real."""
    if isinstance(block, TextBlock):
        return not is_blank(block.text)
    return isinstance(block, ToolCallBlock) and not truncated


def _size_of(message: Message) -> int:
    if isinstance(message, UserMessage):
        return sum(len(text) + _OVERHEAD for text in message.texts)
    if isinstance(message, ToolResultsMessage):
        return sum(len(result.text) + _OVERHEAD for result in message.results)
    if isinstance(message, AssistantMessage):
        texts = sum(len(block.text) for block in message.blocks if isinstance(block, TextBlock))
        # A call's input is a tree of small objects: four times its text is close.
        calls = sum(4 * len(msgspec.json.encode(call.input)) for call in message.calls)
        return texts + calls + len(message.replay or b"") + _OVERHEAD * (1 + len(message.blocks))
    assert_never(message)
