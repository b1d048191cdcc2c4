"""Processes that are asked to stop, also while much is going on: nothing is lost, repeated, or counted as a failure."""

from __future__ import annotations

import asyncio
import signal

from omnara.client import Client
from omnara.domain.content import INTERRUPTED_TEXT
from omnara.testing import call, say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.load import Load
from tests.support.waiting import until

EVERYTHING = "api,worker,maintenance"


async def test_work_in_progress_is_finished_or_handed_over(cluster: Cluster, client: Client) -> None:
    """What ends within the drain is saved; the rest is released, and another worker does it."""
    cluster.page.hold("slow")
    drain_s = max(6.0, cluster.times.drain_s)  # longer than a computer under load stands still
    first = await cluster.only_worker({"WORKER_DRAIN_TIMEOUT": f"{drain_s:g}s"})
    fetch = call("web_fetch", cluster.fetch("quick"), text="{{attempt}}")
    quick = await cluster.agent(client, fetch, say("done"), gate="mid_text")
    endless = await cluster.agent(client, say("answer {{attempt}}"), gate="mid_text")
    fetching = await cluster.agent(client, call("web_fetch", cluster.fetch("slow")), say("done"))
    for agent in (quick, endless):
        await agent.gate.reached(30)
    await cluster.page.visited("slow")
    (second,) = await cluster.start()
    first.signal(signal.SIGTERM)

    async def not_ready() -> bool:
        return await first.readyz() == 503

    await until(not_ready, "it says that it takes no traffic", limit_s=20)
    quick.gate.release()
    await quick.settled()
    later = await cluster.agent(client, say("by the other"))
    await later.settled()
    assert (await later.steps())[0]["worker_id"] == second.worker_id
    assert await first.exited(limit_s=drain_s + 20) == 0
    for agent in (endless, fetching):
        await agent.settled()
    assert [entry.turn for entry in quick.requests] == [0, 1]
    steps = await quick.steps()
    assert [row["kind"] for row in steps] == ["model", "tools", "model"]
    assert {row["state"] for row in steps} == {"succeeded"}
    assert steps[0]["worker_id"] != steps[1]["worker_id"] == second.worker_id
    assert cluster.page.hits["quick"] == cluster.page.hits["slow"] == 1
    assert await endless.texts() == ["answer 2"]
    assert await endless.step_states() == [("model", "released"), ("model", "succeeded")]
    assert [row["attempt"] for row in await endless.steps()] == [1, 1]
    assert [event.text for event in await fetching.events() if event.kind == "tool_result"] == [INTERRUPTED_TEXT]
    assert await fetching.step_states() == [("model", "succeeded"), ("tools", "released"), ("model", "succeeded")]
    assert {(await agent.hot())["deaths"] for agent in (quick, endless, fetching)} == {0}
    cluster.keep(second)


async def test_a_second_signal_cuts_the_drain_short(cluster: Cluster) -> None:
    """Streams are closed at once; the second SIGTERM ends the wait for a model; still in order, still exit 0."""
    (whole,) = await cluster.start(1, EVERYTHING, {"WORKER_DRAIN_TIMEOUT": "60s"})
    client = cluster.client(whole)
    agent = await cluster.agent(client, say("said at last"), gate="mid_text")
    await agent.gate.reached(30)
    url, http = await stream_url(client, agent), client._http
    streams = [await http.session.get(url, headers=http.headers) for _ in range(20)]
    whole.signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        await asyncio.gather(*(stream.read() for stream in streams))
    assert whole.alive, "the step still has its time"
    assert (await client.status(agent.id)).status == "running", "other routes still answer"
    whole.signal(signal.SIGTERM)
    assert await whole.exited() == 0
    agent.gate.release()
    worker = await cluster.only_worker()
    await agent.settled()
    assert [row["attempt"] for row in await agent.steps()] == [1, 1]
    assert (await agent.hot())["deaths"] == 0
    cluster.keep(worker)


async def stream_url(client: Client, agent: Handle) -> str:
    """The address of an agent's event stream."""
    return client._http.url((await client.links(agent.id)).stream)


async def test_rolling_restart_under_load(cluster: Cluster) -> None:
    """Three replicas replaced one after the other: not one step repeated, not one event missed by those who follow."""
    patient = {"WORKER_DRAIN_TIMEOUT": "35s"}  # time enough on any machine: nothing may be released
    replicas = await cluster.start(3, EVERYTHING, patient)
    clients = [cluster.client(replica) for replica in replicas]
    load = Load(cluster, "rolling")
    await load.begin(clients, 15)
    load.follow(6)
    for replica in replicas:
        await load.goes_on()
        assert await replica.stop() == 0
        following = cluster.make(EVERYTHING, ports=replica.ports, settings=patient)
        following.launch()
        await following.ready()
    await load.end()
    await load.check(undisturbed=True)


async def test_nine_deploys_during_one_long_model_call(cluster: Cluster, client: Client) -> None:
    """As many releases as there are attempts: the call is still at its first one, and the tenth process ends it."""
    workers = await cluster.start(10, settings={"WORKER_DRAIN_TIMEOUT": "0s"})
    agent = await cluster.agent(client, say("answer {{attempt}}"), gate="mid_text", gate_times=-1)
    stopped = []
    for number in range(1, 10):
        await agent.asked(number)
        stopped.append(await cluster.runner_of(agent))
        stopped[-1].signal(signal.SIGTERM)
    await agent.asked(10)
    assert [await replica.exited() for replica in stopped] == [0] * 9
    agent.gate.release()
    await agent.settled()
    steps = await agent.steps()
    assert [row["state"] for row in steps] == ["released"] * 9 + ["succeeded"]
    assert {row["attempt"] for row in steps} == {1}
    assert await agent.texts() == ["answer 10"]
    cluster.keep(*(worker for worker in workers if worker not in stopped))
