"""A daemon's channel, spoken to in raw frames: hand-over, displacement, lost hints, strangers' ids, bad frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import msgspec
import pytest
import pytest_asyncio

from omnara.access import tokens
from omnara.access.tokens import TokenKind
from omnara.clock import Deadline
from omnara.fleet.outstanding import MOST_OFFERS
from omnara.fleet.sessions import Sessions
from omnara.ids import IdKind, decode, encode, new_uuid
from tests.contract.server import ApiServer, api_server, invariants_hold
from tests.support.machines import (
    BASE,
    RawDaemon,
    TestMachine,
    bind,
    make_machine,
    process_claim,
    queue_command,
    raw_daemon,
)
from tests.support.postgres import PostgresForTests
from tests.support.tcp_proxy import proxied
from tests.support.waiting import until

QUICK = {"machine_heartbeat_s": 1.0, "machine_lease_s": 60.0, "machine_drain_s": 0.2, "machine_sweep_s": 0.1}


class Sql:
    """The database of a server under test."""

    def __init__(self, server: ApiServer) -> None:
        self.fetch = server.rows


class Bench:
    """A server, an agent, and a machine that is bound to it."""

    def __init__(self, server: ApiServer, machine: TestMachine, agent_id: UUID, binding_id: UUID) -> None:
        self.server = server
        self.sql = Sql(server)
        self.machine = machine
        self.agent_id = agent_id
        self.binding_id = binding_id

    async def queue(self, command: str = "true", *, hint: bool = True) -> UUID:
        """Queue a command; with `hint`, as the tool does."""
        process_id = await queue_command(self.sql, self.machine, self.agent_id, self.binding_id, command)
        if hint:
            self.server.deps.hints.machines((self.machine.id,))
        return process_id

    async def process(self, process_id: UUID) -> Any:
        """The row of a process."""
        return (await self.sql.fetch("select * from processes where id = $1", process_id))[0]

    async def state(self, process_id: UUID) -> str:
        """The state of a process."""
        return str((await self.process(process_id))["state"])

    async def other(self) -> TestMachine:
        """Another machine of the same project."""
        return await make_machine(self.sql, self.machine.org_id, self.machine.project_id, "other")


async def make_bench(server: ApiServer) -> Bench:
    """Make the rows."""
    org_id, project_id = decode(IdKind.ORG, server.org), decode(IdKind.PROJECT, server.project)
    agent_id = decode(IdKind.AGENT, (await server.agent()).rsplit("/", 1)[1])
    machine = await make_machine(Sql(server), org_id, project_id)
    return Bench(server, machine, agent_id, await bind(Sql(server), machine, agent_id))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def dsn(postgres: PostgresForTests) -> AsyncIterator[str]:
    """The database of this module's servers."""
    async with postgres.fresh() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(dsn: str) -> AsyncIterator[ApiServer]:
    async with api_server(dsn, **QUICK) as made:
        yield made
        await invariants_hold(made)


@pytest_asyncio.fixture(loop_scope="session")
async def bench(server: ApiServer) -> Bench:
    return await make_bench(server)


@pytest_asyncio.fixture(loop_scope="session")
async def daemon(bench: Bench) -> AsyncIterator[RawDaemon]:
    async with raw_daemon(bench.server.url, bench.machine) as connected:
        yield connected


# --- handing over -------------------------------------------------------------------------------------------


async def test_a_command_is_offered_granted_and_reported(bench: Bench, daemon: RawDaemon) -> None:
    process_id = await bench.queue("make all")
    offer = await daemon.expect("process_offer")
    assert offer["process_id"] == encode(IdKind.PROCESS, process_id)
    assert (offer["command"], offer["wait_ms"], offer["timeout_seconds"]) == ("make all", 10_000, 0)
    await daemon.send("process_accept", process_id=offer["process_id"])
    assert await daemon.expect("process_accept_ack") == {"process_id": offer["process_id"]}
    assert await bench.state(process_id) == "starting"
    assert (await daemon.started(offer["process_id"]))["ack_status"] == "committed"
    assert await bench.state(process_id) == "running"
    assert (await daemon.finished(offer["process_id"], output="done"))["ack_status"] == "committed"
    row = await bench.process(process_id)
    assert (row["state"], row["exit_code"]) == ("exited", 0)


