"""What runs out of time: machines out of reach, commands that nobody takes. Every sweep against what it races with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omnara.db import process_ends
from omnara.engine.machines import runtimes
from omnara.engine.machines.runtimes import RuntimeEnded
from omnara.engine.machines.sweeps import Sweeper, Swept, sweep
from tests.support.engine_case import Engine
from tests.support.machine_floor import Floor, applied, claim, finished, seen

SHORT = {"machine_grace_s": 30.0, "machine_accept_limit_s": 300.0}


@pytest.fixture(autouse=True)
def _old_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of the tests is younger than the grace; its start is not what is tested here, but in one test."""
    queries = process_ends._SQL
    text = queries["unreachable"].replace("pg_postmaster_start_time()", "'-infinity'::timestamptz")
    monkeypatch.setattr(process_ends, "_SQL", {name: queries[name] for name in queries} | {"unreachable": text})


async def test_a_short_cut_is_invisible(engine: Engine) -> None:
    floor = await Floor.make(engine, **SHORT)
    queued, granted = await floor.jobs(2)
    await floor.accept(granted)
    await floor.lose(20)
    assert await sweep(floor.deps) == Swept()
    assert await floor.state(queued) == ("queued", "")
    await floor.register([claim(granted)])
    await floor.accept(queued)
    assert (await floor.finished(granted)).ack_status == "committed"
    assert (await floor.finished(queued)).ack_status == "committed"


async def test_a_machine_to_which_no_daemon_came_is_not_waited_for(engine: Engine) -> None:
    floor = await Floor.make(engine, register=False, **SHORT)
    job = await floor.job()
    await floor.sql.fetch("update machines set activated_at = now() - interval '31 s' where id = $1", floor.machine.id)
    await floor.age(29)
    assert (await sweep(floor.deps)).unreachable == 0
    await floor.age(2)
    assert (await sweep(floor.deps)).unreachable == 1
    assert await floor.state(job) == ("failed", "machine_unreachable")


async def test_a_long_cut_lets_nobody_wait_and_what_runs_runs_on(engine: Engine) -> None:
    floor = await Floor.make(engine, **SHORT)
    running = await floor.running()
    write, write_call = await floor.act(running, "write", {"data": "x"})
    await floor.accept_action(running, write)
    reading = await floor.running()
    read, read_call = await floor.act(reading, "read", {"max_bytes": 9})
    await floor.accept_action(reading, read)
    waiting = await floor.running()
    queued_action, queued_call = await floor.act(waiting, "interrupt")
    queued, granted = await floor.jobs(2)
    await floor.accept(granted)
    await floor.lose(31)
    found = await sweep(floor.deps)
    assert (found.unreachable, found.overdue) == (5, 0)
    assert await floor.state(queued) == ("failed", "machine_unreachable")
    assert await floor.state(granted) == ("starting", ""), "the row stays live"
    assert await floor.action(write) == ("unknown", "machine_unreachable")
    assert await floor.action(read) == ("failed", "machine_unreachable")
    assert await floor.action(queued_action) == ("failed", "machine_unreachable")
    for path, call, state in (
        (queued.path, queued.call_id, "failed"),
        (granted.path, granted.call_id, "starting"),
        (running.path, write_call, "running"),
        (reading.path, read_call, "running"),
        (waiting.path, queued_call, "running"),
    ):
        outcome, value = await floor.result(path, call) or ("", {})
        assert (outcome, value["error_code"], value["retryable"], value["state"]) == (
            "failed", "machine_unreachable", True, state,
        )  # fmt: skip
        assert (await engine.assert_coherent(path))["ready_at"] is not None
    assert (await sweep(floor.deps)).unreachable == 0, "once"
    await floor.register([claim(job) for job in (granted, running, reading, waiting)])
    assert (await floor.finished(granted, "late")).ack_status == "cleanup_only", "the first result stands"
    assert (await floor.told(granted) or ("", {}))[1]["error_code"] == "machine_unreachable"
    assert (await floor.report(applied(running, write))).ack_status == "cleanup_only"
    assert (await floor.report(applied(reading, read, seen("", 3)))).ack_status == "cleanup_only"


@pytest.mark.parametrize("how", ["channel", "lease", "ended"])
async def test_offline_begins_with_the_first_sign(engine: Engine, how: str) -> None:
    floor = await Floor.make(engine, **SHORT)
    job = await floor.job()
    await floor.age(100)
    if how == "channel":
        await floor.lose(0)
    elif how == "ended":
        await runtimes.end(floor.deps, floor.machine.id, floor.runtime_id)
    column = {"channel": "disconnected_at", "lease": "lease_expires_at", "ended": "ended_at"}[how]
    for ago, state in ((25, "queued"), (35, "failed")):
        await floor.sql.fetch(f"update machine_runtimes set {column} = now() - make_interval(secs => $1)", float(ago))
        await sweep(floor.deps)
        assert (await floor.state(job))[0] == state


