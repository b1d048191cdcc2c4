"""A second runtime over what the first one left: every disposition, and nothing runs or is told twice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnara.machines import wire
from omnara.machines.processes import ActionOutcome, ActionRecord, ProcessRecord, ProcessSpec
from omnara.machines.runtime import Runtime
from omnara.machines.runtime.claims import DirectivesRefused, claim
from tests.support.by_frame import connected, directive, offer
from tests.support.scripted_home import ScriptedHome
from tests.support.waiting import until
from tests.unit.test_machines_runtime import runtime_of


async def _left(home: ScriptedHome, *, executed: bool = True) -> tuple[Runtime, wire.ProcessClaim]:
    """What a killed runtime left: one process, running or only prepared; and the new runtime's claim of it."""
    await home.prepare(ProcessSpec(process_id="prc_a", command="make"))
    if executed:
        await home.execute("prc_a", 0)
    runtime = runtime_of(home)
    (one,) = await runtime.claims()
    return runtime, one


async def test_a_running_command_is_retained_and_its_end_is_told_once() -> None:
    home = ScriptedHome()
    runtime, one = await _left(home)
    assert (one.phase, one.supervisor_live, one.execution_committed) == ("accepted", True, True)
    assert not one.action_admission_closed
    await runtime.reconcile([directive(one, "retain")])
    async with connected(runtime) as server:
        started, _ = await server.expect_report(wire.ProcessStarted)
        await server.acknowledge(started, "cleanup_only")
        home.ends("prc_a")
        finished, _ = await server.expect_report(wire.ProcessFinished)
        await server.acknowledge(finished)
        await until(lambda: not runtime.busy, "it is settled")
    assert home.all["prc_a"].executions == 1
    assert await runtime.claims() == []
    await runtime.close()


async def test_a_retained_command_that_ends_soon_is_told_whole() -> None:
    """The call that waits for it gets output and end, as if no runtime had been killed, and not an empty beginning."""
    home = ScriptedHome()
    runtime, one = await _left(home)
    await runtime.reconcile([directive(one, "retain")])
    async with connected(runtime) as server:
        home.prints("prc_a", b"it\n")
        home.ends("prc_a")
        finished, event = await server.expect_report(wire.ProcessFinished)
        assert event.result is not None
        assert event.result.output == "it\n"
        await server.acknowledge(finished)
    await runtime.close()


async def test_a_start_that_was_acknowledged_is_not_told_again() -> None:
    home = ScriptedHome()
    await _left(home)
    await home.acknowledge("prc_a", "started")
    runtime = runtime_of(home)
    (one,) = await runtime.claims()
    await runtime.reconcile([directive(one, "retain")])
    async with connected(runtime) as server:
        await server.silent()
        home.ends("prc_a")
        await server.expect_report(wire.ProcessFinished)
    await runtime.close()


async def test_a_command_that_ended_meanwhile_is_told_with_its_end_alone() -> None:
    home = ScriptedHome()
    await home.prepare(ProcessSpec(process_id="prc_a", command="make"))
    await home.execute("prc_a", 0)
    home.prints("prc_a", b"done\n")
    home.ends("prc_a")
    runtime = runtime_of(home)
    (one,) = await runtime.claims()
    assert (one.phase, one.action_admission_closed) == ("terminal", True)
    await runtime.reconcile([directive(one, "retain")])
    async with connected(runtime) as server:
        _, event = await server.expect_report(wire.ProcessFinished)
        assert event.result is not None
        assert event.result.output == "done\n"
    # Not acknowledged, so it is sent again by whoever comes next.
    again = runtime_of(home)
    (one,) = await again.claims()
    await again.reconcile([directive(one, "retain")])
    async with connected(again) as server:
        report_id, second = await server.expect_report(wire.ProcessFinished)
        assert second == event
        await server.acknowledge(report_id)
        await until(lambda: not again.busy, "it is settled")
    await runtime.close()
    await again.close()


