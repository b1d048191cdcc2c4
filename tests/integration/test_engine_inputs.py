"""Messages: always accepted, once per key, and never in front of what the model still waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from omnara.access.principals import Credential, OrgRole, Principal, PrincipalKind, ProjectGrant, ProjectRole
from omnara.domain.content import MediaRefBlock, TextBlock
from omnara.engine import cancel, inputs, lifecycle, results
from omnara.engine.actors import ExternalActor
from omnara.engine.inputs import create_input
from omnara.engine.scope import AgentPath
from omnara.errors import (
    Forbidden,
    IdempotencyKeyConflict,
    InvalidRequest,
    NotFound,
    RequestTooLarge,
    StateTransitionConflict,
)
from omnara.ids import new_uuid
from tests.support.engine_case import ASK, LOOK, Engine, needs_permission, texts


def hello(text: str = "hello") -> list[inputs.InputBlock]:
    return [TextBlock(text)]


def org_key(engine: Engine, role: ProjectRole = ProjectRole.OPERATOR) -> Principal:
    return Principal(
        kind=PrincipalKind.ORG_KEY,
        credential=Credential.ORG_KEY,
        id=new_uuid(),
        org_roles={engine.project.org_id: OrgRole.MEMBER},
        project_grants={engine.project.project_id: ProjectGrant(engine.project.org_id, role)},
    )


async def test_a_message_waits_outside_the_log(engine: Engine) -> None:
    path = await engine.agent()
    before = await engine.hot(path)
    made = await create_input(engine.deps, engine.p, path, hello(), key="k")
    assert made.created
    assert (made.input.state, made.input.delivery_mode, texts(made.input)) == ("received", "queued", ["hello"])
    hot = await engine.assert_coherent(path)
    assert hot["inputs_gen"] == before["inputs_gen"] + 1
    assert hot["next_rank"] == before["next_rank"] + 1024
    assert hot["ready_at"] is not None
    assert len(await engine.log(path)) == 1
    await engine.turn(path)
    assert (await engine.inputs(path))[str(made.input.id)] == "resolved"


async def test_replay_returns_the_same_input_and_anything_else_conflicts(engine: Engine) -> None:
    path = await engine.agent()
    first = await create_input(engine.deps, engine.p, path, hello(), key="k")
    await engine.turn(path)
    again = await create_input(engine.deps, engine.p, path, hello(), key="k")
    assert (again.created, again.input.id, again.input.state) == (False, first.input.id, "resolved")
    with pytest.raises(IdempotencyKeyConflict):
        await create_input(engine.deps, engine.p, path, hello("other"), key="k")
    with pytest.raises(IdempotencyKeyConflict):
        await create_input(engine.deps, engine.p, path, hello(), key="k", mode="steering")
    with pytest.raises(IdempotencyKeyConflict):
        await create_input(
            engine.deps, org_key(engine), path, hello(), key="k", actor=ExternalActor("someone", "tenant")
        )
    assert not await engine.fetch("select from actors where provider = 'external'"), "a rejected request wrote an actor"
    with pytest.raises(IdempotencyKeyConflict):
        # The key of a launch's own message is in the same scope, as are those of config changes.
        await create_input(engine.deps, org_key(engine), path, hello(), key="k")


async def test_twenty_requests_with_one_key_make_one_input(engine: Engine) -> None:
    path = await engine.agent()
    made = await asyncio.gather(*(create_input(engine.deps, engine.p, path, hello(), key="k") for _ in range(20)))
    assert sum(item.created for item in made) == 1
    assert len({item.input.id for item in made}) == 1
    assert len(await engine.fetch("select from inputs where kind = 'content'")) == 1


async def test_ranks_follow_the_order_of_acceptance(engine: Engine) -> None:
    path = await engine.agent()
    await asyncio.gather(*(create_input(engine.deps, engine.p, path, hello(f"{n}")) for n in range(30)))
    rows = await engine.fetch("select rank from inputs where kind = 'content' order by rank")
    assert [row["rank"] for row in rows] == [1024 * n for n in range(1, 31)]


async def test_archived_refuses_but_still_replays(engine: Engine) -> None:
    path = await engine.agent()
    first = await create_input(engine.deps, engine.p, path, hello(), key="k")
    await lifecycle.archive(engine.deps, engine.p, path)
    again = await create_input(engine.deps, engine.p, path, hello(), key="k")
    assert (again.created, again.input.id, again.input.state) == (False, first.input.id, "canceled")
    with pytest.raises(StateTransitionConflict):
        await create_input(engine.deps, engine.p, path, hello())
    with pytest.raises(StateTransitionConflict):
        await create_input(engine.deps, engine.p, path, hello(), mode="steering", cancel_open_interactions=True)


@pytest.mark.parametrize("gate", ["paused", "crashed"])
async def test_accepted_and_kept_behind_a_closed_gate(engine: Engine, gate: str) -> None:
    path = await engine.agent()
    await engine.fetch("update agent_sched set gate = $2 where agent_id = $1", path.agent_id, gate)
    made = await create_input(engine.deps, engine.p, path, hello())
    assert (await engine.inputs(path))[str(made.input.id)] == "received"
    assert (await engine.hot(path))["gate"] == gate


WHAT_NO_PROVIDER_WOULD_TAKE_IS_REFUSED: list[Any] = [
    ([], InvalidRequest),
    ([TextBlock(" \t\n")], InvalidRequest),
    ([TextBlock("a"), TextBlock("")], InvalidRequest),
    ([MediaRefBlock("art_x")], InvalidRequest),
    ([TextBlock("x" * (1024 * 1024))], RequestTooLarge),
]


async def test_what_no_provider_would_take_is_refused(engine: Engine) -> None:
    path = await engine.agent()
    for blocks, error in WHAT_NO_PROVIDER_WOULD_TAKE_IS_REFUSED:
        with pytest.raises(error):
            await create_input(engine.deps, engine.p, path, blocks)
        assert not await engine.fetch("select from inputs where kind = 'content'")


async def test_nul_and_lone_surrogates_become_replacement_characters(engine: Engine) -> None:
    path = await engine.agent()
    made = await create_input(engine.deps, engine.p, path, [TextBlock("a\x00b\ud800c", {"k\x00": "v\udfff"})])
    [block] = msgspec.json.decode(made.input.content)
    assert block["text"] == "a\ufffdb\ufffdc"
    assert block["metadata"] == {"k\ufffd": "v\ufffd"}


async def test_steering_cancels_open_forms_and_nothing_else(engine: Engine) -> None:
    path = await engine.agent("go")
    asked, permitted, custom = await engine.turn(path, [ASK, needs_permission(LOOK), LOOK])
    hot = await engine.assert_coherent(path)
    assert (hot["open_calls"], hot["ready_at"]) == (3, None)
    made = await create_input(
        engine.deps, engine.p, path, hello("never mind"), mode="steering", cancel_open_interactions=True, key="s"
    )
    hot = await engine.assert_coherent(path)
    assert (hot["open_calls"], hot["turn_open"], hot["ready_at"]) == (1, True, None)
    calls = {row["id"]: row for row in await engine.fetch("select * from tool_calls")}
    assert [calls[c]["outcome"] for c in (asked, permitted, custom)] == ["canceled", "canceled", None]
    forms = await engine.fetch("select state, reason, resolved_by_input_id from interactions")
    assert {tuple(form) for form in forms} == {("canceled", "superseded_by_input", made.input.id)}
    await create_input(
        engine.deps, engine.p, path, hello("never mind"), mode="steering", cancel_open_interactions=True, key="s"
    )
    await results.submit_result(engine.deps, engine.p, path, custom, "succeeded", [TextBlock("ok")])
    hot = await engine.assert_coherent(path)
    assert hot["ready_at"] is not None
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    kinds = [(kind, payload.get("input_kind")) for kind, payload in await engine.log(path)]
    assert kinds[-1] == ("agent_input", "content"), "steering comes after every result of the batch"
    assert (await engine.inputs(path))[str(made.input.id)] == "resolved"


async def test_cancelling_forms_needs_steering(engine: Engine) -> None:
    path = await engine.agent()
    with pytest.raises(InvalidRequest):
        await create_input(engine.deps, engine.p, path, hello(), cancel_open_interactions=True)


async def test_cancelling_the_last_open_form_wakes_the_agent(engine: Engine) -> None:
    path = await engine.agent("go")
    await engine.turn(path, [ASK])
    await create_input(engine.deps, engine.p, path, hello("skip"), mode="steering", cancel_open_interactions=True)
    hot = await engine.assert_coherent(path)
    assert (hot["open_calls"], hot["batch_sequence"]) == (0, None)
    assert hot["ready_at"] is not None


async def test_a_message_does_not_wake_an_agent_that_waits_for_results(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [LOOK])
    await create_input(engine.deps, engine.p, path, hello())
    assert (await engine.assert_coherent(path))["ready_at"] is None
    await results.submit_result(engine.deps, engine.p, path, call, "succeeded", [])
    assert (await engine.assert_coherent(path))["ready_at"] is not None


async def test_a_message_during_a_model_call_makes_the_holder_look_again(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    made = await create_input(engine.deps, engine.p, path, hello("more"))
    assert await engine.save_output(claim) == []
    hot = await engine.assert_coherent(path)
    assert hot["worker_id"] is None
    assert hot["ready_at"] is not None, "the message would wait for the next sweep at best"
    await engine.turn(path)
    assert (await engine.inputs(path))[str(made.input.id)] == "resolved"


async def test_actors(engine: Engine) -> None:
    path = await engine.agent()
    own = await create_input(engine.deps, engine.p, path, hello())
    assert own.input.actor_id is not None
    [actor] = await engine.fetch("select * from actors")
    assert (actor["provider"], actor["provider_user_id"]) == ("omnara", engine.p.public_id)
    with pytest.raises(InvalidRequest):
        await create_input(engine.deps, engine.p, path, hello(), actor=ExternalActor("x"))
    nobody = await create_input(engine.deps, org_key(engine), path, hello())
    assert nobody.input.actor_id is None
    someone = ExternalActor("u1", "t", "Ann", {"a": "b"})
    first = await create_input(engine.deps, org_key(engine), path, hello(), actor=someone)
    second = await create_input(engine.deps, org_key(engine), path, hello(), actor=ExternalActor("u1", "t"))
    assert first.input.actor_id == second.input.actor_id is not None
    [kept] = await engine.fetch("select * from actors where provider = 'external'")
    assert (kept["display_name"], msgspec.json.decode(kept["metadata"])) == ("Ann", {"a": "b"})


async def test_rights(engine: Engine) -> None:
    path = await engine.agent()
    with pytest.raises(Forbidden):
        await create_input(engine.deps, org_key(engine, ProjectRole.VIEWER), path, hello())
    stranger = msgspec.structs.replace(org_key(engine), project_grants={})
    for broken in (path, AgentPath(new_uuid()), AgentPath(path.agent_id, new_uuid(), engine.project.project_id)):
        with pytest.raises(NotFound):
            await create_input(engine.deps, stranger, broken, hello())
    with pytest.raises(NotFound):
        await create_input(engine.deps, engine.p, AgentPath(path.agent_id, engine.project.org_id, new_uuid()), hello())
    with pytest.raises(Forbidden):
        await lifecycle.archive(engine.deps, org_key(engine), path)


async def test_messages_are_accepted_while_everything_else_happens(engine: Engine) -> None:
    """Whatever else runs against the agent, there are no deadlocks and no lost ranks (coordination §9)."""
    path = await engine.agent("go")
    await engine.turn(path, [ASK, LOOK])

    async def one(n: int) -> None:
        if n % 5 == 0:
            await cancel.cancel_agent(engine.deps, engine.p, path)
        elif n % 5 == 1:
            await create_input(
                engine.deps,
                org_key(engine),
                path,
                hello(f"{n}"),
                mode="steering",
                cancel_open_interactions=True,
                actor=ExternalActor("u1"),
            )
        elif n % 5 == 2:
            await lifecycle.pause(engine.deps, engine.p, path)
        else:
            await create_input(engine.deps, org_key(engine), path, hello(f"{n}"), actor=ExternalActor("u1"))

    async with asyncio.timeout(30):
        await asyncio.gather(*(one(n) for n in range(50)))
    await engine.assert_coherent(path)
    rows = await engine.fetch("select rank from inputs where kind = 'content' order by rank")
    assert [row["rank"] for row in rows] == [1024 * n for n in range(1, len(rows) + 1)]
    deadlocks = await engine.fetch("select deadlocks from pg_stat_database where datname = current_database()")
    assert deadlocks[0][0] == 0