async def test_heartbeats_are_acknowledged_and_keep_the_lease(bench: Bench, daemon: RawDaemon) -> None:
    query = "select lease_expires_at from machine_runtimes where machine_id = $1"
    before = await bench.sql.fetch(query, bench.machine.id)
    await daemon.beat()
    assert await daemon.expect("heartbeat_ack") == {"next_heartbeat_after_ms": 1000}
    assert (await bench.sql.fetch(query, bench.machine.id))[0][0] > before[0][0]
    state = await bench.sql.fetch("select state from machine_connections where machine_id = $1", bench.machine.id)
    assert state[0][0] == "online"


async def test_a_lost_hint_costs_one_sweep(bench: Bench, daemon: RawDaemon) -> None:
    process_id = await bench.queue(hint=False)
    await daemon.take(process_id)
    assert await bench.state(process_id) == "starting"


async def test_every_command_of_many_is_offered_once_and_granted_once(bench: Bench, daemon: RawDaemon) -> None:
    wanted = {encode(IdKind.PROCESS, await bench.queue(f"echo {number}", hint=False)) for number in range(30)}
    granted: list[str] = []
    offered: list[str] = []
    while len(granted) < len(wanted):
        kind, payload = await daemon.receive()
        if kind == "process_offer":
            offered.append(payload["process_id"])
            await daemon.send("process_accept", process_id=payload["process_id"])
        elif kind == "process_accept_ack":
            granted.append(payload["process_id"])
    assert sorted(granted) == sorted(wanted)
    assert sorted(offered) == sorted(wanted)


async def test_one_look_offers_what_a_queue_holds_and_answers_make_room_for_the_rest(dsn: str) -> None:
    """Nothing is left to the sweep, which would come after a minute here."""
    async with api_server(dsn, **QUICK | {"machine_drain_s": 60.0, "machine_heartbeat_s": 20.0}) as server:
        bench = await make_bench(server)
        async with raw_daemon(server.url, bench.machine) as daemon:
            await daemon.take(await bench.queue())  # the first look of the channel is over
            wanted = [encode(IdKind.PROCESS, await bench.queue(hint=False)) for _ in range(MOST_OFFERS + 4)]
            server.deps.hints.machines((bench.machine.id,))
            offered = [(await daemon.expect("process_offer"))["process_id"] for _ in range(MOST_OFFERS)]
            assert offered == wanted[:MOST_OFFERS]
            server.deps.hints.machines((bench.machine.id,))
            for process_id in offered[:4]:
                await daemon.send("process_accept", process_id=process_id)
            frames = [await daemon.receive() for _ in range(8)]
            assert [frame["process_id"] for kind, frame in frames if kind == "process_accept_ack"] == offered[:4]
            assert [frame["process_id"] for kind, frame in frames if kind == "process_offer"] == wanted[MOST_OFFERS:]


async def test_what_becomes_of_actions_is_told_without_a_payload_unless_it_is_to_be_done(
    bench: Bench, daemon: RawDaemon
) -> None:
    public = await daemon.take(await bench.queue("true"))
    action = {"process_action_id": encode(IdKind.PROCESS_ACTION, new_uuid()), "action_kind": "write", "seq": 1}
    claim = process_claim(public, actions=[action | {"position": "terminal"}])
    (told,) = (await daemon.register([claim]))["reconciliation"]["processes"]
    # Its outcome is frozen there: a daemon that were to release it could not, and would never be registered.
    assert told["actions"] == [action | {"disposition": "settle"}]
    claim["actions"] = [action | {"position": "effect_committed"}]
    (told,) = (await daemon.register([claim]))["reconciliation"]["processes"]
    assert told["actions"] == [action | {"disposition": "release"}]
    await daemon.connect()
    await daemon.finished(public)


async def test_a_second_accept_gets_nothing(bench: Bench, daemon: RawDaemon) -> None:
    public = await daemon.take(await bench.queue())
    await daemon.send("process_accept", process_id=public)
    error = await daemon.expect("error")
    assert (error["error_code"], error["process_id"]) == ("process_offer_unavailable", public)


async def test_what_is_to_end_is_told_at_each_heartbeat_until_it_has(bench: Bench, daemon: RawDaemon) -> None:
    process_id = await bench.queue()
    public = await daemon.take(process_id)
    await daemon.started(public)
    await bench.sql.fetch("update processes set terminate_requested = 'agent_canceled' where id = $1", process_id)
    bench.server.deps.hints.machines((bench.machine.id,))
    for _ in range(3):
        assert await daemon.expect("process_terminate") == {"process_id": public}
        await daemon.beat()
    await daemon.finished(public)
    await daemon.beat()
    await daemon.expect("heartbeat_ack")
    await bench.queue("next")
    kinds = []
    while not kinds or kinds[-1] != "process_offer":
        kinds.append((await daemon.receive())[0])
    assert "process_terminate" not in kinds[1:], kinds


