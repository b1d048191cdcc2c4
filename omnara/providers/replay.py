"""Provider-exact content of an output, as stored in `events.replay`.

Signed reasoning must go back as it came, and tool calls under the ids that the model chose; neither fits the neutral
event. The blob is read by later releases, so it is versioned, and it is checked before it is used, because a provider
refuses damaged content with an error that would repeat for ever.

Layout: the bytes `OR1`, the CRC-32 of the rest (4 bytes, big-endian), then MessagePack of `Replay`.
Source: DESIGN §4 (`bytea`, damaged blobs); field-reports B02.
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec

from omnara.domain.events import DamagedEvent
from omnara.providers.nesting import nested_deeper

_MAGIC: Final = b"OR1"
_HEAD: Final = len(_MAGIC) + 4
_MAX_DEPTH: Final = 192
"""Deepest nesting of kept content: the arguments of a call may have 128 levels, and stand in some more."""


class DamagedReplay(DamagedEvent):
    """Stored provider content cannot be used: the engine quarantines the event that carries it."""


class Replay(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """`call_ids`: the provider's id of each call, in order. `content`: JSON of the provider's own blocks, complete and
    in order, or empty when the neutral blocks say the same. `item_ids`: other ids of the provider in `content`, which a
    conversation may have once.
    """

    api_format: str
    call_ids: tuple[str, ...] = ()
    content: tuple[bytes, ...] = ()
    item_ids: tuple[str, ...] = ()


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Replay)


def pack(replay: Replay) -> bytes:
    """Encode for storage. Content that a later reader may find too deep is left out: neutral blocks stand for it."""
    if any(nested_deeper(block.decode("utf-8", "replace"), _MAX_DEPTH) for block in replay.content):
        replay = Replay(replay.api_format, replay.call_ids)
    body = _encoder.encode(replay)
    return _MAGIC + zlib.crc32(body).to_bytes(4, "big") + body


def unpack(blob: bytes, sequence: int, *, calls: int) -> Replay:
    """Decode the blob of event `sequence`, whose output has `calls` calls. Raises DamagedReplay."""
    if blob[: len(_MAGIC)] != _MAGIC:
        raise DamagedReplay(sequence, "replay content has an unknown form")
    body = blob[_HEAD:]
    if zlib.crc32(body) != int.from_bytes(blob[len(_MAGIC) : _HEAD], "big"):
        raise DamagedReplay(sequence, "replay content fails its checksum")
    try:
        replay = _decoder.decode(body)
        for block in replay.content:
            msgspec.json.decode(block, type=dict)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedReplay(sequence, f"replay content does not decode: {error}") from error
    if len(replay.call_ids) != calls:
        raise DamagedReplay(sequence, f"replay content has {len(replay.call_ids)} calls, the output {calls}")
    return replay
