"""A step that kills its worker every time it is tried, and agents beside it that must not suffer for it."""

from __future__ import annotations

import pytest

from omnara.client import ApiError, Client
from omnara.testing import say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.load import Load
from tests.support.processes import ServerProcess
from tests.support.waiting import until

DEATH_LIMIT = 5


async def test_a_step_that_kills_its_worker(cluster: Cluster, client: Client) -> None:
    """After five deaths without a saved step the agent is `crashed`; all others, run beside it each time, finish."""
    load = Load(cluster, "poisoned")
    workers = [await cluster.only_worker(), *await cluster.start(DEATH_LIMIT)]
    await load.begin([client], 12)
    poison = await cluster.agent(client, say("never"), text="poison", gate="request", gate_times=-1)
    killed = 0
    while killed < DEATH_LIMIT:
        victim = await first_to_begin(workers, poison)
        assert (await poison.hot())["deaths"] == killed
        victim.kill_main()
        workers.remove(victim)
        killed += 1
    await poison.settled("crashed")
    assert await poison.step_states() == [("model", "interrupted")] * DEATH_LIMIT
    assert workers[0].alive, "the last worker is spared"
    status = await client.status(poison.id)
    assert status.diagnosis
    with pytest.raises(ApiError) as refused:
        await client.resume(poison.id)
    assert refused.value.status == 409
    await load.end()
    await load.check()
    assert {(await agent.hot())["gate"] for agent in load.agents} == {"open"}
    poison.gate.release()
    await client.resume(poison.id, force=True)
    await poison.settled()
    assert (await poison.texts())[-1] == "never"
    cluster.keep(*workers)


async def first_to_begin(workers: list[ServerProcess], agent: Handle) -> ServerProcess:
    """The worker that begins a step of this agent; each of them is killed before it could begin another one."""

    def begun() -> list[ServerProcess]:
        wanted = {"point": "model_begun", "agent_id": str(agent.uuid)}
        return [worker for worker in workers if any(wanted.items() <= point.items() for point in worker.probes.points)]

    try:
        await until(lambda: bool(begun()), "a worker begins the step", limit_s=agent.cluster.times.patience_s)
    except AssertionError as error:
        raise AssertionError(f"{error}: {dict(await agent.hot())} {await agent.step_states()}") from None
    return begun()[0]