async def test_a_grant_that_got_lost_is_made_good_and_runs_once() -> None:
    home = ScriptedHome()
    runtime, one = await _left(home, executed=False)
    assert (one.phase, one.supervisor_live, one.execution_committed) == ("prepared", True, False)
    await runtime.reconcile([directive(one, "start")])
    async with connected(runtime) as server:
        await until(lambda: home.all["prc_a"].executions == 1, "it runs")
        await server.expect_report(wire.ProcessStarted)
        await server.cut()
    (one,) = await runtime.claims()
    await runtime.reconcile([directive(one, "retain")])
    assert home.all["prc_a"].executions == 1
    await runtime.close()


async def test_a_grant_that_got_lost_with_the_line_runs_once() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.send(offer("prc_a"))
        await server.expect(wire.ProcessAccept)
        await server.cut()
    (one,) = await runtime.claims()
    await runtime.reconcile([directive(one, "start")])
    await until(lambda: home.all["prc_a"].executions == 1, "it runs")
    home.ends("prc_a")
    async with connected(runtime) as server:
        await server.expect_report(wire.ProcessFinished)
    assert home.all["prc_a"].executions == 1
    await runtime.close()


async def test_a_preparation_that_is_closed_leaves_nothing_and_may_come_again() -> None:
    home = ScriptedHome()
    runtime, one = await _left(home, executed=False)
    await runtime.reconcile([directive(one, "close_preparation")])
    assert home.forgotten == ["prc_a"]
    async with connected(runtime) as server:
        await server.run("prc_a")
        await until(lambda: home.all["prc_a"].executions == 1, "it runs")
    await runtime.close()


async def test_a_released_command_is_stopped_and_never_told() -> None:
    home = ScriptedHome()
    runtime, one = await _left(home)
    await runtime.reconcile([directive(one, "release")])
    async with connected(runtime) as server:
        await until(lambda: home.stopped == [("prc_a", "server_resolved")], "it is stopped")
        await until(lambda: not runtime.busy, "it is settled")
        await server.silent()
        # Its output is still there for a read.
        await server.act("prc_a", "pac_1", "read", 1)
        await server.expect_report(wire.ActionApplied)
    assert await runtime.claims() == []
    await runtime.close()


async def test_a_released_command_that_was_being_followed_is_not_told_either() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=0)
        await server.expect_report(wire.ProcessStarted)
        await server.cut()
    (one,) = await runtime.claims()
    await runtime.reconcile([directive(one, "release")])
    async with connected(runtime) as server:
        await until(lambda: not runtime.busy, "it is settled")
        await server.silent()
    await runtime.close()


async def test_a_released_preparation_is_removed() -> None:
    home = ScriptedHome()
    runtime, one = await _left(home, executed=False)
    await runtime.reconcile([directive(one, "release")])
    await until(lambda: home.forgotten == ["prc_a"], "it is removed")
    assert home.stopped == []
    await runtime.close()


def _marked(home: ScriptedHome, outcome: ActionOutcome | None) -> None:
    mark = ActionRecord(action_id="pac_1", kind="write", seq=1, outcome=outcome)
    home._update(home.all["prc_a"], actions=[mark])


def _action(disposition: Any, **fields: Any) -> wire.ActionDirective:
    return wire.ActionDirective(
        **{"process_action_id": "pac_1", "seq": 1, "action_kind": "write", "disposition": disposition, **fields}
    )


@pytest.mark.parametrize("disposition", ["retain", "settle"])
async def test_an_actions_outcome_is_told_again_without_its_effect(disposition: str) -> None:
    home = ScriptedHome()
    await _left(home)
    _marked(home, ActionOutcome(state="unknown", reason_code="stdin_write_unknown"))
    runtime = runtime_of(home)
    (one,) = await runtime.claims()
    assert [action.position for action in one.actions] == ["terminal"]
    await runtime.reconcile([directive(one, "retain", [_action(disposition)])])
    async with connected(runtime) as server:
        reports = [await server.expect(wire.Report)]
        await server.acknowledge(reports[0].report_id)
        reports.append(await server.expect(wire.Report))
        await server.acknowledge(reports[1].report_id)
        (event,) = [report.event for report in reports if isinstance(report.event, wire.ActionUnknown)]
        assert event.state_reason_code == "stdin_write_unknown"
        await until(lambda: ("prc_a", "pac_1") in home.acknowledged, "it is acknowledged")
    assert home.all["prc_a"].effects == []
    await runtime.close()


