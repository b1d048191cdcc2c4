"""Files in messages and results: stored with what refers to them or not at all, each content once."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec
import pytest

from omnara.db.artifacts import newest_texts
from omnara.domain.content import InlineMedia, MediaRefBlock, StructuredDataBlock, TextBlock
from omnara.engine.artifacts_store import Blobs
from omnara.engine.artifacts_tools import AgentFiles
from omnara.engine.inputs import create_input
from omnara.engine.results import submit_result
from omnara.errors import Conflict, IdempotencyKeyConflict, InvalidRequest, NotFound, RequestTooLarge
from omnara.ids import IdKind, decode, new_uuid
from omnara.tools.extract import Extractor
from omnara.tools.protocol import ToolCallRequest, ToolContext
from omnara.tools.registry import execute
from tests.support.engine_case import LOOK, Engine
from tests.support.pictures import PDF, inline, png

MIB = 1024 * 1024


async def artifacts(engine: Engine) -> list[Any]:
    return await engine.fetch("select * from artifacts order by created_at, id")


async def blobs(engine: Engine) -> int:
    return len(await engine.fetch("select from artifact_blobs"))


async def test_a_file_becomes_a_reference(engine: Engine) -> None:
    path = await engine.agent()
    picture = png(640, 480)
    blocks: list[Any] = [TextBlock("look"), inline(picture, filename="a.png"), inline(PDF, "application/pdf")]
    made = await create_input(engine.deps, engine.p, path, blocks)
    text, first, second = msgspec.json.decode(made.input.content)
    assert text == {"type": "text", "text": "look"}
    assert set(first) == {"type", "artifact_id"}
    rows = {row["id"]: row for row in await artifacts(engine)}
    row = rows[decode(IdKind.ARTIFACT, first["artifact_id"])]
    assert row["digest"] == hashlib.sha256(picture).digest()
    assert (row["size"], row["media_type"], row["filename"]) == (len(picture), "image/png", "a.png")
    assert (row["width"], row["height"]) == (640, 480)
    assert rows[decode(IdKind.ARTIFACT, second["artifact_id"])]["filename"] is None
    await engine.assert_coherent(path)


async def test_a_content_is_stored_once_in_pieces(engine: Engine) -> None:
    one, other = await engine.agent(), await engine.agent()
    big = png(padding=2 * MIB)
    await asyncio.gather(
        *(create_input(engine.deps, engine.p, path, [inline(big)]) for path in (one, other) for _ in range(4))
    )
    assert len(await artifacts(engine)) == 8
    assert await blobs(engine) == 1
    pieces = await engine.fetch("select data from artifact_chunks order by ordinal")
    assert len(pieces) == 5
    assert b"".join(piece["data"] for piece in pieces) == big
    assert [row["referenced"] for row in await engine.fetch("select referenced from artifact_blobs")] == [True]


REFUSED: list[tuple[list[Any], type[Exception]]] = [
    ([InlineMedia("image/png", "not base64!")], InvalidRequest),
    ([InlineMedia("image/png", "aGk=\n")], InvalidRequest),
    ([InlineMedia("image/png", "====")], InvalidRequest),
    ([InlineMedia("image/png", "_-8=")], InvalidRequest),
    ([inline(b"hi")], InvalidRequest),
    ([inline(png(), "image/jpeg")], InvalidRequest),
    ([inline(png(), "image/tiff")], InvalidRequest),
    ([inline(png(), filename="a\nb")], InvalidRequest),
    ([inline(png(), filename="ä" * 128)], InvalidRequest),
    ([inline(png())] * 21, InvalidRequest),
    ([inline(b"a" * (10 * MIB + 1), "text/plain")], RequestTooLarge),
    ([inline(b"a" * (9 * MIB), "text/plain")] * 3, RequestTooLarge),
    ([inline(png()), TextBlock("x" * MIB)], RequestTooLarge),
    ([inline(png()), TextBlock(" ")], InvalidRequest),
]


async def test_what_is_refused_leaves_nothing(engine: Engine) -> None:
    path = await engine.agent()
    for blocks, error in REFUSED:
        with pytest.raises(error):
            await create_input(engine.deps, engine.p, path, blocks)
    assert not await artifacts(engine)
    assert await blobs(engine) == 0
    with pytest.raises(NotFound):
        await create_input(engine.deps, engine.p, msgspec.structs.replace(path, agent_id=new_uuid()), [inline(png())])
    assert await blobs(engine) == 0


async def test_limits_are_met_exactly(engine: Engine) -> None:
    path = await engine.agent()
    files = [inline(b"%d" % n + b"a" * (10 * MIB - 1), "text/plain", "ä" * 127 + "a") for n in range(2)]
    files += [inline(b"%d" % n + b"b" * 1000, "text/plain") for n in range(10, 28)]
    await create_input(engine.deps, engine.p, path, files)
    assert len(await artifacts(engine)) == 20


async def test_a_replay_is_known_by_the_content_of_its_files(engine: Engine) -> None:
    path = await engine.agent()
    said: list[Any] = [TextBlock("look"), inline(png(), filename="a.png")]
    first = await create_input(engine.deps, engine.p, path, said, key="k")
    again = await create_input(engine.deps, engine.p, path, said, key="k")
    assert (first.created, again.created) == (True, False)
    assert again.input.content == first.input.content
    others: list[Any] = [
        [TextBlock("look"), inline(png(9, 9), filename="a.png")],
        [TextBlock("look"), inline(png(), filename="b.png")],
        [TextBlock("look")],
        [inline(png(), filename="a.png"), TextBlock("look")],
    ]
    for other in others:
        with pytest.raises(IdempotencyKeyConflict):
            await create_input(engine.deps, engine.p, path, other, key="k")
    assert len(await artifacts(engine)) == 1


async def test_a_result_brings_files(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [LOOK])
    blocks: list[Any] = [inline(png(), filename="shot.png"), StructuredDataBlock({"a": 1}), TextBlock("done")]
    done = await submit_result(engine.deps, engine.p, path, call, "succeeded", blocks)
    first, second, third = msgspec.json.decode(done.content)
    [row] = await artifacts(engine)
    assert decode(IdKind.ARTIFACT, first["artifact_id"]) == row["id"]
    assert (second["value"], third["text"]) == ({"a": 1}, "done")
    payload = next(payload for kind, payload in await engine.log(path) if kind == "tool_result")
    assert payload["content_blocks"] == [first, second, third]
    with pytest.raises(Conflict):
        await submit_result(engine.deps, engine.p, path, call, "succeeded", [inline(png(5, 5))])
    assert len(await artifacts(engine)) == 1
    assert await blobs(engine) == 1
    await engine.assert_coherent(path)


async def test_one_of_many_results_brings_its_file(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [LOOK])
    answers = await asyncio.gather(
        *(submit_result(engine.deps, engine.p, path, call, "succeeded", [inline(png(n + 1, 1))]) for n in range(6)),
        return_exceptions=True,
    )
    assert sum(not isinstance(answer, Exception) for answer in answers) == 1
    assert len(await artifacts(engine)) == 1


async def test_contents_without_a_reference_are_removed_in_time(engine: Engine) -> None:
    path = await engine.agent()
    await create_input(engine.deps, engine.p, path, [inline(png())])
    store: Blobs = engine.deps.blobs
    left = b"left behind" * 100_000
    digest = hashlib.sha256(left).digest()
    await store.put(engine.deps.db, engine.project.org_id, digest, left)
    assert await blobs(engine) == 2
    assert await store.sweep(engine.deps.db, 3600) == 0
    assert await store.sweep(engine.deps.db, 0) == 1
    assert await blobs(engine) == 1
    assert len(await engine.fetch("select from artifact_chunks")) == 1
    await store.put(engine.deps.db, engine.project.org_id, digest, left)
    assert await blobs(engine) == 2


async def test_tools_see_the_files_of_their_agent_only(engine: Engine) -> None:
    one, other = await engine.agent(), await engine.agent()
    text = "".join(f"line {number}\n" for number in range(100_000)).encode()
    made = await create_input(engine.deps, engine.p, one, [inline(text, "text/csv", "a.csv"), inline(png())])
    name, picture = (block["artifact_id"] for block in msgspec.json.decode(made.input.content))
    files = AgentFiles(engine.deps.db, engine.deps.blobs)
    context = ToolContext(extractor=Extractor(), files=files)

    async def page(agent_id: Any, path: str, **more: Any) -> Any:
        return await execute(ToolCallRequest(new_uuid(), agent_id, "read_file", {"path": path, **more}), context)

    read = await page(one.agent_id, name, start_line=90_001, lines=2)
    assert read.content_blocks[0] == TextBlock("line 90000\nline 90001")
    assert read.content_blocks[1].value["next"] == {"start_line": 90_003, "column": 0}
    assert (await page(one.agent_id, picture)).content_blocks[1] == MediaRefBlock(picture)
    assert (await page(other.agent_id, name)).error_code == "file_not_found"
    assert [file.filename for file in await files.texts(one.agent_id, 10)] == ["a.csv"]
    assert await files.texts(other.agent_id, 10) == []


async def test_an_ordinary_result_costs_no_visit_to_the_database() -> None:
    nothing: Any = None
    blocks = [TextBlock("x" * 50_000), StructuredDataBlock({"n": 1})]
    assert await AgentFiles(nothing, nothing).spill(new_uuid(), "look", blocks) == blocks


async def test_a_result_beyond_all_limits_is_cut(engine: Engine) -> None:
    path = await engine.agent()
    files = AgentFiles(engine.deps.db, engine.deps.blobs)
    shown, reference = await files.spill(path.agent_id, "flood", [TextBlock("ä" * (25 * MIB))])
    assert isinstance(shown, TextBlock)
    assert isinstance(reference, MediaRefBlock)
    assert f"of {50 * MIB} bytes are shown" in shown.text
    assert f"last {2 * MIB} bytes were not kept" in shown.text
    [row] = await artifacts(engine)
    assert row["size"] == 48 * MIB


async def test_memory_for_contents_is_bounded(engine: Engine) -> None:
    path = await engine.agent()
    store = Blobs(memory_bytes=3 * MIB)
    await create_input(engine.deps, engine.p, path, [inline(b"%d" % n + b"a" * MIB, "text/plain") for n in range(5)])
    async with engine.deps.db.acquire() as connection:
        rows = await newest_texts(connection, path.agent_id, 10)
    for row in [*rows, *rows]:
        assert len(await store.whole(engine.deps.db, row)) == row.size
        assert 0 < store.memory_used <= 3 * MIB
