"""A command's output on disk: bytes counted from the first one ever, of which the newest are kept.

Pieces of one size, named by number, so that trimming is the removal of the oldest piece and costs no copying.
Source: machines.md §7 (newest 100 MiB kept, trimmed at 125 MiB): pieces of 25 MiB, never more than five.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["PIECES", "PIECE_BYTES", "OutputReader", "OutputWriter"]

PIECE_BYTES = 25 * 1024 * 1024
PIECES = 5
_PREFIX = "output-"


def _name(number: int) -> str:
    return f"{_PREFIX}{number:08d}"


def _numbers(directory: int) -> list[int]:
    return sorted(int(name[len(_PREFIX) :]) for name in os.listdir(directory) if name.startswith(_PREFIX))


class OutputWriter:
    """Appends; there is one for each process. `end` is the offset after the last byte."""

    def __init__(self, directory: int, piece_bytes: int, pieces: int) -> None:
        """Begin at offset 0 in a directory without output. At least two pieces are kept."""
        self.end = 0
        self._directory = directory
        self._piece_bytes = piece_bytes
        self._pieces = max(pieces, 2)
        self._fd: int | None = None

    def append(self, data: bytes) -> None:
        """Add bytes, and drop the oldest piece when there are too many. Raises OSError; what was written counts."""
        view = memoryview(data)
        while view:
            room = self._piece_bytes - self.end % self._piece_bytes
            written = os.write(self._piece(), view[:room])
            self.end += written
            view = view[written:]
            if written == room:
                self.close()
                self._trim()

    def _piece(self) -> int:
        if self._fd is None:
            flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW
            self._fd = os.open(_name(self.end // self._piece_bytes), flags, 0o600, dir_fd=self._directory)
        return self._fd

    def _trim(self) -> None:
        oldest = self.end // self._piece_bytes - self._pieces
        if oldest >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_name(oldest), dir_fd=self._directory)

    def close(self) -> None:
        """Let go of the file. Appending goes on in a new piece or in the same one."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class OutputReader:
    """Reads what is there while it is being written, trimmed, or after the end."""

    def __init__(self, directory: int, piece_bytes: int) -> None:
        """Read the output in an open directory, which stays the caller's."""
        self._directory = directory
        self._piece_bytes = piece_bytes

    def span(self) -> tuple[int, int]:
        """Return the offsets of the oldest byte kept and after the newest one."""
        while True:
            numbers = _numbers(self._directory)
            if not numbers:
                return 0, 0
            with contextlib.suppress(FileNotFoundError):
                size = os.stat(_name(numbers[-1]), dir_fd=self._directory).st_size
                return numbers[0] * self._piece_bytes, numbers[-1] * self._piece_bytes + size

    def read(self, cursor: int, max_bytes: int) -> tuple[int, bytes]:
        """Return bytes from `cursor` or from the oldest one kept, and the offset where they begin."""
        while True:
            start = max(cursor, self.span()[0])
            try:
                return start, self._read(start, max_bytes)
            except FileNotFoundError:
                if start >= self.span()[0]:
                    return start, b""

    def _read(self, start: int, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        while max_bytes > 0:
            number, offset = divmod(start, self._piece_bytes)
            try:
                fd = os.open(_name(number), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._directory)
            except FileNotFoundError:
                if not parts:
                    raise
                break
            try:
                data = os.pread(fd, min(max_bytes, self._piece_bytes - offset), offset)
            finally:
                os.close(fd)
            if not data:
                break
            parts.append(data)
            start += len(data)
            max_bytes -= len(data)
        return b"".join(parts)
