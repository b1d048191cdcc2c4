"""Commands on somebody's own machine, behind a real daemon, while workers, servers, lines and machines die.

Every command appends to a file, which is counted: once, or never where the result says that it did not run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from omnara.testing import Answer, Call, call, embed, say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.daemon_process import DaemonProcess
from tests.support.machine_chaos import (
    HELD,
    PATIENT,
    REAL,
    Floor,
    everywhere,
    machine_times,
    public,
    relay,
    results,
    run,
    wire,
)
from tests.support.postgres import PostgresForTests
from tests.support.small_disk import small_disk
from tests.support.tcp_proxy import TcpProxy
from tests.support.times import Times
from tests.support.waiting import until

FIRST = {"$result": 0, "path": ["process_id"]}
"""The process of the first call."""
LINES = pytest.mark.parametrize(
    "line", [pytest.param(relay, marks=pytest.mark.slow, id="silent"), pytest.param(wire, id="pulled")]
)
READ_ALL = Call("read_process", {"process_id": FIRST, "cursor": 0})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_floor(
    postgres: PostgresForTests, tmp_path_factory: pytest.TempPathFactory, times: Times
) -> AsyncIterator[Cluster]:
    """A cluster of this module's own: one API process, which has the machines' channels."""
    directory = tmp_path_factory.mktemp("machines")
    settings = {f"OMNARA_{name}": value for name, value in machine_times(times).env.items()}
    async with postgres.fresh() as dsn, Cluster(dsn, directory, times, **settings) as cluster:
        cluster.front = await everywhere(cluster, "api")
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def floor(shared_floor: Cluster, tmp_path: Path, times: Times) -> AsyncIterator[Floor]:
    """The cluster, with every invariant checked in the end."""
    cluster = shared_floor
    cluster.agents.clear()
    cluster.model.reset()
    if not cluster.front.alive:
        cluster.front = await everywhere(cluster, "api")
    try:
        yield Floor(cluster, machine_times(times), tmp_path)
        await cluster.verify()
    finally:
        cluster.model.reset()
        await cluster.discard(keep=(cluster.front,))


async def begun(daemon: DaemonProcess, times: int = 1) -> None:
    """Wait until held commands have begun."""
    await until(lambda: daemon.lines("log") == ["begun"] * times, f"the command runs\n{daemon.tail()}", limit_s=30)


def let_end(daemon: DaemonProcess) -> None:
    """Let held commands end."""
    (daemon.work / "stop").touch()


async def said(agent: Handle, text: str) -> bool:
    """Whether this is the last thing that an agent's model said."""
    return (await agent.texts())[-1] == text


async def over(daemon: DaemonProcess) -> None:
    """Wait until one held command has ended, as its machine knows."""
    await until(lambda: daemon.lines("log") == ["begun", "over"], "the command is over", limit_s=30)


async def test_the_worker_that_started_commands_is_killed(floor: Floor) -> None:
    """They run on and end while there is no worker at all; the next one has their results, of each call one."""
    machine = await floor.machine()
    first = await floor.cluster.only_worker()
    async with floor.daemon(machine, "laptop") as daemon:
        waiting = await floor.agent([machine], Answer(blocks=(run(HELD),)), say("{{result -1}}"))
        reading = await floor.agent(
            [machine], Answer(blocks=(run(f"cd other; {HELD}", wait_ms=1),)), Answer(blocks=(READ_ALL,)), say("read")
        )
        (daemon.work / "other").mkdir()
        await floor.client.send(waiting.id, "go")
        await begun(daemon)
        await floor.client.send(reading.id, "go")
        await reading.settled()
        first.kill_main()
        (daemon.work / "other" / "stop").touch()
        let_end(daemon)
        await over(daemon)
        await floor.until_states(waiting, "exited")
        await floor.until_states(reading, "exited")
        (second,) = await floor.cluster.start()
        await waiting.settled()
        [(outcome, value)] = await results(waiting)
        assert (outcome, value["state"], value["output"]) == ("succeeded", "exited", "the end\n")
        assert "the end" in (await waiting.texts())[-1], "the model was told"
        await reading.settled()
        assert [outcome for outcome, _ in await results(reading)] == ["succeeded", "succeeded"]
        assert daemon.lines("log") == ["begun", "over"]
        assert daemon.lines("other/log") == ["begun", "over"]
        floor.cluster.keep(second)


