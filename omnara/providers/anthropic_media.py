"""Files as content blocks of Anthropic Messages.

Source: engine.md §6 (media); the provider's documentation of image and document blocks.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from omnara.providers.media import ModelFile, object_with

_encode: Final = msgspec.json.Encoder().encode


def parts_of(file: ModelFile) -> list[bytes]:
    """The content blocks that stand for a file: a line that names it, then its content if it is shown."""
    named = _text(file.label)
    if file.data is None:
        return [named]
    if file.is_text:
        return [_text(f"{file.label}\n{file.data.decode('utf-8', 'replace')}")]
    source = object_with({"type": "base64", "media_type": file.media_type}, "data", b"", file.data)
    kind: dict[str, Any] = {"type": "image" if file.is_image else "document"}
    return [named, _encode(kind)[:-1] + b',"source":' + source + b"}"]


def _text(text: str) -> bytes:
    return _encode({"type": "text", "text": text})
