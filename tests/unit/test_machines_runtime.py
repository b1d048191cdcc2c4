"""A command's way through the runtime: offered, granted, run once, reported until that is acknowledged."""

from __future__ import annotations

import asyncio
from uuid import UUID

import msgspec
import pytest

from omnara.machines import wire
from omnara.machines.link import LinkClosed
from omnara.machines.processes import HomeLost, ProcessRecord
from omnara.machines.runtime import Runtime, Timing
from tests.support.by_frame import ByFrame, connected, directive, offer
from tests.support.scripted_home import ENDED_AT, STARTED_AT, ScriptedHome
from tests.support.waiting import until

INSTANCE = UUID("5b0c1f7e-2d0a-4c6e-9f5b-0c1d2e3f4a5b")
QUICK = Timing(settle_s=0.02, resend_s=0.05, silence_s=70, watch_s=5, quiesce_s=2, restart_wait_s=0.02)


def runtime_of(home: ScriptedHome, timing: Timing = QUICK) -> Runtime:
    return Runtime(home, instance_id=INSTANCE, timing=timing)


async def test_a_command_that_ends_in_time_is_told_whole_and_once() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", command="make", cwd="/repo", env={"CI": "1"}, shell_selector="bash")
        await until(lambda: home.all["prc_a"].executions == 1, "it runs")
        home.prints("prc_a", b"up\n")
        home.ends("prc_a", 0)
        report_id, event = await server.expect_report(wire.ProcessFinished)
        assert event == wire.ProcessFinished(
            process_id="prc_a",
            state="exited",
            exit_code=0,
            started_at=STARTED_AT,
            ended_at=ENDED_AT,
            result=wire.FinishedResult(state="exited", exit_code=0, output="up\n", next_cursor=3),
        )
        assert runtime.busy
        await server.acknowledge(report_id)
        await until(lambda: home.acknowledged == [("prc_a", "exit")], "it is acknowledged")
        await until(lambda: not runtime.busy, "nothing is left to do")
        await server.silent()
    spec = home.all["prc_a"].spec
    assert (spec.command, spec.cwd, spec.env, spec.shell) == ("make", "/repo", {"CI": "1"}, "bash")
    await runtime.close()


async def test_first_output_of_a_command_that_goes_on_is_told_before_its_wait_is_over() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=10_000)
        await until(lambda: home.all["prc_a"].executions == 1, "it runs")
        home.prints("prc_a", b"ready\n")
        report_id, event = await server.expect_report(wire.ProcessStarted)
        assert event.started_at == STARTED_AT
        assert event.observed_at is not None
        assert event.result == wire.StartedResult(process_id="prc_a", output="ready\n", next_cursor=6)
        await server.acknowledge(report_id)
        home.ends("prc_a", 2)
        report_id, finished = await server.expect_report(wire.ProcessFinished)
        assert (finished.state, finished.exit_code, finished.state_reason_code) == ("failed", 2, "nonzero_exit")
        await server.acknowledge(report_id)
        await until(lambda: not runtime.busy, "nothing is left to do")
    assert home.acknowledged == [("prc_a", "started"), ("prc_a", "exit")]
    await runtime.close()


