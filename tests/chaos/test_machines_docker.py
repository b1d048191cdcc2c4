"""Agents in containers of a real engine while servers and containers die: each command once, each told, nothing left.

The containers are looked into from outside, with the engine's own client.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from omnara.testing import Answer, call, embed, say
from tests.support.docker_boxes import ROLES, Boxes, boxes_on, held, said
from tests.support.docker_engine import SANDBOX_IMAGE, engine_for_tests, has_image, missing
from tests.support.machine_chaos import PATIENT, machine_times, results, run
from tests.support.postgres import PostgresForTests
from tests.support.times import Times
from tests.support.waiting import until

ENGINE = os.environ.get("OMNARA_DOCKER_HOST", "unix:///var/run/docker.sock")
MEGABYTE = 2**20


@pytest_asyncio.fixture(loop_scope="session")
async def boxes(postgres: PostgresForTests, tmp_path: Path, times: Times) -> AsyncIterator[Boxes]:
    """A database of the test's own, and what its installation leaves on the engine removed."""
    provider = await engine_for_tests()
    try:
        if not await has_image(provider, SANDBOX_IMAGE):
            missing(f"there is no image {SANDBOX_IMAGE} (Containerfile, target sandbox)")
        # On a busy computer a container takes its time, and nothing here is about giving up.
        patient = machine_times(times).env | PATIENT
        settings = {f"OMNARA_{name}": value for name, value in patient.items()}
        async with boxes_on(postgres, tmp_path, times, provider, ENGINE, **settings) as made:
            yield made
    finally:
        await provider.close()


async def test_the_only_server_is_killed_and_started_again(boxes: Boxes) -> None:
    """Three commands in two containers run on, one to its end while nobody is there; all are told once."""
    two = await boxes.agent(Answer(blocks=(run(held("one")), run(held("two")))), say("done"))
    one = await boxes.agent(Answer(blocks=(run(held("one")),)), say("done"))
    first = [await boxes.container(two), await boxes.container(one)]
    await boxes.has_lines(first[0], "one", ["begun"])
    await boxes.has_lines(first[0], "two", ["begun"])
    await boxes.has_lines(first[1], "one", ["begun"])
    boxes.cluster.front.kill_main()
    await boxes.inside(first[0], "touch stop")
    await boxes.has_lines(first[0], "one", ["begun", "over"])
    await boxes.has_lines(first[0], "two", ["begun", "over"])
    await boxes.server()
    await boxes.inside(first[1], "touch stop")
    for agent, count in ((two, 2), (one, 1)):
        await agent.settled()
        found = await results(agent)
        assert [(outcome, value["output"]) for outcome, value in found] == [("succeeded", "the end\n")] * count
    assert [await boxes.container(two), await boxes.container(one)] == first, "the same containers"
    assert await boxes.inside(first[0], "cat one two") == "begun\nover\n" * 2
    assert await boxes.inside(first[1], "cat one") == "begun\nover\n"


async def test_a_container_is_killed_and_another_removed(boxes: Boxes) -> None:
    """The waiting call is told in moments that nobody knows; the next command finds the files in a new container."""
    agent = await boxes.agent(
        Answer(blocks=(run(held()),)), Answer(blocks=(run("cat log; echo again >> log"),)), say("went on")
    )
    first = await boxes.container(agent)
    await boxes.has_lines(first, "log", ["begun"])
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.to_thread(subprocess.run, ["docker", "-H", ENGINE, "kill", first], check=True, capture_output=True)
    await agent.settled()
    assert loop.time() - began < 40
    lost, after = await results(agent)
    assert (lost[0], lost[1].get("error_code", lost[1].get("error"))) == (
        "failed",
        "local_process_missing_after_daemon_reconnect",
    )
    assert (after[0], after[1]["output"]) == ("succeeded", "begun\n")
    second = await boxes.container(agent, other_than=first)
    await asyncio.to_thread(
        subprocess.run, ["docker", "-H", ENGINE, "rm", "-f", second], check=True, capture_output=True
    )
    await boxes.client.send(agent.id, embed(call("run_command", {"command": "cat log"}), say("fine"), text="and now?"))
    await until(lambda: said(agent, "fine"), "the next command works", limit_s=60)
    assert (await results(agent))[-1][1]["output"] == "begun\nagain\n"
    await boxes.container(agent, other_than=second)


