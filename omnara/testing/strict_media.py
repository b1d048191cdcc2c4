"""The rules of the providers about files in requests: encoding, types, sizes, and whether a picture can be read.

Source: the providers' documentation; field-reports B03 names the refusals that clients met.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Final

from omnara.testing.strict import refuse

_IMAGES: Final = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}
MAX_IMAGE_BASE64: Final = 5 * 1024 * 1024
MAX_SIDE: Final = 8000
_URL: Final = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,", re.ASCII)


def check_anthropic_file(place: str, block: dict[str, Any]) -> None:
    """Check an image or document block. Raises `Refused`."""
    kind = block["type"]
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") not in ("base64", "text", "url"):
        raise refuse(f"{place}.{kind}.source: Input tag does not match any of the expected tags")
    if source["type"] != "base64":
        return
    media_type, data = source.get("media_type"), source.get("data")
    allowed = _IMAGES if kind == "image" else {"application/pdf"}
    if not isinstance(media_type, str) or media_type not in allowed:
        expected = ", ".join(f"'{name}'" for name in allowed)
        raise refuse(f"{place}.{kind}.source.base64.media_type: Input should be {expected}")
    here = f"{place}.{kind}.source.base64"
    if kind == "image":
        if isinstance(data, str) and len(data) > MAX_IMAGE_BASE64:
            raise refuse(f"{here}: image exceeds 5 MB maximum: {len(data)} bytes > {MAX_IMAGE_BASE64} bytes")
        _check_image(here, media_type, _decoded(here, data))
    elif not _decoded(here, data).startswith(b"%PDF-"):
        raise refuse(f"{here}.data: The PDF specified was not valid.")


def check_chat_file(place: str, part: dict[str, Any]) -> None:
    """Check an `image_url` or `file` part. Raises `Refused`."""
    if part["type"] == "image_url":
        value = part.get("image_url")
        url = value.get("url") if isinstance(value, dict) else None
        if not isinstance(url, str):
            raise refuse(f"Missing required parameter: '{place}.image_url.url'.", param=f"{place}.image_url.url")
        if url.startswith("data:"):
            _check_url(f"{place}.image_url", url, images=True)
    elif part["type"] == "file":
        value = part.get("file")
        if not isinstance(value, dict) or not (value.get("file_id") or value.get("file_data")):
            raise refuse(f"Missing required parameter: '{place}.file.file_id'.", param=f"{place}.file.file_id")
        if value.get("file_data"):
            if not value.get("filename"):
                raise refuse(f"Missing required parameter: '{place}.file.filename'.", param=f"{place}.file.filename")
            _check_url(f"{place}.file", value["file_data"], images=False)
    else:
        raise refuse(f"Invalid value: '{part['type']}'.", param=f"{place}.type", code="invalid_value")


def check_responses_file(place: str, part: dict[str, Any]) -> None:
    """Check an `input_image` or `input_file` part. Raises `Refused`."""
    images = part["type"] == "input_image"
    name = "image_url" if images else "file_data"
    value = part.get(name)
    if value is None and part.get("file_id") is None:
        raise refuse(f"Missing required parameter: '{place}.{name}'.", param=f"{place}.{name}")
    if isinstance(value, str) and (value.startswith("data:") or not images):
        _check_url(f"{place}.{name}", value, images=images)


def _check_url(place: str, url: Any, *, images: bool) -> None:
    match = _URL.match(url) if isinstance(url, str) else None
    if match is None:
        raise refuse(f"Invalid '{place}': expected a base64-encoded data URL.", param=place, code="invalid_value")
    data = _decoded(place, url[match.end() :])
    if images:
        if match.group(1) not in _IMAGES:
            raise refuse(f"You uploaded an unsupported image: '{match.group(1)}'.", param=place)
        _check_image(place, match.group(1), data)


def _decoded(place: str, data: Any) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise refuse(f"{place}.data: Input should be a valid base64 string", param=place) from None


def _check_image(place: str, media_type: str, data: bytes) -> None:
    if not data.startswith(_IMAGES[media_type]):
        raise refuse(f"{place}: Image does not match the provided media type {media_type}", param=place)
    if media_type == "image/png":
        sides = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
        if max(sides) > MAX_SIDE:
            raise refuse(f"{place}: At least one of the image dimensions exceed max allowed size: 8000 pixels")
        if b"IDAT" not in data:
            raise refuse(f"{place}: Could not process image", param=place)