async def test_the_end_that_was_seen_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question to a home is a way into a container; how a command ended never changes."""
    home = ScriptedHome()
    runtime = runtime_of(home)
    watch, asked = home.watch, []

    async def counted(process_id: str, known_end: int, wait_s: float) -> ProcessRecord:
        asked.append(process_id)
        return await watch(process_id, known_end, wait_s)

    monkeypatch.setattr(home, "watch", counted)
    async with connected(runtime) as server:
        await server.run("prc_a")
        await until(lambda: home.all["prc_a"].executions == 1, "it runs")
        home.ends("prc_a", 3)
        for _ in range(2):
            report_id, event = await server.expect_report(wire.ProcessFinished)
            assert event.exit_code == 3
            await server.send(wire.ReportAck(ack_status="transient_error", report_id=report_id, error_code="later"))
    assert asked == ["prc_a"], "only by its execution"
    await runtime.close()


async def test_a_silent_command_is_told_when_its_wait_is_over() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=30)
        _, event = await server.expect_report(wire.ProcessStarted)
        assert event.result is not None
        assert event.result.output == ""
    await runtime.close()


async def test_an_offer_that_is_repeated_runs_nothing_twice() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        for _ in range(3):
            await server.send(offer("prc_a"))
        await server.expect(wire.ProcessAccept)
        for _ in range(3):
            await server.send(wire.ProcessAcceptAck(process_id="prc_a"))
        await until(lambda: home.all["prc_a"].executions == 1, "it runs")
        home.ends("prc_a")
        report_id, _ = await server.expect_report(wire.ProcessFinished)
        await server.acknowledge(report_id)
        await until(lambda: not runtime.busy, "nothing is left to do")
    assert home.all["prc_a"].executions == 1
    await runtime.close()


async def test_an_offer_of_a_process_that_is_over_makes_the_runtime_claim_it_again() -> None:
    """The server has forgotten what it had acknowledged (its database was restored): it is told, a few times."""
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a")
        await until(lambda: home.all["prc_a"].executions == 1, "it runs")
        home.ends("prc_a")
        report_id, _ = await server.expect_report(wire.ProcessFinished)
        await server.acknowledge(report_id)
        await until(lambda: not runtime.busy, "nothing is left to do")
    assert await runtime.claims() == []
    for _ in range(3):
        async with connected(runtime) as server:
            await server.send(offer("prc_a"))
            with pytest.raises(LinkClosed):
                await server.serving
        (one,) = await runtime.claims()
        assert (one.process_id, one.phase, one.execution_committed) == ("prc_a", "terminal", True)
        await runtime.reconcile([directive(one, "release")])
    async with connected(runtime) as server:
        await server.send(offer("prc_a"))
        await server.silent()
    assert await runtime.claims() == []
    assert home.all["prc_a"].executions == 1
    await runtime.close()


async def test_an_offer_that_somebody_else_got_leaves_nothing() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.send(offer("prc_a"))
        await server.expect(wire.ProcessAccept)
        await server.send(wire.ErrorFrame(error_code="process_offer_unavailable", process_id="prc_a"))
        await until(lambda: home.forgotten == ["prc_a"], "the preparation is closed")
        await until(lambda: not runtime.busy, "nothing is left to do")
        # And it may be offered anew.
        await server.run("prc_a")
        await until(lambda: home.all["prc_a"].executions == 1, "it runs")
    await runtime.close()


async def test_an_error_about_a_process_makes_the_runtime_register_again() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.send(wire.ErrorFrame(error_code="database_went_away"))
        await server.silent()
        assert not server.serving.done()
        await server.send(wire.ErrorFrame(error_code="invalid_runtime", process_id="prc_a"))
        with pytest.raises(LinkClosed):
            await server.serving
    await runtime.close()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"preparation_error": "a secret is gone", "io_mode": "", "command": ""}, "a secret is gone"),
        ({"command": "echo \0"}, "NUL"),
        ({"command": " "}, "no command"),
        ({"io_mode": "fax"}, "io_mode"),
    ],
)
async def test_what_cannot_be_started_is_accepted_and_reported(fields: dict[str, str], why: str) -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", **fields)
        report_id, event = await server.expect_report(wire.ProcessFinished)
        assert (event.state, event.state_reason_code) == ("failed", "start_failed")
        assert why in event.state_reason_message
        assert event.started_at is None
        await server.acknowledge(report_id)
        await until(lambda: not runtime.busy, "nothing is left to do")
    assert home.all == {}
    assert home.acknowledged == []
    await runtime.close()


async def test_a_shell_that_is_not_there_is_reported_also_after_the_line_was_cut() -> None:
    home = ScriptedHome()
    home.refuses = "there is no zsh here"
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", shell_selector="zsh")
        await server.expect_report(wire.ProcessFinished)
        await server.cut()
    (claim,) = await runtime.claims()
    assert (claim.phase, claim.execution_committed) == ("terminal", False)
    await runtime.reconcile([directive(claim, "retain")])
    async with connected(runtime) as server:
        report_id, event = await server.expect_report(wire.ProcessFinished)
        assert event.state_reason_message == "there is no zsh here"
        await server.acknowledge(report_id)
        await until(lambda: not runtime.busy, "nothing is left to do")
    assert await runtime.claims() == []
    await runtime.close()


async def test_a_full_disk_is_told_at_once_with_nothing_but_its_fixed_words() -> None:
    home = ScriptedHome()
    home.full = True
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.send(offer("prc_a"))
        report_id, event = await server.expect_report(wire.ProcessFinished)
        assert event == wire.ProcessFinished(
            process_id="prc_a",
            state="failed",
            state_reason_code="machine_storage_exhausted",
            state_reason_message="the machine ran out of writable storage",
        )
        await server.acknowledge(report_id)
        await until(lambda: not runtime.busy, "nothing is left to do")
        home.full = False
        await server.run("prc_b")
    await runtime.close()


async def test_a_disk_that_fills_after_the_grant_is_told_as_well() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.send(offer("prc_a"))
        await server.expect(wire.ProcessAccept)
        home.full = True
        await server.send(wire.ProcessAcceptAck(process_id="prc_a"))
        _, event = await server.expect_report(wire.ProcessFinished)
        assert event.state_reason_code == "machine_storage_exhausted"
        await server.cut()
    # Its report may not have arrived: it is claimed as what it is, prepared and never executed.
    home.full = False
    (claim,) = await runtime.claims()
    assert (claim.phase, claim.execution_committed) == ("prepared", False)
    await runtime.reconcile([directive(claim, "start")])
    await until(lambda: home.all["prc_a"].executions == 1, "it runs")
    await runtime.close()


async def test_a_report_that_the_server_could_not_store_is_sent_again_and_nothing_overtakes_it() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=0)
        first_id, first = await server.expect_report(wire.ProcessStarted)
        home.ends("prc_a")
        await server.acknowledge(first_id, "transient_error")
        again_id, again = await server.expect_report(wire.ProcessStarted)
        assert (again_id, again) == (first_id, first)
        await server.acknowledge(again_id, "cleanup_only")
        last_id, _ = await server.expect_report(wire.ProcessFinished)
        await server.acknowledge(last_id)
        await until(lambda: not runtime.busy, "nothing is left to do")
    await runtime.close()


async def test_a_report_that_is_never_stored_does_not_hold_up_the_end_for_ever() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=0)
        started_id, _ = await server.expect_report(wire.ProcessStarted)
        home.ends("prc_a")
        for _ in range(2):
            await server.acknowledge(started_id, "transient_error")
            await server.expect_report(wire.ProcessStarted)
        await server.acknowledge(started_id, "transient_error")
        finished_id, _ = await server.expect_report(wire.ProcessFinished)
        await server.acknowledge(finished_id)
        await until(lambda: ("prc_a", "exit") in home.acknowledged, "its end is acknowledged")
    await runtime.close()


async def test_a_server_that_beats_and_answers_no_report_is_given_up() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home, Timing(silence_s=0.3))
    async with connected(runtime, first_beat_ms=20) as server:
        await server.run("prc_a", wait_ms=0)
        await server.expect_report(wire.ProcessStarted)
        while not server.serving.done():
            try:
                await server.expect(wire.Heartbeat, within_s=20)
                await server.send(wire.HeartbeatAck(next_heartbeat_after_ms=20))
            except LinkClosed:
                break
        with pytest.raises(LinkClosed):
            await server.serving
    await runtime.close()


async def test_a_rejected_report_waits_for_the_next_registration_and_holds_up_nothing() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=0)
        started_id, _ = await server.expect_report(wire.ProcessStarted)
        await server.acknowledge(started_id, "permanent_reject")
        home.ends("prc_a")
        await server.expect_report(wire.ProcessFinished)
        await server.cut()
    (claim,) = await runtime.claims()
    await runtime.reconcile([directive(claim, "retain")])
    async with connected(runtime) as server:
        started_id, _ = await server.expect_report(wire.ProcessStarted)
        await server.acknowledge(started_id)
        await server.expect_report(wire.ProcessFinished)
    await runtime.close()


async def test_heartbeats_go_out_as_often_as_the_server_says() -> None:
    home = ScriptedHome()
    runtime = Runtime(home, instance_id=INSTANCE, platform=wire.Platform(os="linux", arch="amd64"), timing=QUICK)
    async with connected(runtime, first_beat_ms=10) as server:
        for _ in range(3):
            beat = await server.expect(wire.Heartbeat)
            assert beat == wire.Heartbeat(
                daemon_instance_id=str(INSTANCE), observed_platform=wire.Platform(os="linux", arch="amd64")
            )
            await server.send(wire.HeartbeatAck(next_heartbeat_after_ms=5))
        await server.expect(wire.Heartbeat)
        await server.send(wire.HeartbeatAck(next_heartbeat_after_ms=60_000))
    await runtime.close()


async def test_a_server_from_which_nothing_is_heard_is_given_up() -> None:
    runtime = runtime_of(ScriptedHome(), Timing(silence_s=0.05))
    async with connected(runtime, first_beat_ms=10) as server:
        with pytest.raises(LinkClosed):
            async with asyncio.timeout(20):
                await server.serving
    await runtime.close()


@pytest.mark.parametrize(
    ("code", "lost"),
    [("machine_decommissioned", True), ("authorization_revoked", True), ("daemon_runtime_replaced", False)],
)
async def test_the_server_may_end_the_runtime(code: str, lost: bool) -> None:
    runtime = runtime_of(ScriptedHome())
    async with connected(runtime) as server:
        await server.send(wire.RuntimeEnded(error_code=code))
        await server.link.close(1000)
        ended = await server.ended()
        assert (ended.code, ended.authority_lost) == (code, lost)
    await runtime.close()


async def test_frames_that_are_not_for_us_are_answered_or_ignored() -> None:
    runtime = runtime_of(ScriptedHome())
    async with connected(runtime) as server:
        await server.send(wire.Unknown("newer"))
        await server.send(wire.ReportAck(ack_status="committed", report_id="r99"))
        await server.send(wire.ProcessTerminate(process_id="prc_none"))
        skill = wire.SkillOffer(
            request_id="q1", skill_id="skl_c", revision_id="skr_d", download_token="", download_expires_at=0, digest=""
        )
        await server.send(skill)
        assert (await server.expect(wire.SkillReport)).state == "failed"
        await server.silent()
    await runtime.close()


async def test_a_grant_for_something_unknown_makes_the_runtime_register_again() -> None:
    runtime = runtime_of(ScriptedHome())
    async with connected(runtime) as server:
        await server.send(wire.ProcessAcceptAck(process_id="prc_none"))
        with pytest.raises(LinkClosed):
            await server.serving
    await runtime.close()


async def test_terminated_by_the_server_while_it_runs() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=0)
        started_id, _ = await server.expect_report(wire.ProcessStarted)
        await server.acknowledge(started_id)
        await server.send(wire.ProcessTerminate(process_id="prc_a"))
        report_id, event = await server.expect_report(wire.ProcessFinished)
        assert (event.state, event.state_reason_code, event.exit_code) == ("unknown", "terminated_by_server", None)
        await server.send(wire.ProcessTerminate(process_id="prc_a"))
        await server.acknowledge(report_id, "cleanup_only")
        await until(lambda: not runtime.busy, "nothing is left to do")
    assert home.stopped == [("prc_a", "terminated_by_server")]
    await runtime.close()


async def test_terminated_before_its_grant_came_it_never_runs() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.send(offer("prc_a"))
        await server.expect(wire.ProcessAccept)
        await server.send(wire.ProcessTerminate(process_id="prc_a"))
        await server.send(wire.ProcessAcceptAck(process_id="prc_a"))
        _, event = await server.expect_report(wire.ProcessFinished)
        assert (event.state, event.state_reason_code) == ("failed", "terminated_before_start")
        await until(lambda: home.forgotten == ["prc_a"], "it is forgotten")
    await runtime.close()


async def test_a_command_whose_keeper_died_is_reported_as_unknown() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=0)
        started_id, _ = await server.expect_report(wire.ProcessStarted)
        await server.acknowledge(started_id)
        home.loses_keeper("prc_a")
        _, event = await server.expect_report(wire.ProcessFinished)
        assert (event.state, event.state_reason_code) == ("unknown", "supervisor_lost")
    await runtime.close()


async def test_a_home_that_is_away_ends_the_connection_and_is_claimed_anew() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=0)
        started_id, _ = await server.expect_report(wire.ProcessStarted)
        home.gone = True
        home._changed.set()
        with pytest.raises(HomeLost):
            await server.serving
    with pytest.raises(HomeLost):
        await runtime.claims()
    home.gone = False
    (claim,) = await runtime.claims()
    await runtime.reconcile([directive(claim, "retain")])
    home.ends("prc_a")
    async with connected(runtime) as server:
        # The start was on its way when the home was lost, so it comes first.
        started_again, _ = await server.expect_report(wire.ProcessStarted)
        assert started_again == started_id
        await server.acknowledge(started_again)
        await server.expect_report(wire.ProcessFinished)
    await runtime.close()


async def test_two_hundred_commands_at_once_are_each_run_and_reported_once() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await _two_hundred(home, server)
        await until(lambda: not runtime.busy, "nothing is left to do")
    assert all(one.executions == 1 for one in home.all.values())
    await runtime.close()


async def _two_hundred(home: ScriptedHome, server: ByFrame) -> None:
    names = {f"prc_{number}" for number in range(200)}
    offering = asyncio.ensure_future(_offer_all(server, names))
    finished: set[str] = set()
    while finished < names:
        async with asyncio.timeout(20):
            frame = await server.link.receive()
        if isinstance(frame, wire.ProcessAccept):
            await server.send(wire.ProcessAcceptAck(process_id=frame.process_id))
            await until(lambda name=frame.process_id: home.all[name].executions == 1, "it runs")  # type: ignore[misc]
            home.ends(frame.process_id)
        elif isinstance(frame, wire.Report):
            assert isinstance(frame.event, wire.ProcessFinished)
            assert frame.event.process_id not in finished
            finished.add(frame.event.process_id)
            await server.acknowledge(frame.report_id)
    await offering


async def _offer_all(server: ByFrame, names: set[str]) -> None:
    for name in sorted(names):
        await server.send(offer(name))


async def test_output_of_old_commands_is_not_kept_for_ever() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home, msgspec.structs.replace(QUICK, keep_settled=2))
    async with connected(runtime) as server:
        for number in range(4):
            name = f"prc_{number}"
            await server.run(name)
            await until(lambda name=name: home.all[name].executions == 1, "it runs")  # type: ignore[misc]
            home.ends(name)
            report_id, _ = await server.expect_report(wire.ProcessFinished)
            await server.acknowledge(report_id)
        await until(lambda: list(home.all) == ["prc_2", "prc_3"], "the oldest are forgotten")
        await server.act("prc_0", "pac_1", "read", 1)
        _, event = await server.expect_report(wire.ActionFailed)
        assert event.state_reason_code == "output_unavailable"
    await runtime.close()
    # A later runtime forgets what an earlier one left.
    later = runtime_of(home, msgspec.structs.replace(QUICK, keep_settled=1))
    assert await later.claims() == []
    await until(lambda: list(home.all) == ["prc_3"], "only the newest is kept")
    await later.close()


async def test_ids_that_no_file_can_have_cost_the_connection() -> None:
    for name in ("../../etc/passwd", "", "a/b", "x" * 129, "exit"):
        runtime = runtime_of(ScriptedHome())
        async with connected(runtime) as server:
            await server.send(offer(name))
            with pytest.raises(LinkClosed):
                await server.serving
        await runtime.close()


async def test_files_that_somebody_removed_end_no_runtime() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=0)
        started_id, _ = await server.expect_report(wire.ProcessStarted)
        await server.acknowledge(started_id)
        await until(lambda: ("prc_a", "started") in home.acknowledged, "its start is acknowledged")
        one = home.all.pop("prc_a")
        await server.act("prc_a", "pac_1", "read", 1)
        report_id, event = await server.expect_report(wire.ActionFailed)
        assert event.state_reason_code == "output_unavailable"
        await server.acknowledge(report_id)
        home.all["prc_a"] = one
        home.ends("prc_a")
        del home.all["prc_a"]
        _, finished = await server.expect_report(wire.ProcessFinished)
        assert (finished.state, finished.state_reason_code) == ("unknown", "local_state_missing")
    await runtime.close()