# --- which channel counts -----------------------------------------------------------------------------------


async def test_a_second_channel_displaces_the_first(bench: Bench, daemon: RawDaemon) -> None:
    first = daemon.socket
    second = await daemon.connect()
    daemon.socket = first
    assert await daemon.closed() == 1000
    daemon.socket = second
    await daemon.take(await bench.queue())


async def test_a_new_daemon_replaces_the_old_one(bench: Bench, daemon: RawDaemon) -> None:
    async with raw_daemon(bench.server.url, bench.machine) as newer:
        assert (await daemon.expect("runtime_ended"))["error_code"] == "daemon_runtime_replaced"
        assert await daemon.closed() == 1000
        assert (await daemon.call("POST", f"/runtimes/{daemon.runtime}/end"))[0] == 410
        status, body = await daemon.refused()
        assert (status, body["code"]) == (410, "daemon_runtime_unregistered")
        body = {"daemon_instance_id": daemon.instance, "daemon_version": "1.2.3", "processes": []}
        status, answer = await daemon.call("POST", "/runtimes", body)
        assert (status, answer["code"]) == (410, "gone")
        await newer.take(await bench.queue())


async def test_another_replica_queues_and_takes_over(bench: Bench, dsn: str) -> None:
    """A holds the channel while B queues; then the daemon connects to B, and A closes what it had."""
    async with (
        api_server(dsn, **QUICK | {"machine_drain_s": 30.0}) as b,
        raw_daemon(b.url, bench.machine) as daemon,
    ):
        process_id = await bench.queue()
        await daemon.take(process_id)
        held = daemon.socket
        daemon.url = bench.server.url
        await daemon.register()
        newer = await daemon.connect()
        daemon.socket = held
        assert await daemon.closed() == 1000
        daemon.socket = newer
        await daemon.take(await bench.queue())


async def test_a_lost_channel_is_offline_at_once_and_back_at_once(bench: Bench, daemon: RawDaemon) -> None:
    async def state() -> str:
        query = "select state from machine_connections where machine_id = $1"
        return str((await bench.sql.fetch(query, bench.machine.id))[0][0])

    async def offline() -> bool:
        return await state() == "offline"

    assert await state() == "online"
    daemon.socket._response.connection.transport.abort()  # type: ignore[union-attr]
    await until(offline, "the machine is offline", limit_s=20)
    await daemon.register()
    await daemon.connect()
    await daemon.take(await bench.queue())
    assert await state() == "online"


async def test_silence_ends_a_channel(dsn: str) -> None:
    async with api_server(dsn, **QUICK | {"machine_silence_s": 0.3}) as server:
        bench = await make_bench(server)
        async with raw_daemon(server.url, bench.machine) as daemon:
            assert await daemon.closed() == 1000


async def test_an_open_channel_is_no_request_that_takes_too_long(dsn: str) -> None:
    """The limits for slow clients are for HTTP: a channel may be quiet for as long as its own limit says."""
    async with api_server(dsn, **QUICK | {"request_head_timeout_s": 0.2, "request_body_timeout_s": 0.2}) as server:
        bench = await make_bench(server)
        async with raw_daemon(server.url, bench.machine) as daemon:
            for _ in range(3):
                await asyncio.sleep(0.3)
                await daemon.beat()
                await daemon.expect("heartbeat_ack")


