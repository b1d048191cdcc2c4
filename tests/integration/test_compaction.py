"""Conversations that outgrow their model: summarised, cut where nothing is torn, within the window for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.db.snapshot import read_events
from omnara.domain.content import TextBlock
from omnara.domain.context import ContextState, Message, ToolResultsMessage
from omnara.domain.context_size import tokens
from omnara.domain.state import fold
from omnara.engine.compaction import CANNOT_BE_COMPACTED, SOURCE_IRREDUCIBLE
from omnara.ids import new_uuid
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import Completed, Failed, ModelCall, Outcome
from omnara.tools.registry import SHOWN_CHARS
from omnara.worker import context_cache
from tests.support.engine import Engine, engine_on
from tests.support.reading import events_of
from tests.support.waiting import until

WINDOW = 32_768
TOO_LONG = Failed(kind="context_window", message="prompt is too long", status=400)


def is_summary(call: ModelCall) -> bool:
    return call.system.startswith("You write the memory")


def texts_of(messages: Iterable[Message]) -> list[str]:
    return [text for message in messages for text in getattr(message, "texts", ())]


def said(call: ModelCall) -> list[str]:
    return texts_of(call.context.messages())


async def set_window(engine: Engine, window: int, output: int = 4096) -> None:
    """Give the model another window; steps learn of it within a second, so before the first replica starts."""
    await engine.sql.execute(
        "update configured_model_revisions set context_window_tokens = $1, max_output_tokens = $2", window, output
    )


async def steps_of(engine: Engine, agent: UUID) -> list[tuple[str, str, str | None, int]]:
    """The journal as (kind, state, next action, attempt)."""
    rows = await engine.sql.fetch(
        "select kind, state, next_action, attempt from steps where agent_id = $1 order by number", agent
    )
    return [tuple(row) for row in rows]


def checkpoints(events: list[tuple[int, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [payload for _, kind, payload in events if kind == "context_checkpoint"]


async def coherent(engine: Engine, agent: UUID) -> None:
    hot, state = await engine.hot(agent), fold(await events_of(engine.sql, agent))
    assert (hot["turn_open"], hot["open_calls"], hot["attempt"]) == (state.turn_open, len(state.open_calls), 0)
    await engine.check()


class Talk:
    """A model that answers, and summarises when it is asked to. Records every call."""

    def __init__(
        self,
        answer: Callable[[ModelCall], Outcome] = lambda _: say("ok"),
        summarise: Callable[[ModelCall], Any] = lambda _: say("## Goal\nSummary."),
    ) -> None:
        self.seen: list[tuple[Message, ...]] = []
        self.summaries: list[str] = []
        self._answer = answer
        self._summarise = summarise

    def __call__(self, call: ModelCall) -> Any:
        if is_summary(call):
            assert call.tools == ()
            self.summaries.append("\n".join(said(call)))
            return self._summarise(call)
        self.seen.append(call.context.messages())
        return self._answer(call)

    @property
    def answers(self) -> list[list[str]]:
        """What people had said, for each call that was no summary."""
        return [texts_of(messages) for messages in self.seen]


async def say_much(engine: Engine, agent: UUID, texts: list[str]) -> None:
    """Many messages at once, which one step admits together."""
    contents = [msgspec.json.encode([{"type": "text", "text": text}]).decode() for text in texts]
    async with engine.sql.transaction():
        rank = await engine.sql.fetchval(
            """update agent_sched set inputs_gen = inputs_gen + 1, next_rank = next_rank + 1024 * $2,
                      ready_at = least(ready_at, statement_timestamp())
               where agent_id = $1 returning next_rank - 1024 * $2""",
            agent,
            len(texts),
        )
        await engine.sql.executemany(
            """insert into inputs (agent_id, id, kind, delivery_mode, state, rank, content)
               values ($1, $2, 'content', 'steering', 'received', $3, $4)""",
            [(agent, new_uuid(), rank + 1024 * number, content) for number, content in enumerate(contents)],
        )
    engine.hints.ready([agent])


async def test_ten_thousand_events_stay_within_a_small_window(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def answer(call: ModelCall) -> Outcome:
        sizes.append(sum(len(msgspec.json.encode(message)) for message in call.context.messages()))
        if len(sizes) % 2 == 0:
            return say("a turn is over")
        return ask(call, *[("gone", {"n": len(sizes)})] * 21)

    talk = Talk(answer, lambda _: say(f"summary {len(sizes)}"))
    async with engine_on(database, talk) as engine:
        await set_window(engine, WINDOW)
        [agent] = await engine.add_agents()
        [first] = await engine.start()
        while (await engine.hot(agent))["next_sequence"] <= 10_000:
            await say_much(engine, agent, [f"message {number} of {len(sizes)}: " + "m" * 80 for number in range(120)])
            await engine.until_idle(agent)
        events = await engine.events(agent)
        made = checkpoints(events)
        assert len(made) > 5
        assert [item["summarized_through_event_sequence"] for item in made] == sorted(
            {item["summarized_through_event_sequence"] for item in made}
        )
        # The window in tokens is four bytes each; the records of the test are somewhat larger than requests.
        assert max(sizes) < WINDOW * 4
        assert sum(sizes) / len(sizes) > WINDOW, "and the window is used"
        await coherent(engine, agent)

        # Another process starts at the last checkpoint, and sees the same conversation as a reader of everything.
        await first.drain()
        read = 0

        async def counted(*args: Any) -> list[Any]:
            nonlocal read
            rows = await read_events(*args)
            read += len(rows)
            return rows

        monkeypatch.setattr(context_cache, "read_events", counted)
        await engine.start()
        await engine.say(agent, "still there?")
        await engine.until_idle(agent, limit_s=60)
        assert 0 < read < len(events) / 10, "what is summarised is not read"
        log = await events_of(engine.sql, agent)
        at = next(number for number, texts in enumerate(talk.answers) if "still there?" in texts)
        frontier = len(events) + 1 + (log[len(events) + 1].kind == "context_checkpoint")
        whole = ContextState((), SHOWN_CHARS)
        whole.extend(log[:frontier])
        assert talk.seen[at] == whole.messages()
        assert len(talk.seen[at]) < len(events) / 10


async def test_a_provider_that_refuses_is_believed_and_asked_again_with_less(database: str) -> None:
    def answer(call: ModelCall) -> Outcome:
        long = sum(map(len, said(call))) > 12_000
        return TOO_LONG if long else say("ok " * 100)

    talk = Talk(answer)
    async with engine_on(database, talk) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        for number in range(12):
            await engine.say(agent, f"question {number} " + "x" * 2000)
            await engine.until_idle(agent)
        events = await engine.events(agent)
        steps = await steps_of(engine, agent)
        await coherent(engine, agent)
    assert checkpoints(events)
    assert not [payload for _, _, payload in events if payload.get("stop_reason") == "error"]
    at = steps.index(("compaction", "succeeded", "model", 1))
    assert steps[at - 1] == ("model", "failed", "compact", 1)
    assert steps[at + 1][:2] == ("model", "succeeded")
    # What was asked last is there word for word.
    assert any(text.startswith("question 11 ") for text in talk.answers[-1])


async def test_calls_stay_with_their_results_and_the_question_stays_as_it_was(database: str) -> None:
    question = "the question: " + "q" * 20_000

    def answer(call: ModelCall) -> Outcome:
        for message in call.context.messages():
            if isinstance(message, ToolResultsMessage):
                assert len(message.results) == 2
        rounds = len(talk.seen)
        if rounds == 1:
            return say("first")
        return ask(call, ("gone", {"a": "y" * 9000}), ("gone", {"b": "z" * 9000})) if rounds < 12 else say("done")

    talk = Talk(answer)
    async with engine_on(database, talk) as engine:
        await set_window(engine, 16_384)
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent, "early " + "e" * 30_000)
        await engine.until_idle(agent)
        await engine.say(agent, question)
        await engine.until_idle(agent)
        events = await engine.events(agent)
        await coherent(engine, agent)
    made = checkpoints(events)
    assert len(made) >= 3
    by_sequence = {sequence: kind for sequence, kind, _ in events}
    for item in made:
        after = by_sequence[item["summarized_through_event_sequence"] + 1]
        assert after != "tool_result", "a call and its results were torn apart"
    assert talk.answers[1] == [talk.answers[1][0], question]
    assert talk.answers[1][0].startswith("<context_checkpoint>")
    assert not any("the question" in text for text in talk.summaries[:1])
    assert "the question" in talk.summaries[1]


@pytest.mark.parametrize("question", ["hi", "x" * 40_000])
async def test_a_window_too_small_for_what_must_stay_ends_the_turn_without_a_call(database: str, question: str) -> None:
    talk = Talk()
    async with engine_on(database, talk) as engine:
        await set_window(engine, 8192 if question != "hi" else 1100, 512)
        [agent] = await engine.add_agents(
            tools={} if question != "hi" else {f"tool_{number}": "always_allow" for number in range(60)}
        )
        await engine.start()
        await engine.say(agent, question)
        await engine.until_idle(agent)
        events = await engine.events(agent)
        assert (len(talk.answers), talk.summaries) == (0, [])
        assert CANNOT_BE_COMPACTED in events[-1][2]["content_blocks"][0]["text"]
        await coherent(engine, agent)
        if question != "hi":  # the next message finds an agent that works
            await engine.say(agent, "hello")
            await engine.until_idle(agent)
            assert (await engine.events(agent))[-1][2]["stop_reason"] == "end_turn"
            assert "hello" in talk.answers[-1]
            assert max(map(len, talk.answers[-1])) < 1000
            await coherent(engine, agent)


async def test_a_provider_that_refuses_everything_gets_five_requests(database: str) -> None:
    refusing = False
    talk = Talk(lambda _: TOO_LONG if refusing else say("an answer " * 50))
    async with engine_on(database, talk) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        for number in range(6):
            await engine.say(agent, f"question {number} " + "x" * 1000)
            await engine.until_idle(agent)
        refusing = True
        for _ in range(2):
            talk.seen.clear()
            talk.summaries.clear()
            await engine.say(agent, "one more")
            await engine.until_idle(agent)
            events = await engine.events(agent)
            assert len(talk.answers) + len(talk.summaries) <= 5
            assert CANNOT_BE_COMPACTED in events[-1][2]["content_blocks"][0]["text"]
            await coherent(engine, agent)
        refusing = False
        await engine.say(agent, "and now?")
        await engine.until_idle(agent)
        assert (await engine.events(agent))[-1][2]["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    "useless",
    [
        Completed("end_turn", (TextBlock("  "),)),
        Completed("end_turn", ()),
        Completed("max_tokens", (TextBlock("cut"),)),
        Completed("end_turn", (TextBlock("long " * 30_000),)),
        TOO_LONG,
    ],
    ids=["blank", "empty", "cut", "not smaller", "too long itself"],
)
async def test_a_summary_that_is_none_leaves_history_as_it_was(database: str, useless: Outcome) -> None:
    refusing = False
    answers: list[Outcome] = []
    talk = Talk(lambda _: TOO_LONG if refusing else say("an answer " * 50), lambda _: answers.pop(0))
    async with engine_on(database, talk) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        for number in range(8):
            await engine.say(agent, f"question {number} " + "x" * 1000)
            await engine.until_idle(agent)
        before = await engine.events(agent)
        refusing = True
        answers[:] = [useless] * 9
        talk.seen.clear()
        await engine.say(agent, "one more")
        await engine.until_idle(agent)
        events = await engine.events(agent)
        assert len(talk.answers) + len(talk.summaries) <= 5
        assert events[: len(before)] == before
        assert checkpoints(events) == []
        assert SOURCE_IRREDUCIBLE in events[-1][2]["content_blocks"][0]["text"]
        assert len(set(map(len, talk.summaries))) == 3, "each try had a smaller source"
        await coherent(engine, agent)
        # One that is useless once does not end anything.
        answers[:] = [useless, say("fine")]
        script = talk._answer
        talk._answer = lambda call: say("ok") if "fine" in said(call)[0] else script(call)
        await engine.say(agent, "again")
        await engine.until_idle(agent)
        events = await engine.events(agent)
        assert (len(checkpoints(events)), events[-1][2]["stop_reason"]) == (1, "end_turn")
        await coherent(engine, agent)


async def grown(engine: Engine, agent: UUID, messages: int = 8) -> None:
    """Let a conversation grow before the model is asked to refuse it."""
    for number in range(messages):
        await engine.say(agent, f"question {number} " + "x" * 1000)
        await engine.until_idle(agent)


def is_short(call: ModelCall) -> bool:
    return "<context_checkpoint>" in said(call)[0]


async def test_a_failed_summary_call_is_retried_as_such(database: str) -> None:
    refusing = False
    outcomes: list[Outcome] = [Failed(kind="transient", message="try later", ambiguous=True)] * 3
    talk = Talk(
        lambda call: TOO_LONG if refusing and not is_short(call) else say("an answer " * 50),
        lambda _: outcomes.pop() if outcomes else say("fine"),
    )
    async with engine_on(database, talk) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await grown(engine, agent)
        refusing = True
        talk.seen.clear()
        await engine.say(agent, "one more")
        await engine.until_idle(agent)
        steps = await steps_of(engine, agent)
        await coherent(engine, agent)
    assert steps[8:] == [
        ("model", "failed", "compact", 1),
        ("compaction", "failed", "retry", 1),
        ("compaction", "failed", "retry", 2),
        ("compaction", "failed", "retry", 3),
        ("compaction", "succeeded", "model", 4),
        ("model", "succeeded", "idle", 1),
    ]
    assert len(talk.answers) == 2


async def test_a_summary_call_that_fails_for_good_ends_the_turn(database: str) -> None:
    refusing = False
    talk = Talk(
        lambda call: TOO_LONG if refusing and not is_short(call) else say("an answer " * 50),
        lambda _: Failed(kind="billing_account", message="no credit"),
    )
    async with engine_on(database, talk) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await grown(engine, agent)
        refusing = True
        await engine.say(agent, "one more")
        await engine.until_idle(agent)
        events = await engine.events(agent)
        assert events[-1][2]["content_blocks"][0]["text"] == "no credit"
        assert (len(talk.summaries), checkpoints(events)) == (1, [])
        await coherent(engine, agent)


async def test_steering_and_a_stop_during_a_summary(database: str) -> None:
    refusing = False
    gate = asyncio.Event()

    async def summarise(_call: ModelCall) -> Outcome:
        await gate.wait()
        return say("fine")

    talk = Talk(lambda call: TOO_LONG if refusing and not is_short(call) else say("an answer " * 50), summarise)
    async with engine_on(database, talk) as engine:
        agents = await engine.add_agents(2)
        await engine.start()
        for agent in agents:
            await grown(engine, agent)
        refusing = True
        for agent in agents:
            await engine.say(agent, "one more")

        async def both() -> bool:
            return len(talk.summaries) == 2

        await until(both, "both agents are being summarised")
        steered, stopped = agents
        await engine.say(steered, "rather this", mode="steering")
        # As a cancel does it: the claim is taken, the step closed, the turn over.
        async with engine.sql.transaction():
            await engine.sql.execute(
                """update agent_sched set worker_id = null, claim_token = null, epoch = epoch + 1, turn_open = false,
                          inputs_gen = inputs_gen + 1, ready_at = null where agent_id = $1""",
                stopped,
            )
            await engine.sql.execute(
                "update steps set state = 'canceled', finished_at = now() where agent_id = $1 and state = 'started'",
                stopped,
            )
        gate.set()
        await engine.until_idle(*agents)
        events = await engine.events(steered)
        kinds = [kind for _, kind, _ in events]
        at = kinds.index("context_checkpoint")
        assert kinds[at:] == ["context_checkpoint", "agent_input", "model_output"]
        assert talk.answers[-1][-2:] == ["one more", "rather this"]
        assert checkpoints(await engine.events(stopped)) == []
        await coherent(engine, steered)


async def test_a_worker_lost_during_a_summary_loses_and_doubles_nothing(database: str) -> None:
    gate = asyncio.Event()
    waiting = 0

    async def summarise(_call: ModelCall) -> Outcome:
        nonlocal waiting
        waiting += 1
        await gate.wait()
        return say("fine")

    talk = Talk(lambda _: say("an answer " * 300), summarise)
    async with engine_on(database, talk) as engine:
        await set_window(engine, 8192, 1024)
        [agent] = await engine.add_agents()
        [first] = await engine.start()
        await engine.say(agent, "x" * 6000)
        await engine.until_idle(agent)
        for _ in range(9):
            if waiting:
                break
            await engine.say(agent, "x" * 3000)
            await until_waiting_or_idle(engine, agent, lambda: waiting > 0)
        assert waiting == 1
        await first.stop()
        gate.set()
        await engine.start()
        await engine.until_idle(agent)
        events = await engine.events(agent)
        assert len(checkpoints(events)) == 1
        assert events[-1][2]["stop_reason"] == "end_turn"
        assert waiting == 2
        steps = await steps_of(engine, agent)
        compactions = [step for step in steps if step[0] == "compaction"]
        assert [step[1] for step in compactions] in (["released", "succeeded"], ["interrupted", "succeeded"])
        await coherent(engine, agent)


async def until_waiting_or_idle(engine: Engine, agent: UUID, waiting: Callable[[], bool]) -> None:
    async def done() -> bool:
        hot = await engine.hot(agent)
        return waiting() or (hot["worker_id"] is None and hot["ready_at"] is None)

    await until(done, "the agent waits")


def test_the_estimate_is_in_tokens() -> None:
    assert tokens(4000) == 1001
