"""The part of HTTP about one resource's bytes: ranges and validators.

Apart from the route, because these few rules are easy to get slightly wrong: whatever is not understood is ignored, and
the whole is sent, except a range that lies behind the end. Source: RFC 9110, sections 13 and 14.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

_RANGE: Final = re.compile(r"bytes=[ \t]*(\d{0,18})-(\d{0,18})[ \t]*", re.IGNORECASE | re.ASCII)
_TAG: Final = re.compile(r'(?:W/)?("[^"]*")')


class Span(msgspec.Struct, frozen=True):
    """The bytes from `start` up to `stop`."""

    start: int
    stop: int


def span_of(header: str | None, size: int) -> Span | None:
    """Return the one span that a Range header asks for, None for the whole. An empty span cannot be satisfied."""
    match = _RANGE.fullmatch(header.strip()) if header is not None else None
    if match is None or match.group() == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        if not last:
            return None
        return Span(max(size - int(last), 0), size)
    start = int(first)
    stop = min(int(last) + 1, size) if last else size
    if last and int(last) < start:
        return None
    return Span(start, stop) if start < size else Span(size, size)


def names_tag(header: str | None, tag: str) -> bool:
    """Whether an If-None-Match header names `tag` (quoted) or anything at all."""
    if header is None:
        return False
    return header.strip() == "*" or tag in _TAG.findall(header)