async def test_work_that_is_newer_than_the_cut_has_its_own_grace(engine: Engine) -> None:
    floor = await Floor.make(engine, **SHORT)
    await floor.lose(500)
    job = await floor.job()
    assert (await sweep(floor.deps)).unreachable == 0
    await floor.age(31)
    assert (await sweep(floor.deps)).unreachable == 1
    assert await floor.state(job) == ("failed", "machine_unreachable")


async def test_a_machine_that_is_being_woken_has_time(engine: Engine) -> None:
    floor = await Floor.make(engine, **SHORT)
    await floor.sql.fetch("update machines set sandbox_url = 'x'")
    await runtimes.sleep(floor.deps, floor.machine.id, floor.runtime_id)
    job = await floor.job()
    await floor.age(60)
    await floor.sql.fetch("update machine_runtimes set ended_at = now() - interval '60 seconds'")
    await floor.sql.fetch("update machines set wake_until = now() + interval '60 seconds'")
    assert (await sweep(floor.deps)).unreachable == 0
    await floor.sql.fetch("update machines set wake_until = now() - interval '1 second'")
    assert (await sweep(floor.deps)).unreachable == 1
    assert await floor.state(job) == ("failed", "machine_unreachable")


@pytest.mark.parametrize("connected", [True, False])
async def test_what_nobody_takes_fails_in_the_end(engine: Engine, connected: bool) -> None:
    floor = await Floor.make(engine, **(SHORT | {"machine_grace_s": 3600.0}))
    job, other = await floor.jobs(2)
    await floor.accept(other)
    if not connected:
        await floor.lose(0)
    await floor.age(299)
    assert (await sweep(floor.deps)).overdue == 0
    await floor.age(2)
    assert (await sweep(floor.deps)).overdue == 1
    assert await floor.state(job) == ("failed", "process_not_accepted")
    outcome, value = await floor.told(job) or ("", {})
    assert (outcome, value["error_code"], value["retryable"]) == ("failed", "process_not_accepted", True)
    assert await floor.state(other) == ("starting", "")
    assert not await floor.accept(job)
    await floor.finished(other)


async def test_a_machine_that_is_there_and_says_nothing_is_not_waited_for_for_ever(engine: Engine) -> None:
    floor = await Floor.make(engine, **SHORT)
    job = await floor.job()
    await floor.accept(job)
    writing = await floor.running()
    write, write_call = await floor.act(writing, "write", {"data": "x"})
    reading = await floor.running()
    read, read_call = await floor.act(reading, "read", {"max_bytes": 9})
    await floor.accept_action(writing, write)
    await floor.accept_action(reading, read)

    async def silent_for(seconds: float) -> int:
        await floor.sql.fetch("update processes set granted_at = now() - make_interval(secs => $1)", seconds)
        await floor.sql.fetch("update process_actions set accepted_at = now() - make_interval(secs => $1)", seconds)
        return (await sweep(floor.deps)).silent

    assert await silent_for(299) == 0
    assert await floor.told(job) is None
    assert await silent_for(301) == 3
    assert await silent_for(600) == 0, "once"
    assert await floor.state(job) == ("starting", ""), "it may well run"
    assert await floor.action(write) == ("unknown", "process_not_reported")
    assert await floor.action(read) == ("failed", "process_not_reported")
    for path, call in ((job.path, job.call_id), (writing.path, write_call), (reading.path, read_call)):
        outcome, value = await floor.result(path, call) or ("", {})
        assert (outcome, value["error_code"]) == ("failed", "process_not_reported")
        assert (await engine.assert_coherent(path))["ready_at"] is not None
    assert (await floor.finished(job, "late")).ack_status == "cleanup_only", "the first result stands"
    assert await floor.state(job) == ("exited", "")


async def test_a_machine_that_is_not_there_yet_is_waited_for(engine: Engine) -> None:
    floor = await Floor.make(engine, register=False, **SHORT)
    job = await floor.job()
    await floor.age(200)
    assert await sweep(floor.deps) == Swept(), "no runtime was ever lost"
    await floor.age(200)
    assert (await sweep(floor.deps)).overdue == 1
    assert await floor.state(job) == ("failed", "process_not_accepted")


async def test_a_grant_and_the_end_of_patience_race_for_one_row(engine: Engine) -> None:
    floor = await Floor.make(engine, **SHORT)
    jobs = [job for _ in range(3) for job in await floor.jobs(4)]
    await floor.age(301)
    results = await asyncio.gather(*(floor.accept(job) for job in jobs[:6]), sweep(floor.deps), sweep(floor.deps))
    results += await asyncio.gather(*(floor.accept(job) for job in jobs[6:]), sweep(floor.deps), sweep(floor.deps))
    for job, granted in zip(jobs, results[:6] + results[8:14], strict=True):
        state = await floor.state(job)
        assert state == (("starting", "") if granted else ("failed", "process_not_accepted"))
        if granted:
            assert await floor.told(job) is None
            assert (await floor.finished(job)).ack_status == "committed"
        else:
            assert (await floor.told(job) or ("",))[0] == "failed"