async def test_what_is_no_upgrade_is_refused(bench: Bench, daemon: RawDaemon) -> None:
    status, body = await daemon.call("GET", f"/runtimes/{daemon.runtime}/socket")
    assert (status, body["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("lost", ["grant", "command"])
async def test_what_the_database_has_forgotten_makes_the_machine_register(
    bench: Bench, daemon: RawDaemon, lost: str
) -> None:
    """A standby that had not got everything: only a registration stops what runs there without anybody's knowledge."""
    process_id = await bench.queue()
    public = await daemon.take(process_id)
    if lost == "grant":
        query = "update processes set state = 'queued', granted_at = null, runtime_id = null where id = $1"
    else:
        query = "delete from processes where id = $1"
    await bench.sql.fetch(query, process_id)
    assert (await daemon.started(public))["ack_status"] == "permanent_reject"
    error = await daemon.expect("error")
    assert (error["error_code"], error["process_id"]) == ("reconciliation_conflict", public)
    registered = await daemon.register([process_claim(public)])
    assert [found["disposition"] for found in registered["reconciliation"]["processes"]] == ["release"]
    if lost == "grant":
        assert await bench.state(process_id) == "unknown"
    # What it was refused is sent again on the next channel: taken note of, or it would register for ever.
    await daemon.connect()
    for report in (daemon.started, daemon.finished):
        assert (await report(public))["ack_status"] == "cleanup_only"
    await daemon.beat()
    assert (await daemon.receive())[0] == "heartbeat_ack", "no error comes before it"


async def test_what_was_only_prepared_and_nobody_knows_is_closed(bench: Bench, daemon: RawDaemon) -> None:
    """A daemon can stop only what was accepted: told to release a preparation, it would fail to register for ever."""
    claim = process_claim(encode(IdKind.PROCESS, new_uuid()), phase="prepared", execution_committed=False)
    registered = await daemon.register([claim])
    assert [found["disposition"] for found in registered["reconciliation"]["processes"]] == ["close_preparation"]


# --- what is none of its business ---------------------------------------------------------------------------


async def test_a_machine_cannot_touch_anothers_processes(bench: Bench, daemon: RawDaemon) -> None:
    waiting, running = await bench.queue(), await bench.queue("second")
    await daemon.take(running)
    async with raw_daemon(bench.server.url, await bench.other()) as stranger:
        for process_id in (waiting, running):
            public = encode(IdKind.PROCESS, process_id)
            before = await bench.process(process_id)
            await stranger.send("process_accept", process_id=public)
            assert (await stranger.expect("error"))["error_code"] == "process_offer_unavailable"
            action = encode(IdKind.PROCESS_ACTION, new_uuid())
            await stranger.send("action_accept", process_id=public, process_action_id=action)
            assert (await stranger.expect("error"))["error_code"] == "action_offer_unavailable"
            for report in (stranger.started, stranger.finished):
                ack = await report(public)
                assert ack["ack_status"] == "permanent_reject", ack
                assert "idempotency" not in ack["error_code"]
                assert (await stranger.expect("error"))["error_code"] == "reconciliation_conflict"
            result = {"process_id": public, "output": "x", "cursor": 0, "next_cursor": 1, "truncated": False}
            event = {"type": "process_action_applied", "process_id": public, "process_action_id": action}
            await stranger.send("report", report_id="action", event=event | {"result": result})
            assert (await stranger.expect("report_ack"))["ack_status"] == "permanent_reject"
            assert (await stranger.expect("error"))["error_code"] == "reconciliation_conflict"
            assert await bench.process(process_id) == before
        for method, path in (("POST", "end"), ("POST", "sleep")):
            status, body = await stranger.call(method, f"/runtimes/{daemon.runtime}/{path}")
            assert (status, body["code"]) == (410, "daemon_runtime_unregistered")
        assert (await stranger.refused(daemon.runtime))[0] == 410
        claims = [process_claim(encode(IdKind.PROCESS, process_id)) for process_id in (waiting, running)]
        rows = [await bench.process(process_id) for process_id in (waiting, running)]
        registered = await stranger.register(claims)
        assert [found["disposition"] for found in registered["reconciliation"]["processes"]] == ["release"] * 2
        assert [await bench.process(process_id) for process_id in (waiting, running)] == rows
    await daemon.beat()
    await daemon.expect("heartbeat_ack")


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("process_accept", {"process_id": "prc_nonsense"}),
        ("process_accept", {"process_id": "mch_aaaaaaaaaaaaaaaaaaaaaaaaaa"}),
        ("action_accept", {"process_id": "prc_x", "process_action_id": "pac_y"}),
        ("dance", {}),
        ("process_offer", {"process_id": "prc_x"}),
    ],
)
async def test_what_makes_no_sense_is_told_and_the_channel_stays(
    daemon: RawDaemon, kind: str, payload: dict[str, Any]
) -> None:
    await daemon.send(kind, **payload)
    error = await daemon.expect("error")
    assert error["error_code"] == "validation_failed"
    assert not error.get("process_id")
    await daemon.beat()
    await daemon.expect("heartbeat_ack")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", 1002),
        ("[]", 1002),
        ('{"type":"heartbeat"}', 1002),
        ('{"type":"heartbeat","payload":[]}', 1002),
        ('{"type":"report","payload":{"report_id":"","event":{"type":1}}}', 1002),
        ("[" * 100_000, 1002),
        (b"\x00\xff", 1003),
        ('{"type":"heartbeat","payload":{"x":"' + "a" * 2**20 + '"}}', 1009),
    ],
)
async def test_a_bad_frame_closes_its_socket_and_no_other(
    bench: Bench, daemon: RawDaemon, message: str | bytes, code: int
) -> None:
    async with raw_daemon(bench.server.url, await bench.other()) as neighbour:
        if isinstance(message, str):
            await daemon.socket.send_str(message)
        else:
            await daemon.socket.send_bytes(message)
        assert await daemon.closed() == code
        await neighbour.beat()
        await neighbour.expect("heartbeat_ack")
    await daemon.register()
    await daemon.connect()
    await daemon.beat()
    await daemon.expect("heartbeat_ack")


