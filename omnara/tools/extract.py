"""Readable text from HTML pages of strangers, without letting a page harm the server.

The extraction runs in a process of its own with bounded memory, processor time and wall time, two at a time. When
it finds nothing or is cut off, a plain and linear conversion stands in, so that a page always gives something.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Final, Literal

import msgspec

from omnara.tools.plain_html import page_title, plain_text

__all__ = ["ExtractLimits", "Extracted", "Extractor"]

_CHILD: Final = str(Path(__file__).with_name("extract_child.py"))
# The child reads pages of strangers: it inherits no setting, so no secret either.
_CHILD_ENVIRONMENT: Final = {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1", "HOME": "/nonexistent"}

TextFormat = Literal["markdown", "text"]


class ExtractLimits(msgspec.Struct, frozen=True):
    """Bounds of one extraction: seconds to wait for a free slot and for the child, characters handed to the plain
    conversion and to the extractor."""

    slot_s: float = 20.0
    wall_s: float = 15.0
    plain_chars: int = 1_000_000
    html_chars: int = 2_000_000


class Extracted(msgspec.Struct, frozen=True):
    """Text of a page. `plain` tells that the simple conversion stood in for the extractor."""

    text: str
    title: str | None
    plain: bool


class Extractor:
    """Runs extractions for the whole process, at most `concurrency` at a time; the others wait in order, but not
    for long: when everybody fetches at once, plain text now is worth more than good text later.

    Holds no process between calls. A waiting or running call is given up by cancelling it; its child is killed.
    """

    def __init__(self, *, concurrency: int = 2, limits: ExtractLimits | None = None) -> None:
        self._slots = asyncio.Semaphore(concurrency)
        self._limits = limits or ExtractLimits()

    async def extract(self, html: str, text_format: TextFormat, url: str) -> Extracted:
        """Return the readable text of a page, cut to the limits.

        Never raises for what a page contains. On cancellation the child is killed and reaped before this returns.
        """
        title = page_title(html)
        text = await self._in_slot(html[: self._limits.html_chars], text_format, url)
        if text:
            return Extracted(text, title, plain=False)
        text = await asyncio.to_thread(plain_text, html[: self._limits.plain_chars])
        return Extracted(text, title, plain=True)

    async def _in_slot(self, html: str, text_format: TextFormat, url: str) -> str:
        try:
            async with asyncio.timeout(self._limits.slot_s):
                await self._slots.acquire()
        except TimeoutError:
            return ""
        try:
            return await self._in_child(html, text_format, url)
        finally:
            self._slots.release()

    async def _in_child(self, html: str, text_format: TextFormat, url: str) -> str:
        request = msgspec.json.encode({"html": html, "format": text_format, "url": url})
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            _CHILD,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_CHILD_ENVIRONMENT,
            cwd=os.sep,
        )
        output = b""
        try:
            async with asyncio.timeout(self._limits.wall_s):
                output, _ = await process.communicate(request)
        except TimeoutError:
            return ""
        finally:
            await _end(process)
        return output.decode("utf-8", "replace").strip() if process.returncode == 0 else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    # A killed child ends at once, so the wait is short; shielded, lest a cancelled fetch leave a zombie behind.
    await asyncio.shield(process.wait())
