"""The file of a long result whose worker died before the result was saved goes away; every other file stays."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

from omnara.db.sqlfiles import split_statements, sql_root
from omnara.domain.content import ResultBlock, TextBlock
from omnara.engine.artifacts_sweep import sweep_loose_files
from omnara.engine.artifacts_tools import AgentFiles
from omnara.engine.inputs import create_input
from omnara.engine.results import submit_result
from omnara.engine.scope import AgentPath
from tests.support.engine_case import LOOK, Engine
from tests.support.pictures import inline, png
from tests.support.waiting import until

LONG = "a long result, line by line\n" * 4000
HOUR_S = 3600.0
MIGRATION = "0011_sums_and_emptying.expand.sql"


async def spilled(engine: Engine, path: AgentPath, text: str = LONG) -> list[Any]:
    """What a worker does with a long result before it saves it."""
    files = AgentFiles(engine.deps.db, engine.deps.blobs)
    blocks: list[ResultBlock] = [TextBlock(text)]
    return await files.spill(path.agent_id, "flood", blocks)


async def swept(engine: Engine, older_than_s: float = HOUR_S) -> tuple[int, int, int]:
    """Files that the sweep decided about; files and contents that are left after it and the sweep of contents."""
    decided = await sweep_loose_files(engine.deps.db, older_than_s)
    await engine.deps.blobs.sweep(engine.deps.db, 0)
    [row] = await engine.fetch("select (select count(*) from artifacts), (select count(*) from artifact_blobs)")
    assert await sweep_loose_files(engine.deps.db, older_than_s) == 0, "nothing is decided twice"
    return decided, row[0], row[1]


async def an_hour_passes(engine: Engine) -> None:
    await engine.fetch("update artifacts set created_at = created_at - interval '61 minutes'")
    await engine.fetch("update artifact_blobs set touched_at = touched_at - interval '61 minutes'")


async def mention(engine: Engine, path: AgentPath, kept: list[Any]) -> None:
    """Save a result that refers to the file, as the worker does; the kind of event does not matter to the sweep."""
    await engine.fetch(
        """update events set payload = jsonb_set(payload::jsonb, '{content_blocks}', $2::text::jsonb)::json
           where agent_id = $1 and sequence = 1""",
        path.agent_id,
        f'[{{"type": "media_ref", "artifact_id": "{kept[1].artifact_id}"}}]',
    )


async def test_a_file_without_its_result_is_removed_after_an_hour(engine: Engine) -> None:
    path = await engine.agent()
    await spilled(engine, path)
    assert await swept(engine) == (0, 1, 1)
    await an_hour_passes(engine)
    assert await swept(engine) == (1, 0, 0)


async def test_a_file_that_the_log_mentions_stays_and_is_not_looked_at_again(engine: Engine) -> None:
    path = await engine.agent()
    await mention(engine, path, await spilled(engine, path))
    await an_hour_passes(engine)
    assert await swept(engine) == (1, 1, 1)
    [row] = await engine.fetch("select loose from artifacts")
    assert row[0] is False


async def test_files_of_messages_and_custom_results_were_never_loose(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [LOOK])
    await create_input(engine.deps, engine.p, path, [inline(png())])
    await submit_result(engine.deps, engine.p, path, call, "succeeded", [TextBlock(LONG)])
    await an_hour_passes(engine)
    assert await swept(engine) == (0, 2, 2)


async def test_while_a_call_runs_its_result_may_still_come(engine: Engine) -> None:
    path = await engine.agent("go")
    await engine.turn(path, [LOOK])
    await spilled(engine, path)
    await an_hour_passes(engine)
    await engine.fetch("update tool_calls set state = 'running'")
    assert await swept(engine) == (0, 1, 1)
    await engine.fetch("update tool_calls set state = 'ready'")
    assert await swept(engine) == (1, 0, 0)


async def test_a_content_that_another_agent_has_stays(engine: Engine) -> None:
    one, other = await engine.agent(), await engine.agent()
    await spilled(engine, one)
    await mention(engine, other, await spilled(engine, other))
    await an_hour_passes(engine)
    assert await swept(engine) == (2, 1, 1)
    [row] = await engine.fetch("select agent_id from artifacts")
    assert row[0] == other.agent_id


async def test_two_files_of_one_content_go_with_it(engine: Engine) -> None:
    path = await engine.agent()
    await spilled(engine, path)
    await spilled(engine, path)
    await an_hour_passes(engine)
    assert await swept(engine) == (2, 0, 0)


async def test_a_content_that_somebody_is_about_to_refer_to_waits(engine: Engine) -> None:
    path = await engine.agent()
    await spilled(engine, path)
    await an_hour_passes(engine)
    [row] = await engine.fetch("select digest from artifact_blobs")
    await engine.deps.blobs.put(engine.deps.db, engine.project.org_id, row[0], LONG.encode())
    assert await swept(engine) == (0, 1, 1)
    await spilled(engine, await engine.agent())
    await an_hour_passes(engine)
    assert await swept(engine) == (2, 0, 0)


async def test_what_was_saved_while_the_sweep_waited_for_the_agent_counts(engine: Engine, database: str) -> None:
    path = await engine.agent()
    kept = await spilled(engine, path)
    await an_hour_passes(engine)
    saver = await asyncpg.connect(database)
    try:
        async with saver.transaction():
            await saver.execute("select from agent_sched where agent_id = $1 for no key update", path.agent_id)
            sweeping = asyncio.create_task(swept(engine))

            async def waits() -> bool:
                rows = await engine.fetch(
                    "select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
                )
                return bool(rows)

            await until(waits, "the sweep waits for the hot row")
            await saver.execute(
                "insert into inputs (agent_id, id, kind, delivery_mode, state, rank, content) "
                "values ($1, gen_random_uuid(), 'content', 'queued', 'canceled', 1, $2::text::json)",
                path.agent_id,
                f'[{{"type": "media_ref", "artifact_id": "{kept[1].artifact_id}"}}]',
            )
        assert await sweeping == (0, 1, 1)
    finally:
        await saver.close()


async def test_several_sweeps_at_once_remove_each_file_once(engine: Engine) -> None:
    for number in range(6):
        await spilled(engine, await engine.agent(), LONG + str(number % 3))
    await an_hour_passes(engine)
    decided = await asyncio.gather(*(sweep_loose_files(engine.deps.db, HOUR_S) for _ in range(4)))
    assert sum(decided) == 6
    assert await swept(engine) == (0, 0, 0)


async def test_files_of_before_the_mark_are_looked_at_once(engine: Engine) -> None:
    """The migration marks those that may be without a result; what is younger than the mark, or no such file, stays."""
    path, other = await engine.agent(), await engine.agent("go")
    await spilled(engine, path)
    await mention(engine, other, await spilled(engine, other, LONG + "mentioned"))
    await create_input(engine.deps, engine.p, other, [inline(png())])
    await engine.fetch("update artifacts set loose = false")
    (mark,) = [
        text
        for text in split_statements((sql_root() / "migrations" / MIGRATION).read_text(encoding="utf-8"))
        if "update artifacts" in text
    ]
    await engine.fetch(mark)
    assert await swept(engine, 0) == (0, 3, 3), "these are younger than the mark, which whoever wrote them kept"
    await engine.fetch(
        """update artifacts
           set created_at = (select applied_at from schema_migrations where version = 9) - interval '1 day'"""
    )
    await engine.fetch(mark)
    await engine.fetch("update artifact_blobs set touched_at = touched_at - interval '61 minutes'")
    assert await swept(engine) == (2, 2, 2)
    assert await swept(engine) == (0, 2, 2)
