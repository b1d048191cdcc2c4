"""An API process that dies, a client's backend that restarts, answers that come twenty at a time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from omnara.client import ApiError, Client, ServerUnreachable
from omnara.testing import call, say
from tests.support.agent_handle import Handle
from tests.support.cluster import MODEL, Cluster
from tests.support.waiting import until

LOOK_UP = {"name": "look_up", "description": "Looks something up.", "input_schema": {"type": "object"}}
SEND_IT = {"name": "send_it", "description": "Sends it.", "input_schema": {"type": "object"}, "permission": "ask"}


async def test_a_killed_api_process(cluster: Cluster, client: Client) -> None:
    """Agents run on; a request that it had not answered is repeated elsewhere and counts once."""
    worker = await cluster.only_worker()
    (doomed,) = await cluster.start(roles="api")
    broken = cluster.client(doomed, retry_for_s=0)
    running = await cluster.agent(broken, call("web_fetch", cluster.fetch("api")), say("went on"), gate="mid_text")
    busy = await cluster.agent(broken, say("one"), say("two"))
    await running.gate.reached(30)
    await busy.settled()
    launched = await broken.launch(model=MODEL, system_prompt="Once.", key="launch-once")
    answered = await broken.send(busy.id, "answered", key="answered-once")
    await busy.settled()
    async with busy.locked():
        sending = asyncio.create_task(broken.send(busy.id, "unanswered", key="unanswered-once"))
        await until(lambda: waits_for_a_lock(cluster), "the message waits for the hot row")
        doomed.kill()
        with pytest.raises(ServerUnreachable):
            await sending
    running.gate.release()
    await running.settled()
    assert await broken_texts(client, running) == ["", "went on"]
    assert (await client.launch(model=MODEL, system_prompt="Once.", key="launch-once")).id == launched.id
    assert (await client.send(busy.id, "answered", key="answered-once")).id == answered.id
    repeated = [(await client.send(busy.id, "unanswered", key="unanswered-once")).id for _ in range(3)]
    assert len(set(repeated)) == 1
    await busy.settled()
    said = [event.text for event in await read(client, busy) if event.kind == "agent_input"]
    assert said[-2:] == ["answered", "unanswered"]
    assert said.count("unanswered") == 1
    assert await cluster.sql.fetchval("select count(*) from agents where idempotency_key = 'launch-once'") == 1
    cluster.keep(worker)


async def waits_for_a_lock(cluster: Cluster) -> bool:
    """Whether some API connection waits for a row lock."""
    return bool(
        await cluster.sql.fetchval(
            """select exists (select from pg_stat_activity where datname = current_database()
               and application_name = 'omnara:api' and wait_event_type = 'Lock')"""
        )
    )


async def read(client: Client, agent: Handle) -> list[Any]:
    """An agent's log through another process than the one that it was launched with."""
    return [event async for event in client.events(agent.id)]


async def broken_texts(client: Client, agent: Handle) -> list[str]:
    """What the model said, through another process."""
    return [event.text for event in await read(client, agent) if event.kind == "model_output"]


async def test_clients_that_hang_up(cluster: Cluster, client: Client) -> None:
    """Hundreds of requests dropped at any instant: no transaction stays open, no message counts twice."""
    worker = await cluster.only_worker()
    agent = await cluster.agent(client, say("one"), *(say("more") for _ in range(500)))
    await agent.settled()
    chance = random.Random(7)
    keys = [f"dropped-{number}" for number in range(300)]

    async def drop(key: str) -> None:
        impatient = cluster.client(cluster.front, retry_for_s=0)
        with contextlib.suppress(TimeoutError, ServerUnreachable, ApiError):
            async with asyncio.timeout(chance.uniform(0.001, 0.05)):
                await impatient.send(agent.id, key, key=key)
        await impatient.close()

    for start in range(0, len(keys), 50):
        await asyncio.gather(*(drop(key) for key in keys[start : start + 50]))
    again = keys[::30]
    for key in again:
        await client.send(agent.id, key, key=key)
    await agent.settled()
    rows = await cluster.sql.fetch("select state, count(*) from inputs where agent_id = $1 group by 1", agent.uuid)
    assert [row["state"] for row in rows] == ["resolved"]
    said = [event.text for event in await agent.events() if event.kind == "agent_input"]
    assert len(said) == len(set(said))
    assert set(again) <= set(said)
    left = await left_open(cluster)

    async def gone_on() -> bool:
        return not left & await left_open(cluster)

    # At once, or when Postgres goes on after a standstill; the server itself would end them only after ten seconds.
    await until(gone_on, "no transaction is left open", limit_s=5)
    cluster.keep(worker)


