"""Further models of a config: who takes over when, who answers next, and what the journal and the log say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

import msgspec
import pytest

from omnara.domain.content import TextBlock
from omnara.domain.events import ModelOutputPayload
from omnara.ids import IdKind, encode, new_uuid
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import Failed, ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from tests.support.engine import Engine, built_in, engine_on
from tests.support.reading import events_of

OVERLOADED = Failed(kind="provider_unavailable", message="overloaded", status=529)
DOWN = Failed(kind="provider_unavailable", message="bad gateway", status=502)
REFUSED = Failed(kind="auth", message="no such key", status=401)
LIMITED = Failed(kind="rate_limit", message="slow down", status=429)


async def add_models(engine: Engine, *slugs: str, window: int = 100_000) -> list[UUID]:
    """Further models of the same provider, granted to the project; returns their revisions."""
    provider = await engine.sql.fetchval("select provider_config_id from configured_models limit 1")
    revisions = []
    for slug in slugs:
        model, revision = new_uuid(), new_uuid()
        await engine.sql.execute(
            """insert into configured_models (id, org_id, provider_config_id, name, current_revision_id)
               values ($1, $2, $3, $4, $5)""",
            model,
            engine.org_id,
            provider,
            slug,
            revision,
        )
        await engine.sql.execute(
            """insert into configured_model_revisions (id, configured_model_id, revision, provider_model_slug,
                                                       context_window_tokens, max_output_tokens)
               values ($1, $2, 1, $3, $4, 4096)""",
            revision,
            model,
            slug,
            window,
        )
        await engine.sql.execute(
            "insert into project_model_grants (id, project_id, configured_model_id) values ($1, $2, $3)",
            new_uuid(),
            engine.project_id,
            model,
        )
        [row] = await engine.sql.fetch("select id, definition from agent_configs")
        definition = msgspec.json.decode(row["definition"])
        definition["model"].setdefault("fallback_model_ids", []).append(encode(IdKind.CONFIGURED_MODEL, model))
        await engine.sql.execute(
            "update agent_configs set definition = $2 where id = $1",
            row["id"],
            msgspec.json.encode(definition).decode(),
        )
        revisions.append(revision)
    return revisions


class Models:
    """Scripts by model; records who was asked."""

    def __init__(self, **scripts: Callable[[ModelCall], Outcome]) -> None:
        self.scripts = scripts
        self.asked: list[str] = []

    def __call__(self, call: ModelCall) -> Outcome:
        self.asked.append(call.target.slug)
        return self.scripts[call.target.slug](call)


async def journal(engine: Engine, agent: UUID) -> list[tuple[str, str, int, UUID]]:
    rows = await engine.sql.fetch(
        "select state, next_action, attempt, revision_id from steps where agent_id = $1 order by number", agent
    )
    return [tuple(row) for row in rows]


async def answered_by(engine: Engine, agent: UUID) -> list[str]:
    """The model that each output of the log names."""
    log = await events_of(engine.sql, agent)
    return [event.meta.model for event in log if isinstance(event.payload, ModelOutputPayload)]


@pytest.mark.parametrize(
    "failure", [OVERLOADED, Failed(kind="rate_limit", status=429, message="come back in an hour", retry_after_s=3600.0)]
)
async def test_an_overloaded_model_is_replaced_at_once_and_asked_first_in_the_next_turn(
    database: str, failure: Failed
) -> None:
    models = Models(model=lambda _: failure, second=lambda _: say("I do"))
    async with engine_on(database, models) as engine:
        [agent] = await engine.add_agents()
        [revision] = await add_models(engine, "second")
        await engine.start()
        await engine.say(agent)
        await engine.until_idle(agent)
        assert models.asked == ["model", "second"]
        steps = await journal(engine, agent)
        assert [step[:3] for step in steps] == [("failed", "fallback", 1), ("succeeded", "idle", 10)]
        assert steps[1][3] == revision
        assert await answered_by(engine, agent) == ["second"]
        models.scripts["model"] = lambda _: say("back again")
        await engine.say(agent)
        await engine.until_idle(agent)
        assert models.asked == ["model", "second", "model"]
        assert (await engine.hot(agent))["attempt"] == 0


@pytest.mark.parametrize("failure", [DOWN, LIMITED], ids=["down", "limited"])
async def test_each_model_has_its_own_retries_and_the_last_one_ends_the_turn(database: str, failure: Failed) -> None:
    models = Models(model=lambda _: failure, second=lambda _: failure, third=lambda _: OVERLOADED)
    async with engine_on(database, models) as engine:
        [agent] = await engine.add_agents()
        await add_models(engine, "second", "third")
        await engine.start(model_retries=2)
        await engine.say(agent)
        await engine.until_idle(agent)
        assert models.asked == ["model"] * 3 + ["second"] * 3 + ["third"] * 3
        steps = await journal(engine, agent)
        assert [step[2] for step in steps] == list(range(1, 10))
        assert [step[1] for step in steps] == ["retry", "retry", "fallback"] * 2 + ["retry", "retry", "idle"]
        events = await engine.events(agent)
        assert events[-1][2]["content_blocks"][0]["text"] == "overloaded"
        assert (await engine.hot(agent))["attempt"] == 0


async def test_an_error_that_no_other_try_would_mend_is_not_passed_on(database: str) -> None:
    models = Models(model=lambda _: REFUSED, second=lambda _: say("never"))
    async with engine_on(database, models) as engine:
        [agent] = await engine.add_agents()
        await add_models(engine, "second")
        await engine.start()
        await engine.say(agent)
        await engine.until_idle(agent)
        assert models.asked == ["model"]


async def test_the_model_that_took_over_finishes_the_turn(database: str) -> None:
    async def look(_call: ToolCallRequest) -> ToolResult:
        await asyncio.sleep(0)
        return succeeded(TextBlock("seen"))

    def second(call: ModelCall) -> Outcome:
        rounds = models.asked.count("second")
        return ask(call, ("look" if rounds % 2 else "gone", {})) if rounds < 4 else say("done")

    models = Models(model=lambda _: OVERLOADED, second=second)
    with built_in("look", look):
        async with engine_on(database, models) as engine:
            [agent] = await engine.add_agents(tools={"look": "always_allow"})
            await add_models(engine, "second")
            # One step for each claim: what is known of the turn has to come from the database.
            await engine.start(claim_max_steps=1)
            await engine.say(agent)
            await engine.until_idle(agent)
            assert models.asked == ["model"] + ["second"] * 4
            assert await answered_by(engine, agent) == ["second"] * 4
            assert (await engine.hot(agent))["attempt"] == 0


async def test_a_model_that_is_not_granted_any_more_is_passed_over(database: str) -> None:
    models = Models(model=lambda _: OVERLOADED, second=lambda _: say("never"), third=lambda _: say("I do"))
    async with engine_on(database, models) as engine:
        [agent] = await engine.add_agents()
        await add_models(engine, "second", "third")
        await engine.sql.execute(
            """delete from project_model_grants where configured_model_id =
               (select id from configured_models where name = 'second')"""
        )
        await engine.start()
        await engine.say(agent)
        await engine.until_idle(agent)
        assert models.asked == ["model", "third"]


async def test_a_smaller_model_that_takes_over_gets_a_shorter_conversation(database: str) -> None:
    summaries = 0

    def second(call: ModelCall) -> Outcome:
        nonlocal summaries
        summaries += call.system.startswith("You write the memory")
        return say("short")

    models = Models(model=lambda _: say("an answer " * 500), second=second)
    async with engine_on(database, models) as engine:
        [agent] = await engine.add_agents()
        await add_models(engine, "second", window=16_384)
        await engine.start()
        for _ in range(10):
            await engine.say(agent, "x" * 2000)
            await engine.until_idle(agent)
        models.scripts["model"] = lambda _: OVERLOADED
        models.asked.clear()
        await engine.say(agent, "and now")
        await engine.until_idle(agent)
        assert (models.asked, summaries) == (["model", "second", "second"], 1)
        rows = await engine.sql.fetch(
            "select kind, attempt, state from steps where agent_id = $1 order by number", agent
        )
        assert [tuple(row) for row in rows[-4:]] == [
            ("model", 1, "failed"),
            ("model", 10, "failed"),
            ("compaction", 10, "succeeded"),
            ("model", 10, "succeeded"),
        ]
