"""Files as content parts of Chat Completions messages.

Source: engine.md §6 (media); the provider's documentation of `image_url` and `file` parts.
"""

from __future__ import annotations

from typing import Final

import msgspec

from omnara.providers.media import ModelFile, object_with

_encode: Final = msgspec.json.Encoder().encode


def parts_of(file: ModelFile) -> list[bytes]:
    """The content parts that stand for a file: a line that names it, then its content if it is shown."""
    named = text_part(file.label)
    if file.data is None:
        return [named]
    if file.is_text:
        return [text_part(f"{file.label}\n{file.data.decode('utf-8', 'replace')}")]
    prefix = f"data:{file.media_type};base64,".encode()
    if file.is_image:
        url = object_with({"detail": "auto"}, "url", prefix, file.data)
        return [named, b'{"type":"image_url","image_url":' + url + b"}"]
    content = object_with({"filename": file.filename or file.artifact_id}, "file_data", prefix, file.data)
    return [named, b'{"type":"file","file":' + content + b"}"]


def text_part(text: str) -> bytes:
    """A text among content parts."""
    return _encode({"type": "text", "text": text})
