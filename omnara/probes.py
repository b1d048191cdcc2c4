"""Named points in the code that a test can wait for, instead of sleeping and hoping.

A probe tells, it never changes what happens: with nobody listening `hit` is one look at an empty tuple. Tests in the
process use `expect`; a process under test writes one JSON line per point to the file or pipe of OMNARA_TEST_PROBES.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Expectation", "Point", "attach", "expect", "hit", "to_file"]


class Point(msgspec.Struct, frozen=True):
    """A point that was reached, and the facts that belong to it (ids and numbers, never content)."""

    name: str
    fields: dict[str, Any]


Listener = Callable[[Point], None]

_listeners: tuple[Listener, ...] = ()


def hit(name: str, **fields: Any) -> None:
    """Tell whoever listens that this point was reached. Runs the listeners at once; their errors pass through."""
    if _listeners:
        point = Point(name, fields)
        for listener in _listeners:
            listener(point)


@contextmanager
def attach(listener: Listener) -> Iterator[None]:
    """Call `listener` for every point reached meanwhile, in whatever thread reaches it."""
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        _listeners = tuple(other for other in _listeners if other is not listener)


class Expectation:
    """The points of one name reached since `expect` was entered."""

    def __init__(self, name: str, where: dict[str, Any]) -> None:
        self._name = name
        self._where = where
        self._arrived = asyncio.Event()
        self.points: list[Point] = []

    def __call__(self, point: Point) -> None:
        """Listener: keep the point if it is one of those waited for."""
        if point.name == self._name and all(point.fields.get(key) == value for key, value in self._where.items()):
            self.points.append(point)
            self._arrived.set()

    async def wait(self, count: int = 1, *, within_s: float = 10.0) -> Point:
        """Return the `count`-th point, now or when it is reached. Raises TimeoutError with what did not happen."""
        try:
            async with asyncio.timeout(within_s):
                while len(self.points) < count:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise TimeoutError(f"{self._name} {self._where}: {len(self.points)} of {count} in {within_s} s") from None
        return self.points[count - 1]


@contextmanager
def expect(name: str, **where: Any) -> Iterator[Expectation]:
    """Collect the points `name` whose fields equal `where`, from now on, in this event loop."""
    expectation = Expectation(name, where)
    with attach(expectation):
        yield expectation


@contextmanager
def to_file(path: Path) -> Iterator[None]:
    """Write each point as a JSON line to `path`, which may be a pipe; a reader that has gone is no failure."""
    # Unbuffered and append: a killed process has written every point that it reached.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(point: Point) -> None:
        line = msgspec.json.encode({"point": point.name, **{key: _plain(value) for key, value in point.fields.items()}})
        try:
            os.write(descriptor, line + b"\n")
        except (BrokenPipeError, BlockingIOError):
            return

    try:
        with attach(write):
            yield
    finally:
        os.close(descriptor)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
