"""A program on a pseudo-terminal, as a terminal emulator sees it: what a person would see, scrolled lines included."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import Mapping, Sequence

import pyte

from tests.support.waiting import until

ON_TTY = """import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])"""
"""Makes the pseudo-terminal the controlling one, then becomes the program."""


class Terminal:
    """Runs one program. Use it in `async with`; the program is killed at the end if it still runs."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, columns: int = 80, rows: int = 24
    ) -> None:
        self._arguments = list(arguments)
        self._environment = {"TERM": "xterm-256color", **environment}
        self._screen = pyte.HistoryScreen(columns, rows, history=5000, ratio=0.5)
        self._emulator = pyte.ByteStream(self._screen)
        self._size = (rows, columns)
        self._master = -1
        self._left = 0
        self.raw = b""
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Terminal:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *self._size, 0, 0))
        try:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-SEc", ON_TTY, *self._arguments,
                env=self._environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(slave)
        os.set_blocking(self._master, False)
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
        self._close()

    def _close(self) -> None:
        if self._master >= 0:
            self._left = termios.tcgetattr(self._master)[3]
            asyncio.get_running_loop().remove_reader(self._master)
            os.close(self._master)
            self._master = -1

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except BlockingIOError:
            return
        except OSError:  # Linux: the program and with it the other end are gone.
            data = b""
        if not data:
            self._close()
            return
        self.raw += data
        self._emulator.feed(data)

    def type(self, keys: str) -> None:
        """Press keys; `\\r` is Enter, `\\x03` Ctrl-C."""
        os.write(self._master, keys.encode())

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the window, as a person does with the mouse."""
        self._screen.resize(rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows typed keys by itself, as it does when no program edits lines."""
        flags = self._left if self._master < 0 else termios.tcgetattr(self._master)[3]
        return bool(flags & termios.ECHO)

    @property
    def visible(self) -> str:
        """The window's lines now."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    @property
    def text(self) -> str:
        """Everything: what scrolled away and what is in the window."""
        gone = [
            "".join(line[x].data for x in range(self._screen.columns)).rstrip() for line in self._screen.history.top
        ]
        return "\n".join([*gone, self.visible])

    async def shows(self, *wanted: str, within_s: float = 15.0) -> None:
        """Wait until all these texts are in the window."""
        try:
            await until(lambda: all(text in self.visible for text in wanted), "shown", limit_s=within_s)
        except AssertionError:
            raise AssertionError(f"not shown: {[t for t in wanted if t not in self.visible]}\n{self.text}") from None

    async def gone(self, text: str, within_s: float = 15.0) -> None:
        """Wait until a text is no longer in the window."""
        try:
            await until(lambda: text not in self.visible, "gone", limit_s=within_s)
        except AssertionError:
            raise AssertionError(f"still there: {text}\n{self.text}") from None

    async def ended(self, within_s: float = 20.0) -> int:
        """Wait until the program has ended and all that it wrote is shown; its exit code."""
        assert self.process is not None
        async with asyncio.timeout(within_s):
            code = await self.process.wait()
        await until(lambda: self._master < 0, "everything is read")
        return code
