"""Which files of a conversation a request carries, and their bytes.

All of them are named in every request; what fits is shown, the newest first. What the model does not take, or what is
too big for it, is told in words, since a provider that refuses one picture would refuse the conversation for ever.
Source: engine.md §6 (media per request); field-reports B03.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from omnara.db import artifacts
from omnara.db.artifacts import ArtifactRow
from omnara.domain.content import MediaPart
from omnara.engine.artifacts import artifact_uuid
from omnara.engine.artifacts_store import ContentLost
from omnara.engine.deps import Deps
from omnara.providers.media import ModelFile, RequestLimits, limits_of
from omnara.providers.protocol import ModelTarget

SHOWN_TEXT_BYTES: Final = 8 * 1024
WHOLE_TEXT_BYTES: Final = 50 * 1024
"""A text up to the second size is shown whole, of a longer one only the beginning. Source: features.md (overflow)."""

REFUSED: Final = "It is not shown: the model's provider refused it."

_MISSING: Final = "Its content is not available."
_ENCODED_IN_THREAD: Final = 256 * 1024


class _Room:
    """What is left of a request's limits while files are chosen."""

    def __init__(self, limits: RequestLimits, modalities: Sequence[str], images: int) -> None:
        self.limits = limits
        self._modalities = modalities
        self._bytes = limits.total_bytes
        self._images = _shown_images(images, limits.images)

    def refusal(self, row: ArtifactRow) -> str:
        """Why a file is not shown, or nothing: then its room is taken."""
        kind = _kind(row)
        refusal = self._never(row, kind)
        if refusal:
            return refusal
        size = _shown_bytes(row)
        if kind == "image":
            self._images -= 1
            if self._images < 0:
                return "It is not shown: there are too many newer pictures."
        if size > self._bytes:
            return "It is not shown: newer files take up the request."
        self._bytes -= size
        return ""

    def _never(self, row: ArtifactRow, kind: str) -> str:
        limits = self.limits
        if kind == "text":
            return ""
        if self._modalities and kind not in self._modalities:
            return f"It is not shown: this model takes no {kind}s."
        if kind == "file":
            if row.media_type not in limits.documents:
                return "It is not shown: this model does not read files of this type."
            return "It is not shown: it is too large for this model." if row.size > limits.document_bytes else ""
        side = max(row.width or 0, row.height or 0)
        if row.size > limits.image_bytes or side > limits.image_side:
            return f"It is not shown: {row.width} x {row.height} pixels are too large a picture for this model."
        return ""


async def files_of(
    deps: Deps, agent_id: UUID, media: Sequence[MediaPart], target: ModelTarget, refused: Iterable[str] = ()
) -> dict[str, ModelFile]:
    """Return the files of a conversation for one request. `media` is in its order, `refused` names what a provider did
    not take. Reads what is not in memory; at most the request's limit is held. Raises DatabaseUnavailable, Unavailable.
    """
    names = list(dict.fromkeys(part.artifact_id for part in media))
    if not names:
        return {}
    ids = {name: artifact_uuid(name) for name in names}
    async with deps.db.acquire() as connection:
        known = [artifact_id for artifact_id in ids.values() if artifact_id is not None]
        rows = {row.id: row for row in await artifacts.find_artifacts(connection, agent_id, known)}
    found = {name: rows[value] for name, value in ids.items() if value is not None and value in rows}
    refusals = _choose(found, target, frozenset(refused))
    files = {}
    for name in names:
        row = found.get(name)
        if row is None:
            files[name] = ModelFile(artifact_id=name, note=_MISSING)
        elif name in refusals:
            files[name] = _named(name, row, refusals[name])
        else:
            try:
                files[name] = await _shown(deps, name, row)
            except ContentLost:
                files[name] = _named(name, row, _MISSING)
    return files


def shown_parts(files: Mapping[str, ModelFile], media: Sequence[MediaPart]) -> set[str]:
    """Those of `media` that a request shows as pictures or documents: what a provider may choke on."""
    shown = (files.get(part.artifact_id) for part in media)
    return {file.artifact_id for file in shown if file is not None and file.data is not None and not file.is_text}


def _choose(found: Mapping[str, ArtifactRow], target: ModelTarget, refused: frozenset[str]) -> dict[str, str]:
    """Say of each file that is not shown why. The newest are chosen first."""
    images = sum(_kind(row) == "image" for name, row in found.items() if name not in refused)
    room = _Room(limits_of(target.api_format), target.input_modalities, images)
    refusals = {}
    for name, row in reversed(list(found.items())):
        refusal = REFUSED if name in refused else room.refusal(row)
        if refusal:
            refusals[name] = refusal
    return refusals


def _shown_images(images: int, limit: int) -> int:
    """How many of the newest pictures are shown. Above the limit they leave by halves of it, not one by one: what a
    request changes near its beginning, its provider has to read again.
    """
    step = max(limit // 2, 1)
    over = max(images - limit, 0)
    return images - -(-over // step) * step


def _kind(row: ArtifactRow) -> str:
    if row.media_type.startswith("image/"):
        return "image"
    return "text" if row.media_type.startswith("text/") else "file"


def _shown_bytes(row: ArtifactRow) -> int:
    if _kind(row) == "text" and row.size > WHOLE_TEXT_BYTES:
        return SHOWN_TEXT_BYTES
    return row.size


def _named(name: str, row: ArtifactRow, note: str) -> ModelFile:
    return ModelFile(artifact_id=name, media_type=row.media_type, filename=row.filename or "", size=row.size, note=note)


async def _shown(deps: Deps, name: str, row: ArtifactRow) -> ModelFile:
    size = _shown_bytes(row)
    if size < row.size:
        data = await deps.blobs.read(deps.db, row, 0, size)
        # The cut may go through a character.
        whole = data.decode("utf-8", "ignore").encode()
        return msgspec.structs.replace(_named(name, row, f"Its first {len(whole)} bytes:"), data=whole, cut=True)
    data = await deps.blobs.whole(deps.db, row)
    if _kind(row) != "text":
        data = await asyncio.to_thread(base64.b64encode, data) if size > _ENCODED_IN_THREAD else base64.b64encode(data)
    return msgspec.structs.replace(_named(name, row, ""), data=data)
