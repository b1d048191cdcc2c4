"""Small files of every kind, made by hand."""

from __future__ import annotations

import base64
import io
import struct
import zipfile
import zlib

from omnara.domain.content import InlineMedia

PDF = b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
GIF = b"GIF89a" + struct.pack("<HH", 3, 2) + b"\x00\x00\x00;"
JPEG = (
    b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
    b"\xff\xc0\x00\x0b\x08\x00\x05\x00\x07\x01\x01\x11\x00\xff\xd9"
)


def png(width: int = 2, height: int = 3, *, padding: int = 0) -> bytes:
    """A black picture. `padding` adds bytes that no reader looks at."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\x00" + b"\x00" * width) * height
    extra = chunk(b"teXt", b"k\x00" + b"x" * padding) if padding else b""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    """The head of an extended WebP."""
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x00" * 4
    body += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(body)) + body


def office(folder: str) -> bytes:
    """A package with one part in `folder`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as package:
        package.writestr("[Content_Types].xml", "<Types/>")
        package.writestr(f"{folder}/document.xml", "<x/>")
    return out.getvalue()


def inline(data: bytes, media_type: str = "image/png", filename: str | None = None) -> InlineMedia:
    """A file as it comes inside a request."""
    return InlineMedia(media_type, base64.b64encode(data).decode(), filename)


def block(data: bytes, media_type: str = "image/png", **more: str) -> dict[str, str]:
    """A file as a client sends it."""
    return {"type": "media", "media_type": media_type, "data": base64.b64encode(data).decode(), **more}
