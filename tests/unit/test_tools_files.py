"""Paging and searching of stored files: nothing is lost between pages, and no pattern or text takes long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnara.clock import monotonic
from omnara.domain.content import MediaRefBlock, ResultBlock, StructuredDataBlock, TextBlock
from omnara.ids import IdKind, encode, new_uuid
from omnara.tools.builtin import read_file, search_files
from omnara.tools.extract import Extractor
from omnara.tools.files import StoredFile, artifact_in
from omnara.tools.protocol import ToolCallRequest, ToolContext, ToolResult
from omnara.tools.registry import execute

AGENT = new_uuid()
NAME = encode(IdKind.ARTIFACT, new_uuid())


class Memory:
    """Files by name, all of one agent."""

    def __init__(self, *contents: bytes, media_type: str = "text/plain") -> None:
        names = [NAME, *(encode(IdKind.ARTIFACT, new_uuid()) for _ in contents[1:])]
        self.files = {
            name: StoredFile(name, media_type, "", len(content), content)
            for name, content in zip(names, contents, strict=True)
        }
        self.reads = 0

    async def find(self, agent_id: UUID, artifact_id: str) -> StoredFile | None:
        return self.files.get(artifact_id) if agent_id == AGENT else None

    async def texts(self, agent_id: UUID, limit: int) -> list[StoredFile]:
        return list(self.files.values())[:limit] if agent_id == AGENT else []

    async def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        self.reads += 1
        assert stop - start <= 512 * 1024
        assert isinstance(file.handle, bytes)
        return file.handle[start:stop]

    async def spill(self, agent_id: UUID, tool: str, blocks: Sequence[ResultBlock]) -> list[ResultBlock]:
        return list(blocks)


async def run(store: Memory | None, tool: str, agent: UUID = AGENT, **tool_input: Any) -> ToolResult:
    context = ToolContext(extractor=Extractor(), files=store)
    return await execute(ToolCallRequest(new_uuid(), agent, tool, tool_input), context)


async def read(store: Memory, **tool_input: Any) -> tuple[str, Any]:
    """Read a page of the first file: its text and facts."""
    result = await run(store, "read_file", path=NAME, **tool_input)
    assert result.outcome == "succeeded", result
    text, facts = result.content_blocks
    assert isinstance(text, TextBlock)
    assert isinstance(facts, StructuredDataBlock)
    assert len(text.text.encode()) <= read_file.PAGE_BYTES
    return text.text, facts.value


async def found(store: Memory, pattern: str, **more: Any) -> tuple[list[str], Any]:
    """Search: the lines and the facts."""
    result = await run(store, "search_files", pattern=pattern, **more)
    assert result.outcome == "succeeded", result
    text, facts = result.content_blocks
    assert isinstance(text, TextBlock)
    assert isinstance(facts, StructuredDataBlock)
    return text.text.split("\n"), facts.value


async def whole(store: Memory, lines: int = 200) -> str:
    """Read a file page by page, as a model would."""
    parts: list[str] = []
    where: dict[str, int] | None = {"start_line": 1, "column": 0}
    while where is not None:
        text, facts = await read(store, lines=lines, **where)
        text = "\n" * (facts["lines"] - 1) if text == "(blank lines)" else text
        if parts and not where["column"]:
            parts.append("\n")
        parts.append(text)
        after = facts["next"]
        assert after is None or (after["start_line"], after["column"]) > (where["start_line"], where["column"])
        where = after
    return "".join(parts)


LINES = st.one_of(st.text("aß😀 x", min_size=1, max_size=30), st.text("ß😀", min_size=1100, max_size=2300))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.lists(LINES, min_size=1, max_size=12), st.integers(1, 200))
async def test_pages_make_up_the_file(lines: list[str], per_page: int) -> None:
    text = "\n".join(line.strip() or "-" for line in lines)
    assert await whole(Memory(text.encode()), per_page) == text


async def test_a_page_begins_where_it_is_asked_to() -> None:
    store = Memory("".join(f"line {number}\n" for number in range(1, 200_001)).encode())
    text, facts = await read(store, start_line=150_000, lines=2)
    assert text == "line 150000\nline 150001"
    assert facts["next"] == {"start_line": 150_002, "column": 0}
    text, facts = await read(store, start_line=199_999)
    assert (text, facts["lines"], facts["next"]) == ("line 199999\nline 200000\n", 2, None)
    assert (await run(store, "read_file", path=NAME, start_line=200_002)).error_code == "file_range"


@pytest.mark.parametrize(
    "path",
    ["art_x", "../etc/passwd", f"/artifacts/{NAME}x", "/artifacts", encode(IdKind.EVENT, AGENT)],
    ids=["short", "elsewhere", "long", "none", "event"],
)
async def test_nothing_else_is_read(path: str) -> None:
    assert (await run(Memory(b"x"), "read_file", path=path)).error_code == "file_not_found"
    assert (await run(Memory(b"x"), "search_files", pattern="x", path=path)).error_code == "file_not_found"


async def test_files_of_other_agents_are_not_there() -> None:
    store = Memory(b"secret")
    assert (await run(store, "read_file", new_uuid(), path=NAME)).error_code == "file_not_found"
    other = await run(store, "search_files", new_uuid(), pattern="secret")
    assert other.content_blocks[0] == TextBlock("No line matches.")


async def test_pictures_are_shown_and_packages_are_not() -> None:
    shown = await run(Memory(b"x", media_type="image/png"), "read_file", path=f"/artifacts/{NAME}")
    assert shown.content_blocks[1] == MediaRefBlock(NAME)
    assert (await run(Memory(b"x", media_type="application/zip"), "read_file", path=NAME)).error_code == "file_not_text"


def test_paths() -> None:
    for path in (NAME, f"/artifacts/{NAME}", f"artifacts/{NAME}", f" /artifacts/{NAME}/a b.txt"):
        assert artifact_in(path) == NAME


async def test_lines_are_found_with_their_numbers() -> None:
    store = Memory(b"alpha\nbeta\nALPHA x\n", b"gamma\nalphabet")
    other = list(store.files)[1]
    lines, facts = await found(store, "(?i)^alpha")
    assert lines == [f"{NAME}:1: alpha", f"{NAME}:3: ALPHA x", f"{other}:2: alphabet"]
    assert facts == {"matches": 3, "files": 2, "complete": True}
    lines, facts = await found(store, "alpha", path=NAME, max_matches=1)
    assert (lines, facts["complete"]) == ([f"{NAME}:1: alpha"], False)


async def test_lines_across_pieces_and_long_lines_are_searched() -> None:
    content = b"a" * (512 * 1024 - 3) + b"needle\n" + b"b" * 700_000 + b"needle" + b"c" * 600_000 + b"\nlast needle"
    store = Memory(content)
    lines, facts = await found(store, "needle")
    assert [line.split(":")[1].split(" ")[0] for line in lines] == ["1", "2", "3"]
    assert all("needle" in line for line in lines)
    assert facts["complete"]
    column = int(lines[1].split("column ")[1].split(")")[0])
    assert "needle" in (await read(store, start_line=2, column=column))[0]


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+b", "(.*)*x", "a{1,200}a{1,200}b"])
async def test_no_pattern_takes_long(pattern: str) -> None:
    started = monotonic()
    await run(Memory(b"a" * 2_000_000), "search_files", pattern=pattern)
    assert monotonic() - started < 30


@pytest.mark.parametrize("content", [b"a" * 2_000_000, b"a\n" * 1_000_000])
async def test_a_search_ends_when_its_time_is_up(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**9))
    monkeypatch.setattr(search_files, "monotonic", lambda: float(next(now)))
    _, facts = await found(Memory(content), "b")
    assert facts["complete"] is False
    assert next(now) < 2 * search_files.MAX_SECONDS, "the clock is looked at after every line and span"


@pytest.mark.parametrize("pattern", ["(", "(?=a)", "(a)\\1", "(?:a{1000}){1000}", "(?:a.{0,99}){9}b", "[z-a]"])
async def test_bad_patterns_are_said_to_be_bad(pattern: str) -> None:
    assert (await run(Memory(b"a"), "search_files", pattern=pattern)).error_code == "bad_pattern"


async def test_a_result_is_bounded() -> None:
    store = Memory(b"\n".join(b"x" * 900 for _ in range(5000)))
    result = await run(store, "search_files", pattern="x", max_matches=100)
    text = result.content_blocks[0]
    assert isinstance(text, TextBlock)
    assert len(text.text) < search_files._RESULT_CHARS + 1000


@given(st.binary(max_size=9000).map(lambda data: data.replace(b"\x01", b"\n").replace(b"\x02", b"\n")), st.data())
def test_the_line_after_a_break_is_found_by_halving(piece: bytes, data: st.DataObject) -> None:
    piece = piece + b"\n" * data.draw(st.integers(1, 3000))
    number = data.draw(st.integers(1, piece.count(b"\n")))
    lines = piece.split(b"\n")
    assert read_file._after_break(piece, number) == sum(len(line) + 1 for line in lines[:number])


def test_a_piece_of_nothing_but_breaks_is_not_walked() -> None:
    """Half a million breaks took 40 ms of everybody's time."""
    piece = b"\n" * read_file._PIECE

    def walked() -> int:
        position = -1
        for _ in range(read_file._PIECE - 1):
            position = piece.index(b"\n", position + 1)
        return position + 1

    def fastest(work: Any) -> tuple[float, int]:
        times = []
        for _ in range(3):
            began = monotonic()
            found = work()
            times.append(monotonic() - began)
        return min(times), found

    slow, expected = fastest(walked)
    quick, found = fastest(lambda: read_file._after_break(piece, read_file._PIECE - 1))
    assert found == expected
    assert quick < slow / 5
