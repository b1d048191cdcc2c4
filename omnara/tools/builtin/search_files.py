"""`search_files`: the agent looks for lines in its attachments and stored results.

The pattern comes from a model and the text from anywhere, so matching is linear in both: the engine has no
backtracking, and its automaton is bounded. Source: features.md (`search_files`: RE2, at most 100 matches).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import jsonschema_rs
import msgspec

from omnara.clock import monotonic
from omnara.domain.content import StructuredDataBlock, TextBlock
from omnara.domain.text import clean_text
from omnara.tools.files import PATH_SCHEMA, FileStore, StoredFile, artifact_in
from omnara.tools.protocol import Effect, Tool, ToolCallRequest, ToolContext, ToolResult, failed, succeeded

__all__ = ["TOOL", "execute"]

MAX_MATCHES: Final = 100
MAX_FILES: Final = 50
MAX_BYTES: Final = 64 * 1024 * 1024
"""How much one call looks through. The result says when there was more."""
MAX_SECONDS: Final = 20.0
_MAX_PATTERN_CHARS: Final = 200
_PATTERN_BYTES: Final = 128 * 1024
"""Size of a compiled pattern, and so of the slowest way through a span, which keeps the interpreter to itself."""
_AUTOMATON_BYTES: Final = 4 * 1024 * 1024
"""Memory for the states that a search comes across; with too little of it every character takes the slowest way."""
_PIECE: Final = 512 * 1024
_SPAN: Final = 1000
_STEP: Final = 800
"""Longer lines are looked at in overlapping spans, so that a match can be shown without its whole line."""
_SHOWN_CHARS: Final = 300
_RESULT_CHARS: Final = 16_000

TOOL: Final = Tool(
    name="search_files",
    description=(
        "Find the lines that match a regular expression in one stored file or in all text files of this conversation: "
        "attachments and tool results that were stored because of their length. Read around a match with read_file."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "pattern": {
                "type": "string",
                "minLength": 1,
                "maxLength": _MAX_PATTERN_CHARS,
                "description": "Regular expression without look-around or back-references; (?i) ignores case.",
            },
            "path": PATH_SCHEMA,
            "max_matches": {"type": "integer", "minimum": 1, "maximum": MAX_MATCHES, "default": 50},
        },
        "required": ["pattern"],
        "additionalProperties": False,
    },
    type="built_in",
    effect=Effect.INTERNAL,
)


class _Search(msgspec.Struct):
    """A search under way. `complete` is False when a limit ended it."""

    matcher: Any
    left: int
    deadline: float
    bytes_left: int = MAX_BYTES
    chars_left: int = _RESULT_CHARS
    complete: bool = True
    found: list[str] = msgspec.field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether a limit is reached."""
        return self.left <= 0 or self.bytes_left <= 0 or self.chars_left <= 0 or monotonic() > self.deadline


async def execute(call: ToolCallRequest, ctx: ToolContext) -> ToolResult:
    """Search. Returns a failed result for a bad pattern or an unknown file. Raises Unavailable."""
    try:
        matcher = jsonschema_rs.Draft202012Validator(
            {"pattern": call.input["pattern"]},
            pattern_options=jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES, dfa_size_limit=_AUTOMATON_BYTES),
            offline=True,
        )
    except ValueError:
        return failed("The pattern is not a regular expression that can be used here.", "bad_pattern")
    files = await _files(call, ctx.files)
    if files is None or ctx.files is None:
        return failed("There is no such text file.", "file_not_found")
    search = _Search(matcher, call.input.get("max_matches", 50), monotonic() + MAX_SECONDS)
    for file in files:
        await _search_file(ctx.files, file, search)
        if search.over:
            search.complete = False
            break
    facts = {"matches": len(search.found), "files": len(files), "complete": search.complete}
    return succeeded(TextBlock("\n".join(search.found) or "No line matches."), StructuredDataBlock(facts))


async def _files(call: ToolCallRequest, store: FileStore | None) -> list[StoredFile] | None:
    if store is None:
        return None
    if "path" not in call.input:
        return await store.texts(call.agent_id, MAX_FILES)
    name = artifact_in(call.input["path"])
    file = None if name is None else await store.find(call.agent_id, name)
    return [file] if file is not None and file.is_text else None


async def _search_file(store: FileStore, file: StoredFile, search: _Search) -> None:
    """Go through a file in pieces, each outside the event loop; a line that goes on is finished with the next piece."""
    at, number, rest, column = 0, 1, b"", 0
    while at < file.size and not search.over:
        piece = await store.read(file, at, min(at + _PIECE, file.size))
        at += len(piece)
        search.bytes_left -= len(piece)
        lines = (rest + piece).split(b"\n")
        first, rest, after = column, b"", number + len(lines) - 1
        if at < file.size:
            rest = lines.pop()
            column = first if not lines else 0
            if len(rest) > _PIECE:  # a line without end is looked at in parts, which overlap like its spans
                lines.append(rest)
                column += len(rest) - (_SPAN - _STEP)
                rest = rest[-(_SPAN - _STEP) :]
        await asyncio.to_thread(_search_lines, file.artifact_id, lines, number, first, search)
        number = after


def _search_lines(name: str, lines: list[bytes], number: int, column: int, search: _Search) -> None:
    """Note the matches in lines from `number` on, of which the first is given from byte `column` on."""
    for offset, line in enumerate(lines):
        for start, text in _matches(line.decode("utf-8", "replace"), search):
            before = (column if not offset else 0) + start
            place = f"{name}:{number + offset}" + (f" (column {before})" if before else "")
            shown = f"{place}: {clean_text(text)}"
            search.found.append(shown)
            search.left -= 1
            search.chars_left -= len(shown)
            if search.over:
                return
        if search.over:
            return


def _matches(line: str, search: _Search) -> Iterator[tuple[int, str]]:
    """The matching parts of a line: the byte at which each begins, and what of it is shown. Ends when time is up."""
    matcher = search.matcher
    if len(line) <= _SPAN:
        if matcher.is_valid(line):
            start, text = _narrowed(line, matcher)
            yield (len(line[:start].encode()) if start else 0), text
        return
    shown = 0
    for at in range(0, len(line) - _SPAN + _STEP, _STEP):
        if search.over:
            return
        span = line[at : at + _SPAN]
        if matcher.is_valid(span):
            start, text = _narrowed(span, matcher)
            if at + start >= shown:  # otherwise it is the match that two spans share
                yield len(line[: at + start].encode("utf-8", "replace")), text
            shown = at + start + len(text)


def _narrowed(span: str, matcher: Any) -> tuple[int, str]:
    """A part of a matching span that is short enough to be shown and matches too, if there is one."""
    if len(span) <= _SHOWN_CHARS:
        return 0, span
    for start in range(0, len(span), _SHOWN_CHARS // 2):
        part = span[start : start + _SHOWN_CHARS]
        if matcher.is_valid(part):
            return start, part
    return 0, span[:_SHOWN_CHARS]
