"""An agent with a long log that is not in memory: where its reading starts, and that it is the same conversation."""

from __future__ import annotations

from uuid import UUID

import pytest

from omnara.domain.context import Message
from omnara.providers.in_process import say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.worker import context_cache
from tests.support.engine import Engine, engine_on
from tests.support.long_log import LongLog

TURNS = 60
assert TURNS * 4 > context_cache.LONG_LOG


class Heard:
    """A model that remembers what it was shown last."""

    def __init__(self) -> None:
        self.messages: tuple[Message, ...] = ()

    def __call__(self, call: ModelCall) -> Outcome:
        self.messages = call.context.messages()
        return say("ok")

    @property
    def text(self) -> str:
        return "\n".join(str(message) for message in self.messages)


async def grown(engine: Engine) -> tuple[UUID, int, int]:
    """An agent, and the sequences of its two checkpoints; three parts of its log can be told apart."""
    [agent] = await engine.add_agents()
    log = LongLog(engine.sql, agent)
    await log.grow(TURNS, text="long ago")
    first = await log.checkpoint(TURNS * 4 + 1, "the first summary")
    await log.grow(TURNS, text="in between")
    second = await log.checkpoint(TURNS * 8 + 2, "the second summary")
    await log.grow(3, text="lately")
    return agent, first, second


async def void(engine: Engine, agent: UUID, *sequences: int) -> None:
    """What an operator's restart does to events: they stay, and do not count."""
    ranges = ",".join(f"[{sequence},{sequence}]" for sequence in sequences)
    await engine.sql.execute(
        "update agent_sched set void = $2::text::int8multirange, history_version = history_version + 1 "
        "where agent_id = $1",
        agent,
        "{" + ranges + "}",
    )


async def shown_to_a_cold_worker(engine: Engine, agent: UUID, heard: Heard) -> str:
    """What the model is shown for one more message by a worker that never saw the agent."""
    [worker] = await engine.start()
    await engine.say(agent, "and now?")
    await engine.until_idle(agent)
    await worker.drain()
    return heard.text


@pytest.mark.parametrize(
    ("voided", "starts_with", "hidden"),
    [
        ((), "the second summary", ("the first summary", "long ago", "in between")),
        ((1,), "the first summary", ("the second summary", "long ago")),
        ((0,), "the second summary", ("the first summary", "long ago", "in between")),
        ((0, 1), "long ago", ("the first summary", "the second summary")),
    ],
    ids=["none", "the newest", "the older", "both"],
)
async def test_a_void_checkpoint_is_passed_over(
    database: str, voided: tuple[int, ...], starts_with: str, hidden: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    async with engine_on(database, heard) as engine:
        await engine.sql.execute("update configured_model_revisions set context_window_tokens = 1000000")
        cold, whole = await grown(engine), await grown(engine)
        for agent, *checkpoints in (cold, whole):
            await void(engine, agent, *(checkpoints[number] for number in voided))
        shown = await shown_to_a_cold_worker(engine, cold[0], heard)
        assert starts_with in shown
        assert "lately" in shown
        assert not [text for text in hidden if text in shown]
        # A worker that reads the whole log has the same conversation.
        monkeypatch.setattr(context_cache, "LONG_LOG", 1_000_000)
        again = await shown_to_a_cold_worker(engine, whole[0], heard)
        counted = ("summary", "long ago", "in between", "lately", "and now?")
        assert [shown.count(text) for text in counted] == [again.count(text) for text in counted]


async def test_events_before_the_checkpoint_are_not_read(database: str) -> None:
    """They may even be damaged: nobody looks at them."""
    heard = Heard()
    async with engine_on(database, heard) as engine:
        agent, _, second = await grown(engine)
        await engine.sql.execute(
            "update events set payload = '{}' where agent_id = $1 and sequence between 3 and $2", agent, second - 1
        )
        assert "the second summary" in await shown_to_a_cold_worker(engine, agent, heard)
        assert (await engine.hot(agent))["gate"] == "open"