async def left_open(cluster: Cluster) -> set[tuple[int, Any]]:
    """Process and begin of the transactions in which nothing has happened for a second."""
    rows = await cluster.sql.fetch(
        """select pid, xact_start from pg_stat_activity where datname = current_database()
           and state like 'idle in transaction%' and state_change < clock_timestamp() - interval '1 second'"""
    )
    return {(row["pid"], row["xact_start"]) for row in rows}


async def test_calls_and_approvals_wait_for_the_first_answer(cluster: Cluster, client: Client) -> None:
    """Nobody answers, the workers die, the backend starts again: all of it waits; of twenty answers one counts."""
    worker = await cluster.only_worker()
    (other,) = await cluster.start(roles="api")
    calling = await cluster.agent(client, call("look_up"), say("{{result -1}}"), tools=[LOOK_UP])
    asking = await cluster.agent(client, call("send_it"), say("ok"), tools=[SEND_IT])
    for agent in (calling, asking):
        await agent.settled("waiting")
    worker.kill()
    assert await cluster.sql.fetchval("select count(*) from agent_sched where worker_id is not null") == 0
    clients = [cluster.client(replica) for replica in (cluster.front, other)]  # a backend that has just started
    (found,) = await clients[0].tool_calls(calling.id, state="ready")
    texts = [f"answer {number}" for number in range(20)]
    won = await first_wins([clients[n % 2].answer_call(calling.id, found.id, text) for n, text in enumerate(texts)])
    assert len(won) == 1
    (form,) = await clients[1].interactions(asking.id)
    allow = next(n for n, option in enumerate(form.request["questions"][0]["options"]) if option["label"] == "Allow")
    choices = [allow if number % 3 else 1 - allow for number in range(20)]
    answers = [[{"option_indices": [choice]}] for choice in choices]
    accepted = await first_wins([clients[n % 2].resolve(asking.id, form.id, answers[n]) for n in range(20)])
    same = {choices[n] for n in accepted}
    assert len(same) == 1
    assert len(accepted) == choices.count(same.pop()), "the same answer by the same person is fine"
    (second,) = await cluster.start()
    permitted = choices[accepted[0]] == allow
    if permitted:
        (allowed,) = await clients[0].tool_calls(asking.id, state="ready")
        await clients[0].answer_call(asking.id, allowed.id, "sent")
    for agent in (calling, asking):
        await agent.settled()
    assert (await calling.texts())[-1] == texts[won[0]]
    (result,) = [event for event in await asking.events() if event.kind == "tool_result"]
    assert result.outcome == ("succeeded" if permitted else "denied")
    assert [entry.turn for entry in calling.requests] == [entry.turn for entry in asking.requests] == [0, 1]
    await cluster.end(other)
    cluster.keep(second)


async def first_wins(attempts: Sequence[Awaitable[object]]) -> list[int]:
    """Make all attempts at once; the numbers of those that were accepted. Every other one must be a 409."""
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert all(isinstance(error, ApiError) for error in refused), refused
    assert {(error.status, error.code) for error in refused if isinstance(error, ApiError)} <= {(409, "conflict")}
    return [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
