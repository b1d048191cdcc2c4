"""Files as content parts of OpenAI Responses, in messages and in the outputs of calls alike.

Source: engine.md §6 (media); the provider's documentation of `input_image` and `input_file` parts.
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
        return [named, object_with({"type": "input_image", "detail": "auto"}, "image_url", prefix, file.data)]
    value = {"type": "input_file", "filename": file.filename or file.artifact_id}
    return [named, object_with(value, "file_data", prefix, file.data)]


def text_part(text: str) -> bytes:
    """A text among content parts."""
    return _encode({"type": "input_text", "text": text})