@LINES
async def test_a_short_cut_is_invisible(floor: Floor, line: object) -> None:
    """The command ends during the cut, and its waiting call hears of that as if nothing had been."""
    machine = await floor.machine()
    await floor.cluster.only_worker({} if floor.times is REAL else PATIENT)
    loop = asyncio.get_running_loop()
    async with (
        line(floor.cluster.front) as cable,  # type: ignore[operator]
        floor.daemon(machine, "laptop", cable.url, around=cable.around) as daemon,
    ):
        agent = await floor.agent([machine], Answer(blocks=(run(HELD),)), say("done"))
        await floor.client.send(agent.id, "go")
        await begun(daemon)
        cable.pull()
        pulled = loop.time()
        let_end(daemon)
        await over(daemon)
        await floor.offline(machine)
        await asyncio.sleep(max(0.0, pulled + floor.times.short_cut_s - loop.time()))
        assert await results(agent) == []
        cable.plug()
        await agent.settled(within_s=floor.times.back_s)
        [(outcome, value)] = await results(agent)
        assert (outcome, value["output"], value["exit_code"]) == ("succeeded", "the end\n", 0)
        assert daemon.lines("log") == ["begun", "over"]


@LINES
async def test_a_long_cut_lets_nobody_wait(floor: Floor, line: object) -> None:
    """The call is answered in time, the command runs on, and its late end is noted without another result.

    Then the daemon is killed: the next one has all that the command said, and runs nothing again.
    """
    machine = await floor.machine()
    await floor.cluster.only_worker()
    loop = asyncio.get_running_loop()
    async with (
        line(floor.cluster.front) as cable,  # type: ignore[operator]
        floor.daemon(machine, "laptop", cable.url, around=cable.around) as daemon,
    ):
        agent = await floor.agent([machine], Answer(blocks=(run(HELD),)), say("gave up"))
        await floor.client.send(agent.id, "go")
        await begun(daemon)
        cable.pull()
        pulled = loop.time()
        await agent.settled(within_s=floor.times.unreachable_s)
        [(outcome, value)] = await results(agent)
        assert (outcome, value["error_code"], value["retryable"]) == ("failed", "machine_unreachable", True)
        [row] = await floor.processes(agent)
        assert row["closed_at"] is None, "its row lives on"
        assert (value["process_id"], value["state"]) == (public(row["id"]), row["state"])
        assert value["state"] in ("starting", "running")
        let_end(daemon)
        await over(daemon)
        await asyncio.sleep(max(0.0, pulled + floor.times.long_cut_s - loop.time()))
        cable.plug()
        await floor.until_states(agent, "exited", limit_s=floor.times.back_s)
        assert len(await results(agent)) == 1, "the first result stands"
        daemon.kill()
        daemon.start()
        await floor.online(machine, daemon)
        read = call("read_process", {"process_id": value["process_id"], "cursor": 0})
        await floor.client.send(agent.id, embed(read, say("read"), text="read it"))
        await until(lambda: said(agent, "read"), "the output was read", limit_s=floor.times.back_s)
        (_, (outcome, value)) = await results(agent)
        assert (outcome, value.get("output")) == ("succeeded", "the end\n"), value
        assert daemon.lines("log") == ["begun", "over"]


async def test_the_first_machine_dies_and_the_second_does_the_job(floor: Floor) -> None:
    machine, other = await floor.machine(), await floor.machine()
    await floor.cluster.only_worker()
    async with floor.daemon(machine, "first") as first, floor.daemon(other, "second") as second:
        job = run("echo job >> log; echo done here", other)
        agent = await floor.agent(
            [machine, other], Answer(blocks=(run(HELD, machine),)), Answer(blocks=(job,)), say("ok")
        )
        await floor.client.send(agent.id, "go")
        await begun(first)
        first.die()
        await until(lambda: second.lines("log") == ["job"], "the second did the job", limit_s=floor.times.unreachable_s)
        await agent.settled()
        (lost, done) = await results(agent)
        assert (lost[0], lost[1]["error_code"]) == ("failed", "machine_unreachable")
        assert (done[0], done[1]["output"]) == ("succeeded", "done here\n")
        # Its power is back: what was lost is known to be unknown, and is not run again.
        first.start()
        await floor.until_states(agent, "unknown", "exited", limit_s=floor.times.back_s)
        assert (first.lines("log"), second.lines("log")) == (["begun"], ["job"])
        assert len(await results(agent)) == 2


