"""Building an answer out of a stream: neutral blocks and their preview deltas, the same for every wire format.

A wire module says what arrived; what an answer is, and when it is sound, is decided here once.
Source: engine.md §5 (malformed success, max_tokens); field-reports B04, B13, B43.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

from omnara.domain.content import ReasoningBlock, TextBlock
from omnara.domain.events import StopReason
from omnara.domain.stream import (
    BlockStart,
    BlockStop,
    ModelStopReason,
    ModelUsage,
    Sink,
    StreamDelta,
    TextDelta,
    TextStreamBlock,
    ThinkingDelta,
    ThinkingStreamBlock,
    ToolArgumentsDelta,
    ToolUseStreamBlock,
)
from omnara.domain.text import clean, clean_text, is_blank
from omnara.providers.arguments import read_arguments
from omnara.providers.json_events import BadEvent
from omnara.providers.protocol import MAX_CALL_ID_BYTES, Completed, CompletedBlock, Failed, RequestedCall
from omnara.providers.sse import StreamTooLarge

BlockKind = Literal["text", "thinking", "call"]
MALFORMED: Final = "malformed_answer"
"""`provider_code` of an answer that came whole and makes no sense; the call is tried again."""

MAX_BLOCKS: Final = 10_000
MAX_CALLS: Final = 1_000
"""Of one answer. A model that runs away asks for calls until its stream ends, and they are saved in one statement."""

MAX_ARGUMENTS: Final = 8 * 1024 * 1024
"""Characters of all arguments of one answer together: reading them holds up everybody else in the process."""

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Text, reasoning and arguments of one answer together, in UTF-8: far above what the longest answer of any model has,
and what one row of the log, every later request and every reader still take."""

_MAX_NAME: Final = 256
_DELTAS: Final[dict[BlockKind, Callable[[int, str], StreamDelta]]] = {
    "text": TextDelta,
    "thinking": ThinkingDelta,
    "call": ToolArgumentsDelta,
}


class _Block(msgspec.Struct):
    """A block under construction. `pieces` are as they came, uncleaned: signed content must stay what it is."""

    kind: BlockKind
    pieces: list[str]
    half: str = ""
    closed: bool = False
    name: str = ""
    provider_id: str = ""
    id: UUID | None = None
    public_id: str = ""
    read: tuple[dict[str, Any], str | None] | None = None

    def arguments(self) -> tuple[dict[str, Any], str | None]:
        """The arguments of a call, uncleaned, and what is wrong with them. Read once, when the answer is over."""
        if self.read is None:
            self.read = read_arguments(self.raw())
        return self.read

    def raw(self) -> str:
        """All that came, with the halves of surrogate pairs joined."""
        text = "".join(self.pieces)
        if text.isascii():
            return text
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


