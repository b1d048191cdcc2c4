"""`read_file`: the agent reads on in a file that was too long to be shown, a page at a time.

A page is small on purpose: what is read stays in the conversation and is paid for with every later step.
Source: features.md (`read_file`: 1 to 200 lines, 4 KiB of text, images).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from omnara.domain.content import MediaRefBlock, StructuredDataBlock, TextBlock
from omnara.domain.text import clean_text, is_blank
from omnara.tools.files import PATH_SCHEMA, FileStore, StoredFile, artifact_in
from omnara.tools.protocol import Effect, Tool, ToolCallRequest, ToolContext, ToolResult, failed, succeeded

__all__ = ["TOOL", "execute"]

MAX_LINES: Final = 200
PAGE_BYTES: Final = 4 * 1024
_PIECE: Final = 512 * 1024
_WALKED: Final = 1024

TOOL: Final = Tool(
    name="read_file",
    description=(
        "Read a page of an attachment or of a tool result that was stored because of its length: up to 200 lines and "
        "4 KiB of text, or a picture. The result says where the next page begins."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "path": PATH_SCHEMA,
            "start_line": {"type": "integer", "minimum": 1, "default": 1, "description": "First line, counted from 1."},
            "column": {
                "type": "integer",
                "minimum": 0,
                "default": 0,
                "description": "Byte of that line to begin at, for lines longer than a page.",
            },
            "lines": {"type": "integer", "minimum": 1, "maximum": MAX_LINES, "default": MAX_LINES},
        },
        "required": ["path"],
        "additionalProperties": False,
    },
    type="built_in",
    effect=Effect.INTERNAL,
)


class _Page(msgspec.Struct):
    """A page of text, and where the next one begins: None at the end of the file."""

    text: str
    lines: int
    next_line: int | None = None
    next_column: int = 0


async def execute(call: ToolCallRequest, ctx: ToolContext) -> ToolResult:
    """Read a page. Returns a failed result for what is not there or not readable. Raises Unavailable."""
    store = ctx.files
    name = artifact_in(call.input["path"])
    file = None if store is None or name is None else await store.find(call.agent_id, name)
    if store is None or file is None:
        return failed("There is no such file.", "file_not_found")
    facts: dict[str, Any] = {"path": f"/artifacts/{file.artifact_id}", "size": file.size, "type": file.media_type}
    if not file.is_text:
        if not file.media_type.startswith("image/") and file.media_type != "application/pdf":
            return failed("The file is not text.", "file_not_text", **facts)
        return succeeded(StructuredDataBlock(facts), MediaRefBlock(file.artifact_id))
    start = call.input.get("start_line", 1)
    page = await _page(store, file, start, call.input.get("column", 0), call.input.get("lines", MAX_LINES))
    if page is None:
        return failed("The file has fewer lines.", "file_range", **facts)
    facts |= {"start_line": start, "lines": page.lines}
    facts["next"] = None if page.next_line is None else {"start_line": page.next_line, "column": page.next_column}
    text = clean_text(page.text)
    return succeeded(TextBlock("(blank lines)" if is_blank(text) else text), StructuredDataBlock(facts))


async def _page(store: FileStore, file: StoredFile, line: int, column: int, lines: int) -> _Page | None:
    offset = await _offset_of(store, file, line)
    if offset is None or offset + column >= file.size > 0:
        return None
    offset += column
    data = await store.read(file, offset, min(offset + PAGE_BYTES, file.size))
    whole = data.split(b"\n")[:lines]
    shown = b"\n".join(whole)
    if len(shown) < len(data):  # a line break follows: the page ends with the last line asked for
        end = offset + len(shown) + 1
        return _Page(_text(shown), len(whole), line + len(whole) if end < file.size else None)
    if offset + len(data) >= file.size:
        return _Page(_text(shown), len(whole) - (not whole[-1]))
    if len(whole) > 1:  # the last line is cut: it is the first of the next page
        return _Page(_text(b"\n".join(whole[:-1])), len(whole) - 1, line + len(whole) - 1)
    text = _text(shown)  # a character that is cut is left to the next page
    return _Page(text, 1, line, column + len(text.encode()))


async def _offset_of(store: FileStore, file: StoredFile, line: int) -> int | None:
    """The byte at which a line begins. Line by line there is no other way than to count."""
    missing = line - 1
    at = 0
    while missing:
        if at >= file.size:
            return None
        piece = await store.read(file, at, min(at + _PIECE, file.size))
        found = piece.count(b"\n")
        if found < missing:
            missing -= found
            at += len(piece)
            continue
        return at + _after_break(piece, missing)
    return at


def _after_break(piece: bytes, number: int) -> int:
    """Where the line after break `number` (from 1) begins. Halves instead of walking: a piece may be all breaks, and
    everybody else in the process waits meanwhile.
    """
    low, high = 0, len(piece)
    while high - low > _WALKED:
        middle = (low + high) // 2
        found = piece.count(b"\n", low, middle)
        if found >= number:
            high = middle
        else:
            number -= found
            low = middle
    for _ in range(number):
        low = piece.index(b"\n", low) + 1
    return low


def _text(data: bytes) -> str:
    """Decode a page whose ends may go through a character."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:].decode("utf-8", "ignore")
