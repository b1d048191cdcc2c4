"""Files that come inside requests: checked and stored before the transaction that refers to them.

The content is written first, in a transaction of its own, because megabytes must not be written under the lock of an
agent. The artifact itself, which is what makes a content belong to an agent, is inserted together with the input or
result. A process that dies in between leaves a content that nothing refers to, and that is removed later.
Source: api.md §13; engine.md §4 (result media is stored beforehand).
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from collections.abc import Sequence
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec

from omnara.db import artifacts
from omnara.db.agents import AgentRef
from omnara.db.artifacts import NewFile
from omnara.db.connection import Connection
from omnara.domain.content import InlineMedia, MediaRefBlock
from omnara.domain.text import clean, clean_text, has_controls
from omnara.engine.artifacts_check import MEDIA_TYPES, Unfit, check_file
from omnara.engine.deps import Deps
from omnara.errors import InvalidRequest, RequestTooLarge
from omnara.ids import IdKind, InvalidPublicId, decode, encode, new_uuid

B = TypeVar("B")

MAX_FILES: Final = 20
MAX_FILE_BYTES: Final = 10 * 1024 * 1024
MAX_TOTAL_BYTES: Final = 24 * 1024 * 1024
MAX_FILENAME_BYTES: Final = 255
"""Of one input or result, decoded. Source: api.md §13."""
_BASE64_CHARS: Final = 1024 * 1024


class TakenIn(msgspec.Struct, frozen=True):
    """Files whose contents are stored; `attach` makes them an agent's."""

    files: tuple[NewFile, ...] = ()


NO_FILES: Final = TakenIn()


async def take_in(
    deps: Deps, org_id: UUID, blocks: Sequence[B | InlineMedia]
) -> tuple[list[B | MediaRefBlock], TakenIn]:
    """Return the blocks with references in the places of files, whose contents are stored then.

    Call it while holding no connection, for a caller who may do what the blocks are for. Idempotent: contents that are
    there already stay as they are. Raises InvalidRequest (bad base64, too many files, a file that is not of its type),
    RequestTooLarge, DatabaseUnavailable. Cancelled, it leaves contents that nothing refers to.
    """
    media = [block for block in blocks if isinstance(block, InlineMedia)]
    if not media:
        return [block for block in blocks if not isinstance(block, InlineMedia)], NO_FILES
    _check_request(media)
    decoded = await asyncio.to_thread(_decode_all, media)
    for file, data in decoded:
        await deps.blobs.put(deps.db, org_id, file.digest, data)
    files = tuple(file for file, _ in decoded)
    following = iter(files)
    stored: list[Any] = [
        MediaRefBlock(
            encode(IdKind.ARTIFACT, next(following).id), None if not block.metadata else clean(block.metadata)
        )
        if isinstance(block, InlineMedia)
        else block
        for block in blocks
    ]
    return stored, TakenIn(files)


async def attach(connection: Connection, agent: AgentRef, taken: TakenIn, *, loose: bool = False) -> None:
    """Make the files an agent's, in the transaction that writes the blocks which refer to them.

    `loose`: those come in a later one, or never; `artifacts_sweep` finds out.
    """
    if taken.files:
        await artifacts.insert_artifacts(connection, agent.id, agent.org_id, taken.files, loose=loose)


async def same_content(connection: Connection, agent_id: UUID, stored: str, new: str, taken: TakenIn) -> bool:
    """Whether two messages say the same: files are the same by content, type and name, since each has a new id."""
    old, fresh = msgspec.json.decode(stored), msgspec.json.decode(new)
    ids = [decode(IdKind.ARTIFACT, block["artifact_id"]) for block in old if block["type"] == "media_ref"]
    known = {row.id: row for row in await artifacts.find_artifacts(connection, agent_id, ids)} if ids else {}
    return _by_content(old, known) == _by_content(fresh, {file.id: file for file in taken.files})


def _by_content(blocks: list[dict[str, Any]], files: dict[UUID, Any]) -> list[dict[str, Any]]:
    compared: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "media_ref":
            file = files[decode(IdKind.ARTIFACT, block["artifact_id"])]
            compared.append({**block, "artifact_id": (file.digest, file.media_type, file.filename)})
        else:
            compared.append(block)
    return compared


def artifact_uuid(public_id: str) -> UUID | None:
    """The id of an artifact that a model or a stored block names; None when it is none."""
    try:
        return decode(IdKind.ARTIFACT, public_id)
    except InvalidPublicId:
        return None


def _check_request(media: Sequence[InlineMedia]) -> None:
    """Check what can be checked before anything is decoded."""
    if len(media) > MAX_FILES:
        raise InvalidRequest(f"there may be {MAX_FILES} files at most")
    total = 0
    for number, block in enumerate(media, 1):
        size = len(block.data) * 3 // 4 - block.data[-2:].count("=")
        if size > MAX_FILE_BYTES:
            raise RequestTooLarge(f"file {number} has more than {MAX_FILE_BYTES} bytes")
        total += size
    if total > MAX_TOTAL_BYTES:
        raise RequestTooLarge(f"the files have more than {MAX_TOTAL_BYTES} bytes together")


def _decode_all(media: Sequence[InlineMedia]) -> list[tuple[NewFile, bytes]]:
    return [_decode(number, block) for number, block in enumerate(media, 1)]


def _decode(number: int, block: InlineMedia) -> tuple[NewFile, bytes]:
    if block.media_type not in MEDIA_TYPES:
        raise InvalidRequest(f"file {number} is of a type that is not accepted")
    data = _base64(number, block.data)
    if not data:
        raise InvalidRequest(f"file {number} is empty")
    found = check_file(block.media_type, data)
    if isinstance(found, Unfit):
        raise InvalidRequest(f"file {number} cannot be taken as {block.media_type}: {found.reason}")
    file = NewFile(
        id=new_uuid(),
        digest=hashlib.sha256(data).digest(),
        size=len(data),
        media_type=block.media_type,
        filename=_filename(number, block.filename),
        width=None if found is None else found.width,
        height=None if found is None else found.height,
    )
    return file, data


def _base64(number: int, text: str) -> bytes:
    """Decode piece by piece: in one piece the interpreter, and with it the event loop, would stand still meanwhile."""
    try:
        if "=" in text[:-2]:
            raise ValueError
        starts = range(0, len(text), _BASE64_CHARS)
        return b"".join(binascii.a2b_base64(text[start : start + _BASE64_CHARS], strict_mode=True) for start in starts)
    except ValueError:  # of which the decoder's error is one
        raise InvalidRequest(f"file {number} is not standard base64") from None


def _filename(number: int, name: str | None) -> str | None:
    if name is None:
        return None
    if has_controls(name):
        raise InvalidRequest(f"the name of file {number} must not have control characters")
    name = clean_text(name).strip()
    if len(name.encode()) > MAX_FILENAME_BYTES:
        raise InvalidRequest(f"the name of file {number} has more than {MAX_FILENAME_BYTES} bytes")
    return name or None