class OutputBuilder:
    """Collects the blocks of one answer and tells `sink` about them as they grow."""

    def __init__(self, new_call_id: Callable[[], tuple[UUID, str]], sink: Sink | None) -> None:
        self._new_call_id = new_call_id
        self._sink = sink
        self._blocks: list[_Block] = []
        self._ids: set[str] = set()
        self._size = 0

    @property
    def provider_ids(self) -> list[str]:
        """The providers' ids of the calls so far, in order."""
        return [block.provider_id for block in self._blocks if block.kind == "call"]

    def open(self, kind: Literal["text", "thinking"]) -> int:
        """Open a block and return its index. Raises BadEvent at the bound of blocks."""
        index = self._grow(_Block(kind, []))
        if self._sink is not None:
            self._sink(BlockStart(index, TextStreamBlock() if kind == "text" else ThinkingStreamBlock()))
        return index

    def open_call(self, provider_id: str, name: str) -> int:
        """Open a tool call and return its index. Ids that are missing or not unique are replaced by our own.

        Raises BadEvent at the bound of blocks.
        """
        call_id, public_id = self._new_call_id()
        provider_id = clean_text(provider_id)
        if not provider_id or provider_id in self._ids:
            provider_id = public_id
        self._ids.add(provider_id)
        name = clean_text(name)
        block = _Block("call", [], name=name, provider_id=provider_id, id=call_id, public_id=public_id)
        index = self._grow(block)
        if self._sink is not None:
            self._sink(BlockStart(index, ToolUseStreamBlock(public_id, name)))
        return index

    def _grow(self, block: _Block) -> int:
        if len(self._blocks) == MAX_BLOCKS:
            raise BadEvent(f"the answer has more than {MAX_BLOCKS} blocks")
        self._blocks.append(block)
        return len(self._blocks) - 1

    def add(self, index: int, piece: str) -> None:
        """Append to block `index`. Empty pieces are nothing. Raises StreamTooLarge at the bound of the answer."""
        if not piece:
            return
        block = self._blocks[index]
        self._keep(block, piece)
        if self._sink is None:
            return
        if block.half:
            piece, block.half = block.half + piece, ""
        if "\ud800" <= piece[-1] <= "\udbff":
            piece, block.half = piece[:-1], piece[-1]
            if not piece:
                return
        self._sink(_DELTAS[block.kind](index, clean_text(piece)))

    def _keep(self, block: _Block, piece: str) -> None:
        self._size += len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogatepass"))
        if self._size > MAX_ANSWER_BYTES:
            raise StreamTooLarge(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        block.pieces.append(piece)

    def settle(self, index: int, text: str) -> None:
        """Say what block `index` came to, where the provider repeats it whole: that counts, whatever its pieces said.

        Nothing at all is no such repetition.
        """
        block = self._blocks[index]
        if not block.pieces:
            self.add(index, text)
        elif text and block.raw() != text:
            block.pieces.clear()
            self._keep(block, text)

    def close(self, index: int) -> None:
        """Close block `index`; once more does nothing."""
        block = self._blocks[index]
        if block.closed:
            return
        block.closed = True
        if self._sink is not None:
            if block.half:
                self._sink(_DELTAS[block.kind](index, "\ufffd"))
            self._sink(BlockStop(index))

    def close_all(self) -> None:
        """Close what is open, in order."""
        for index in range(len(self._blocks)):
            self.close(index)

    def raw(self, index: int) -> str:
        """What came for block `index`, uncleaned."""
        return self._blocks[index].raw()

    def call_name(self, index: int) -> str:
        """The name that the call at `index` asks for."""
        return self._blocks[index].name

    def call_id(self, index: int) -> str:
        """The id of the call at `index`: the provider's, or ours in its place."""
        return self._blocks[index].provider_id

    def arguments(self, index: int) -> tuple[dict[str, Any], str | None]:
        """The arguments of the call at `index` as the log has them, and what is wrong with them."""
        arguments, problem = self._blocks[index].arguments()
        return clean(arguments), problem

    def finish(
        self, reason: ModelStopReason, usage: ModelUsage, *, replay: Callable[[], bytes | None], request_id: str
    ) -> Completed | Failed:
        """Judge the whole answer. `replay` is asked only when the answer may be repeated to its model."""
        self.close_all()
        calls = self.provider_ids
        if reason == "end_turn" and calls:
            reason = "tool_use"  # many servers say `stop` all the same
        failed = self._failure(reason, calls)
        if failed is not None:
            return msgspec.structs.replace(failed, request_id=request_id)
        stop = _DURABLE[reason]
        kept = replay() if stop in ("end_turn", "tool_use") else None
        # The calls of a cut answer are told too: the engine answers them, and never runs one.
        calls_told = stop in ("tool_use", "max_tokens")
        return Completed(stop, self._completed(with_calls=calls_told), usage, kept, request_id)

    def _failure(self, reason: ModelStopReason, calls: list[str]) -> Failed | None:
        if reason == "context_window":
            return Failed(kind="context_window", message="the model's context window is full")
        if reason == "pause":
            return Failed(
                kind="invalid_request",
                message="the model paused its turn, which no tool on offer allows",
                ambiguous=True,
            )
        if reason == "unknown":
            return _malformed("the answer ended for a reason that is not known")
        if reason == "tool_use" and not calls:
            return _malformed("the answer ended for a tool call and has none")
        asked = (block for block in self._blocks if block.kind == "call")
        if sum(len(piece) for block in asked for piece in block.pieces) > MAX_ARGUMENTS:
            return _malformed(f"the arguments of the tool calls are longer than {MAX_ARGUMENTS} characters")
        if reason in ("refusal", "content_filter") and calls:
            return _malformed("the answer was refused and asks for tools all the same")
        return self._unfit_calls(calls) if reason == "tool_use" else None

    def _unfit_calls(self, calls: list[str]) -> Failed | None:
        if len(calls) > MAX_CALLS:
            return _malformed(f"the answer asks for more than {MAX_CALLS} tool calls")
        if any(len(call.encode()) > MAX_CALL_ID_BYTES for call in calls):
            return _malformed("the id of a tool call is longer than 2000 bytes")
        if not all(0 < len(block.name) <= _MAX_NAME for block in self._blocks if block.kind == "call"):
            return _malformed("the name of a tool call is missing or longer than 256 characters")
        return None

    def _completed(self, *, with_calls: bool) -> tuple[CompletedBlock, ...]:
        blocks: list[CompletedBlock] = []
        told = 0
        for block in self._blocks:
            if block.kind == "call":
                # Only a cut answer can have more; none of its calls runs, so those beyond the bound are left out.
                if with_calls and told < MAX_CALLS:
                    told += 1
                    blocks.append(_requested(block))
                continue
            text = clean_text(block.raw())
            if not is_blank(text):
                blocks.append(TextBlock(text) if block.kind == "text" else ReasoningBlock(text))
        return tuple(blocks)


_DURABLE: Final[dict[ModelStopReason, StopReason]] = {
    "end_turn": "end_turn",
    "tool_use": "tool_use",
    "max_tokens": "max_tokens",
    "refusal": "refusal",
    "content_filter": "content_filter",
}


def _requested(block: _Block) -> RequestedCall:
    arguments, problem = block.arguments()
    assert block.id is not None  # set by open_call, the only maker of this kind
    return RequestedCall(block.id, block.public_id, block.provider_id, block.name, arguments, problem)


def _malformed(message: str) -> Failed:
    return Failed(kind="unknown", message=message, ambiguous=True, provider_code=MALFORMED)