async def test_a_sweep_and_a_report_give_one_result(engine: Engine) -> None:
    floor = await Floor.make(engine, **SHORT)
    jobs = [await floor.job() for _ in range(6)]
    for job in jobs:
        await floor.accept(job)
    await floor.lose(31)
    acks: list[Any] = await asyncio.gather(
        *(floor.finished(job) for job in jobs), sweep(floor.deps), sweep(floor.deps), sweep(floor.deps)
    )
    for job, ack in zip(jobs, acks[:6], strict=True):
        assert await floor.state(job) == ("exited", "")
        outcome, _ = await floor.told(job) or ("", {})
        assert (ack.ack_status, outcome) in (("committed", "succeeded"), ("cleanup_only", "failed"))


async def test_a_sweep_waits_for_nobody(engine: Engine) -> None:
    floor = await Floor.make(engine, **SHORT)
    held, free = await floor.job(), await floor.job()
    locked = await floor.job()
    await floor.age(301)
    async with floor.deps.db.transaction() as connection:
        await connection.execute("select from agent_sched where agent_id = $1 for update", held.path.agent_id)
        await connection.execute("select from processes where id = $1 for update", locked.id)
        async with asyncio.timeout(20):
            # One task may hold one connection of the pool.
            assert (await asyncio.create_task(sweep(floor.deps))).overdue == 1
    assert await floor.state(free) == ("failed", "process_not_accepted")
    assert await floor.state(held) == ("queued", "")
    assert (await sweep(floor.deps)).overdue == 2


async def test_two_hundred_commands_end_in_few_statements(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    floor = await Floor.make(engine, **SHORT)
    jobs = [job for _ in range(10) for job in await floor.jobs(20)]
    await floor.age(301)
    seen_by: list[str] = []
    run = floor.deps.db.run

    def note(record: Any) -> None:
        seen_by.append(record.query)

    async def counted(work: Any) -> Any:
        async def watched(connection: Any) -> Any:
            with connection.query_logger(note):
                return await work(connection)

        return await run(watched)

    monkeypatch.setattr(floor.deps.db, "run", counted)
    assert (await sweep(floor.deps)).overdue == 200
    assert len(seen_by) < 60, "per agent, not per command"
    for job in jobs[::37]:
        assert await floor.state(job) == ("failed", "process_not_accepted")
    for path in {job.path.agent_id: job.path for job in jobs}.values():
        assert (await engine.assert_coherent(path))["open_calls"] == 0


async def test_silent_runtimes_end_and_come_back(engine: Engine) -> None:
    floor = await Floor.make(engine, **SHORT)
    await floor.sql.fetch("update machine_runtimes set lease_expires_at = now() - interval '11 seconds'")
    assert (await sweep(floor.deps)).runtimes == 0, "a late beat still counts"
    await floor.sql.fetch("update machine_runtimes set lease_expires_at = now() - interval '13 seconds'")
    assert (await sweep(floor.deps)).runtimes == 1
    ended = await runtimes.beat(floor.deps, floor.runtime_id, floor.session_id, floor.instance)
    assert ended == RuntimeEnded("daemon_lease_expired")
    first = floor.runtime_id
    assert (await floor.register()).runtime.id == first


async def test_an_outage_of_ours_is_not_the_machines(engine: Engine) -> None:
    floor = await Floor.make(engine, **SHORT)
    clock = [100.0]
    sweeper = Sweeper(floor.deps, clock=lambda: clock[0])
    job = await floor.job()
    await floor.lose(60)
    for gap in (0, 60):
        clock[0] += gap
        assert await sweeper.sweep() == Swept(), "nobody could be heard before"
        for _ in range(3):
            clock[0] += 9
            assert await sweeper.sweep() == Swept()
    clock[0] += 9
    assert (await sweeper.sweep()).unreachable == 1
    assert await floor.state(job) == ("failed", "machine_unreachable")


async def test_after_a_start_of_the_database_machines_have_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = dict(process_ends._SQL)
    queries["unreachable"] = queries["unreachable"].replace("'-infinity'::timestamptz", "now() - interval '5 seconds'")
    monkeypatch.setattr(process_ends, "_SQL", queries)
    floor = await Floor.make(engine, **SHORT)
    job = await floor.job()
    await floor.lose(200)
    assert (await sweep(floor.deps)).unreachable == 0
    assert await floor.state(job) == ("queued", "")
    assert (await floor.report(finished(job.id))).ack_status == "permanent_reject"
