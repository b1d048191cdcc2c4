"""Results that are too long for a conversation: kept whole in a file, with their beginning in the log.

A result stays in every later request of its conversation, so one long one would crowd out all the rest, and one that
no model takes would be refused for ever. Source: features.md (results over 50 KiB); field-reports B03.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from omnara.db.artifacts import NewFile
from omnara.db.pool import ApiPool
from omnara.domain.content import (
    OVERFLOW_KEY,
    MediaRefBlock,
    NewResultBlock,
    ResultBlock,
    StructuredDataBlock,
    TextBlock,
)
from omnara.domain.text import clean_text
from omnara.engine.artifacts import NO_FILES, TakenIn
from omnara.engine.artifacts_store import Blobs
from omnara.ids import IdKind, encode, new_uuid

MAX_RESULT_BYTES: Final = 50 * 1024
PREVIEW_BYTES: Final = 8 * 1024
MAX_FILE_BYTES: Final = 48 * 1024 * 1024
"""Sizes of what stays in the log, of what is shown of the rest, and of what is kept. Source: features.md."""


async def spilled(
    db: ApiPool, blobs: Blobs, org_id: UUID, tool: str, blocks: Sequence[ResultBlock]
) -> tuple[list[ResultBlock], TakenIn]:
    """Return a result's blocks as they are, or a preview of them and the file that holds all of their text.

    Files among the blocks stay. Call it while holding no connection; the content is stored then, and `attach` makes it
    the agent's. Raises DatabaseUnavailable, Unavailable.
    """
    if not is_too_long(blocks):
        return list(blocks), NO_FILES
    data, digest, lost = await asyncio.to_thread(_joined, blocks)
    file = NewFile(
        id=new_uuid(),
        digest=digest,
        size=len(data),
        media_type="text/plain",
        filename=f"{tool}-result.txt",
    )
    await blobs.put(db, org_id, file.digest, data)
    name = encode(IdKind.ARTIFACT, file.id)
    kept = [block for block in blocks if isinstance(block, MediaRefBlock)]
    return [
        TextBlock(preview(data, name, lost=lost)),
        MediaRefBlock(name, {OVERFLOW_KEY: "true"}),
        *kept,
    ], TakenIn((file,))


def is_too_long(blocks: Sequence[ResultBlock]) -> bool:
    """Whether a result does not stay in the log as it is."""
    return sum(map(_size, blocks)) > MAX_RESULT_BYTES


def _joined(blocks: Sequence[ResultBlock]) -> tuple[bytes, bytes, int]:
    """The text of all blocks as far as it is kept, its digest, and how many bytes are not kept."""
    texts = (_text(block) for block in blocks)
    whole = "\n".join(text for text in texts if text is not None).encode("utf-8", "replace")
    data = whole[:MAX_FILE_BYTES].decode("utf-8", "ignore").encode() if len(whole) > MAX_FILE_BYTES else whole
    return data, hashlib.sha256(data).digest(), len(whole) - len(data)


def may_spill(blocks: Sequence[NewResultBlock]) -> bool:
    """Whether a result could be too long, at the price of a look: structured values are not measured."""
    characters = sum(len(block.text) for block in blocks if isinstance(block, TextBlock))
    return characters * 4 > MAX_RESULT_BYTES or any(isinstance(block, StructuredDataBlock) for block in blocks)


def preview(data: bytes, name: str, *, lost: int = 0) -> str:
    """The beginning of a long result, and how to get at the rest. `name` is empty when there is no rest to be had."""
    shown = data[:PREVIEW_BYTES].decode("utf-8", "ignore")
    note = f"The first {len(shown.encode())} of {len(data) + lost} bytes are shown."
    if name:
        note += f" The result is stored as /artifacts/{name}: read_file pages through it, search_files searches it."
    if lost:
        note += f" Its last {lost} bytes were not kept."
    return clean_text(f"{shown}\n\n[{note}]")


def _text(block: ResultBlock) -> str | None:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, StructuredDataBlock):
        return msgspec.json.encode(block.value).decode()
    return None


def _size(block: ResultBlock) -> int:
    """Bytes of a block's text; what is certainly short is not encoded."""
    if isinstance(block, TextBlock):
        characters = len(block.text)
        return characters if characters * 4 <= MAX_RESULT_BYTES else len(block.text.encode("utf-8", "replace"))
    return len(msgspec.json.encode(block.value)) if isinstance(block, StructuredDataBlock) else 0
