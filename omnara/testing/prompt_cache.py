"""Prompt caching as the providers do it, so that a client's cache hints can be seen to work in the usage.

A prefix is known when an earlier request ended a cached part there with exactly the same content before it.
Anthropic caches up to the blocks that carry `cache_control`, and looks back at most twenty blocks from such a
mark; OpenAI caches every prefix by itself. Prefixes below the model's minimum are not cached.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec

from omnara.testing.conversation import Format
from omnara.testing.frames import encode

_LOOK_BACK = 20
_BYTES_PER_TOKEN = 4


class Cached(msgspec.Struct, frozen=True):
    """Tokens of a request that were read from the cache, and that were written to it."""

    read: int = 0
    write: int = 0


class _Boundary(msgspec.Struct, frozen=True):
    digest: bytes
    tokens: int
    marked: bool


class PromptCache:
    """Remembers the newest `limit` prefixes; never expires otherwise, unlike the real ones."""

    def __init__(self, *, limit: int = 20_000) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._limit = limit

    def visit(self, wire: Format, body: Any, minimum: int) -> Cached:
        """Return what a sound request finds and leaves in the cache, and remember its prefixes."""
        boundaries = _boundaries(wire, body)
        marks = [at for at, boundary in enumerate(boundaries) if boundary.marked and boundary.tokens >= minimum]
        if not marks:
            return Cached()
        reachable = (boundaries[at] for mark in reversed(marks) for at in _reach(mark, wire))
        read = next((boundary.tokens for boundary in reachable if boundary.digest in self._known), 0)
        for at in marks:
            self._remember(boundaries[at].digest)
        if wire != "anthropic":
            return Cached(read)
        return Cached(read, max(0, boundaries[marks[-1]].tokens - read))

    def _remember(self, digest: bytes) -> None:
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)


def _reach(mark: int, wire: Format) -> range:
    if wire != "anthropic":
        return range(mark, mark - 1, -1)
    return range(mark, max(-1, mark - _LOOK_BACK), -1)


def _boundaries(wire: Format, body: Any) -> list[_Boundary]:
    digest = hashlib.sha256(body["model"].encode())
    size = 0
    out = []
    for item in _items(wire, body):
        marked = wire != "anthropic" or (isinstance(item, dict) and bool(item.get("cache_control")))
        # The mark itself is no content: a later request carries it elsewhere and still finds the prefix.
        plain = {key: part for key, part in item.items() if key != "cache_control"} if isinstance(item, dict) else item
        content = encode(plain)
        digest.update(content)
        size += len(content)
        out.append(_Boundary(digest.digest(), size // _BYTES_PER_TOKEN, marked))
    return out


def _items(wire: Format, body: Any) -> Iterator[Any]:
    """The parts of a request in the order in which they are cached: tools, system, messages."""
    yield from body.get("tools") or ()
    if wire != "anthropic":
        given = body.get("input") if wire == "responses" else body["messages"]
        yield [body.get("instructions")]
        yield from given if isinstance(given, list) else [given]
        return
    system = body.get("system") or ()
    yield from [system] if isinstance(system, str) else system
    for message in body["messages"]:
        content = message["content"]
        yield [message["role"]]
        yield from [content] if isinstance(content, str) else content
