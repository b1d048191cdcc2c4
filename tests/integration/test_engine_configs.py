"""Configs on a real catalogue, and changing the config of a live agent."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from omnara.access.roles import ProjectScope
from omnara.domain.config import decode_definition, sha256_hex
from omnara.domain.content import TextBlock
from omnara.engine import lifecycle, model_admin
from omnara.engine.cancel import cancel_agent
from omnara.engine.config_change import ChangedConfig, change_agent_config
from omnara.engine.configs import create_config, get_config
from omnara.engine.inputs import create_input
from omnara.engine.results import submit_result
from omnara.engine.scope import AgentPath
from omnara.errors import IdempotencyKeyConflict, InvalidRequest, NotFound, StateTransitionConflict
from omnara.ids import IdKind, encode, new_uuid
from tests.support.engine_case import CONFIG, FACTS, LAB, LOOK, Engine

YAML = """
version: v1
instruction: |
  Look things up.
model: {provider_config: lab, name: small, reasoning: {effort: high}, context_window_tokens: 50000}
tools:
  web_fetch: {permission: {mode: always_ask}}
"""


def source(**changes: Any) -> str:
    return msgspec.json.encode(CONFIG | changes).decode()


async def change(engine: Engine, path: AgentPath, **options: Any) -> ChangedConfig:
    changes = options.pop("changes", {"instruction": "Other."})
    return await change_agent_config(engine.deps, engine.p, path, source(**changes), "json", **options)


# --- compiling --------------------------------------------------------------------------------------------


async def test_same_source_same_config_other_words_same_hash(engine: Engine) -> None:
    first = await create_config(engine.deps, engine.p, engine.project, YAML, "yaml")
    again = await create_config(engine.deps, engine.p, engine.project, YAML, "yaml")
    other = await create_config(engine.deps, engine.p, engine.project, YAML + "# a note\n", "yaml")
    assert (first.created, again.created, other.created) == (True, False, True)
    assert first.config.row.id == again.config.row.id != other.config.row.id
    assert first.config.row.definition_hash == other.config.row.definition_hash
    assert first.config.row.source == YAML
    assert first.config.row.instruction_hash == sha256_hex("Look things up.")
    definition = msgspec.json.decode(first.config.row.definition)
    assert definition["model"]["configured_model_id"] == encode(
        IdKind.CONFIGURED_MODEL, first.config.model.configured_model_id
    )


async def test_twenty_at_once_store_one(engine: Engine) -> None:
    made = await asyncio.gather(
        *(create_config(engine.deps, engine.p, engine.project, YAML, "yaml") for _ in range(20))
    )
    assert sum(item.created for item in made) == 1
    assert len({item.config.row.id for item in made}) == 1


async def test_limits_are_those_of_today(engine: Engine) -> None:
    made = await create_config(engine.deps, engine.p, engine.project, YAML, "yaml")
    assert (made.config.limits.context_window_tokens, made.config.limits.reasoning_effort) == (50_000, "high")
    await engine.fetch("update project_model_grants set context_window_tokens = 20000, max_output_tokens = 1000")
    seen = await get_config(engine.deps, engine.p, engine.project, made.config.row.id)
    assert (seen.limits.context_window_tokens, seen.limits.request_max_output_tokens) == (20_000, 1_000)
    with pytest.raises(InvalidRequest, match="context_window_tokens: must not be larger than 20000"):
        await create_config(engine.deps, engine.p, engine.project, YAML + "#\n", "yaml")


WHAT_THE_CATALOGUE_DOES_NOT_HAVE: list[Any] = [
    (
        {"model": {"provider_config": "ghost", "name": "small"}},
        "model.provider_config: is not the name of a provider",
    ),
    ({"model": {"provider_config": "lab", "name": "ghost"}}, "model.name: is not the name of a model"),
    (
        {"model": {"provider_config": "lab", "name": "small", "reasoning": {"effort": "max"}}},
        "model.reasoning.effort: must be one of high, low",
    ),
    (
        {"model": {"provider_config": "lab", "name": "small", "default_max_output_tokens": 9000}},
        "default_max_output_tokens: must not be larger than 8000",
    ),
    (
        {
            "model": {
                "provider_config": "lab",
                "name": "small",
                "default_max_output_tokens": 500,
                "context_window_tokens": 500,
            }
        },
        "must be smaller than context_window_tokens",
    ),
]


async def test_what_the_catalogue_does_not_have(engine: Engine) -> None:
    for changes, message in WHAT_THE_CATALOGUE_DOES_NOT_HAVE:
        with pytest.raises(InvalidRequest, match=message):
            await create_config(engine.deps, engine.p, engine.project, source(**changes), "json")
        assert not await engine.fetch("select from agent_configs")


async def test_grant_and_tool_support_are_needed(engine: Engine) -> None:
    await engine.fetch("update configured_model_revisions set supports_tools = false")
    with pytest.raises(InvalidRequest, match="tools: the model does not support tools"):
        await create_config(engine.deps, engine.p, engine.project, source(), "json")
    await create_config(engine.deps, engine.p, engine.project, source(tools={}), "json")
    await engine.fetch("delete from project_model_grants")
    with pytest.raises(InvalidRequest, match="not granted"):
        await create_config(engine.deps, engine.p, engine.project, source(tools={}), "json")


async def test_further_models_are_resolved_granted_and_named_once(engine: Engine) -> None:
    ring, facts = engine.deps.ring, msgspec.structs.replace(FACTS, provider_model_slug="lab-large-1")
    await model_admin.add_model(engine.deps.db, ring, engine.project.org_id, LAB, None, "large", facts)
    model = CONFIG["model"]
    names = {"provider_config": model["provider_config"], "name": model["name"]}
    large = {"provider_config": "lab", "name": "large"}

    def naming(*further: dict[str, str]) -> str:
        return source(model=model | {"fallback_models": list(further)})

    made = await create_config(engine.deps, engine.p, engine.project, naming(large), "json")
    plain = await create_config(engine.deps, engine.p, engine.project, source(), "json")
    definition, without = (decode_definition(item.config.row.definition) for item in (made, plain))
    [row] = await engine.fetch("select id from configured_models where name = 'large'")
    assert definition.model.fallback_model_ids == (encode(IdKind.CONFIGURED_MODEL, row["id"]),)
    assert without.model.fallback_model_ids == ()
    assert "fallback" not in plain.config.row.definition, "what is not used changes no hash"
    for further, message in (
        ((large, large), "model.fallback_models.1.name: is named before"),
        ((names,), "model.fallback_models.0.name: is named before"),
        (({"provider_config": "lab", "name": "gone"},), "model.fallback_models.0.name: is not the name"),
        (({"provider_config": "gone", "name": "large"},), "model.fallback_models.0.provider_config: is not the name"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            await create_config(engine.deps, engine.p, engine.project, naming(*further), "json")
    await engine.fetch("delete from project_model_grants where configured_model_id = $1", row["id"])
    with pytest.raises(InvalidRequest, match=r"model.fallback_models.0.name: is not granted"):
        await create_config(engine.deps, engine.p, engine.project, naming(large), "json")


async def test_other_projects_configs_are_out_of_sight(engine: Engine) -> None:
    made = await create_config(engine.deps, engine.p, engine.project, YAML, "yaml")
    stranger = ProjectScope(engine.project.org_id, new_uuid())
    with pytest.raises(NotFound):
        await get_config(engine.deps, engine.p, stranger, made.config.row.id)
    with pytest.raises(NotFound):
        await create_config(engine.deps, engine.p, stranger, YAML, "yaml")
    with pytest.raises(NotFound):
        await get_config(engine.deps, engine.p, engine.project, new_uuid())


# --- changing a live agent --------------------------------------------------------------------------------


async def test_between_turns_a_change_is_a_turn_of_its_own(engine: Engine) -> None:
    path = await engine.agent("go")
    await engine.turn(path)
    done = await change(engine, path)
    hot = await engine.assert_coherent(path)
    assert (hot["turn_sequence"], hot["turn_open"], hot["ready_at"]) == (3, False, None)
    assert hot["config_id"] == done.config.row.id
    [agent] = await engine.fetch("select current_config_id from agents")
    assert agent["current_config_id"] == done.config.row.id
    [event] = await engine.fetch("select * from events order by sequence desc limit 1")
    assert (event["id"], event["is_opening"], event["is_semantic"]) == (done.event_id, True, True)
    assert msgspec.json.decode(event["payload"])["agent_input_id"] == encode(IdKind.AGENT_INPUT, done.input.id)
    assert (done.input.kind, done.input.delivery_mode, done.input.state) == ("config_change", "immediate", "resolved")


async def test_during_a_turn_it_joins_and_restarts_a_pending_retry(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    await engine.park(claim)
    await change(engine, path)
    hot = await engine.assert_coherent(path)
    assert (hot["turn_sequence"], hot["turn_open"], hot["attempt"], hot["retry_at"]) == (2, True, 0, None)
    [due] = await engine.fetch("select ready_at <= now() as due from agent_sched where agent_id = $1", path.agent_id)
    assert due["due"]
    assert len(await engine.fetch("select from turns where agent_id = $1", path.agent_id)) == 2


async def test_it_joins_a_batch_without_waking_the_agent(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [LOOK])
    done = await change(engine, path)
    hot = await engine.assert_coherent(path)
    assert (hot["open_calls"], hot["turn_sequence"], hot["ready_at"]) == (1, 2, None)
    await submit_result(engine.deps, engine.p, path, call, "succeeded", [])
    claim = await engine.claim(path)
    assert claim.config_id == done.config.row.id


async def test_a_change_during_a_model_call_is_seen_by_the_next_step(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    done = await change(engine, path)
    assert await engine.save_output(claim, [LOOK]) is not None
    await engine.assert_coherent(path)
    await cancel_agent(engine.deps, engine.p, path)
    await create_input(engine.deps, engine.p, path, [TextBlock("next")])
    assert (await engine.claim(path)).config_id == done.config.row.id


async def test_expected_config(engine: Engine) -> None:
    path = await engine.agent()
    before = (await engine.hot(path))["config_id"]
    results = await asyncio.gather(
        *(change(engine, path, changes={"instruction": f"{n}"}, expected_current_config_id=before) for n in range(10)),
        return_exceptions=True,
    )
    assert sum(isinstance(item, ChangedConfig) for item in results) == 1
    assert sum(isinstance(item, StateTransitionConflict) for item in results) == 9
    await engine.assert_coherent(path)


async def test_replay_and_key_conflicts(engine: Engine) -> None:
    path = await engine.agent()
    first = await change(engine, path, key="k")
    again = await change(engine, path, key="k")
    assert again.replayed
    assert (again.input.id, again.event_id, again.config.row.id) == (
        first.input.id,
        first.event_id,
        first.config.row.id,
    )
    with pytest.raises(IdempotencyKeyConflict):
        await change(engine, path, key="k", changes={"instruction": "Third."})
    await create_input(engine.deps, engine.p, path, [TextBlock("x")], key="message")
    with pytest.raises(IdempotencyKeyConflict):
        await change(engine, path, key="message")
    assert len([p for _, p in await engine.log(path) if p["input_kind"] == "config_change"]) == 2


async def test_twenty_changes_with_one_key_write_one_event(engine: Engine) -> None:
    path = await engine.agent()
    done = await asyncio.gather(*(change(engine, path, key="k") for _ in range(20)))
    assert len({item.event_id for item in done}) == 1
    assert sum(not item.replayed for item in done) == 1


async def test_archived_agents_keep_their_config(engine: Engine) -> None:
    path = await engine.agent()
    await lifecycle.archive(engine.deps, engine.p, path)
    with pytest.raises(StateTransitionConflict):
        await change(engine, path)
    with pytest.raises(InvalidRequest):
        await change(engine, path, changes={"instruction": ""})
