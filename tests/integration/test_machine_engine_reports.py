"""Handing over, granting and reporting: every acknowledgement, and exactly one result for each call."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from omnara.engine.machines import offers, reports, runtimes
from omnara.engine.machines.runtimes import RuntimeEnded
from omnara.engine.scope import AgentPath
from omnara.errors import RuntimeUnregistered
from omnara.ids import IdKind, encode, new_uuid
from omnara.machines.events import (
    STORAGE_EXHAUSTED,
    STORAGE_EXHAUSTED_MESSAGE,
    FinishedResult,
    ProcessFinished,
    StartedResult,
)
from omnara.machines.frames import Report
from tests.support.engine_case import Engine
from tests.support.machine_floor import Floor, applied, at, failed, prc, seen, started, unknown


async def test_a_command_from_its_offer_to_its_result(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job(command="make", env='{"CI":"1"}')
    pending = await floor.pending()
    assert [(o.process_id, o.command, dict(o.env), o.wait_ms) for o in pending.processes] == [
        (prc(job.id), "make", {"CI": "1"}, 10_000)
    ]
    assert await floor.accept(job)
    assert not await floor.accept(job), "granted once"
    assert (await floor.pending()).processes == []
    ack = await floor.finished(job, "ok\n", exit_code=0)
    assert ack.ack_status == "committed"
    assert await floor.told(job) == (
        "succeeded",
        {
            "process_id": prc(job.id),
            "state": "exited",
            "output": "ok\n",
            "cursor": 0,
            "next_cursor": 3,
            "truncated": False,
            "done": True,
            "exit_code": 0,
            "error": "",
        },
    )
    assert await floor.state(job) == ("exited", "")
    assert (await floor.row(job))["default_cursor"] == 3
    hot = await engine.assert_coherent(job.path)
    assert hot["ready_at"] is not None
    assert ("ready", job.path.agent_id) in engine.hints


async def test_the_agent_is_woken_by_the_last_of_its_calls(engine: Engine) -> None:
    floor = await Floor.make(engine)
    first, second = await floor.jobs(2)
    for job in (first, second):
        assert await floor.accept(job)
    await floor.finished(first)
    assert (await engine.hot(first.path))["ready_at"] is None
    await floor.finished(second)
    assert (await engine.assert_coherent(first.path))["ready_at"] is not None


async def test_a_long_command_is_told_twice_but_has_one_result(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    await floor.accept(job)
    assert (await floor.started(job, "up\n")).ack_status == "committed"
    assert (await floor.started(job, "up\n")).ack_status == "committed", "a repetition"
    outcome, value = await floor.told(job) or ("", {})
    assert (outcome, value["state"], value["done"], value["exit_code"]) == ("succeeded", "running", False, None)
    late = await floor.finished(job, "up\ndown\n", state="failed", exit_code=2, state_reason_code="nonzero_exit")
    assert late.ack_status == "cleanup_only"
    assert await floor.state(job) == ("failed", "nonzero_exit")
    assert (await floor.row(job))["default_cursor"] == 3, "what was not told must still be read"
    again = await floor.finished(job, "up\ndown\n", state="failed", exit_code=2, state_reason_code="nonzero_exit")
    assert again.ack_status == "cleanup_only"
    assert (await floor.started(job)).ack_status == "cleanup_only"
    assert (await floor.told(job) or ("", {}))[1] == value


async def test_a_repeated_end_is_known_by_its_content(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    await floor.accept(job)
    end: dict[str, Any] = {"state": "failed", "exit_code": 2, "state_reason_code": "nonzero_exit"}
    assert (await floor.finished(job, "x", **end)).ack_status == "committed"
    # Times are compared as they are stored: to the microsecond.
    same = await floor.finished(job, "x", **end, ended_at="2026-08-01T10:00:01.100000123Z")
    assert same.ack_status == "committed"
    other = await floor.finished(job, "x", **(end | {"exit_code": 3}))
    assert (other.ack_status, other.error_code) == ("permanent_reject", "idempotency_conflict")
    assert (await floor.row(job))["exit_code"] == 2
    assert (await floor.told(job) or ("",))[0] == "succeeded", "a command that ran was run, whatever its exit code"


async def test_a_command_that_could_not_start_failed(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    await floor.accept(job)
    ack = await floor.finished(
        job, state="failed", exit_code=None, started_at=None, ended_at=None,
        state_reason_code="start_failed", state_reason_message="no such directory: /nowhere",
    )  # fmt: skip
    assert ack.ack_status == "committed"
    outcome, value = await floor.told(job) or ("", {})
    assert (outcome, value["error"], value["message"]) == ("failed", "start_failed", "no such directory: /nowhere")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"observed_at": at(2)}, "observed_at"),
        ({"ended_at": None}, "ended_at"),
        ({"state": "killed", "exit_code": None, "ended_at": None}, "ended_at"),
        ({"state": "failed", "exit_code": 1, "ended_at": None, "state_reason_code": "x"}, "ended_at"),
        ({"state": "failed", "exit_code": 1}, "reason"),
        ({"state": "unknown", "exit_code": None}, "reason"),
        ({"exit_code": None}, "exit code"),
        ({"state": "unknown", "exit_code": 1, "state_reason_code": "x"}, "exit code"),
        ({"ended_at": at(-1)}, "before"),
        ({"exit_code": 2**40}, "exit code"),
        ({"result": FinishedResult(output="x" * 65_537, next_cursor=65_537)}, "bytes"),
        ({"result": FinishedResult(cursor=3, next_cursor=2)}, "next_cursor"),
        ({"started_at": at(-5)}, "started_at"),
    ],
)
async def test_an_end_that_cannot_be_is_rejected_for_good(engine: Engine, changes: dict[str, Any], text: str) -> None:
    floor = await Floor.make(engine)
    job = await floor.running()
    ack = await floor.finished(job, **changes)
    assert ack.ack_status == "permanent_reject"
    assert ack.error_code in ("validation_failed", "idempotency_conflict")
    assert text in ack.error
    assert await floor.state(job) == ("running", "")
    await floor.finished(job)


async def test_an_exit_code_without_a_sign_has_the_same_32_bits(engine: Engine) -> None:
    """Windows tells crashes so; refused, the command would never end."""
    floor = await Floor.make(engine)
    job = await floor.running()
    end: dict[str, Any] = {"state": "failed", "exit_code": 0xC0000005, "state_reason_code": "nonzero_exit"}
    assert [(await floor.finished(job, **end)).ack_status for _ in range(2)] == ["cleanup_only", "cleanup_only"]
    assert (await floor.row(job))["exit_code"] == -1_073_741_819


async def test_a_start_that_cannot_be_is_rejected_for_good(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    assert (await floor.started(job)).error_code == "validation_failed", "not granted"
    assert (await floor.finished(job)).error_code == "validation_failed", "not granted"
    await floor.accept(job)
    for changes in (
        {"started_at": None},
        {"observed_at": None},
        {"started_at": at(2), "observed_at": at(1)},
        {"result": None},
        {"result": StartedResult(process_id=prc(new_uuid()))},
        {"result": StartedResult(output="x" * 70_000, next_cursor=70_000)},
    ):
        ack = await floor.started(job, **changes)
        assert (ack.ack_status, ack.error_code) == ("permanent_reject", "validation_failed"), changes
    assert (await floor.started(job)).ack_status == "committed"
    other = await floor.started(job, started_at=at(0.2))
    assert (other.ack_status, other.error_code) == ("permanent_reject", "idempotency_conflict")


async def test_a_full_disk_ends_what_was_never_granted(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    bare: dict[str, Any] = {"state": "failed", "state_reason_code": STORAGE_EXHAUSTED}
    wrong = await floor.report(ProcessFinished(process_id=prc(job.id), **bare, state_reason_message="full"))
    assert wrong.ack_status == "permanent_reject"
    event = ProcessFinished(process_id=prc(job.id), **bare, state_reason_message=STORAGE_EXHAUSTED_MESSAGE)
    assert (await floor.report(event)).ack_status == "committed"
    assert (await floor.report(event)).ack_status == "committed", "a repetition"
    outcome, value = await floor.told(job) or ("", {})
    assert (outcome, value["error"]) == ("failed", STORAGE_EXHAUSTED)
    assert not await floor.accept(job)


async def test_only_the_machines_own_runtime_reports(engine: Engine) -> None:
    floor = await Floor.make(engine)
    stranger = await Floor.make(engine)
    job = await floor.job()
    await floor.accept(job)
    ack = await stranger.finished(job)
    assert (ack.ack_status, ack.error_code) == ("permanent_reject", "validation_failed")
    assert not await stranger.accept(job)
    assert (await stranger.pending()).processes == []
    for wrong in ("prc_x", encode(IdKind.PROCESS_ACTION, job.id), prc(new_uuid())):
        event = ProcessFinished(process_id=wrong, state="exited", exit_code=0, ended_at=at(1))
        assert (await floor.report(event)).ack_status == "permanent_reject"
    old = floor.runtime_id
    await floor.register([], instance=new_uuid())
    assert await floor.state(job) == ("unknown", "local_process_missing_after_daemon_reconnect")
    late = await reports.apply(floor.deps, old, Report(report_id="r", event=started(job.id)))
    assert (late.ack_status, late.error_code) == ("transient_error", "invalid_runtime")


async def test_reports_count_after_the_lease_ran_out(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    await floor.accept(job)
    await floor.sql.fetch(
        "update machine_runtimes set state = 'ended', ended_at = now(), session_id = null,"
        " state_reason_code = 'daemon_lease_expired'"
    )
    assert (await floor.finished(job)).ack_status == "committed"
    await floor.sql.fetch("update machine_runtimes set state_reason_code = 'daemon_ended'")
    assert (await floor.finished(job)).error_code == "invalid_runtime"


async def test_output_is_fit_for_the_log(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    await floor.accept(job)
    assert (await floor.finished(job, "a\0b �")).ack_status == "committed"
    assert (await floor.told(job) or ("", {}))[1]["output"] == "a�b �"


async def test_channels_fence_their_statements(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    old = floor.session_id
    await floor.connect()
    new, floor.session_id = floor.session_id, old
    assert not await floor.accept(job)
    assert await offers.pending(floor.deps, floor.runtime_id, old, set()) == RuntimeEnded("")
    assert await runtimes.beat(floor.deps, floor.runtime_id, old, floor.instance) == RuntimeEnded("")
    await runtimes.close_channel(floor.deps, floor.runtime_id, old)
    floor.session_id = new
    assert await runtimes.beat(floor.deps, floor.runtime_id, new, floor.instance) == 10_000
    assert await runtimes.beat(floor.deps, floor.runtime_id, new, new_uuid()) == RuntimeEnded("invalid_runtime", True)
    assert await floor.accept(job)
    with pytest.raises(RuntimeUnregistered):
        await runtimes.open_channel(floor.deps, new_uuid(), floor.runtime_id, new_uuid(), new_uuid())
    await floor.finished(job)


async def test_a_lease_that_ran_out_is_revived_by_a_beat(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    await floor.sql.fetch("update machine_runtimes set lease_expires_at = now() - interval '1 second'")
    assert not await floor.accept(job)
    assert (await floor.pending()).processes == []
    assert await runtimes.beat(floor.deps, floor.runtime_id, floor.session_id, floor.instance) == 10_000
    assert len((await floor.pending()).processes) == 1
    assert await floor.accept(job)
    await floor.finished(job)


async def test_offers_are_bounded_and_in_order(engine: Engine) -> None:
    floor = await Floor.make(engine)
    jobs = await floor.jobs(6)
    order = [prc(job.id) for job in jobs]
    assert [o.process_id for o in (await floor.pending()).processes] == order[:4]
    assert [o.process_id for o in (await floor.pending({job.id for job in jobs[:4]})).processes] == order[4:]
    await floor.sql.fetch("update machine_grants set deleted_at = now()")
    assert (await floor.pending()).processes == []
    assert not await floor.accept(jobs[0])
    await floor.sql.fetch("update machine_grants set deleted_at = null")
    await floor.sql.fetch("update agent_machine_bindings set state = 'released'")
    assert (await floor.pending()).processes == []
    assert not await floor.accept(jobs[0])
    await floor.sql.fetch("update agent_machine_bindings set state = 'attached'")
    for job in jobs:
        assert await floor.accept(job)
        await floor.finished(job)


async def test_actions_are_handed_over_one_at_a_time(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    await floor.accept(job)
    first, _ = await floor.act(job, "write", {"data": "a"}, waits=False)
    second, _ = await floor.act(job, "read", waits=False)
    assert (await floor.pending()).actions == [], "not while it starts"
    await floor.started(job)
    offered = (await floor.pending()).actions
    assert [(a.seq, a.action_kind, bytes(a.payload)) for a in offered] == [(1, "write", b'{"data":"a"}')]
    assert await floor.accept_action(job, second) is None, "not its turn"
    assert await floor.accept_action(job, first) is not None
    assert await floor.accept_action(job, first) is None
    assert (await floor.pending()).actions == []
    assert (await floor.report(applied(job, first))).ack_status == "committed"
    granted = await floor.accept_action(job, second)
    assert granted is not None
    assert (granted.process_state, granted.default_output_cursor) == ("running", 3)
    assert (await floor.report(applied(job, second, seen("", 3)))).ack_status == "committed"
    await floor.finished(job)


async def test_reads_move_the_cursor_only_with_their_result(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.running()
    action, call = await floor.act(job, "read", {"max_bytes": 100})
    await floor.accept_action(job, action)
    assert (await floor.report(applied(job, action, seen("more", 3)))).ack_status == "committed"
    outcome, value = await floor.result(job.path, call) or ("", {})
    assert (outcome, value["output"], value["cursor"], value["next_cursor"], value["state"]) == (
        "succeeded", "more", 3, 7, "running",
    )  # fmt: skip
    assert (await floor.row(job))["default_cursor"] == 7
    assert (await floor.report(applied(job, action, seen("more", 3)))).ack_status == "committed", "a repetition"
    explicit, call = await floor.act(job, "read", {"cursor": 0, "max_bytes": 100})
    await floor.accept_action(job, explicit)
    assert (await floor.report(applied(job, explicit, seen("up", 0)))).ack_status == "committed"
    assert (await floor.row(job))["default_cursor"] == 7
    await floor.finished(job, "")
    after, call = await floor.act(job, "read", {"max_bytes": 100})
    assert [a.seq for a in (await floor.pending()).actions] == [3], "reads go on after the end"
    await floor.accept_action(job, after)
    await floor.report(applied(job, after, seen("", 7)))
    assert (await floor.result(job.path, call) or ("", {}))[1]["done"] is True


@pytest.mark.parametrize(
    "observed",
    [
        seen("x", 2),
        seen("x", 5),
        seen("x" * 11, 3),
        seen("xyz", 3, next_cursor=4),
        msgspec.structs.replace(seen("x", 3), process_id="prc_aaaaaaaaaaaaaaaaaaaaaaaaba"),
    ],
)
async def test_a_read_that_cannot_be_fails(engine: Engine, observed: Any) -> None:
    floor = await Floor.make(engine)
    job = await floor.running()
    action, call = await floor.act(job, "read", {"max_bytes": 10})
    await floor.accept_action(job, action)
    assert (await floor.report(applied(job, action, observed))).ack_status == "cleanup_only"
    assert await floor.action(action) == ("failed", "invalid_read_observation")
    assert (await floor.result(job.path, call) or ("", {}))[1]["error_code"] == "invalid_read_observation"
    assert (await floor.row(job))["default_cursor"] == 3
    await floor.finished(job)


async def test_a_read_past_lost_bytes_says_so(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.running()
    action, call = await floor.act(job, "read", {"max_bytes": 10})
    await floor.accept_action(job, action)
    assert (await floor.report(applied(job, action, seen("x", 50, truncated=True)))).ack_status == "committed"
    assert (await floor.result(job.path, call) or ("", {}))[1]["truncated"] is True
    await floor.finished(job)


async def test_what_came_of_actions(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.running()
    write, call = await floor.act(job, "write", {"data": "x"})
    assert (await floor.report(applied(job, write))).error_code == "validation_failed", "not granted"
    await floor.accept_action(job, write)
    assert (await floor.report(unknown(job, write, ""))).error_code == "validation_failed", "no reason"
    assert (await floor.report(unknown(job, write, "stdin_write_unknown"))).ack_status == "committed"
    assert (await floor.report(unknown(job, write, "stdin_write_unknown"))).ack_status == "committed"
    outcome, value = await floor.result(job.path, call) or ("", {})
    assert (outcome, value["error_code"], value["state"]) == ("failed", "stdin_write_unknown", "running")
    interrupt, call = await floor.act(job, "interrupt")
    await floor.accept_action(job, interrupt)
    assert (await floor.report(applied(job, interrupt))).ack_status == "committed"
    assert await floor.result(job.path, call) == (
        "succeeded",
        {"process_id": prc(job.id), "state": "running", "action": "interrupt", "applied": True},
    )
    other = await floor.report(failed(job, interrupt, "gone"))
    assert (other.ack_status, other.error_code) == ("permanent_reject", "idempotency_conflict")
    assert (await floor.report(applied(job, new_uuid()))).error_code == "validation_failed"
    await floor.finished(job)


async def test_the_end_of_a_process_ends_what_waits_for_it(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.running()
    write, write_call = await floor.act(job, "write", {"data": "x"})
    read, _ = await floor.act(job, "read", waits=False)
    stop, _ = await floor.act(job, "terminate", waits=False)
    assert (await floor.finished(job)).ack_status == "cleanup_only"
    assert await floor.action(write) == ("failed", "process_terminal")
    assert await floor.action(stop) == ("applied", "already_stopped")
    assert await floor.action(read) == ("queued", "")
    outcome, value = await floor.result(job.path, write_call) or ("", {})
    assert (outcome, value["error_code"], value["state"]) == ("failed", "process_terminal", "exited")
    await floor.accept_action(job, read)
    assert (await floor.report(applied(job, read, seen("", 3)))).ack_status == "committed"


async def test_one_report_many_times_at_once_is_one_result(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    await floor.accept(job)
    acks = await asyncio.gather(*(floor.finished(job, "x") for _ in range(8)))
    assert [ack.ack_status for ack in acks] == ["committed"] * 8
    assert await floor.told(job) is not None


async def test_nobody_but_one_gets_the_grant(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    assert sorted(await asyncio.gather(*(floor.accept(job) for _ in range(8)))) == [False] * 7 + [True]
    await floor.finished(job)


async def test_a_file_on_its_way_keeps_its_bytes_and_completes_nobody(engine: Engine) -> None:
    floor = await Floor.make(engine)
    path: AgentPath = await engine.agent()
    job = await floor.queue(path, None, purpose="download")
    await floor.accept(job)
    assert (await floor.started(job)).ack_status == "committed"
    action, _ = await floor.act(job, "read", {"cursor": 0, "max_bytes": 65536}, waits=False)
    await floor.accept_action(job, action)
    assert (await floor.report(applied(job, action, seen("AAEC", 0)))).ack_status == "committed"
    rows = await floor.sql.fetch("select result from process_actions where id = $1", action)
    assert msgspec.json.decode(rows[0]["result"])["output"] == "AAEC"
    assert (await floor.finished(job)).ack_status == "committed"


async def test_the_first_command_in_a_new_place_tells_of_it(engine: Engine) -> None:
    floor = await Floor.make(engine)
    change = "update machines set generation = 2, activated_at = now(), last_activity_at = now() where id = $1"
    await floor.sql.fetch(change, floor.machine.id)
    jobs = [await floor.job() for _ in range(2)]
    for job in jobs:
        await floor.accept(job)
        await floor.started(job)
        await floor.finished(job)
    notices = [(await floor.told(job))[1].get("notice", "") for job in jobs]
    assert "was replaced" in notices[0]
    assert notices[1] == ""


async def test_the_usual_report_takes_two_statements(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    await floor.accept(job)
    statements: list[str] = []
    run = floor.deps.db.run

    def note(record: Any) -> None:
        statements.append(record.query)

    async def counted(work: Any) -> Any:
        async def watched(connection: Any) -> Any:
            with connection.query_logger(note):
                return await work(connection)

        return await run(watched)

    monkeypatch.setattr(floor.deps.db, "run", counted)
    assert (await floor.finished(job, "ok")).ack_status == "committed"
    names = [statement.split(" */")[0].removeprefix("/* processes.") for statement in statements]
    assert names == ["lock_waiting_report", "publish_result"]
