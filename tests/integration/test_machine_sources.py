"""Where agents get machines from: configs name them, launches attach them, config changes keep and give them up.

Source: features.md (default tools, grants, pools); machines.md §12 (caps); engine.md §4 (launch, config change), §8.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.domain.config import decode_definition
from omnara.engine import lifecycle
from omnara.engine.config_change import change_agent_config
from omnara.engine.configs import create_config
from omnara.engine.launch import Launched, launch_agent
from omnara.engine.scope import AgentPath
from omnara.errors import Conflict, InvalidRequest
from omnara.ids import IdKind, encode, new_uuid
from omnara.tools.registry import MACHINE_TOOLS, POOL_TOOLS
from tests.support.engine_case import CONFIG, Engine

PLAIN: dict[str, Any] = {"tools": {}}


def source(**changes: Any) -> str:
    return msgspec.json.encode(CONFIG | PLAIN | changes).decode()


async def machine(engine: Engine, name: str = "laptop", *, granted: bool = True, state: str = "active") -> UUID:
    """Somebody's own machine."""
    machine_id = new_uuid()
    await engine.fetch(
        """insert into machines (id, org_id, source_kind, display_name, lifecycle_state)
           values ($1, $2, 'byo', $3, $4)""",
        machine_id, engine.project.org_id, name, state,
    )  # fmt: skip
    if granted:
        await engine.fetch(
            """insert into machine_grants (id, org_id, project_id, machine_id, source_kind)
               values ($1, $2, $3, $4, 'explicit')""",
            new_uuid(), engine.project.org_id, engine.project.project_id, machine_id,
        )  # fmt: skip
    return machine_id


async def pool(engine: Engine, name: str = "cloud", most: int = 10, *, granted: bool = True, **grant: Any) -> UUID:
    """A pool of the provider docker."""
    pool_id = new_uuid()
    await engine.fetch(
        """insert into machine_pools (id, org_id, name, provider, max_total_machines, default_machine_cpu,
             default_machine_env, default_machine_provider_options, default_cwd, delete_after_idle_minutes)
           values ($1, $2, $3, 'docker', $4, 2, '{"A": "pool", "B": "pool", "C": "pool"}', '{"sleep_after_ms": 40000}',
                   '/pool', 60)""",
        pool_id, engine.project.org_id, name, most,
    )  # fmt: skip
    if granted:
        names = "".join(f", {column}" for column in grant)
        values = "".join(f", ${number}" for number in range(5, 5 + len(grant)))
        await engine.fetch(
            f"insert into machine_pool_grants (id, org_id, project_id, pool_id{names}) values ($1, $2, $3, $4{values})",
            new_uuid(), engine.project.org_id, engine.project.project_id, pool_id, *grant.values(),
        )  # fmt: skip
    return pool_id


async def launched(engine: Engine, *sources: dict[str, Any]) -> Launched:
    """Launch an agent with these sources."""
    made = await create_config(engine.deps, engine.p, engine.project, source(machine_sources=list(sources)), "json")
    return await launch_agent(engine.deps, engine.p, engine.project, made.config.row.id)


async def change(engine: Engine, agent: UUID, *sources: dict[str, Any]) -> None:
    """Give an agent other sources."""
    text = source(machine_sources=list(sources))
    await change_agent_config(engine.deps, engine.p, AgentPath(agent), text, "json")


async def attached(engine: Engine, agent: UUID) -> list[Any]:
    """The attached bindings of an agent with their machines."""
    return await engine.fetch(
        """select b.machine_id, b.machine_ref, b.binding_kind, b.description, b.cwd, m.lifecycle_state, m.env::text,
                  m.provider_options::text as options, m.cpu, m.cwd as machine_cwd, m.delete_after_idle_minutes as idle
           from agent_machine_bindings b join machines m on m.id = b.machine_id
           where b.agent_id = $1 and b.state = 'attached' order by b.created_at, b.id""",
        agent,
    )


# --- compiling --------------------------------------------------------------------------------------------


async def test_default_tools_come_with_machines_and_explicit_words_win(engine: Engine) -> None:
    await machine(engine)
    await pool(engine)
    tools = {"write_process": {"enabled": False}, "run_command": {"permission": {"mode": "always_ask"}}}
    text = source(machine_sources=[{"machine": "laptop"}], tools=tools)
    made = await create_config(engine.deps, engine.p, engine.project, text, "json")
    definition = decode_definition(made.config.row.definition)
    assert set(definition.tools) == set(MACHINE_TOOLS) - {"write_process"}
    assert definition.tools["run_command"].permission.mode == "always_ask"
    assert made.config.row.source == text
    assert made.config.missing_machine_tools == ["write_process"]
    text = source(machine_sources=[{"pool": "cloud"}])
    made = await create_config(engine.deps, engine.p, engine.project, text, "json")
    assert set(decode_definition(made.config.row.definition).tools) == {*MACHINE_TOOLS, *POOL_TOOLS}
    assert made.config.missing_machine_tools == []