async def test_many_commands_while_the_driving_replica_dies(boxes: Boxes, times: Times) -> None:
    """Two replicas and a container for each agent; the one in front is killed in the middle. Each command runs once."""
    agents, each = (3, 10) if times.name == "shrunk" else (10, 20)
    await boxes.cluster.start(1, ROLES)
    handles = []
    for _ in range(agents):
        calls = tuple(run(f"echo {number} >> ran; sleep 0.{number % 5}; echo it") for number in range(each))
        handles.append(await boxes.agent(Answer(blocks=calls), say("done")))
    containers = [await boxes.container(agent) for agent in handles]

    async def some() -> bool:
        return len((await boxes.inside(containers[0], "cat ran")).split()) > each // 4

    await until(some, "some have run", limit_s=60)
    boxes.cluster.front.kill_main()
    boxes.go_to(next(one for one in boxes.cluster.replicas if one.alive))
    for agent, container in zip(handles, containers, strict=True):
        await agent.settled(within_s=180)
        found = [value for _, value in await results(agent)]
        # Who takes over may tell that a command runs before it says anything; what is over has said it all.
        assert {value["output"] for value in found if value["state"] == "exited"} == {"it\n"}
        assert {value["state"] for value in found} <= {"exited", "running"}
        assert len(found) == each
        ran = (await boxes.inside(container, "cat ran")).split()
        assert sorted(ran, key=int) == [str(number) for number in range(each)]


