"""A bound on the memory of large bodies that are in work at once, whoever sends them.

A body with files may have 48 MiB, and is in memory several times over while it is joined, decoded and stored: a few
dozen at a time would end the process, and with it everybody's agents. What has arrived counts, not what was announced,
so that a slow sender holds no room that it does not use; over the bound the next piece is refused, which makes room for
the others. Nobody waits: the client is told to come back. Source: DESIGN §2 (bounded queues); field-reports B03.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from omnara.errors import Unavailable
from omnara.metrics import Metrics

COUNTED_FROM: Final = 1024 * 1024
"""Bodies up to so many bytes are not counted: the limit of open connections bounds those."""


class Held:
    """One request's share. `body.read` reports to it, and it ends with the request."""

    def __init__(self, bodies: LargeBodies) -> None:
        self._bodies = bodies
        self.size = 0

    def announced(self, size: int | None) -> None:
        """Refuse a body for which there is no room now, before any of it is read. Holds nothing. Raises Unavailable."""
        if size is not None and size > COUNTED_FROM:
            self._bodies.check(size)

    def arrived(self, size: int) -> None:
        """Hold `size` bytes altogether. Raises Unavailable when there is no room for them."""
        if size > COUNTED_FROM:
            self._bodies.hold(size - self.size)
            self.size = size


class LargeBodies:
    """One per process. `limit_bytes` bounds the bodies themselves; their working copies come to about four times it."""

    def __init__(self, limit_bytes: int, metrics: Metrics) -> None:
        self._limit = limit_bytes
        self._metrics = metrics
        self.used = 0
        """Bytes of large bodies in work."""

    @contextmanager
    def share(self) -> Iterator[Held]:
        """Return what a request's body is counted in; its room is free again at the end of the block."""
        held = Held(self)
        try:
            yield held
        finally:
            if held.size:
                self.hold(-held.size)

    def check(self, size: int) -> None:
        """Raise Unavailable, and count it, when `size` more bytes have no room."""
        if self.used + size > self._limit:
            self._metrics.large_bodies_refused.inc()
            raise Unavailable("too many large bodies at once; try again soon")

    def hold(self, more: int) -> None:
        """Hold `more` bytes, or give so many back when it is negative. Raises Unavailable."""
        if more > 0:
            self.check(more)
        self.used += more
        self._metrics.large_body_bytes.set(self.used)