async def test_an_action_with_a_mark_and_no_outcome_is_never_performed_again() -> None:
    home = ScriptedHome()
    await _left(home)
    _marked(home, None)
    runtime = runtime_of(home)
    (one,) = await runtime.claims()
    assert [action.position for action in one.actions] == ["effect_committed"]
    await runtime.reconcile([directive(one, "retain", [_action("retain")])])
    await until(lambda: home.all["prc_a"].record.actions[0].outcome is not None, "the home tells its outcome")
    assert home.all["prc_a"].effects == []
    await runtime.close()


async def test_an_action_that_never_arrived_is_applied_now() -> None:
    home = ScriptedHome()
    runtime, one = await _left(home)
    apply = _action("apply", payload=msgspec.Raw(b'{"data":"now"}'))
    await runtime.reconcile([directive(one, "retain", [apply])])
    await until(lambda: home.all["prc_a"].effects == [("write", b"now")], "it is applied")
    await runtime.close()


async def test_a_released_action_is_not_told() -> None:
    home = ScriptedHome()
    await _left(home)
    await home.acknowledge("prc_a", "started")
    _marked(home, ActionOutcome(state="applied"))
    runtime = runtime_of(home)
    (one,) = await runtime.claims()
    await runtime.reconcile([directive(one, "retain", [_action("release")])])
    async with connected(runtime) as server:
        await server.silent()
    (one,) = await runtime.claims()
    assert (one.resolved_action_seq, one.actions) == (1, [])
    await runtime.close()


async def test_directives_that_do_not_answer_the_claims_change_nothing() -> None:
    home = ScriptedHome()
    runtime, one = await _left(home)
    other = msgspec.structs.replace(one, supervisor_instance_id="another launch")
    for wrong in ([], [directive(one, "retain")] * 2, [directive(other, "release")]):
        with pytest.raises(DirectivesRefused):
            await runtime.reconcile(wrong)
    assert home.stopped == []
    assert home.forgotten == []
    await runtime.close()


async def test_authority_lost_ends_and_removes_everything() -> None:
    home = ScriptedHome()
    await home.prepare(ProcessSpec(process_id="prc_b", command="make"))
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await server.run("prc_a", wait_ms=0)
        await server.expect_report(wire.ProcessStarted)
    await runtime.destroy("authorization_revoked")
    assert home.all == {}
    assert ("prc_a", "authorization_revoked") in home.stopped


def _record(**fields: Any) -> ProcessRecord:
    return ProcessRecord(
        **{
            "process_id": "prc_a",
            "supervisor_id": "s",
            "phase": "accepted",
            "supervisor_live": True,
            "execution_committed": True,
            **fields,
        }
    )


def test_a_claims_resolved_sequence_stops_below_the_first_that_is_open() -> None:
    marks = [
        ActionRecord(action_id="pac_2", kind="write", seq=2, outcome=ActionOutcome(state="applied"), acknowledged=True),
        ActionRecord(action_id="pac_5", kind="write", seq=5, outcome=ActionOutcome(state="applied")),
        ActionRecord(action_id="pac_7", kind="terminate", seq=7),
    ]
    one = claim(_record(actions=marks))
    assert one.resolved_action_seq == 2
    assert [action.seq for action in one.actions] == [5, 7]
    assert one.action_admission_closed, "after a terminate nothing is admitted any more"


def test_a_command_whose_keeper_is_gone_is_claimed_as_dead() -> None:
    one = claim(_record(supervisor_live=False))
    assert (one.supervisor_live, one.execution_committed, one.action_admission_closed) == (False, True, True)
