"""The benches measure what they say: real saves, counted once they are in Postgres, and no process stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgspec
import psutil
import pytest
from aiohttp import web

from bench import api_load, cluster, commands, overload, steps, streams
from bench.api_load import ApiLoad
from bench.cluster import NotDurable, open_cluster
from bench.flatness import RULE, Minute, judge_flat
from bench.options import Options
from bench.processes import ROOT, ChildFailed, Process, start_child
from bench.raw import RawContestant
from bench.seed import make_ready, seed
from bench.servers import Server
from bench.verify import double_executions, look, wrong_with
from omnara.clock import poll_until
from omnara.vault import generate_ring
from tests.support.postgres import PostgresForTests

AGENTS = 6


async def steps_of(child: Any) -> int:
    """Steps of half a second, or of some more when all stood still meanwhile."""
    for _ in range(10):
        if steps := (await child.ask("run", seconds=0.5))["steps"]:
            return int(steps)
    return 0


async def test_engines_count_what_postgres_holds_and_run_each_step_once(database: str, tmp_path: Path) -> None:
    ring = generate_ring()
    await seed(database, AGENTS, ring, ready=False)
    ledgers = [tmp_path / "ledger-a", tmp_path / "ledger-b"]
    spec = {"dsn": database, "embedded": False, "ring": ring.serialise(), "capacity": AGENTS // 2}
    async with contextlib.AsyncExitStack() as stack:
        children = [
            await stack.enter_async_context(start_child("engine", tmp_path, ledger=str(ledger), **spec))
            for ledger in ledgers
        ]
        await make_ready(database)
        for child in children:
            await child.ask("gathered", agents=AGENTS // 2)
        slices = await asyncio.gather(*(steps_of(child) for child in children))
        finished = await asyncio.gather(*(child.ask("finish") for child in children))
        counted = await look(database)
    saved = sum(answer["saved"] for answer in finished)
    assert min(slices) > 0
    assert wrong_with("engine", counted, saved) == []
    assert double_executions(ledgers) == (saved, 0)


async def test_the_engine_runs_against_the_scripted_model_over_http(database: str, tmp_path: Path) -> None:
    ring = generate_ring()
    async with start_child("model", tmp_path, script="endless") as model:
        await seed(database, AGENTS, ring, base_url=f"{model.hello['url']}/v1")
        spec = {"dsn": database, "embedded": False, "ring": ring.serialise(), "http": True}
        async with start_child("engine", tmp_path, **spec) as engine:
            await engine.ask("gathered", agents=AGENTS)
            assert await steps_of(engine) > 0
            await model.ask("end")
            finished = await engine.ask("finish")
        assert wrong_with("http", await look(database), finished["saved"]) == []
        assert (await model.ask("finish"))["refused"] == 0


async def test_logs_grow_to_their_length_and_a_step_is_timed_warm_and_cold(database: str, tmp_path: Path) -> None:
    ring = generate_ring()
    seeded = await seed(database, 2, ring)
    short, long = (str(agent) for agent in seeded.agents)
    spec = {"dsn": database, "embedded": False, "ring": ring.serialise(), "agents": [short, long]}
    spec["targets"] = {short: 10, long: 120}
    found = {}
    for name, cache_bytes in (("warm", 2**28), ("cold", 0)):
        settings = {"context_cache_bytes": cache_bytes}
        async with start_child("log", tmp_path, settings=settings, **spec) as child:
            lengths = (await child.ask("grow"))["lengths"]
            found[name] = [await child.ask("step", agent=agent, round=1) for agent in (short, long)]
        if name == "warm":
            assert sorted(lengths) == [10, 120]
    for one in found["warm"] + found["cold"]:
        assert one["total"] >= one["claim"] + one["begin"] + one["model"] > 0
    assert found["warm"][1]["body_bytes"] > 120 * 100 > found["warm"][0]["body_bytes"]
    counted = await look(database)
    assert (counted.succeeded, counted.others, counted.broken) == (10 - 1 + 120 - 1 + 4, {}, [])


async def test_every_token_is_shown_to_its_reader_and_saved(postgres: PostgresForTests) -> None:
    """The whole scenario in small, as `python -m bench streams` runs it."""
    with durable_enough() as patch:
        patch.setattr(streams, "WARM_UP_S", 0.0)
        patch.setattr(streams, "SETTLE_S", 0.1)
        run = await streams.run(Options(database_url=postgres.admin_dsn, streams=((6, 20),), seconds=1.0))
    assert run.wrong == []
    tokens = run.details["6x20"]["tokens"]
    assert tokens["read"] == tokens["written"] == 6 * 20 * 2
    assert 0 < run.figures["lag_ms_p50"] <= run.figures["lag_ms_p99"]
    assert run.figures["cpu_share"] > 0


async def test_minutes_are_watched_one_by_one(postgres: PostgresForTests) -> None:
    with durable_enough():
        run = await steps.run(Options(database_url=postgres.admin_dsn, agents=4, minutes=0.05))
    assert run.wrong == []
    minutes = run.details["minutes"]
    assert [one["number"] for one in minutes] == [1, 2, 3]
    assert all(one["steps"] > 0 and one["rss_bytes"] > 2**20 for one in minutes)
    assert all(one["tables"]["agent_sched"]["indexes"] > 0 for one in minutes)
    assert run.details["rule"] == RULE
    assert run.figures["flat"] in (0, 1)


@pytest.mark.slow
async def test_overload_turns_clients_away_and_loses_nothing(postgres: PostgresForTests) -> None:
    with durable_enough() as patch:
        patch.setattr(overload, "WARM_UP_S", 0.2)
        patch.setattr(api_load, "CROWD_S", 0.5)
        run = await overload.run(Options(database_url=postgres.admin_dsn, slots=2, seconds=1.0))
    assert run.wrong == []
    seen = run.details["overloaded"]
    assert seen["answered"] > 0
    assert seen["messages"] > 0
    assert run.figures["unavailable_503"] == seen["unavailable"] > 0
    assert run.figures["throughput_kept"] > 0
    assert run.figures["read_ms_p50"] <= run.figures["read_ms_p99"]


async def test_an_answer_that_says_not_when_to_come_back_is_wrong() -> None:
    async def refuse(_request: web.Request) -> web.Response:
        return web.Response(status=503)

    site = web.Application()
    site.router.add_get("/agents/x", refuse)
    runner = web.AppRunner(site)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        load = ApiLoad(f"http://127.0.0.1:{runner.addresses[0][1]}", "k", ["x"], ["/agents/x"], burst=2, crowd=0)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
            await load._read(session, "/agents/x", counted=True)
    finally:
        await runner.cleanup()
    assert load.seen.wrong == ["a read was answered with 503"]
    assert (load.seen.unavailable, load.seen.read_ms) == (0, [])


def minute(number: int, **changed: Any) -> Minute:
    values: dict[str, Any] = {"steps": 60_000, "seconds": 60.0, "rss_bytes": 10**8, "oldest_xmin_s": 0.1}
    hot = {"table": changed.pop("hot", 10**6), "indexes": 0, "dead_rows": 9, "dead": 900}
    return Minute(number=number, oldest_xmin_xids=3, tables={"agent_sched": hot}, **values | changed)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"steps": 53_000}, "the rate fell to 0.88"),
        ({"hot": 1_300_000}, "the hot table grew to 1.30"),
        ({"rss_bytes": 120_000_000}, "memory grew to 1.20"),
        ({"oldest_xmin_s": 11.0}, "a snapshot was held for 11.0 s"),
    ],
)
def test_flat_is_a_rule_about_first_and_last(changed: dict[str, Any], reason: str | None) -> None:
    warming_up = minute(1, steps=1_000, rss_bytes=10**7, hot=10**4)
    verdict = judge_flat([warming_up, *(minute(n) for n in range(2, 8)), *(minute(n, **changed) for n in (8, 9, 10))])
    assert verdict.reasons == ([] if reason is None else [reason])
    assert verdict.figures["flat"] == int(reason is None)


def test_too_few_open_files_are_told_before_anything_starts() -> None:
    streams.check_limits(400, hard=1024)
    with pytest.raises(ChildFailed, match=r"2000 streams need 4128 open files .* hard limit is 1024"):
        streams.check_limits(2000, hard=1024)


async def test_a_stream_that_is_lost_fails_the_run(tmp_path: Path) -> None:
    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listener = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(ChildFailed, match="1 were lost"):
            async with start_child("readers", tmp_path, host="127.0.0.1", port=port, key="k", paths=["/"]):
                pass


@contextlib.contextmanager
def durable_enough() -> Iterator[pytest.MonkeyPatch]:
    """Let a whole scenario run on the test's Postgres, which has fsync off: its figures are looked at by nobody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "DURABLE", ())
        yield patch