async def test_names_and_ids_mean_the_same_and_plain_configs_keep_their_hash(engine: Engine) -> None:
    machine_id = await machine(engine)
    hashes = []
    for name in ("laptop", encode(IdKind.MACHINE, machine_id)):
        made = await create_config(
            engine.deps, engine.p, engine.project, source(machine_sources=[{"machine": name}]), "json"
        )
        hashes.append(made.config.row.definition_hash)
    assert hashes[0] == hashes[1]
    empties: list[dict[str, Any]] = [{}, {"machine_sources": []}, {"machine_sources": None}]
    for empty in empties:
        made = await create_config(engine.deps, engine.p, engine.project, source(**empty), "json")
        assert "machine" not in made.config.row.definition
        hashes.append(made.config.row.definition_hash)
    assert len(set(hashes[2:])) == 1


FAULTS: list[tuple[Any, str]] = [
    ([{"machine": "nobody"}], "machine_sources.0.machine"),
    ([{"machine": "laptop"}, {"machine": "foreign"}], "machine_sources.1.machine"),
    ([{"machine": "gone"}], "machine_sources.0.machine"),
    ([{"machine": "mch_aaaaaaaaaaaaaaaaaaaaaaaaae"}], "machine_sources.0.machine"),
    ([{"machine": "laptop"}, {"machine": "laptop"}], "machine_sources.1"),
    ([{"pool": "nothing"}], "machine_sources.0.pool"),
    ([{"pool": "closed"}], "machine_sources.0.pool"),
    ([{"pool": "cloud", "max_machines": 0}], "machine_sources.0.max_machines"),
    ([{"pool": "cloud", "initial_num_machines": 2}], "machine_sources.0.initial_num_machines"),
    ([{"pool": "cloud", "delete_after_idle_minutes": 4}], "machine_sources.0.delete_after_idle_minutes"),
    ([{"pool": "cloud", "cpu": 0}], "machine_sources.0.cpu"),
    ([{"pool": "cloud", "provider_options": {"image": "evil"}}], "machine_sources.0.provider_options"),
    ([{"pool": "cloud", "provider_options": {"privileged": True}}], "machine_sources.0.provider_options"),
    ([{"pool": "cloud", "machine": "laptop"}], "machine_sources.0"),
    ([{}], "machine_sources.0"),
    ([{"machine": "laptop", "ref": "No Good"}], "machine_sources.0.ref"),
    ([{"machine": "laptop", "env_overlay": {"omnara_x": "1"}}], "machine_sources.0.env_overlay.omnara_x"),
    ([{"machine": "laptop", "env_overlay": {"A": "1", "a": "2"}}], "machine_sources.0"),
    ([{"machine": "laptop", "env_overlay": {"1A": "1"}}], "machine_sources.0.env_overlay"),
    ([{"machine": "laptop", "env_overlay": {"A": 1}}], "machine_sources.0.env_overlay.A"),
    ([{"machine": "laptop", "secret_env_overlay": {"K": "x"}}], "machine_sources.0.secret_env_overlay.K"),
    (
        [{"machine": "laptop", "secret_env_overlay": {"K": "sec_aaaaaaaaaaaaaaaaaaaaaaaaae"}}],
        "machine_sources.0.secret_env_overlay.K",
    ),
    ("laptop", "machine_sources"),
]


async def test_faults_have_paths(engine: Engine) -> None:
    await machine(engine)
    await machine(engine, "foreign", granted=False)
    await machine(engine, "gone", state="deleting")
    await pool(engine)
    await pool(engine, "closed", granted=False)
    for sources, path in FAULTS:
        with pytest.raises(InvalidRequest) as caught:
            await create_config(engine.deps, engine.p, engine.project, source(machine_sources=sources), "json")
        assert f"{path}:" in caught.value.detail, sources


# --- launching --------------------------------------------------------------------------------------------


async def test_a_launch_attaches_and_asks_for_machines(engine: Engine) -> None:
    own = await machine(engine)
    await pool(
        engine,
        default_machine_env_overlay='{"B": "grant", "C": null}',
        default_machine_provider_options_overlay='{"sleep_after_ms": 50000}',
        default_machine_cpu=3,
    )
    done = await launched(
        engine,
        {"machine": "laptop", "ref": "mine", "description": "the laptop", "cwd": "/src"},
        {"pool": "cloud", "initial_num_machines": 2, "max_machines": 3, "env_overlay": {"A": "agent"}},
    )
    first, *others = await attached(engine, done.agent.id)
    assert (first["machine_id"], first["machine_ref"], first["binding_kind"]) == (own, "mine", "explicit")
    assert (first["description"], first["cwd"]) == ("the laptop", "/src")
    assert len(others) == 2
    for row in others:
        assert row["machine_ref"].startswith("mchr-")
        assert len(row["machine_ref"]) == 11
        assert (row["lifecycle_state"], row["cpu"], row["machine_cwd"], row["idle"]) == ("provisioning", 3, "/pool", 60)
        assert msgspec.json.decode(row["env"]) == {"A": "agent", "B": "grant"}
        assert msgspec.json.decode(row["options"]) == {"sleep_after_ms": 50000}
    assert [binding.machine_ref for binding in done.bindings] == [row["machine_ref"] for row in (first, *others)]
    assert {("machines", row["machine_id"]) for row in others} <= set(engine.hints)
    granted = await engine.fetch("select machine_id from machine_grants where source_kind = 'pool'")
    assert {row["machine_id"] for row in granted} == {row["machine_id"] for row in others}