@pytest.mark.parametrize(
    "event",
    [
        {"type": "process_vanished", "process_id": "prc_x"},
        {"type": "process_finished", "process_id": "prc_x", "state": "running"},
        {"type": "process_finished", "process_id": "prc_x", "state": "exited", "result": [1]},
        {},
        None,
    ],
)
async def test_a_report_that_cannot_be_is_refused_and_the_channel_stays(daemon: RawDaemon, event: Any) -> None:
    """A daemon says everything again on each channel: cut off for it, it would come back for ever."""
    await daemon.send("report", report_id="r1", event=event)
    ack = await daemon.expect("report_ack")
    assert (ack["ack_status"], ack["report_id"], ack["error_code"]) == ("permanent_reject", "r1", "validation_failed")
    await daemon.beat()
    assert (await daemon.receive())[0] == "heartbeat_ack", "no error, and no close"


async def test_a_skill_that_nobody_offered_is_nobodys_business(daemon: RawDaemon) -> None:
    await daemon.send("skill_report", request_id="r", skill_id="s", state="failed", error_code="x", error="y")
    await daemon.beat()
    assert (await daemon.receive())[0] == "heartbeat_ack"


async def test_a_zero_instance_is_refused(bench: Bench, daemon: RawDaemon) -> None:
    await daemon.send("heartbeat", daemon_instance_id="00000000-0000-0000-0000-000000000000")
    assert (await daemon.expect("error"))["error_code"] == "validation_failed"
    assert await daemon.closed() == 1000


async def test_while_postgres_is_away_a_machine_is_held_on_to(dsn: str) -> None:
    """Beats are acknowledged, reports are to be said again; only a grant of unknown outcome costs the channel."""
    async with proxied(dsn) as (proxy, url), api_server(url, **QUICK) as cut:
        bench = await make_bench(cut)
        async with raw_daemon(cut.url, bench.machine) as daemon:
            public = await daemon.take(await bench.queue())
            await proxy.stop()
            for _ in range(2):
                await daemon.beat()
                await daemon.expect("heartbeat_ack", 20)
            ack = await daemon.finished(public)
            assert (ack["ack_status"], ack["error_code"]) == ("transient_error", "storage_unavailable")
            await daemon.send("process_accept", process_id=public)
            assert await daemon.closed(20) == 1011


# --- the routes ---------------------------------------------------------------------------------------------


async def test_bootstrap_tells_the_machine_and_always_the_same_installation(bench: Bench, daemon: RawDaemon) -> None:
    answers = [await daemon.call("POST", "/bootstrap") for _ in range(2)]
    assert answers[0] == answers[1]
    status, body = answers[0]
    assert (status, body["machine_id"]) == (200, bench.machine.public_id)


