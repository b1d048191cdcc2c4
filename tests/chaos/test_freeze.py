"""A process that is stopped for longer than its lease has lost its agents, whatever it believes when it goes on."""

from __future__ import annotations

import signal

from omnara.client import Client
from omnara.domain.content import INTERRUPTED_TEXT
from omnara.testing import call, say
from tests.support.cluster import Cluster
from tests.support.waiting import until


async def test_late_worker_saves_nothing(cluster: Cluster, client: Client) -> None:
    """Stopped in a model call, in a fetch and in a save; another worker goes on; the late one gives up all three."""
    cluster.page.hold("frozen")
    lease = cluster.times.short_lease
    frozen = await cluster.only_worker(lease)
    asking = await cluster.agent(client, say("answer {{attempt}}"), gate="mid_text")
    fetching = await cluster.agent(client, call("web_fetch", cluster.fetch("frozen")), say("went on"))
    saving = await cluster.agent(client, say("answer {{attempt}}"), gate="mid_text")
    for agent in (asking, saving):
        await agent.gate.reached(30)
    await cluster.page.visited("frozen")
    (second,) = await cluster.start(settings=lease)
    async with saving.locked():
        saving.gate.release()
        await frozen.probes.wait("saving", agent_id=saving.uuid)
        frozen.signal(signal.SIGSTOP)
    old = frozen.worker_id
    agents = (asking, fetching, saving)
    try:
        async def taken() -> bool:
            return old not in [(await agent.hot())["worker_id"] for agent in agents]

        waited_s = await until(taken, "the claims are released", limit_s=cluster.times.lease_s + 30)
        assert waited_s > cluster.times.lease_s / 2, "not before the lease ran out"
        assert await cluster.worker_state(old) == "lapsed", "which is not a death"
        for agent in agents:
            await agent.settled()
        logs = {agent: [event.id for event in await agent.events()] for agent in agents}
        # What the stopped process waits for arrives before it goes on, so that it has something to save.
        asking.gate.release()
        cluster.page.release("frozen")
    finally:
        frozen.signal(signal.SIGCONT)
    await until(lambda: len(frozen.log_lines("worker_registered")) == 2, "it starts again as another", limit_s=30)
    await until(lambda: bool(frozen.log_lines("declared_dead")), "it has heard that it was given up", limit_s=20)
    await frozen.probes.wait("reconciled", after=len(frozen.probes.points), held=0, runs=0)
    for agent in agents:
        assert [event.id for event in await agent.events()] == logs[agent]
    assert await asking.texts() == ["answer 2"]
    # The save was sent before the stop, and its row came free: it may have been the last thing that counted.
    assert await saving.texts() in (["answer 1"], ["answer 2"])
    results = [event for event in await fetching.events() if event.kind == "tool_result"]
    assert [(result.outcome, result.text) for result in results] == [("failed", INTERRUPTED_TEXT)]
    assert cluster.page.hits["frozen"] == 1
    # The new identity works: alone, it takes the next agent.
    await cluster.end(second)
    later = await cluster.agent(client, say("by the thawed one"))
    await later.settled()
    assert (await later.steps())[0]["worker_id"] == frozen.worker_id != old
    cluster.keep(frozen)
