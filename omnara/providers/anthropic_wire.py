"""The events of an Anthropic Messages stream, as far as they are read."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from omnara.providers.json_events import EventDecoder
from omnara.providers.usage import Stated


class _Tagged(msgspec.Struct, tag_field="type"):
    """Base: `type` tells the variants apart."""


class OutputDetails(msgspec.Struct):
    """Breakdown of the output tokens."""

    thinking_tokens: Stated = None


class Usage(msgspec.Struct):
    """Counts so far; later ones replace earlier ones, absent ones do not."""

    input_tokens: Stated = None
    output_tokens: Stated = None
    cache_creation_input_tokens: Stated = None
    cache_read_input_tokens: Stated = None
    output_tokens_details: OutputDetails | None = None


class Message(msgspec.Struct):
    """The message that opens."""

    usage: Usage | None = None


class MessageStart(_Tagged, tag="message_start"):
    """First event."""

    message: Message


class StartedBlock(msgspec.Struct):
    """A block as it opens. Not a union: blocks of kinds that we do not ask for are skipped, not refused."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None


class BlockStart(_Tagged, tag="content_block_start"):
    """Block `index` opens."""

    index: int
    content_block: StartedBlock


class Delta(msgspec.Struct):
    """A piece of a block; which field is set depends on `type`."""

    type: str
    text: str | None = None
    partial_json: str | None = None
    thinking: str | None = None
    signature: str | None = None


class BlockDelta(_Tagged, tag="content_block_delta"):
    """More of block `index`."""

    index: int
    delta: Delta


class BlockStop(_Tagged, tag="content_block_stop"):
    """Block `index` is complete."""

    index: int


class Ending(msgspec.Struct):
    """Why the message ends."""

    stop_reason: str | None = None


class MessageDelta(_Tagged, tag="message_delta"):
    """The end of the message is near."""

    delta: Ending
    usage: Usage | None = None


class MessageStop(_Tagged, tag="message_stop"):
    """The message is complete; only now may it be believed."""


class Ping(_Tagged, tag="ping"):
    """Keeps the connection busy and says nothing."""


class Error(_Tagged, tag="error"):
    """The answer fails after its 200."""

    error: Any = None


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | Error

_TAGS: Final = frozenset(
    {
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "ping", "error",
    }
)  # fmt: skip

decoder: Final[EventDecoder[StreamEvent]] = EventDecoder(StreamEvent, _TAGS)