async def test_a_machine_comes_back_after_its_power_was_gone(floor: Floor) -> None:
    """What ran then is known to be unknown, is not run again, and what it had said can still be read."""
    machine = await floor.machine()
    await floor.cluster.only_worker()
    async with floor.daemon(machine, "laptop") as daemon:
        agent = await floor.agent([machine], Answer(blocks=(run(f"echo up; {HELD}"),)), say("started"))
        await floor.client.send(agent.id, "go")
        await until(lambda: said(agent, "started"), "it has begun", limit_s=30)
        [(_, value)] = await results(agent)
        assert (value["state"], value["output"]) == ("running", "up\n")
        daemon.die()
        daemon.start()
        await floor.until_states(agent, "unknown", limit_s=floor.times.back_s)
        await floor.online(machine, daemon)
        [row] = await floor.processes(agent)
        assert row["reason_code"] == "local_process_missing_after_daemon_reconnect"
        read = call("read_process", {"process_id": value["process_id"], "cursor": 0})
        await floor.client.send(agent.id, embed(read, say("read"), text="what did it say?"))
        await until(lambda: said(agent, "read"), "the output was read", limit_s=30)
        (_, value) = (await results(agent))[-1]
        assert (value["output"], value["state"], value["exit_code"]) == ("up\n", "unknown", None)
        assert daemon.lines("log") == ["begun"]


async def test_a_read_that_waits_outlives_its_daemon(floor: Floor) -> None:
    """It is asked again of the next one, from where it was to begin: nothing of the output is passed over."""
    machine = await floor.machine()
    worker = await floor.cluster.only_worker(PATIENT)
    async with floor.daemon(machine, "laptop") as daemon:
        reading = Call("read_process", {"process_id": FIRST, "wait_ms": 10_000})
        agent = await floor.agent(
            [machine], Answer(blocks=(run(f"echo up; {HELD}"),)), Answer(blocks=(reading,)), say("read")
        )
        await floor.client.send(agent.id, "go")

        async def accepted() -> bool:
            query = "select exists (select from process_actions where agent_id = $1 and state = 'accepted')"
            return bool(await floor.cluster.sql.fetchval(query, agent.uuid))

        await until(accepted, "the machine reads", limit_s=30)
        daemon.kill()
        let_end(daemon)
        await over(daemon)
        daemon.start()
        await until(lambda: said(agent, "read"), "the output was read", limit_s=floor.times.back_s)
        started, read = await results(agent)
        assert (started[1]["output"], read[1]["output"]) == ("up\n", "the end\n")
        assert read[1]["cursor"] == started[1]["next_cursor"]
        assert daemon.lines("log") == ["begun", "over"]
    floor.cluster.keep(worker)


WRITES = 20


async def test_what_is_written_to_a_command_arrives_once_while_its_daemon_dies(floor: Floor) -> None:
    """Killed again and again: what was told as written is there once, in order; of what is unknown, at most once."""
    machine = await floor.machine()
    worker = await floor.cluster.only_worker(PATIENT)
    async with floor.daemon(machine, "laptop") as daemon:
        writes = [Call("write_process", {"process_id": FIRST, "data": f"{n}\n"}) for n in range(WRITES)]
        agent = await floor.agent(
            [machine], Answer(blocks=(run("cat >> got", wait_ms=1),)), Answer(blocks=tuple(writes)), say("written")
        )
        await floor.client.send(agent.id, "go")
        for seen in (1, 6, 12):
            await until(
                lambda seen=seen: len(daemon.lines("got")) >= seen, f"it gets input\n{daemon.tail()}", limit_s=60
            )  # type: ignore[misc]
            daemon.kill()
            daemon.start()
        await until(lambda: said(agent, "written"), "all writes are over", limit_s=90)
        told = {}
        for event in await agent.events():
            if event.kind == "tool_result":
                told[event.tool_call_id] = (event.outcome, event.content_blocks[0].get("value"))
        rows = await floor.cluster.sql.fetch(
            "select a.seq, a.state, a.payload::text as payload, a.tool_call_id from process_actions a"
            " where a.agent_id = $1 order by a.seq",
            agent.uuid,
        )
        assert len(rows) == WRITES
        assert len(told) == WRITES + 1
        got = daemon.lines("got")
        assert got == sorted(set(got), key=int), "something arrived twice, or out of order"
        for row in rows:
            line = str(row["seq"] - 1)
            assert row["state"] in ("applied", "unknown"), dict(row)
            if row["state"] == "applied":
                assert line in got, f"{line} was told as written"
        assert len(got) > WRITES - 6
    floor.cluster.keep(worker)


