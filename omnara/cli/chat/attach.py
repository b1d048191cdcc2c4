"""Files for an agent: read, checked, and made content blocks before anything is sent.

Source: api.md §13 (types and sizes).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

__all__ = ["Attachment", "CannotAttach", "read_attachment"]

MAX_TEXT_BYTES: Final = 1024 * 1024 - 4096
"""Blocks of text may hold 1 MiB in all, and the message needs some of it."""


class CannotAttach(Exception):
    """Why a file cannot be sent, in words for the person who named it."""


class Attachment(msgspec.Struct, frozen=True):
    """A file that goes with the next message."""

    name: str
    size: int
    block: dict[str, Any]


def read_attachment(path_text: str) -> Attachment:
    """Read a file of text and return it as a block. Blocks the event loop for one read. Raises CannotAttach."""
    path = Path(path_text.strip().strip("'\"")).expanduser()
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise CannotAttach(f"{path} is no file")
        if size > MAX_TEXT_BYTES:
            raise CannotAttach(f"{path.name} is too large: {size:,} bytes, and text may have {MAX_TEXT_BYTES:,}")
        data = path.read_bytes()
    except OSError as error:
        raise CannotAttach(f"{path}: {error.strerror or error}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise CannotAttach(f"{path.name} is no text in UTF-8; only text can be attached") from None
    if not text.strip():
        raise CannotAttach(f"{path.name} is empty")
    if "\0" in text:
        raise CannotAttach(f"{path.name} is no text; only text can be attached")
    return Attachment(path.name, size, {"type": "text", "text": f"File {path.name}:\n\n{text}"})
