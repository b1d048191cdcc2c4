"""Files as content parts of OpenAI Responses: pictures, PDF and office documents as data URLs, texts as text."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from omnara.providers.media import ModelFile, object_with

_encode: Final = msgspec.json.Encoder().encode


def parts_of(file: ModelFile, modalities: Collection[str]) -> list[bytes]:
    """The content parts that stand for a file: a line that names it, then its content where the model takes it.

    `modalities`: what the model takes (text, image, file); none named means everything.
    """
    named = _text(file.label)
    if file.data is None:
        return [named]
    if file.is_text:
        return [_text(f"{file.label}\n{file.data.decode('utf-8', 'replace')}")]
    if modalities and ("image" if file.is_image else "file") not in modalities:
        return [_text(f"{file.label} The model does not take files of this kind.")]
    prefix = f"data:{file.media_type};base64,".encode()
    if file.is_image:
        return [named, object_with({"type": "input_image", "detail": "auto"}, "image_url", prefix, file.data)]
    value = {"type": "input_file", "filename": file.filename or file.artifact_id}
    return [named, object_with(value, "file_data", prefix, file.data)]


def _text(text: str) -> bytes:
    return _encode({"type": "input_text", "text": text})
