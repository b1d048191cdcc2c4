"""Files as content blocks: what the server takes inline, told by name and content before anything is sent.

Source: api.md §13 (types and sizes).
"""

from __future__ import annotations

import base64
from pathlib import PurePath
from typing import Any, Final

__all__ = ["MAX_FILES", "MAX_FILE_BYTES", "MAX_TOTAL_BYTES", "file_block"]

MAX_FILE_BYTES: Final = 10 * 1024 * 1024
MAX_TOTAL_BYTES: Final = 24 * 1024 * 1024
"""Of all files of one message, before base64."""
MAX_FILES: Final = 20
_MAX_NAME_BYTES: Final = 255

_OFFICE: Final = "application/vnd.openxmlformats-officedocument."
_TYPES: Final = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".pdf": "application/pdf",
    ".docx": f"{_OFFICE}wordprocessingml.document",
    ".pptx": f"{_OFFICE}presentationml.presentation",
    ".xlsx": f"{_OFFICE}spreadsheetml.sheet",
    ".md": "text/markdown",
    ".markdown": "text/markdown",
    ".csv": "text/csv",
    ".tsv": "text/tab-separated-values",
}


def file_block(data: bytes, filename: str, media_type: str | None = None) -> dict[str, Any]:
    """Return the content block that carries a file, for `attachments` of `Client.send`.

    Without `media_type` the name's ending decides, and text in UTF-8 of any other ending is `text/plain`. The name also
    goes into the block's metadata as `filename`, where events keep it. Raises ValueError, in words for a user, for an
    empty or too large file, and for one of a type that the server does not take.
    """
    name = PurePath(filename).name
    if not data:
        raise ValueError(f"{name} is empty")
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{name} is too large: {len(data):,} bytes, and a file may have {MAX_FILE_BYTES:,}")
    if len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
        raise ValueError(f"the name of {name[:40]}… is longer than {_MAX_NAME_BYTES} bytes")
    found = media_type or _TYPES.get(PurePath(name).suffix.casefold()) or "text/plain"
    if found.startswith("text/") and not _is_text(data):
        raise ValueError(f"{name} is neither text in UTF-8 nor a picture, PDF or office document")
    block = {"type": "media", "media_type": found, "data": base64.b64encode(data).decode(), "filename": name}
    return {**block, "metadata": {"filename": name}}


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False
