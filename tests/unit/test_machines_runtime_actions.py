"""Actions on a running command: in order, with their effect once, and reads that see what is there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omnara.machines import wire
from tests.support.by_frame import ByFrame, connected, directive
from tests.support.scripted_home import ScriptedHome
from tests.support.waiting import until
from tests.unit.test_machines_runtime import runtime_of


async def _running(home: ScriptedHome, server: ByFrame) -> None:
    await server.run("prc_a", wait_ms=0)
    report_id, _ = await server.expect_report(wire.ProcessStarted)
    await server.acknowledge(report_id)
    await until(lambda: ("prc_a", "started") in home.acknowledged, "its start is acknowledged")


async def _applied(server: ByFrame) -> wire.ReadObservation:
    report_id, event = await server.expect_report(wire.ActionApplied)
    await server.acknowledge(report_id)
    assert event.result is not None
    return event.result


async def test_a_write_has_its_effect_once_and_is_reported_until_acknowledged() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await _running(home, server)
        await server.act("prc_a", "pac_1", "write", 1, {"data": "yes\n"})
        first_id, first = await server.expect_report(wire.ActionApplied)
        await server.acknowledge(first_id, "transient_error")
        again_id, again = await server.expect_report(wire.ActionApplied)
        assert (first_id, first) == (again_id, again)
        assert first.result is None
        await server.acknowledge(again_id)
        await until(lambda: ("prc_a", "pac_1") in home.acknowledged, "it is acknowledged")
    assert home.all["prc_a"].effects == [("write", b"yes\n")]
    await runtime.close()


async def test_a_terminate_ends_the_process_and_both_are_reported() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await _running(home, server)
        await server.act("prc_a", "pac_1", "terminate", 1)
        seen: set[str] = set()
        for _ in range(2):
            report = await server.expect(wire.Report)
            seen.add(type(report.event).__name__)
            await server.acknowledge(report.report_id)
        assert seen == {"ActionApplied", "ProcessFinished"}
        await until(lambda: not runtime.busy, "nothing is left to do")
    await runtime.close()


async def test_a_read_without_a_cursor_begins_where_the_server_says() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await _running(home, server)
        home.prints("prc_a", b"0123456789")
        await server.act("prc_a", "pac_1", "read", 1, {"max_bytes": 4}, cursor=3)
        assert await _applied(server) == wire.ReadObservation(
            process_id="prc_a", output="3456", cursor=3, next_cursor=7, truncated=True
        )
        await server.act("prc_a", "pac_2", "read", 2, {"cursor": 7}, cursor=3)
        assert await _applied(server) == wire.ReadObservation(
            process_id="prc_a", output="789", cursor=7, next_cursor=10, truncated=False
        )
    assert ("prc_a", "pac_1") not in home.acknowledged, "a read leaves no mark in the home"
    await runtime.close()


async def test_a_read_waits_for_output_and_no_longer() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await _running(home, server)
        await server.act("prc_a", "pac_1", "read", 1, {"wait_ms": 10_000})
        await server.silent(0.03)
        home.prints("prc_a", b"\xe2\x82")
        await server.silent(0.03)
        home.prints("prc_a", b"\xac")
        assert (await _applied(server)).output == "€"
        await server.act("prc_a", "pac_2", "read", 2, {"cursor": 3, "wait_ms": 20})
        assert await _applied(server) == wire.ReadObservation(process_id="prc_a", cursor=3, next_cursor=3)
        await server.act("prc_a", "pac_3", "read", 3, {"cursor": 3, "wait_ms": 10_000})
        home.ends("prc_a")
        kinds = []
        for _ in range(2):
            report = await server.expect(wire.Report)
            kinds.append(type(report.event).__name__)
            await server.acknowledge(report.report_id)
        assert sorted(kinds) == ["ActionApplied", "ProcessFinished"]
    await runtime.close()


async def test_a_finished_process_can_still_be_read() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await _running(home, server)
        home.prints("prc_a", b"0123456789")
        home.drops("prc_a", 4)
        home.ends("prc_a")
        report_id, _ = await server.expect_report(wire.ProcessFinished)
        await server.acknowledge(report_id)
        await until(lambda: not runtime.busy, "it is settled")
        await server.act("prc_a", "pac_1", "read", 1)
        assert await _applied(server) == wire.ReadObservation(
            process_id="prc_a", output="456789", cursor=4, next_cursor=10, truncated=True
        )
        await server.act("prc_a", "pac_2", "read", 2, {"cursor": 99})
        assert await _applied(server) == wire.ReadObservation(process_id="prc_a", cursor=99, next_cursor=99)
    await runtime.close()


@pytest.mark.parametrize(
    ("kind", "payload", "code"),
    [
        ("read", {"cursor": None}, "invalid_payload"),
        ("read", {"lines": 3}, "invalid_payload"),
        ("write", {}, "invalid_payload"),
        ("write", {"data": "x" * 131_073}, "invalid_payload"),
    ],
)
async def test_a_payload_that_makes_no_sense_fails_the_action(kind: str, payload: Any, code: str) -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await _running(home, server)
        await server.act("prc_a", "pac_1", kind, 1, payload)
        _, event = await server.expect_report(wire.ActionFailed)
        assert event.state_reason_code == code
    assert home.all["prc_a"].effects == []
    await runtime.close()


@pytest.mark.parametrize(("kind", "code"), [("read", "output_unavailable"), ("interrupt", "process_not_running")])
async def test_a_process_whose_files_are_gone_is_no_secret(kind: str, code: str) -> None:
    runtime = runtime_of(ScriptedHome())
    async with connected(runtime) as server:
        await server.act("prc_gone", "pac_1", kind, 1)
        _, event = await server.expect_report(wire.ActionFailed)
        assert event.state_reason_code == code
    await runtime.close()


async def test_an_action_that_somebody_else_decided_is_dropped() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await _running(home, server)
        one = wire.ActionOffer(process_id="prc_a", process_action_id="pac_1", action_kind="interrupt", seq=1)
        await server.send(one)
        await server.send(one)
        await server.expect(wire.ActionAccept)
        gone = wire.ErrorFrame(
            error_code="action_offer_unavailable", process_id="prc_a", process_action_id="pac_1", error="gone"
        )
        await server.send(gone)
        await server.silent()
        await until(lambda: len(home.all) == 1, "the process is still there")
        # The same offer again is a new one.
        await server.act("prc_a", "pac_1", "interrupt", 1)
        await server.expect_report(wire.ActionApplied)
    assert home.all["prc_a"].effects == [("interrupt", b"")]
    await runtime.close()


async def test_an_effect_under_way_goes_on_when_the_line_is_cut_and_is_claimed_as_over() -> None:
    home = ScriptedHome()
    home.hold_effects = asyncio.Event()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await _running(home, server)
        await server.act("prc_a", "pac_1", "write", 1, {"data": "a"})
        await until(lambda: bool(home.all["prc_a"].record.actions), "its mark is there")
        await server.cut()
    claiming = asyncio.ensure_future(runtime.claims())
    home.hold_effects.set()
    (claim,) = await claiming
    assert [(one.process_action_id, one.position) for one in claim.actions] == [("pac_1", "terminal")]
    settle = wire.ActionDirective(process_action_id="pac_1", seq=1, action_kind="write", disposition="settle")
    await runtime.reconcile([directive(claim, "retain", [settle])])
    async with connected(runtime) as server:
        report_id, _ = await server.expect_report(wire.ActionApplied)
        await server.acknowledge(report_id)
        await until(lambda: ("prc_a", "pac_1") in home.acknowledged, "it is acknowledged")
    assert home.all["prc_a"].effects == [("write", b"a")]
    (claim,) = await runtime.claims()
    assert (claim.resolved_action_seq, claim.actions) == (1, [])
    await runtime.close()


async def test_a_read_that_was_under_way_ends_with_its_line() -> None:
    home = ScriptedHome()
    runtime = runtime_of(home)
    async with connected(runtime) as server:
        await _running(home, server)
        await server.act("prc_a", "pac_1", "read", 1, {"wait_ms": 10_000})
        await server.cut()
    (claim,) = await runtime.claims()
    assert claim.actions == []
    await runtime.reconcile([directive(claim, "retain")])
    async with connected(runtime) as server:
        home.prints("prc_a", b"later")
        await server.silent()
        await server.act("prc_a", "pac_1", "read", 1)
        assert (await _applied(server)).output == "later"
    await runtime.close()
