"""Launching agents, and the two APIs' ways of saying what to launch."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from omnara.engine import launch, lifecycle, reads
from omnara.engine.launch_flat import FlatLaunch, FlatTool, launch_flat
from omnara.engine.scope import AgentPath
from omnara.errors import InvalidRequest, NotFound
from omnara.ids import IdKind, encode, new_uuid
from tests.support.engine_case import Engine, texts


async def test_launch_writes_the_config_alone_in_turn_one(engine: Engine) -> None:
    launched = await engine.launch("Hello")
    path = AgentPath(launched.agent.id)
    assert launched.created
    assert launched.config is not None
    [(kind, payload)] = await engine.log(path)
    assert kind == "agent_input"
    assert payload["input_kind"] == "config_change"
    assert payload["agent_config_id"] == encode(IdKind.AGENT_CONFIG, launched.config.row.id)
    assert payload["actor_id"].startswith("actr_")
    hot = await engine.assert_coherent(path)
    assert (hot["turn_sequence"], hot["turn_open"], hot["next_rank"]) == (1, False, 2048)
    assert hot["ready_at"] is not None
    assert launched.input is not None
    assert texts(launched.input) == ["Hello"]
    assert ("ready", launched.agent.id) in engine.hints


async def test_launch_without_a_message_is_at_rest(engine: Engine) -> None:
    path = await engine.agent()
    hot = await engine.assert_coherent(path)
    assert hot["ready_at"] is None
    assert hot["next_rank"] == 1024


async def test_first_write_wins_even_if_the_agent_was_archived_since(engine: Engine) -> None:
    first = await engine.launch("One", key="k", name="First")
    assert first.input is not None
    again = await engine.launch("Two", key="k", name="Second")
    assert (again.created, again.agent.id, again.agent.name) == (False, first.agent.id, "First")
    await lifecycle.archive(engine.deps, engine.p, AgentPath(first.agent.id))
    third = await engine.launch("Three", key="k")
    assert third.agent.id == first.agent.id
    assert third.agent.archived_at is not None
    rows = await engine.fetch(
        "select idempotency_key from inputs where agent_id = $1 and kind = 'content'", first.agent.id
    )
    assert [row[0] for row in rows] == ["launch:k:content-input"]


async def test_twenty_launches_with_one_key_make_one_agent(engine: Engine) -> None:
    config_id = await engine.config()
    launches = await asyncio.gather(
        *(
            launch.launch_agent(engine.deps, engine.p, engine.project, config_id, message=f"{n}", key="same")
            for n in range(20)
        )
    )
    assert sum(item.created for item in launches) == 1
    assert len({item.agent.id for item in launches}) == 1
    assert len(await engine.fetch("select from agents")) == 1
    assert len(await engine.fetch("select from inputs where kind = 'content'")) == 1
    await engine.assert_coherent(AgentPath(launches[0].agent.id))


async def test_unknown_config_and_blank_message_are_refused(engine: Engine) -> None:
    with pytest.raises(NotFound):
        await launch.launch_agent(engine.deps, engine.p, engine.project, new_uuid())
    with pytest.raises(InvalidRequest):
        await engine.launch("  \n")
    assert not await engine.fetch("select from agents")


async def test_flat_launch_makes_the_same_config_once(engine: Engine) -> None:
    look = FlatTool("look", "Looks.", {"type": "object", "properties": {}}, "always_ask")
    request = FlatLaunch(
        model="small", system_prompt=" Be <brief>. ", tools=["web_fetch", look], temperature=0.5, message="Hi", name="x"
    )
    first = await launch_flat(engine.deps, engine.p, engine.project, request)
    second = await launch_flat(engine.deps, engine.p, engine.project, request)
    assert first.agent.id != second.agent.id
    assert first.agent.current_config_id == second.agent.current_config_id
    assert first.config is not None
    definition = msgspec.json.decode(first.config.row.definition)
    assert definition["instruction"] == "Be <brief>."
    assert definition["temperature"] == 0.5
    assert definition["tools"]["look"]["permission"]["mode"] == "always_ask"
    assert definition["tools"]["web_fetch"]["type"] == "built_in"


async def test_a_flat_launch_names_machine_sources_as_a_config_does(engine: Engine) -> None:
    request = FlatLaunch(model="small", machine_sources=[{"machine": "nobody"}])
    with pytest.raises(InvalidRequest, match=r"machine_sources\.0\.machine"):
        await launch_flat(engine.deps, engine.p, engine.project, request)
    with pytest.raises(InvalidRequest, match=r"machine_sources\.0"):
        await launch_flat(engine.deps, engine.p, engine.project, FlatLaunch(model="small", machine_sources=[{}]))


FLAT_MODEL_NAMES: list[Any] = ["small", "lab/small", "lab/lab-small-1"]


async def test_flat_model_names(engine: Engine) -> None:
    for name in FLAT_MODEL_NAMES:
        launched = await launch_flat(engine.deps, engine.p, engine.project, FlatLaunch(model=name))
        assert (launched.agent.provider_config, launched.agent.model) == ("lab", "small")


FLAT_MODEL_NAMES_THAT_MEAN_NOTHING: list[Any] = ["", "nope", "lab/nope", "ghost/x", "lab/"]


async def test_flat_model_names_that_mean_nothing(engine: Engine) -> None:
    for name in FLAT_MODEL_NAMES_THAT_MEAN_NOTHING:
        with pytest.raises(InvalidRequest, match="model"):
            await launch_flat(engine.deps, engine.p, engine.project, FlatLaunch(model=name))


async def test_flat_faults_are_told_in_the_callers_words(engine: Engine) -> None:
    bad = FlatLaunch(model="small", system_prompt="x" * 300_000, tools=["no_such_tool"], temperature=9.0)
    with pytest.raises(InvalidRequest) as caught:
        await launch_flat(engine.deps, engine.p, engine.project, bad)
    text = str(caught.value)
    assert "system_prompt: must not be longer" in text
    assert "tools.no_such_tool: is not a built-in tool" in text
    assert "temperature: must be a number from 0 to 2" in text


async def test_lists_leave_archived_agents_out(engine: Engine) -> None:
    paths = [await engine.agent() for _ in range(3)]
    await lifecycle.archive(engine.deps, engine.p, paths[1])
    page = await reads.list_agents(engine.deps, engine.p, engine.project, limit=1)
    assert [row.id for row in page.rows] == [paths[2].agent_id]
    assert page.more
    last = page.rows[-1]
    rest = await reads.list_agents(engine.deps, engine.p, engine.project, after=(last.created_at, last.id), limit=5)
    assert [row.id for row in rest.rows] == [paths[0].agent_id]
    assert not rest.more