FULL: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({}, {"initial_num_machines": 3, "max_machines": 3}),
    ({"max_total_machines": 1}, {"initial_num_machines": 2, "max_machines": 2}),
    ({"max_total_cpu": 3}, {"initial_num_machines": 2, "max_machines": 2}),
    ({"max_machine_cpu": 1}, {}),
    ({"min_machine_cpu": 4}, {}),
]


async def test_a_launch_without_room_leaves_nothing(engine: Engine) -> None:
    for number, (grant, wanted) in enumerate(FULL):
        await pool(engine, f"cloud{number}", most=2, **grant)
        with pytest.raises(Conflict):
            await launched(engine, {"pool": f"cloud{number}", **wanted})
    assert await engine.fetch("select id from agents") == []
    assert await engine.fetch("select id from machines") == []


async def test_a_grant_that_is_gone_stops_the_launch(engine: Engine) -> None:
    await machine(engine)
    text = source(machine_sources=[{"machine": "laptop"}])
    made = await create_config(engine.deps, engine.p, engine.project, text, "json")
    await engine.fetch("update machine_grants set deleted_at = now()")
    with pytest.raises(InvalidRequest, match="not granted"):
        await launch_agent(engine.deps, engine.p, engine.project, made.config.row.id)


async def test_launches_at_once_never_pass_a_cap(engine: Engine) -> None:
    await pool(engine, most=3)
    text = source(machine_sources=[{"pool": "cloud"}])
    made = await create_config(engine.deps, engine.p, engine.project, text, "json")

    async def one() -> bool:
        try:
            await launch_agent(engine.deps, engine.p, engine.project, made.config.row.id)
        except Conflict:
            return False
        return True

    assert sum(await asyncio.gather(*(one() for _ in range(8)))) == 3
    assert len(await engine.fetch("select id from machines")) == 3


# --- changing and archiving ---------------------------------------------------------------------------------


async def test_a_config_change_keeps_adds_and_gives_up_machines(engine: Engine) -> None:
    first, second = await machine(engine), await machine(engine, "tower")
    await pool(engine)
    sources = {"machine": "laptop", "ref": "a"}, {"machine": "tower", "ref": "b"}, {"pool": "cloud"}
    done = await launched(engine, *sources)
    agent = done.agent.id
    before = await attached(engine, agent)
    await change(engine, agent, {"machine": "laptop", "ref": "b", "cwd": "/x"}, {"machine": "tower", "ref": "a"})
    after = await attached(engine, agent)
    assert [(row["machine_id"], row["machine_ref"]) for row in after] == [(first, "b"), (second, "a")]
    assert after[0]["cwd"] == "/x"
    states = await engine.fetch("select lifecycle_state, lifecycle_version from machines where source_kind = 'pool'")
    assert [tuple(row) for row in states] == [("deleting", 2)]
    assert ("machines", before[2]["machine_id"]) in engine.hints
    await change(engine, agent, {"machine": "tower"})
    await change(engine, agent, {"machine": "tower"}, {"machine": "laptop", "ref": "b"})
    assert [row["machine_ref"] for row in await attached(engine, agent)] == ["a", "b"]
    with pytest.raises(Conflict):
        await change(engine, agent, {"pool": "cloud", "initial_num_machines": 11, "max_machines": 11})
    assert len(await attached(engine, agent)) == 2


async def test_a_pool_machine_stays_with_its_pool_and_goes_with_its_agent(engine: Engine) -> None:
    await machine(engine)
    await pool(engine)
    done = await launched(engine, {"machine": "laptop"}, {"pool": "cloud"})
    agent = done.agent.id
    await change(engine, agent, {"pool": "cloud", "description": "new words"})
    [row] = await attached(engine, agent)
    assert (row["binding_kind"], row["description"], row["lifecycle_state"]) == ("pool", "new words", "provisioning")
    await lifecycle.archive(engine.deps, engine.p, AgentPath(agent))
    assert await attached(engine, agent) == []
    states = await engine.fetch("select source_kind, lifecycle_state from machines order by source_kind")
    assert [tuple(row) for row in states] == [("byo", "active"), ("pool", "deleting")]
    granted = await engine.fetch(
        "select m.source_kind from machine_grants g join machines m on m.id = g.machine_id where g.deleted_at is null"
    )
    assert [row["source_kind"] for row in granted] == ["byo"]
    assert await engine.broken_invariants() == {}
