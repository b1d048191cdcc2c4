"""Whether a file is what it is said to be. Nothing is decoded: only signatures, headers and the encoding of text.

A picture that a provider refuses would be refused with every later request of its conversation, so what can be seen
at the door is refused at the door. Source: api.md §13; field-reports B03.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

_OFFICE: Final = "application/vnd.openxmlformats-officedocument."
_ZIP_FOLDERS: Final = {
    _OFFICE + "wordprocessingml.document": b"word/",
    _OFFICE + "presentationml.presentation": b"ppt/",
    _OFFICE + "spreadsheetml.sheet": b"xl/",
}
MEDIA_TYPES: Final = frozenset(
    {"image/png", "image/jpeg", "image/gif", "image/webp", "application/pdf"}
    | {"text/plain", "text/markdown", "text/csv", "text/tab-separated-values", *_ZIP_FOLDERS}
)
"""Types of files that may be sent. Source: api.md §13."""

_TEXTS: Final = {"md": "text/markdown", "csv": "text/csv", "tsv": "text/tab-separated-values"}
_PDF_HEAD: Final = 1024
# Start-of-frame markers of JPEG: all of C0 to CF but the tables (C4, C8, CC).
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_NO_FILL: Final = re.compile(rb"[^\xff]")
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})
_MOST_SEGMENTS: Final = 4096
"""Before the frame of a JPEG: a 10 MiB colour profile takes 161, and millions of empty ones seconds to walk through."""


class Size(msgspec.Struct, frozen=True):
    """Width and height of a picture, in pixels."""

    width: int
    height: int


class Unfit(msgspec.Struct, frozen=True):
    """Why a file is not what its type says."""

    reason: str


def check_file(media_type: str, data: bytes) -> Size | Unfit | None:
    """Return the size of a picture, None for another good file, or why it is none of its type."""
    if media_type.startswith("image/"):
        found = _picture(data)
        if found is None:
            return Unfit("it is not a picture of a known format")
        kind, size = found
        if f"image/{kind}" != media_type:
            return Unfit(f"it is of type image/{kind}")
        if size is None or not size.width or not size.height:
            return Unfit("it is a damaged picture")
        return size
    if media_type == "application/pdf":
        return None if b"%PDF-" in data[:_PDF_HEAD] else Unfit("it is not a PDF")
    if media_type in _ZIP_FOLDERS:
        good = data.startswith(b"PK\x03\x04") and b"[Content_Types].xml" in data and _ZIP_FOLDERS[media_type] in data
        return None if good else Unfit("it is not an office document of this type")
    return None if _is_text(data) else Unfit("it is not text in UTF-8")


def media_type_of(name: str, data: bytes) -> str | None:
    """Return the type of a file that came without one, or None when it is of none that is accepted."""
    found = _picture(data)
    if found is not None:
        return f"image/{found[0]}"
    if data.startswith(b"%PDF-"):
        return "application/pdf"
    for media_type in _ZIP_FOLDERS:
        if check_file(media_type, data) is None:
            return media_type
    return _TEXTS.get(name.rpartition(".")[2].lower(), "text/plain") if _is_text(data) else None


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


Kind = Literal["png", "jpeg", "gif", "webp"]


def _picture(data: bytes) -> tuple[Kind, Size | None] | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png", _png(data)
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg", _jpeg(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif", _gif(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp", _webp(data)
    return None


def _png(data: bytes) -> Size | None:
    # A picture that was cut off has no end chunk; some programs add bytes after it.
    if data[12:16] != b"IHDR" or b"IEND" not in data[-1024:]:
        return None
    return Size(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"))


def _gif(data: bytes) -> Size | None:
    if len(data) < 14:
        return None
    return Size(int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little"))


def _jpeg(data: bytes) -> Size | None:
    at = 2
    for _ in range(_MOST_SEGMENTS):
        if at + 9 > len(data) or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes may stand before a marker
            found = _NO_FILL.search(data, at)
            at = len(data) if found is None else found.start() - 1
        elif marker in _ALONE:
            at += 2
        elif marker in _FRAMES:
            return Size(int.from_bytes(data[at + 7 : at + 9], "big"), int.from_bytes(data[at + 5 : at + 7], "big"))
        else:
            at += 2 + max(int.from_bytes(data[at + 2 : at + 4], "big"), 2)
    return None


def _webp(data: bytes) -> Size | None:
    if len(data) < 30 or int.from_bytes(data[4:8], "little") + 8 > len(data) + 1:
        return None
    kind = data[12:16]
    if kind == b"VP8 ":
        return Size(int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF)
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return Size((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        return Size(int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1)
    return None
