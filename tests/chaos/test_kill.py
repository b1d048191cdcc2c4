"""`kill -9` of a worker at every point of a step: the next goes on from the last saved one, and nothing runs twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omnara.client import Client
from omnara.domain.content import INTERRUPTED_TEXT
from omnara.testing import Answer, Call, call, embed, say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.load import Load
from tests.support.processes import ServerProcess, first_at
from tests.support.waiting import until


async def recovery_s(agent: Handle, killed_at: Any) -> float:
    """Seconds from the kill until the first step that began after it, on the database's clock."""
    begun = [row["started_at"] for row in await agent.steps() if row["started_at"] > killed_at]
    return float((begun[0] - killed_at).total_seconds())


async def kill(cluster: Cluster, worker: ServerProcess) -> Any:
    """Kill a worker's process; the database's time of it. Returns when the server has ended all of its sessions.

    A save that was sent before the kill may still be carried out: what a test locks must stay locked until then.
    """
    ports = worker.local_ports(await cluster.sql.fetchval("select inet_server_port()"))
    worker.kill_main()
    killed_at = await cluster.now()

    async def gone() -> bool:
        query = "select not exists (select from pg_stat_activity where client_port = any($1::int[]))"
        return bool(await cluster.sql.fetchval(query, ports))

    await until(gone, "the server has ended the sessions of a process that is gone")
    return killed_at


