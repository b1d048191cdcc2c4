"""Reading request bodies: size first, then one JSON value of the declared type, and nothing else.

Whatever a client sends must end as a value or as a 4xx that names the place of the fault and repeats nothing of it.
Source: api.md §6 (limits, `validation_failed`); field-reports B13 (NUL and lone surrogates).
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from omnara.api.large_bodies import COUNTED_FROM, Held
from omnara.errors import InvalidRequest, OmnaraError, RequestTooLarge, UnsupportedMediaType, ValidationFailed

T = TypeVar("T")

BODY_LIMIT: Final = COUNTED_FROM
MEDIA_BODY_LIMIT: Final = 48 * 1024 * 1024
"""Of agent inputs and tool results, which may carry files. Source: api.md §6."""
SLOWEST_BYTES_S: Final = 64 * 1024
"""Bytes a second that a body must bring once its time has passed: what arrived buys this much more of it."""
MAX_DEPTH: Final = 100
"""Levels of nesting in free-form JSON. Far above any honest use and far below what recursion can take."""

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPES: Final = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.", re.DOTALL)
_LONE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_PLACE: Final = re.compile(r" - at (?:key in )?`(\$[^`]*)`$")


def check_declared_size(request: web.Request, limit: int) -> None:
    """Refuse a body whose length is announced as over `limit` bytes, before anything is read or known about it.

    Raises RequestTooLarge.
    """
    if request.content_length is not None and request.content_length > limit:
        raise RequestTooLarge(f"the body may have {limit} bytes")


async def read(request: web.Request, limit: int, held: Held, *, timeout_s: float) -> bytes:
    """Return the body, at most `limit` bytes, which has `timeout_s` to arrive and a second more for each 64 KiB.

    `held` is told how much has arrived. Raises RequestTooLarge, InvalidRequest for a body that is too slow,
    ValidationFailed for a broken transfer, Unavailable while there is no room for it.
    """
    held.announced(request.content_length)
    chunks: list[bytes] = []
    size = 0
    end = asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout_at(end) as patience:
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > limit:
                    raise RequestTooLarge(f"the body may have {limit} bytes")
                held.arrived(size)
                chunks.append(chunk)
                patience.reschedule(end + size / SLOWEST_BYTES_S)
    except TimeoutError:
        raise InvalidRequest("the body did not arrive in time") from None
    except (web.RequestPayloadError, ConnectionError, ValueError):
        raise ValidationFailed("the body did not arrive whole") from None
    return b"".join(chunks)


def check_media_type(request: web.Request) -> None:
    """Refuse a body that is not called JSON, or is packed: nothing is unpacked here. Raises UnsupportedMediaType."""
    if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("send the body without a Content-Encoding")
    if request.content_type != "application/json":
        raise UnsupportedMediaType("send application/json")
    charset = request.charset
    if charset is not None and charset.lower() not in {"utf-8", "utf8"}:
        raise UnsupportedMediaType("JSON is sent in UTF-8")


def decode(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the one JSON value in `raw`. Lone surrogates become U+FFFD. Raises ValidationFailed."""
    if _SURROGATE.search(raw) is not None:
        raw = _ESCAPES.sub(_mended, raw)
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise fault(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ValidationFailed("the body is not one JSON value in UTF-8") from None
    except RecursionError:
        raise ValidationFailed("the body is nested too deeply") from None


def _mended(match: re.Match[bytes]) -> bytes:
    escape = match.group()
    return rb"\ufffd" if len(escape) == 6 and _LONE.fullmatch(escape) else escape


def fault(error: msgspec.ValidationError) -> OmnaraError:
    """Return the error for a value that does not fit: what was expected and where, never what was sent."""
    text = str(error)
    place = _PLACE.search(text)
    where = f" at {place.group(1)}" if place is not None else ""
    if text.startswith("Object contains unknown field"):
        return ValidationFailed(f"unknown field{where}")
    if text.startswith(("Expected ", "Object missing required field")):
        return ValidationFailed(_PLACE.sub("", text).replace("`", "") + where)
    return ValidationFailed(f"a value is not one of those allowed{where}")


def check_depth(value: Any, *, limit: int = MAX_DEPTH) -> None:
    """Refuse free-form JSON nested deeper than `limit` levels: later readers recurse. Raises ValidationFailed."""
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > limit:
            raise ValidationFailed(f"JSON may nest {limit} levels")
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
