"""Rows that somebody or something has damaged: the agent is stopped and says so, an operator decides, others go on."""

from __future__ import annotations

from typing import Any

import pytest

from omnara.client import ApiError, Client
from omnara.testing import Answer, Text, Thinking, call, say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.waiting import until

THINKING = Answer(blocks=(Thinking("Hm, hm."), Text("a thought")))

SPOIL = {
    "payload": "update events set payload = '{\"broken\": 1}' where agent_id = $1 and kind = 'model_output'",
    "shape": "update events set payload = '[1, 2, 3]' where agent_id = $1 and kind = 'model_output'",
    "blob": "update events set replay = '\\xdeadbeef' where agent_id = $1 and kind = 'model_output'",
    "missing": """with gone as (delete from events where agent_id = $1 and kind = 'model_output' returning *)
                  insert into chaos_removed select * from gone""",
}
"""What happens to the one answer in the log."""


async def test_damaged_rows_stop_their_agent_alone(cluster: Cluster, client: Client) -> None:
    """`crashed` with a diagnosis; `force` goes on without the rows, `restart` from the last message; no 5xx."""
    first = await cluster.only_worker()
    agents = {name: await cluster.agent(client, THINKING, say("went on"), text=name) for name in SPOIL}
    healthy = await cluster.agent(client, say("one"), say("two"))
    steps = await cluster.agent(client, call("web_fetch", cluster.fetch("damage")), say("three"), say("four"))
    for agent in (*agents.values(), healthy, steps):
        await agent.settled()
    first.kill()  # what it remembers of the agents would hide the damage
    await cluster.sql.execute("create table chaos_removed (like events)")
    for name, agent in agents.items():
        assert (await cluster.sql.execute(SPOIL[name], agent.uuid)).endswith(" 1")
    await cluster.sql.execute(
        "update steps set usage = '[\"?\"]', error = '7', next_action = 'nonsense' where agent_id = $1", steps.uuid
    )
    (second,) = await cluster.start()
    for agent in (*agents.values(), healthy, steps):
        await client.send(agent.id, "go on")
    for name, agent in agents.items():
        await agent.settled("crashed")
        await stopped_with_a_reason(client, agent, name)
    await answers(healthy, "two")
    await answers(steps, "four")
    assert (await client.status(steps.id)).status == "idle", "a damaged step row is history, and harms nobody"
    for number, (name, agent) in enumerate(agents.items()):
        status = await client.resume(agent.id, force=number % 2 == 0, restart=number % 2 == 1)
        assert status.status != "crashed", name
        await answers(agent, "")
    # The log keeps its hole for ever, which the checks at the end would rightly report.
    await cluster.sql.execute("insert into events select * from chaos_removed")
    await cluster.sql.execute("drop table chaos_removed")
    cluster.keep(second)


async def stopped_with_a_reason(client: Client, agent: Handle, name: str) -> None:
    """What an operator sees, over HTTP."""
    status = await client.status(agent.id)
    assert status.diagnosis, name
    hot = await agent.hot()
    assert hot["void"], name
    assert hot["history_version"] == 1
    with pytest.raises(ApiError) as refused:
        await client.resume(agent.id)
    assert refused.value.status == 409
    await client.send(agent.id, "and this while it is stopped")


async def answers(agent: Handle, text: str) -> None:
    """The agent comes to rest, and has said this last."""

    async def at_rest() -> Any:
        status = await agent.client.status(agent.id)
        return status.status == "idle" and text in (status.output or "")

    await until(at_rest, f"{agent.key[:20]} says {text!r}", limit_s=agent.cluster.times.patience_s)