async def test_a_cancel_reaches_the_machine_when_its_line_is_back(floor: Floor) -> None:
    """What waits is taken back and never runs, what runs for the cancelled call is ended, the background goes on."""
    machine = await floor.machine()
    await floor.cluster.only_worker(PATIENT)
    async with relay(floor.cluster.front) as cable, floor.daemon(machine, "laptop", cable.url) as daemon:
        behind = await floor.agent([machine], Answer(blocks=(run(HELD, wait_ms=1),)), say("started"))
        await floor.client.send(behind.id, "go")
        await until(lambda: said(behind, "started"), "the background runs", limit_s=30)
        kept = "echo $$ > pid; echo begun >> canceled; while :; do sleep 0.05; done"
        agent = await floor.agent([machine], Answer(blocks=(run(kept), run("echo never >> never"))), say("never"))
        await floor.client.send(agent.id, "go")
        await until(lambda: daemon.lines("canceled") == ["begun"], "it runs", limit_s=30)
        await until(lambda: daemon.lines("never") == ["never"], "both have run", limit_s=30)
        pid = int(daemon.lines("pid")[0])
        queued = await floor.agent([machine], Answer(blocks=(run("echo late >> late"),)), say("never"))
        cable.pull()
        await floor.client.send(queued.id, "go")
        await floor.until_states(queued, "queued")
        for one in (agent, queued):
            await floor.client.cancel(one.id)
            await one.settled()
        assert psutil.pid_exists(pid)
        assert {outcome for outcome, _ in await results(queued)} == {"canceled"}
        cable.plug()
        await until(lambda: not psutil.pid_exists(pid), "the cancelled command is ended", limit_s=floor.times.back_s)
        let_end(daemon)
        await floor.until_states(behind, "exited", limit_s=floor.times.back_s)
        assert (daemon.lines("log"), daemon.lines("late")) == (["begun", "over"], [])
        assert [row["state"] for row in await floor.processes(queued)] == ["failed"]
        assert (await floor.processes(agent))[0]["state"] in ("unknown", "killed")


AGENTS, EACH = 10, 20


async def test_two_hundred_commands_while_everything_dies_once(floor: Floor) -> None:
    """The worker, the server with the channel and the daemon are killed in the middle: each runs once, each is told."""
    machine = await floor.machine()
    (first,) = await floor.cluster.start(settings=PATIENT)
    async with floor.daemon(machine, "laptop") as daemon:
        agents = []
        for number in range(AGENTS):
            calls = [run(f"echo {number}.{each} >> ran; sleep 0.{each % 5}; echo it") for each in range(EACH)]
            agents.append(await floor.agent([machine], Answer(blocks=tuple(calls)), say("all done")))
        for agent in agents:
            await floor.client.send(agent.id, "go")
        await until(lambda: len(daemon.lines("ran")) > 20, f"some have run\n{daemon.tail()}", limit_s=60)
        first.kill_main()
        daemon.kill()
        daemon.start()
        (second,) = await floor.cluster.start(settings=PATIENT)
        await until(lambda: len(daemon.lines("ran")) > 80, f"more have run\n{daemon.tail()}", limit_s=90)
        floor.cluster.front.kill_main()
        front = floor.cluster.make("api", ports=floor.cluster.front.ports)
        front.launch()
        await front.ready()
        floor.cluster.front = front
        for agent in agents:
            await agent.settled(within_s=180)
            found = await results(agent)
            assert [(outcome, value["output"]) for outcome, value in found] == [("succeeded", "it\n")] * EACH
            assert [row["state"] for row in await floor.processes(agent)] == ["exited"] * EACH
        ran = daemon.lines("ran")
        assert sorted(ran) == sorted(f"{agent}.{each}" for agent in range(AGENTS) for each in range(EACH))
        assert second.alive


async def test_a_daemon_that_is_heard_but_hears_nothing(floor: Floor) -> None:
    """Its heartbeats arrive and what the server sends does not: what is queued fails in time, and never runs later.

    What ran meanwhile is told once, by a daemon that was killed after that too.
    """
    machine = await floor.machine()
    (worker,) = await floor.cluster.start(settings={} if floor.times is REAL else {"MACHINE_ACCEPT_LIMIT": "6s"})
    proxy = TcpProxy("127.0.0.1", floor.cluster.front.ports[0])
    await proxy.start()
    try:
        async with floor.daemon(machine, "laptop", f"http://127.0.0.1:{proxy.port}") as daemon:
            held = await floor.agent([machine], Answer(blocks=(run(HELD, wait_ms=500),)), say("started"))
            late = await floor.agent([machine], Answer(blocks=(run("echo late >> late"),)), say("gave up"))
            await floor.client.send(held.id, "go")
            await begun(daemon)
            await held.settled()
            proxy.go_deaf()
            await floor.client.send(late.id, "go")
            let_end(daemon)
            await floor.until_states(held, "exited", limit_s=20)
            await late.settled(within_s=330)
            [(outcome, value)] = await results(late)
            assert (outcome, value["retryable"]) == ("failed", True)
            assert value["error_code"] in ("process_not_accepted", "machine_unreachable")
            proxy.flow()
            daemon.kill()
            daemon.start()
            await floor.online(machine, daemon)
            after = await floor.agent([machine], Answer(blocks=(run("echo after; cat late"),)), say("done"))
            await floor.client.send(after.id, "go")
            await after.settled()
            [(_, value)] = await results(after)
            assert value["output"].startswith("after\n")
            assert (daemon.lines("log"), daemon.lines("late")) == (["begun", "over"], [])
            assert [outcome for outcome, _ in await results(held)] == ["succeeded"]
    finally:
        await proxy.stop()
    floor.cluster.keep(worker)


