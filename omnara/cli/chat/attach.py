"""Files for an agent: read, checked, and made content blocks before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from omnara.client.files import MAX_FILE_BYTES, MAX_FILES, MAX_TOTAL_BYTES, file_block

__all__ = ["Attachment", "CannotAttach", "read_attachment"]


class CannotAttach(Exception):
    """Why a file cannot be sent, in words for the person who named it."""


class Attachment(msgspec.Struct, frozen=True):
    """A file that goes with the next message; `size` in bytes."""

    name: str
    size: int
    block: dict[str, Any]


def read_attachment(path_text: str, attached: Sequence[Attachment] = ()) -> Attachment:
    """Read a file that is to join `attached`. Blocks the event loop for one bounded read. Raises CannotAttach."""
    path = Path(path_text.strip().strip("'\"")).expanduser()
    if len(attached) >= MAX_FILES:
        raise CannotAttach(f"a message takes {MAX_FILES} files at most")
    try:
        if path.exists() and not path.is_file():
            raise CannotAttach(f"{path} is no file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CannotAttach(f"{path}: {error.strerror or error}") from error
    if sum(other.size for other in attached) + len(data) > MAX_TOTAL_BYTES:
        raise CannotAttach(f"the files of a message may have {MAX_TOTAL_BYTES:,} bytes together")
    try:
        return Attachment(path.name, len(data), file_block(data, path.name))
    except ValueError as error:
        raise CannotAttach(str(error)) from error
