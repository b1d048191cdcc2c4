"""Files in an object store: the same behaviour, and trouble there is the trouble of one request only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import obstore.exceptions
import pytest
import pytest_asyncio
from obstore.store import MemoryStore

from omnara.domain.content import MediaPart
from omnara.engine.artifacts_objects import Objects, open_objects
from omnara.engine.artifacts_read import get_artifact, read_content
from omnara.engine.artifacts_shown import files_of
from omnara.engine.artifacts_store import Blobs, ContentLost, object_name
from omnara.engine.inputs import create_input
from omnara.errors import ConfigurationError, Unavailable
from omnara.ids import IdKind, decode
from omnara.providers.protocol import ModelTarget
from tests.support.engine_case import Engine
from tests.support.pictures import inline, png

PICTURE = png(5, 5, padding=1_500_000)
TARGET = ModelTarget(revision_id="", provider="", slug="", api_format="openai_responses")


@pytest.fixture
def memory() -> Any:
    return MemoryStore()


@pytest_asyncio.fixture(loop_scope="session")
async def stored(engine: Engine, memory: Any) -> AsyncIterator[Engine]:
    """The use cases with their files in `memory`."""
    blobs = Blobs(Objects(memory, obstore.exceptions.BaseError))
    yield Engine(replace(engine.deps, blobs=blobs), engine.p, engine.project, engine.worker_id)


async def names(memory: Any) -> list[str]:
    return [entry["path"] for entry in memory.list().collect()]


async def test_contents_are_objects_and_nothing_in_postgres(stored: Engine, memory: Any) -> None:
    path = await stored.agent()
    for _ in range(2):
        made = await create_input(stored.deps, stored.p, path, [inline(PICTURE)])
    [blob] = await stored.fetch("select * from artifact_blobs")
    assert (blob["place"], blob["size"], blob["referenced"]) == ("object_store", len(PICTURE), True)
    assert not await stored.fetch("select from artifact_chunks")
    assert await names(memory) == [object_name(stored.project.org_id, blob["digest"])]
    [block] = msgspec.json.decode(made.input.content)
    artifact_id = decode(IdKind.ARTIFACT, block["artifact_id"])
    row = (await get_artifact(stored.deps, stored.p, path, artifact_id)).row
    assert await read_content(stored.deps, row, 500_000, 1_100_000) == PICTURE[500_000:1_100_000]
    files = await files_of(stored.deps, path.agent_id, [MediaPart(block["artifact_id"])], TARGET)
    assert files[block["artifact_id"]].data is not None


async def test_a_lost_object_is_told_to_the_model_and_ends_nothing(stored: Engine, memory: Any) -> None:
    path = await stored.agent()
    made = await create_input(stored.deps, stored.p, path, [inline(PICTURE)])
    [block] = msgspec.json.decode(made.input.content)
    row = (await get_artifact(stored.deps, stored.p, path, decode(IdKind.ARTIFACT, block["artifact_id"]))).row
    memory.delete(object_name(row.org_id, row.digest))
    with pytest.raises(ContentLost):
        await read_content(stored.deps, row, 0, 10)
    [file] = (await files_of(stored.deps, path.agent_id, [MediaPart(block["artifact_id"])], TARGET)).values()
    assert (file.data, file.note) == (None, "Its content is not available.")


async def test_what_nothing_refers_to_is_deleted_there_too(stored: Engine, memory: Any) -> None:
    await stored.deps.blobs.put(stored.deps.db, stored.project.org_id, b"d" * 32, b"left")
    assert len(await names(memory)) == 1
    assert await stored.deps.blobs.sweep(stored.deps.db, 0) == 1
    assert await names(memory) == []


async def test_trouble_is_a_503_and_leaves_nothing(stored: Engine, tmp_path: Path) -> None:
    class Broken:
        async def put_async(self, *_: Any) -> None:
            raise obstore.exceptions.GenericError("https://bucket.example/secret")

    path = await stored.agent()
    deps = replace(stored.deps, blobs=Blobs(Objects(Broken(), obstore.exceptions.BaseError)))
    with pytest.raises(Unavailable) as caught:
        await create_input(deps, stored.p, path, [inline(PICTURE)])
    assert "secret" not in str(caught.value)
    assert not await stored.fetch("select from artifact_blobs")


async def test_a_process_without_the_store_says_so(stored: Engine) -> None:
    path = await stored.agent()
    made = await create_input(stored.deps, stored.p, path, [inline(PICTURE)])
    [block] = msgspec.json.decode(made.input.content)
    row = (await get_artifact(stored.deps, stored.p, path, decode(IdKind.ARTIFACT, block["artifact_id"]))).row
    with pytest.raises(Unavailable, match="not configured here"):
        await read_content(replace(stored.deps, blobs=Blobs()), row, 0, 10)


async def test_urls(tmp_path: Path) -> None:
    store = open_objects(tmp_path.as_uri())
    await store.put("artifacts/a/b", b"0123456789")
    await store.put("artifacts/a/b", b"0123456789")
    assert await store.get("artifacts/a/b", 2, 5) == b"234"
    await store.delete("artifacts/a/b")
    await store.delete("artifacts/a/b")
    with pytest.raises(ContentLost):
        await store.get("artifacts/a/b", 0, 1)
    for url in ("ftp://x", "nothing", ""):
        with pytest.raises(ConfigurationError, match="OMNARA_ARTIFACT_STORE"):
            open_objects(url)