ROUTES = [("POST", "/bootstrap"), ("POST", "/runtimes"), ("POST", "/failures?stage=daemon_install&exit_status=1")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_only_a_daemons_token_opens_the_door(bench: Bench, method: str, path: str) -> None:
    stranger = tokens.generate(TokenKind.DAEMON).text
    wrong = bench.machine.token[:-1] + ("y" if bench.machine.token.endswith("x") else "x")
    for key in (None, "nonsense", bench.server.key, stranger, wrong):
        answer = await bench.server.call(method, BASE + path, key=key)
        assert (answer.status, answer.code) == (401, "unauthorized"), key
    answer = await bench.server.call("GET", "/api/v1/me", key=bench.machine.token)
    assert answer.status == 401


async def test_an_outage_is_never_told_as_a_bad_token(dsn: str, daemon: RawDaemon, bench: Bench) -> None:
    """A daemon that hears 401 destroys everything: while Postgres is away it must hear 503, whatever it asks for."""
    async with proxied(dsn) as (proxy, url), api_server(url, **QUICK) as cut:
        daemon.url = cut.url
        assert (await daemon.call("POST", "/bootstrap"))[0] == 200
        proxy.cut()
        await proxy.stop()
        for method, path in ROUTES:
            body = {"daemon_instance_id": daemon.instance, "daemon_version": "1.0.0", "processes": []}
            status, answer = await daemon.call(method, path, body if path == "/runtimes" else None)
            assert (status, answer["code"]) == (503, "service_unavailable"), path
        assert (await daemon.refused())[0] == 503


async def test_an_end_in_good_order_and_the_same_daemon_again(bench: Bench, daemon: RawDaemon) -> None:
    status, runtime = await daemon.call("POST", f"/runtimes/{daemon.runtime}/end")
    assert (status, runtime["state"]) == (200, "ended")
    assert runtime["ended_at"] is not None
    await daemon.beat()
    assert await daemon.expect("runtime_ended")
    assert await daemon.closed() == 1000
    assert (await daemon.refused())[1]["code"] == "daemon_runtime_unregistered"


async def test_sleep_is_refused_with_the_reason(bench: Bench, daemon: RawDaemon) -> None:
    status, body = await daemon.call("POST", f"/runtimes/{daemon.runtime}/sleep")
    assert (status, body["code"]) == (409, "not_wake_capable")
    await bench.sql.fetch("update machines set sandbox_url = 'http://x' where id = $1", bench.machine.id)
    process_id = await bench.queue()
    status, body = await daemon.call("POST", f"/runtimes/{daemon.runtime}/sleep")
    assert (status, body["code"]) == (409, "pending_work")
    public = await daemon.take(process_id)
    await daemon.finished(public)
    status, body = await daemon.call("POST", f"/runtimes/{daemon.runtime}/sleep")
    assert (status, body["state_reason_code"]) == (200, "machine_asleep")
    state = await bench.sql.fetch("select state from machine_connections where machine_id = $1", bench.machine.id)
    assert state[0][0] == "asleep"


async def test_a_failure_is_kept(bench: Bench, daemon: RawDaemon) -> None:
    path = "/failures?stage=startup_script&exit_status=3"
    assert (await _text(daemon, path, "no such\0file"))[0] == 204
    report = (await bench.sql.fetch("select failure_report from machines where id = $1", bench.machine.id))[0][0]
    assert msgspec.json.decode(report)["stage"] == "startup_script"
    assert (await _text(daemon, "/failures?stage=dance"))[0] == 400
    assert (await _text(daemon, "/failures?stage=startup_script&exit_status=0"))[0] == 400
    assert (await _text(daemon, path, "x" * 4098))[0] == 413


async def _text(daemon: RawDaemon, path: str, text: str = "") -> tuple[int, str]:
    headers = daemon.headers | {"Content-Type": "text/plain"}
    async with daemon.session.post(f"{daemon.url}{BASE}{path}", data=text.encode(), headers=headers) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"daemon_instance_id": "x", "daemon_version": "1.0.0", "processes": []},
        {"daemon_instance_id": "00000000-0000-0000-0000-000000000000", "daemon_version": "1.0.0", "processes": []},
        {"daemon_instance_id": str(new_uuid()), "daemon_version": "", "processes": []},
        {"daemon_instance_id": str(new_uuid()), "daemon_version": "1.0.0", "processes": [{"process_id": "prc_x"}]},
    ],
)
async def test_a_bad_registration_is_400(bench: Bench, body: Any) -> None:
    async with raw_daemon(bench.server.url, bench.machine, connected=False) as daemon:
        status, answer = await daemon.call("POST", "/runtimes", body)
        assert status == 400, answer


# --- the end of a server ------------------------------------------------------------------------------------


async def test_a_server_that_stops_closes_its_channels_within_a_second(dsn: str) -> None:
    async with api_server(dsn, **QUICK) as server:
        bench = await make_bench(server)
        async with raw_daemon(server.url, bench.machine) as daemon:
            sessions = next(part for part in server.parts.services if isinstance(part, Sessions))
            assert len(sessions) == 1
            started = asyncio.get_running_loop().time()
            closing = asyncio.create_task(sessions.drain(Deadline(20)))
            assert await daemon.closed() == 1001
            await closing
            assert asyncio.get_running_loop().time() - started < 15
            status, body = await daemon.refused()
            assert (status, body["code"]) == (503, "service_unavailable")