async def test_the_bare_loop_saves_rows_that_keep_every_invariant(database: str) -> None:
    seeded = await seed(database, AGENTS, generate_ring(), ready=False)
    raw = RawContestant()
    try:
        await raw.start({"dsn": database, "seeded": msgspec.to_builtins(seeded)})
        measured = 0
        for _ in range(10):  # one is enough, unless all stands still
            measured += (await raw.ask("run", {"seconds": 0.5}))["steps"]
            if measured > 2 * AGENTS:
                break
        saved = (await raw.ask("finish", {}))["saved"]
    finally:
        await raw.stop()
    assert measured == saved > 2 * AGENTS
    conn = await asyncpg.connect(database)
    try:
        kinds = dict(await conn.fetch("select kind, count(*) from events group by kind"))
        closed = await conn.fetchval("select count(*) from steps where state = 'succeeded'")
        answered = await conn.fetchval("select count(*) from tool_calls where state = 'completed'")
        gaps = await conn.fetchval(
            "select count(*) from (select max(sequence) - min(sequence) + 1 - count(*) as missing from events "
            "group by agent_id) found where missing <> 0"
        )
    finally:
        await conn.close()
    assert closed == saved
    assert kinds["model_output"] + kinds["tool_result"] == saved
    assert answered == kinds["tool_result"]
    assert gaps == 0