MEGABYTE = 2**20


async def test_a_flood_of_output_is_bounded_and_hurts_nobody(floor: Floor) -> None:
    """A line of a gigabyte, and a million lines on standard error: memory and disk stay small, others go on."""
    size = 1000 if floor.times is REAL else 200
    machine = await floor.machine()
    await floor.cluster.only_worker()
    async with floor.daemon(machine, "laptop") as daemon:
        flood = await floor.agent(
            [machine],
            Answer(
                blocks=(
                    run(f"head -c {size}M /dev/zero | tr '\\0' x; echo done >> log"),
                    run("yes 'a line' | head -n 1000000 >&2; echo done >> log"),
                )
            ),
            say("flooded"),
        )
        other = await floor.agent([machine], *([Answer(blocks=(run("echo here"),))] * 5), say("done"))
        before = {process.pid: process.memory_info().rss for process in daemon.family()}
        server = psutil.Process(floor.cluster.front.pid)
        before_server = server.memory_info().rss
        most, most_server = 0, 0

        async def all_done() -> bool:
            nonlocal most, most_server
            most_server = max(most_server, server.memory_info().rss)
            for process in daemon.family():
                with contextlib.suppress(psutil.Error):
                    most = max(most, process.memory_info().rss)
            return daemon.lines("log") == ["done"] * 2

        await floor.client.send(flood.id, "go")
        await floor.client.send(other.id, "go")
        await until(all_done, "the floods are over", limit_s=240)
        await flood.settled(within_s=60)
        await other.settled()
        assert [value["output"] for _, value in await results(other)] == ["here\n"] * 5
        for outcome, value in await results(flood):
            assert (outcome, value["truncated"]) == ("succeeded", True)
            assert 0 < len(value["output"]) <= 65_536
        used = sum(path.stat().st_blocks * 512 for path in daemon.home.rglob("*") if path.is_file())
        assert used < 2 * 135 * MEGABYTE
        assert most - max(before.values()) < 64 * MEGABYTE
        assert most_server - before_server < 64 * MEGABYTE
        huge = public((await floor.processes(flood))[0]["id"])
        tail = call("read_process", {"process_id": huge, "cursor": (size - 1) << 20})
        await floor.client.send(flood.id, embed(tail, say("end"), text="how does it end?"))
        await until(lambda: said(flood, "end"), "the end was read", limit_s=30)
        value = (await results(flood))[-1][1]
        assert (set(value["output"]), value["cursor"]) == ({"x"}, (size - 1) << 20)


async def test_a_full_disk_on_the_machine_is_told_and_over_when_there_is_room(floor: Floor) -> None:
    machine = await floor.machine()
    await floor.cluster.only_worker()
    with small_disk(floor.directory / "disk", 24) as disk:
        async with floor.daemon(machine, "laptop", home=disk.path / "home") as daemon:
            agent = await floor.agent([machine], Answer(blocks=(run("echo one >> log"),)), say("full"))
            disk.fill()
            await floor.client.send(agent.id, "go")
            await until(lambda: said(agent, "full"), "it was told that the disk is full", limit_s=30)
            [(outcome, value)] = await results(agent)
            assert outcome == "failed" or value["state"] == "failed"
            assert "machine_storage_exhausted" in (value.get("error_code"), value.get("error"))
            disk.free()
            again = embed(Answer(blocks=(run("echo two >> log; cat log"),)), say("fine"), text="again")
            await floor.client.send(agent.id, again)
            await until(lambda: said(agent, "fine"), "it works again", limit_s=30)
            assert (await results(agent))[1][1]["output"] == "two\n"
            assert daemon.lines("log") == ["two"]
