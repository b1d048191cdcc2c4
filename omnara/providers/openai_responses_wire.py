"""The events of an OpenAI Responses stream that a reader needs, and the items that it is made of.

An item is read twice: once loosely, for what it says, and once as the bytes that came, for what must be repeated.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from omnara.providers.json_events import EventDecoder
from omnara.providers.usage import Stated


class Item(msgspec.Struct):
    """An output item. Its fields are checked where they are used: other kinds have others of the same names."""

    type: str = ""
    id: Any = None
    call_id: Any = None
    name: Any = None
    arguments: Any = None
    content: Any = None
    summary: Any = None
    encrypted_content: Any = None


class ItemAdded(msgspec.Struct, tag="response.output_item.added"):
    """Item `output_index` begins."""

    output_index: int
    item: Item


class ItemDone(msgspec.Struct, tag="response.output_item.done"):
    """Item `output_index`, whole: what it came to, whatever its deltas said."""

    output_index: int
    item: Item


class TextDelta(msgspec.Struct, tag="response.output_text.delta"):
    """More of a text part."""

    output_index: int
    delta: str
    content_index: int = 0


class RefusalDelta(msgspec.Struct, tag="response.refusal.delta"):
    """More of a part that says no."""

    output_index: int
    delta: str
    content_index: int = 0


class ArgumentsDelta(msgspec.Struct, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    output_index: int
    delta: str


class SummaryDelta(msgspec.Struct, tag="response.reasoning_summary_text.delta"):
    """More of a part of the summary of some reasoning."""

    output_index: int
    delta: str
    summary_index: int = 0


class ReasoningDelta(msgspec.Struct, tag="response.reasoning_text.delta"):
    """More of some reasoning itself, where the model's maker shows it."""

    output_index: int
    delta: str
    content_index: int = 0


class InputDetails(msgspec.Struct):
    """Breakdown of the input tokens."""

    cached_tokens: Stated = None
    cache_write_tokens: Stated = None


class OutputDetails(msgspec.Struct):
    """Breakdown of the output tokens."""

    reasoning_tokens: Stated = None


class Usage(msgspec.Struct):
    """Token counts of the whole answer."""

    input_tokens: Stated = None
    output_tokens: Stated = None
    input_tokens_details: InputDetails | None = None
    output_tokens_details: OutputDetails | None = None


class IncompleteDetails(msgspec.Struct):
    """Why an answer is not complete."""

    reason: str | None = None


class Response(msgspec.Struct):
    """The answer as its last event has it."""

    status: str | None = None
    usage: Usage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: Any = None


class Completed(msgspec.Struct, tag="response.completed"):
    """The answer is whole."""

    response: Response


class Incomplete(msgspec.Struct, tag="response.incomplete"):
    """The answer was cut."""

    response: Response


class FailedResponse(msgspec.Struct, tag="response.failed"):
    """There is no answer."""

    response: Response


class Error(msgspec.Struct, tag="error"):
    """The stream fails. Imitators put the fields one level down, as in an error body."""

    code: Any = None
    message: Any = None
    error: Any = None


class Created(msgspec.Struct, tag="response.created"):
    """The provider has begun."""


class InProgress(msgspec.Struct, tag="response.in_progress"):
    """Nothing new."""


class PartAdded(msgspec.Struct, tag="response.content_part.added"):
    """Said by its deltas."""


class PartDone(msgspec.Struct, tag="response.content_part.done"):
    """Said by its item's end, as all these are."""


class TextDone(msgspec.Struct, tag="response.output_text.done"):
    """See PartDone."""


class RefusalDone(msgspec.Struct, tag="response.refusal.done"):
    """See PartDone."""


class ArgumentsDone(msgspec.Struct, tag="response.function_call_arguments.done"):
    """See PartDone."""


class SummaryPartAdded(msgspec.Struct, tag="response.reasoning_summary_part.added"):
    """See PartAdded."""


class SummaryPartDone(msgspec.Struct, tag="response.reasoning_summary_part.done"):
    """See PartDone."""


class SummaryDone(msgspec.Struct, tag="response.reasoning_summary_text.done"):
    """See PartDone."""


class ReasoningDone(msgspec.Struct, tag="response.reasoning_text.done"):
    """See PartDone."""


DELTAS: Final = (TextDelta, ArgumentsDelta, SummaryDelta, ReasoningDelta, RefusalDelta)
Delta = TextDelta | RefusalDelta | ArgumentsDelta | SummaryDelta | ReasoningDelta
Skipped = (
    InProgress
    | PartAdded
    | PartDone
    | TextDone
    | RefusalDone
    | ArgumentsDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryDone
    | ReasoningDone
)
Event = Delta | ItemAdded | ItemDone | Created | Completed | Incomplete | FailedResponse | Error | Skipped

_TAGS: Final = frozenset(str(kind.__struct_config__.tag) for kind in Event.__args__)

decoder: Final[EventDecoder[Event]] = EventDecoder(Event, _TAGS)


class _RawItem(msgspec.Struct):
    item: msgspec.Raw


class _Outputs(msgspec.Struct):
    output: list[msgspec.Raw] | None = None


class _RawResponse(msgspec.Struct):
    response: _Outputs


_raw_item: Final = msgspec.json.Decoder(_RawItem)
_raw_response: Final = msgspec.json.Decoder(_RawResponse)
_item: Final[EventDecoder[Item]] = EventDecoder(Item)


def exact_item(data: bytes) -> bytes | None:
    """The bytes of the item in an event; None when they cannot go into a request as they are."""
    try:
        return bytes(_raw_item.decode(data).item)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def whole_output(data: bytes) -> list[tuple[Item, bytes]]:
    """The items that a last event repeats. Raises BadEvent."""
    try:
        raws = [bytes(raw) for raw in _raw_response.decode(data).response.output or ()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    items = [(_item.decode(raw), raw) for raw in raws]
    return [(item, raw) for item, raw in items if item is not None]


def texts_of(parts: Any, field: str = "text") -> list[str]:
    """The texts under `field` of a list of parts, as far as it is one."""
    found = [part.get(field) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [text for text in found if isinstance(text, str)]