async def test_the_bare_loop_saves_the_bytes_of_the_engine(postgres: PostgresForTests, tmp_path: Path) -> None:
    ring = generate_ring()
    async with postgres.fresh() as engines, postgres.fresh() as bare:
        await seed(engines, 1, ring)
        async with start_child("engine", tmp_path, dsn=engines, embedded=False, ring=ring.serialise()) as engine:
            await engine.ask("gathered", agents=1)
            await engine.ask("run", seconds=0.2)
            await engine.ask("finish")
        seeded = await seed(bare, 1, ring, ready=False)
        raw = RawContestant()
        await raw.start({"dsn": bare, "seeded": msgspec.to_builtins(seeded)})
        await raw.ask("run", {"seconds": 0.2})
        await raw.stop()
        sizes = [await _payload_sizes(dsn) for dsn in (engines, bare)]
    assert sizes[0] == sizes[1]
    assert set(sizes[0]) == {"model_output", "tool_result"}


async def _payload_sizes(dsn: str) -> dict[str, int]:
    conn = await asyncpg.connect(dsn)
    try:
        rows = await conn.fetch(
            "select distinct on (kind) kind, octet_length(payload::text) from events "
            "where kind in ('model_output', 'tool_result') order by kind, sequence"
        )
    finally:
        await conn.close()
    return dict(rows)


async def test_a_server_that_can_lose_commits_is_refused(postgres: PostgresForTests) -> None:
    conn = await asyncpg.connect(postgres.admin_dsn)
    durable = await conn.fetchval("select current_setting('fsync')")
    await conn.close()
    if durable == "on":
        async with open_cluster(postgres.admin_dsn) as found:
            assert found.facts["fsync"] == "on"
        return
    with pytest.raises(NotDurable, match="fsync"):
        async with open_cluster(postgres.admin_dsn):
            pass


async def test_a_child_that_fails_says_why_and_is_gone(tmp_path: Path) -> None:
    async with start_child("model", tmp_path) as child:
        pid = child.pid
        with pytest.raises(ChildFailed, match="unknown request"):
            await child.ask("dance")
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


async def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from bench.processes import Process\n"
        "async def main():\n"
        "    child = Process(['sleep', '600'], {}, pathlib.Path(sys.argv[1]) / 'log')\n"
        "    await child.start()\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()

    async def gone() -> bool:
        return not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE

    assert await poll_until(gone, within_s=20.0)


async def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    server = Server("broken", {"OMNARA_ROLES": "nothing"}, tmp_path)
    with pytest.raises(ChildFailed, match="OMNARA_ROLES"):
        await server.start()


async def test_stop_ends_a_process_by_signal(tmp_path: Path) -> None:
    process = Process(["sleep", "600"], {}, tmp_path / "log")
    await process.start()
    assert await process.stop() == -signal.SIGTERM
    assert not process.running


@pytest.mark.slow
async def test_commands_are_timed_on_machines_that_go_away_afterwards(postgres: PostgresForTests) -> None:
    """The whole scenario in small. What a server leaves open on machines that are gone would be told as wrong."""
    with durable_enough() as patch:
        patch.setattr(commands, "IDLE", {"local": 1, "daemon": 1, "docker": 1})
        patch.setattr(commands, "AGENTS", 2)
        patch.setattr(commands, "WARM_UP", 1)
        patch.setattr(commands, "SETTLE_S", 0.2)
        patch.setattr(commands, "docker_problem", no_engine)
        run = await commands.run(Options(database_url=postgres.admin_dsn, rounds=2, seconds=0.5))
    assert run.wrong == []
    assert run.skipped["docker"] == "none in this test"
    assert run.figures["docker_ms_p50"] is None
    for kind in {"local", "daemon"} - run.skipped.keys():
        assert run.figures[f"{kind}_ms_p50"] > 0
        stages = run.details["stages_ms"][kind]
        assert all(stages[name]["p50"] > 0 for name in ("call", "queue", "grant", "run", "save"))


async def no_engine() -> str:
    """A reason not to make containers."""
    return "none in this test"