async def test_containers_of_deleted_agents_go_although_nobody_saw_it(boxes: Boxes, times: Times) -> None:
    """The server dies, half of the agents are deleted by one that reaches no engine: exactly theirs are removed."""
    count = 4 if times.name == "shrunk" else 20
    agents = [await boxes.agent(Answer(blocks=(run(f"echo {n} > file"),)), say("kept")) for n in range(count)]
    for agent in agents:
        await agent.settled(within_s=180)
    kept = {await boxes.container(agent) for agent in agents[: count // 2]}
    assert len([thing for thing in await boxes.owned() if thing.kind == "container"]) == count
    boxes.cluster.front.kill_main()
    (blind,) = await boxes.cluster.start(1, ROLES, settings={"DOCKER_HOST": "off"})
    client = boxes.cluster.client(blind)
    for agent in agents[count // 2 :]:
        await client.delete(agent.id)
    assert len([thing for thing in await boxes.owned() if thing.kind == "container"]) == count
    await boxes.server()

    async def removed() -> bool:
        return sorted(thing.kind for thing in await boxes.owned()) == ["container"] * len(kept) + ["volume"] * len(kept)

    await until(removed, "what belongs to nobody is removed", limit_s=120)
    read = embed(call("run_command", {"command": "cat file"}), say("read"), text="what is there?")
    for number, agent in enumerate(agents[: count // 2]):
        await boxes.client.send(agent.id, read)
        await until(lambda agent=agent: said(agent, "read"), "it goes on", limit_s=60)  # type: ignore[misc]
        assert (await results(agent))[-1][1]["output"] == f"{number}\n"
    assert {await boxes.container(agent) for agent in agents[: count // 2]} == kept


@pytest.mark.slow
async def test_a_fork_bomb_and_a_flood_stay_in_their_containers(boxes: Boxes) -> None:
    """Somebody else's commands go on, the server's memory and the volume stay small, and the agents can go on too."""
    bomb = await boxes.agent(
        Answer(blocks=(run("b() { b | b & sleep 600; }; b", wait_ms=500),)),
        Answer(blocks=(call("stop_process", {"process_id": {"$result": 0, "path": ["process_id"]}}).blocks[0],)),
        say("stopped"),
    )
    flood = await boxes.agent(
        Answer(blocks=(run("head -c 1000M /dev/zero | tr '\\0' x; echo over > log"),)), say("flooded")
    )
    other = await boxes.agent(*([Answer(blocks=(run("echo here"),))] * 10), say("done"))
    server = psutil.Process(boxes.cluster.front.pid)
    before, most = server.memory_info().rss, 0

    async def over() -> bool:
        nonlocal most
        most = max(most, server.memory_info().rss)
        return await said(bomb, "stopped") and await said(flood, "flooded") and await said(other, "done")

    await until(over, "all three are done", limit_s=180)
    assert [value["output"] for _, value in await results(other)] == ["here\n"] * 10
    assert most - before < 96 * MEGABYTE
    box = await boxes.container(flood)
    await boxes.has_lines(box, "log", ["over"])
    used = int((await boxes.inside(box, "du -sk /home | cut -f1")).strip())
    assert used < 140 * 1024
    again = embed(call("run_command", {"command": "echo well"}), say("well"), text="how are you?")
    for agent in (bomb, flood):
        await boxes.client.send(agent.id, again)
        await until(lambda agent=agent: said(agent, "well"), "the agent goes on", limit_s=120)  # type: ignore[misc]
        assert (await results(agent))[-1][1]["output"] == "well\n"


FLOODS = (
    "yes",
    "cat /dev/urandom",
    "head -c 3G /dev/zero",
    "head -c 500M /dev/zero | tr '\\0' x; echo over >> log",
    "yes 'a line' | head -n 1000000 >&2; echo over >> log",
)


@pytest.mark.slow
async def test_twenty_floods_at_once(boxes: Boxes) -> None:
    """Five huge or endless outputs in each of four containers: each call is answered in its time and can be ended."""
    endless = [call("stop_process", {"process_id": {"$result": each, "path": ["process_id"]}}) for each in (0, 1)]
    floods = [
        await boxes.agent(
            Answer(blocks=tuple(run(command, wait_ms=2000) for command in FLOODS)),
            Answer(blocks=tuple(one.blocks[0] for one in endless)),
            say("stopped"),
        )
        for _ in range(4)
    ]
    other = await boxes.agent(*([Answer(blocks=(run("echo here"),))] * 10), say("done"))
    server = psutil.Process(boxes.cluster.front.pid)
    loop = asyncio.get_running_loop()
    before, most, answers = server.memory_info().rss, 0, list[float]()

    async def over() -> bool:
        nonlocal most
        most, asked = max(most, server.memory_info().rss), loop.time()
        await boxes.client.agents()
        answers.append(loop.time() - asked)
        return not await boxes.cluster.sql.fetchval("select count(*) from processes where closed_at is null") and (
            await said(other, "done") and all([await said(agent, "stopped") for agent in floods])
        )

    await until(over, "all floods are over", limit_s=400)
    assert [value["output"] for _, value in await results(other)] == ["here\n"] * 10
    for agent in floods:
        found = await results(agent)
        assert [outcome for outcome, _ in found] == ["succeeded"] * 7, found
        assert all(len(value.get("output", "")) <= 65_536 for _, value in found)
        box = await boxes.container(agent)
        await boxes.has_lines(box, "log", ["over"] * 2)
        used = int((await boxes.inside(box, "du -sk /home | cut -f1")).strip())
        assert used < len(FLOODS) * 135 * 1024
    assert most - before < 96 * MEGABYTE
    assert sorted(answers)[-2] < 3  # the slowest may have met a computer that stood still
    query = "select extract(epoch from max(completed_at - created_at))::float8 from tool_calls"
    assert await boxes.cluster.sql.fetchval(query) < 60
