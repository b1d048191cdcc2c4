"""From the log to a conversation: the fold that decides what a model is told, independent of any wire format.

Providers refuse a conversation over one misplaced record, and then refuse it for ever, since the record stays in the
log. So the order is made here, once, for every provider: the results of an output stand together, in call order, right
after it and before any other text; nothing blank is said; what is missing is filled in. The fold is incremental (a step
costs its new events) and gives the same conversation whether events came one by one or all at once.
Source: engine.md §6 (layout); field-reports B01, B02, B04; DESIGN §4 (void ranges).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, dropwhile
from types import MappingProxyType
from typing import assert_never

from omnara.domain.content import ErrorBlock, MediaPart, OutputBlock, Part, TextBlock, ToolCallBlock
from omnara.domain.context_size import Cut, message_bytes
from omnara.domain.context_text import (
    CANCEL_NOTICE,
    CONFIG_NOTICE,
    CUT_NOTICE,
    LOST_NOTICE,
    checkpoint_text,
    error_notice,
    input_parts,
    result_media,
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
from omnara.domain.open_side import OpenSide, Said
from omnara.domain.text import is_blank

__all__ = ["AnsweredCall", "AssistantMessage", "ContextState", "Message", "ToolResultsMessage", "UserMessage"]


class ContextState:
    """The conversation up to `sequence`, open at its end.

    `settled` holds messages that no later event changes, except that a checkpoint replaces them (`generation` then
    moves on, and whatever was derived from `settled` has to be derived anew). What came after the last output is kept
    apart until the next output shows where it belongs: see `tail`.
    """

    # fmt: off
    __slots__ = (
        "_cuts", "_failed_at", "_open", "_shown", "_size", "_told", "_void",
        "answers", "compactions", "generation", "media", "sequence", "settled", "summarized_through", "truncations",
    )
    # fmt: on

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
        self._open = OpenSide()
        self._size = 0
        self._told = 0
        self._cuts: list[Cut] = []
        self._failed_at = 0
        self.media: list[MediaPart] = []  # every file of the conversation, oldest first
        self.summarized_through = -1
        """The last event that a checkpoint stands for; -1 without one."""
        self.compactions = 0
        """Checkpoints since the last accepted output or message."""
        self.truncations = self.answers = 0
        """Answers in a row, up to now, that the length limit cut; and all that were accepted since the last message."""

    def start_after(self, checkpoint: Event) -> None:
        """Begin an empty state with a checkpoint, in place of everything it stands for: the next event to apply is the
        one after `summarized_through`. Gives the same conversation as a fold of the whole log.
        """
        payload = checkpoint.payload
        assert isinstance(payload, CheckpointPayload), "only a checkpoint stands for a log"
        self._apply_checkpoint(payload, checkpoint.meta)
        self.sequence = payload.summarized_through_event_sequence

    @property
    def bytes_size(self) -> int:
        """Estimate of the memory held, in bytes; kept up to date at no cost."""
        return self._size

    @property
    def told_bytes(self) -> int:
        """Estimate of the conversation's size in a request, in bytes."""
        return self._told + self._open.told_bytes(self.sequence)

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
            self._apply_checkpoint(payload, event.meta)
        else:
            assert_never(payload)

    def tail(self) -> tuple[Message, ...]:
        """Messages after `settled`, as a call would send them now; they may still grow.

        Never empty and never an assistant's: a call without anything new to say gets a notice, because providers
        take a conversation that ends with the assistant for a request to continue its sentence.
        """
        messages = self._open.messages(self.sequence)
        return tuple(messages) if messages else (UserMessage(self.sequence, (LOST_NOTICE,)),)

    def messages(self) -> tuple[Message, ...]:
        """The whole conversation: `settled`, then `tail()`."""
        return (*self.settled, *self.tail())

    # --- for compaction -----------------------------------------------------------------------------------

    def cuts(self) -> list[Cut]:
        """Every place where this conversation may be cut, oldest first. Calls stay with their results, and what has no
        answer yet stays as it is. To be asked only while no call is open. Source: engine.md §6 (plan).
        """
        return [cut for cut in (*self._cuts, *self._open_cut()) if cut.through > self.summarized_through]

    def up_to(self, cut: Cut) -> list[Message]:
        """The messages that a cut takes away."""
        if cut.index is not None:
            return self.settled[: cut.index]
        return [*self.settled, *self._open.messages(cut.through)]

    def _open_cut(self) -> list[Cut]:
        results, newest = self._open.results_at, self.settled[-1].sequence if self.settled else 0
        through = max(results, self._failed_at)
        if through < newest or (through == newest and not results):
            return []
        if any(said.awaits and self._failed_at < said.sequence <= through for said in self._open.said):
            return []
        before = self._told + self._open.told_bytes(through)
        return [Cut(through, None, before, between_turns=through == self._failed_at)]

    # --- events -------------------------------------------------------------------------------------------

    def _apply_input(self, sequence: int, payload: AgentInputPayload) -> None:
        if payload.input_kind == "content":
            self.compactions = self.truncations = self.answers = 0
            for part in input_parts(payload.content_blocks):
                self._say(sequence, part, awaits=True)
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
            self._failed_at = event.sequence
            return
        truncated = payload.stop_reason == "max_tokens"
        self.compactions, self.answers = 0, event.meta.answers or self.answers + 1
        self.truncations = event.meta.truncations or int(truncated)
        blocks = tuple(block for block in payload.content_blocks if _is_told(block))
        if blocks:  # providers refuse an empty turn; the next one follows what was said before it
            self._answer(event, blocks, truncated=truncated)
        if truncated and not self._open.calls:
            self._say(event.sequence, CUT_NOTICE)

    def _answer(self, event: Event, blocks: tuple[OutputBlock, ...], *, truncated: bool) -> None:
        self._settle(event.meta.frontier or event.sequence)
        message = AssistantMessage(
            event.sequence,
            blocks,  # type: ignore[arg-type]  # _is_told lets only these two through
            event.meta,
            None if truncated else event.replay,
        )
        self._push(message)
        self._size += size_of(message)
        self._open.ask(event.sequence, message.calls)
        if not message.calls and not truncated and not self._open.said:
            self._cuts.append(Cut(event.sequence, len(self.settled), self._told, between_turns=True))

    def _apply_result(self, sequence: int, payload: ToolResultPayload) -> None:
        call = self._open.wants(payload.tool_call_id)
        if call is None:
            return  # its call is void or summarised; providers refuse an answer to nothing
        shown_chars = self._shown.get(call.name) if call.tool_type == "built_in" else None
        text = result_text(payload.outcome, payload.content_blocks, shown_chars)
        media = result_media(payload.content_blocks)
        shown = tuple(part for part in media if not part.previewed)
        answer = AnsweredCall(payload.tool_call_id, text, payload.outcome != "succeeded", shown)
        self._open.answers[payload.tool_call_id] = (sequence, answer)
        self.media.extend(media)
        self._size += len(text) + OVERHEAD

    def _apply_checkpoint(self, payload: CheckpointPayload, meta: EventMeta) -> None:
        through = payload.summarized_through_event_sequence
        self.compactions = meta.compactions or self.compactions + 1
        self.truncations, self.answers = meta.truncations or self.truncations, meta.answers or self.answers
        if through <= self.summarized_through:
            return  # it is the one that this state began with, or an older one
        # A cut, not a filter: an output stands before what it had not seen, so sequences may step back.
        kept = list(dropwhile(lambda message: message.sequence <= through, self.settled))
        if kept and isinstance(kept[0], ToolResultsMessage):
            kept.pop(0)
        gone = len(self.settled) - len(kept)
        self._open.forget(through, calls=not kept)
        summary = checkpoint_text(payload.summary)
        first = kept[0] if kept else None
        if isinstance(first, UserMessage):
            lost = first.parts == (LOST_NOTICE,)  # it only stood where nothing had been said
            kept[0] = UserMessage(through if lost else first.sequence, (summary, *(() if lost else first.parts)))
        elif kept:
            kept.insert(0, UserMessage(through, (summary,)))
            gone -= 1
        else:
            self._open.said.insert(0, Said(through, summary))
        self.settled = kept
        self.summarized_through = through
        self.generation += 1
        self._recount([cut for cut in self._cuts if cut.through > through], gone)

    def _recount(self, cuts: list[Cut], gone: int) -> None:
        """Count again after a checkpoint: what is left is small. `gone` messages fewer stand before each cut."""
        self._size = sum(map(size_of, self.settled)) + self._open.bytes_size
        previewed = (part for part in self.media if part.previewed)  # a summary may speak of them
        shown = (part for message in self.settled for part in media_of(message))
        self.media = [*previewed, *shown, *self._open.media()]
        before = [0, *accumulate(map(message_bytes, self.settled))]
        self._told = before[-1]
        at = [(cut, cut.index - gone) for cut in cuts if cut.index is not None]
        self._cuts = [Cut(cut.through, index, before[index], cut.between_turns) for cut, index in at]

    def _say(self, sequence: int, part: Part, *, awaits: bool = False) -> None:
        self._open.said.append(Said(sequence, part, awaits))
        self._size += part_size(part)
        if isinstance(part, MediaPart):
            self.media.append(part)

    def _settle(self, frontier: int) -> None:
        """Close the open side at what the output had seen; later texts wait for the output after it."""
        while self._cuts and self._cuts[-1].through > frontier:
            self._cuts.pop()  # this answer had not seen all that would go
        side = self._open.messages(frontier)
        # Two answers in a row, or one at the start, are refused.
        for message in side or [UserMessage(frontier, (LOST_NOTICE,))]:
            self._push(message)
            if isinstance(message, ToolResultsMessage) and self._may_cut_after(message.sequence, frontier):
                self._cuts.append(Cut(message.sequence, len(self.settled), self._told, between_turns=False))
        self._open.close(frontier)

    def _may_cut_after(self, results: int, frontier: int) -> bool:
        return results <= frontier and all(said.sequence > results for said in self._open.said)

    def _push(self, message: Message) -> None:
        self.settled.append(message)
        self._told += message_bytes(message)


def _is_told(block: OutputBlock) -> bool:
    """True for what is repeated to any model. Reasoning lives in the replay."""
    if isinstance(block, TextBlock):
        return not is_blank(block.text)
    return isinstance(block, ToolCallBlock)