async def test_during_a_model_call(cluster: Cluster, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """The call is made again, with what was said and changed meanwhile; nothing of the first answer is left."""
    first = await cluster.only_worker()
    steered = await cluster.agent(client, say("answer {{attempt}} to what you said"), gate="mid_text")
    changed = await cluster.agent(client, say("answer {{attempt}}"), prompt="The old prompt.", gate="mid_text")
    for agent in (steered, changed):
        await agent.gate.reached(30)
    await client.send(steered.id, "and also this", steering=True)
    await change_prompt(client, changed, "The new prompt.")
    (second,) = await cluster.start()
    killed_at = await kill(cluster, first)
    for agent in (steered, changed):
        await agent.settled()
        assert await agent.texts() == [f"answer 2{' to what you said' if agent is steered else ''}"]
        assert [entry.outcome for entry in agent.requests] == ["gone", "answered"]
        states = await agent.step_states()
        assert states == [("model", "interrupted"), ("model", "succeeded")]
        assert [row["attempt"] for row in await agent.steps()] == [1, 1], "a death is no failed attempt"
        hot = await agent.hot()
        assert (hot["deaths"], hot["attempt"]) == (0, 0)
    assert "and also this" not in str(steered.requests[0].body)
    assert "and also this" in str(steered.requests[1].body)
    assert [entry.body["system"] != changed.requests[0].body["system"] for entry in changed.requests] == [False, True]
    assert "The new prompt." in str(changed.requests[1].body["system"])
    assert await cluster.worker_state(first.worker_id) == "dead"
    report(capsys, "model call", await recovery_s(steered, killed_at))
    cluster.keep(second)


async def change_prompt(client: Client, agent: Handle, prompt: str) -> None:
    """Give the agent another config through the scoped API."""
    path = (await client.links(agent.id)).events.removesuffix("/events") + "/config"
    source = f"instruction: {prompt}\nmodel:\n  provider_config: anthropic\n  name: scripted\n"
    body = {"source": source, "source_format": "yaml"}
    await client._http.request("POST", path, dict[str, Any], body=body, key=agent.id)


async def test_during_a_fetch(cluster: Cluster, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """A fetch under way, a fetch whose result was being saved: told as interrupted, never made again."""
    cluster.page.hold("held")
    cluster.page.hold("lost")
    cluster.page.hold("slow")
    first = await cluster.only_worker()
    fetching = await cluster.agent(client, call("web_fetch", cluster.fetch("held")), say("{{result -1}}"))
    saving = await cluster.agent(client, call("web_fetch", cluster.fetch("lost")), say("{{result -1}}"))
    both = Answer(blocks=(Call("web_fetch", cluster.fetch("slow")), Call("web_fetch", cluster.fetch("quick.html"))))
    half = await cluster.agent(client, both, say("{{result 0}}"))
    extracting = await cluster.agent(client, call("web_fetch", cluster.fetch("fast.html")), say("fine"))
    await cluster.page.visited("held")
    await cluster.page.visited("lost")
    await cluster.page.visited("slow")
    await until(lambda: half_answered(half), "the quick one of two calls is in the log")
    await client.send(half.id, embed(say("hello to you"), text="hello"))
    (second,) = await cluster.start()
    async with saving.locked():
        cluster.page.release("lost")
        await first.probes.wait("saving", agent_id=saving.uuid, kind="tools")
        await extracting.settled()
        killed_at = await kill(cluster, first)
    cluster.page.release("held")
    cluster.page.release("slow")
    await a_whole_batch(half)
    assert (cluster.page.hits["slow"], cluster.page.hits["quick.html"]) == (1, 1)
    for agent in (fetching, saving):
        await agent.settled()
        results = [event for event in await agent.events() if event.kind == "tool_result"]
        assert [(result.outcome, result.text) for result in results] == [("failed", INTERRUPTED_TEXT)]
        assert INTERRUPTED_TEXT in (await agent.texts())[-1], "the model is told in these words"
        states = await agent.step_states()
        assert states == [("model", "succeeded"), ("tools", "interrupted"), ("model", "succeeded")]
    assert (cluster.page.hits["held"], cluster.page.hits["lost"], cluster.page.hits["fast.html"]) == (1, 1, 1)
    report(capsys, "fetch", await recovery_s(fetching, killed_at))
    cluster.keep(second)


async def half_answered(agent: Handle) -> bool:
    """Whether one result is in the log."""
    return [event.kind for event in await agent.events()].count("tool_result") == 1


async def a_whole_batch(agent: Handle) -> None:
    """Two results in call order, in one message, before the text that came between them; the strict model took it."""
    await until(lambda: said_hello(agent), "the message of the meantime is answered", limit_s=30)
    results = [event for event in await agent.events() if event.kind == "tool_result"]
    assert [result.outcome for result in results] == ["succeeded", "failed"]
    assert results[1].text == INTERRUPTED_TEXT
    assert [entry.status for entry in agent.requests] == [200, 200, 200]
    for entry in agent.requests[1:]:
        messages = entry.body["messages"]
        at = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
        called = [block["id"] for block in messages[at]["content"] if block["type"] == "tool_use"]
        answered = [block for block in messages[at + 1]["content"] if block["type"] == "tool_result"]
        assert [block["tool_use_id"] for block in answered] == called
        assert [INTERRUPTED_TEXT in str(block) for block in answered] == [True, False]


async def said_hello(agent: Handle) -> bool:
    """Whether the second message was answered."""
    return (await agent.texts())[-1] == "hello to you"


async def test_during_the_save(cluster: Cluster, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer that was complete but not saved is asked for again; what began with it did not happen."""
    first = await cluster.only_worker()
    fetch = call("web_fetch", cluster.fetch("after"), text="{{attempt}}")
    last = await cluster.agent(client, say("answer {{attempt}}"), gate="request")
    calling = await cluster.agent(client, fetch, say("done"), gate="request")
    for agent in (last, calling):
        await agent.gate.reached(30)
    async with last.locked(), calling.locked():
        for agent in (last, calling):
            agent.gate.release()
        for agent in (last, calling):
            await first.probes.wait("saving", agent_id=agent.uuid, kind="model")
        (second,) = await cluster.start()
        killed_at = await kill(cluster, first)
    for agent, texts in ((last, ["answer 2"]), (calling, ["2", "done"])):
        await agent.settled()
        assert await agent.texts() == texts
        assert [entry.turn for entry in agent.requests] == [0, 0, 1][: len(agent.requests)]
        assert (await agent.step_states())[:2] == [("model", "interrupted"), ("model", "succeeded")]
    assert cluster.page.hits["after"] == 1
    report(capsys, "save", await recovery_s(last, killed_at))
    cluster.keep(second)


async def test_between_two_steps(cluster: Cluster, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """One step saved, the agent claimed for the next, which has not begun: it begins elsewhere, once."""
    first = await cluster.only_worker()
    agent = await cluster.agent(client, say("one"), say("two"))
    await agent.settled()
    async with cluster.no_new_turns():
        await client.send(agent.id, "again")
        assert await cluster.runner_of(agent) is first
        await until(cluster.waits_for_a_lock, "the begin waits")
        (second,) = await cluster.start()
        killed_at = await kill(cluster, first)
        assert await cluster.runner_of(agent) is second, "the server drops the begin of a process that is gone"
    await agent.settled()
    assert await agent.texts() == ["one", "two"]
    assert [entry.outcome for entry in agent.requests] == ["answered", "answered"]
    assert await agent.step_states() == [("model", "succeeded"), ("model", "succeeded")]
    report(capsys, "pause between steps", await recovery_s(agent, killed_at))
    cluster.keep(second)


POINTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("claimed", {}),
    ("model_begun", {}),
    ("saving", {"kind": "model"}),
    ("tools_started", {}),
    ("saving", {"kind": "tools"}),
)


async def test_again_and_again_under_load(cluster: Cluster, client: Client) -> None:
    """Whatever the instant: every agent comes to its end, no page is fetched twice, no finished step runs again."""
    load = Load(cluster, "storm")
    workers = [await cluster.only_worker(), *await cluster.start(len(POINTS))]
    beginning = asyncio.create_task(load.begin([client], 16))
    for name, fields in POINTS:
        victim = await first_at(workers, name, **fields)
        victim.kill_main()
        workers.remove(victim)
        if name == "claimed":
            await beginning
            load.follow(4)
    await load.end()
    assert await load.check() > 0
    cluster.keep(workers[0])


def report(capsys: pytest.CaptureFixture[str], what: str, seconds: float) -> None:
    """Print a recovery time past the capture."""
    with capsys.disabled():
        print(f"\n  kill -9 during a {what}: next step after {seconds * 1000:.0f} ms")
