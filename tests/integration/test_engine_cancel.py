"""Cancel, archive, pause and resume: what is stopped, what is kept, and who wins."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from omnara.domain.content import INTERRUPTED_TEXT, TextBlock
from omnara.engine import lifecycle
from omnara.engine.cancel import cancel_agent
from omnara.engine.config_change import change_agent_config
from omnara.engine.inputs import create_input
from omnara.engine.reads import get_agent
from omnara.engine.results import submit_result
from omnara.engine.resume import resume
from omnara.engine.scope import AgentPath
from omnara.engine.status import agent_status
from omnara.errors import Conflict, IdempotencyKeyConflict, StateTransitionConflict
from tests.support.engine_case import ASK, CONFIG, LOOK, Call, Engine

FETCH = Call("web_fetch", "built_in", "ready", {"url": "https://example.org"})


async def status(engine: Engine, path: AgentPath) -> str:
    return (await agent_status(engine.deps, engine.p, path)).row.status


async def message(engine: Engine, path: AgentPath, text: str = "hello", mode: Any = "queued") -> None:
    await create_input(engine.deps, engine.p, path, [TextBlock(text)], mode=mode)


# --- cancel -----------------------------------------------------------------------------------------------


async def test_idle_cancel_writes_nothing(engine: Engine) -> None:
    path = await engine.agent("go")
    before = dict(await engine.hot(path))
    done = await cancel_agent(engine.deps, engine.p, path)
    assert (done.event, done.affected, done.taken, done.actor_id) == (None, False, False, None)
    assert dict(await engine.hot(path)) == before, "a message that was not admitted yet is no turn"
    await engine.turn(path)
    assert not (await cancel_agent(engine.deps, engine.p, path)).affected


async def test_cancel_during_a_model_call_takes_the_claim(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    await message(engine, path, "queued")
    await message(engine, path, "steer", "steering")
    done = await cancel_agent(engine.deps, engine.p, path)
    assert (done.affected, done.taken) == (True, True)
    assert ("cancel", path.agent_id) in engine.hints
    assert await engine.save_output(claim) is None, "the late result must not count"
    hot = await engine.assert_coherent(path)
    assert (hot["worker_id"], hot["turn_open"], hot["epoch"]) == (None, False, claim.epoch + 1)
    assert hot["ready_at"] is not None, "the queued message starts next"
    log = await engine.log(path)
    assert log[-1][1]["control_type"] == "cancel_current"
    states = await engine.fetch("select delivery_mode, state from inputs where kind = 'content' order by rank")
    assert [tuple(row) for row in states] == [("queued", "resolved"), ("queued", "received"), ("steering", "canceled")]
    [step] = await engine.fetch("select state from steps where agent_id = $1", path.agent_id)
    assert step["state"] == "canceled"
    await engine.turn(path)
    assert (await engine.log(path))[-2][1]["content_blocks"][0]["text"] == "queued"


async def test_control_comes_before_the_canceled_results(engine: Engine) -> None:
    path = await engine.agent("go")
    calls = await engine.turn(path, [LOOK, ASK, LOOK])
    await submit_result(engine.deps, engine.p, path, calls[0], "succeeded", [])
    done = await cancel_agent(engine.deps, engine.p, path)
    assert done.event is not None
    assert not done.taken
    log = await engine.log(path)
    assert [kind for kind, _ in log[-3:]] == ["agent_input", "tool_result", "tool_result"]
    assert [p["outcome"] for _, p in log[-2:]] == ["canceled", "canceled"]
    assert log[-1][1]["content_blocks"][0]["value"] == {"reason": "canceled"}
    hot = await engine.assert_coherent(path)
    assert (hot["ready_at"], hot["open_calls"]) == (None, 0)
    [form] = await engine.fetch("select state from interactions")
    assert form["state"] == "canceled"
    assert await status(engine, path) == "idle"


async def test_cancel_during_backoff_forgets_the_retry(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    await engine.park(claim)
    await message(engine, path, "next")
    await cancel_agent(engine.deps, engine.p, path)
    hot = await engine.assert_coherent(path)
    assert (hot["attempt"], hot["retry_at"]) == (0, None)
    await engine.turn(path)
    assert (await engine.log(path))[-2][1]["content_blocks"][0]["text"] == "next"


async def test_twenty_cancels_write_one_event(engine: Engine) -> None:
    path = await engine.agent("go")
    await engine.turn(path, [LOOK])
    done = await asyncio.gather(*(cancel_agent(engine.deps, engine.p, path) for _ in range(20)))
    assert sum(item.affected for item in done) == 1
    assert sum(p.get("input_kind") == "control" for _, p in await engine.log(path)) == 1


async def test_cancel_against_the_save_has_one_end(engine: Engine) -> None:
    for _ in range(10):
        path = await engine.agent("go")
        claim = await engine.claim(path)
        await engine.begin_model(claim)
        saved, canceled = await asyncio.gather(engine.save_output(claim), cancel_agent(engine.deps, engine.p, path))
        assert (saved is not None) == (not canceled.affected)
        log = await engine.log(path)
        assert len(log) == 3
        await engine.assert_coherent(path)
        [step] = await engine.fetch("select state from steps where agent_id = $1", path.agent_id)
        assert step["state"] == ("canceled" if canceled.affected else "succeeded")


# --- archive ----------------------------------------------------------------------------------------------


async def test_archive_stops_everything_once(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    await message(engine, path)
    done = await asyncio.gather(*(lifecycle.archive(engine.deps, engine.p, path) for _ in range(5)))
    assert len({agent.archived_at for agent in done}) == 1
    assert done[0].archived_at is not None
    assert await engine.save_output(claim) is None
    hot = await engine.assert_coherent(path)
    assert (hot["gate"], hot["ready_at"], hot["worker_id"]) == ("archived", None, None)
    assert set((await engine.inputs(path)).values()) == {"resolved", "canceled"}
    assert await status(engine, path) == "archived"
    assert (await get_agent(engine.deps, engine.p, path)).archived_at is not None
    assert not (await cancel_agent(engine.deps, engine.p, path)).affected
    for step in (lifecycle.pause, resume):
        with pytest.raises(StateTransitionConflict):
            await step(engine.deps, engine.p, path)


async def test_archive_of_an_idle_agent_writes_no_event(engine: Engine) -> None:
    path = await engine.agent()
    await lifecycle.delete(engine.deps, engine.p, path)
    assert len(await engine.log(path)) == 1


# --- pause and resume -------------------------------------------------------------------------------------


async def test_pause_saves_the_running_step_and_then_nothing_is_claimed(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    await lifecycle.pause(engine.deps, engine.p, path)
    assert await status(engine, path) == "pausing"
    await lifecycle.pause(engine.deps, engine.p, path)
    assert await engine.save_output(claim, [FETCH]) is not None
    assert await status(engine, path) == "paused"
    with pytest.raises(AssertionError):
        await engine.claim(path)
    await message(engine, path)
    resumed = await resume(engine.deps, engine.p, path)
    assert resumed.voided == ()
    assert (await engine.assert_coherent(path))["ready_at"] is not None
    await engine.claim(path)


async def test_a_holder_begins_nothing_that_it_planned_before_somebody_else_wrote(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    kept = await engine.go_on(claim)
    assert (kept.begun, kept.kept) == (True, True)
    claim.follow(kept)
    await change_agent_config(engine.deps, engine.p, path, json.dumps(CONFIG | {"instruction": "Other."}), "json")
    done = await engine.go_on(claim)
    assert (done.begun, done.kept, done.ready) == (False, False, True)
    claim = await engine.claim(path)
    assert claim.config_id == (await engine.hot(path))["config_id"]
    await engine.begin_model(claim)
    await lifecycle.pause(engine.deps, engine.p, path)
    done = await engine.go_on(claim)
    assert (done.begun, done.kept) == (False, False)
    assert await status(engine, path) == "paused"


async def test_resume_of_an_open_agent_changes_nothing(engine: Engine) -> None:
    path = await engine.agent("go")
    before = dict(await engine.hot(path))
    await resume(engine.deps, engine.p, path, force=True)
    assert dict(await engine.hot(path)) == before


async def crash(engine: Engine, path: AgentPath, deaths: int = 5) -> None:
    await engine.fetch(
        "update agent_sched set gate = 'crashed', deaths = $2, ready_at = null, worker_id = null, claim_token = null, "
        "epoch = epoch + 1 where agent_id = $1",
        path.agent_id,
        deaths,
    )


async def test_a_crashed_agent_needs_a_word_from_the_operator(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    await crash(engine, path)
    for step in (lifecycle.pause, resume):
        with pytest.raises(StateTransitionConflict):
            await step(engine.deps, engine.p, path)
    with pytest.raises(StateTransitionConflict, match="5 workers in a row died"):
        await resume(engine.deps, engine.p, path)
    shown = await agent_status(engine.deps, engine.p, path)
    assert (shown.row.status, shown.next_action) == ("crashed", "operator")
    assert shown.diagnosis is not None
    await resume(engine.deps, engine.p, path, force=True)
    hot = await engine.assert_coherent(path)
    assert (hot["gate"], hot["deaths"], hot["turn_open"], hot["history_version"]) == ("open", 0, True, 1)
    assert await engine.save_output(claim) is None
    await engine.turn(path)
    assert await status(engine, path) == "idle"


async def damage(engine: Engine, path: AgentPath, sequence: int) -> None:
    await engine.fetch(
        "update events set payload = '{\"broken\": 1}' where agent_id = $1 and sequence = $2", path.agent_id, sequence
    )


async def test_force_voids_the_whole_step_of_a_damaged_result(engine: Engine) -> None:
    path = await engine.agent("go")  # 1 config, 2 message
    one, two = await engine.turn(path, [LOOK, LOOK])  # 3 output
    for call in (one, two):
        await submit_result(engine.deps, engine.p, path, call, "succeeded", [])  # 4, 5
    await damage(engine, path, 4)
    await crash(engine, path, deaths=0)
    resumed = await resume(engine.deps, engine.p, path, force=True)
    assert resumed.voided == ((3, 6),)
    hot = await engine.assert_coherent(path)
    assert (hot["turn_open"], hot["open_calls"]) == (True, 0), "the message is still unanswered"
    assert hot["ready_at"] is not None
    assert len(await engine.log(path)) == 5, "rows stay where they are"


async def test_force_closes_the_calls_of_a_damaged_output(engine: Engine) -> None:
    path = await engine.agent("go")
    calls = await engine.turn(path, [LOOK, ASK])
    await damage(engine, path, 3)
    await crash(engine, path, deaths=0)
    resumed = await resume(engine.deps, engine.p, path, force=True)
    assert resumed.voided == ((3, 6),)
    hot = await engine.assert_coherent(path)
    assert (hot["turn_open"], hot["open_calls"], hot["batch_sequence"]) == (True, 0, None)
    rows = await engine.fetch("select outcome from tool_calls where id = any($1)", calls)
    assert [row["outcome"] for row in rows] == ["canceled", "canceled"]
    [form] = await engine.fetch("select state, reason from interactions")
    assert tuple(form) == ("canceled", "voided")
    await engine.turn(path)


async def test_force_skips_the_notice_of_the_crash(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    await damage(engine, path, 2)
    await message(engine, path, "next")
    from omnara.engine.recovery import quarantine

    assert await quarantine(engine.deps, claim, engine.worker_id, [(2, 3)], "event 2 is damaged")
    with pytest.raises(StateTransitionConflict, match="event 2 is damaged"):
        await resume(engine.deps, engine.p, path)
    resumed = await resume(engine.deps, engine.p, path, force=True)
    assert resumed.voided == ((3, 4),)
    hot = await engine.assert_coherent(path)
    assert not hot["turn_open"], "the only message of the turn is gone"
    await engine.turn(path)
    assert (await engine.log(path))[-2][1]["content_blocks"][0]["text"] == "next"


async def test_an_interrupted_call_is_not_run_again(engine: Engine) -> None:
    path = await engine.agent("go")
    [fetch] = await engine.turn(path, [FETCH])
    await engine.fetch("update tool_calls set state = 'running' where id = $1", fetch)
    await crash(engine, path)
    await resume(engine.deps, engine.p, path, force=True)
    hot = await engine.assert_coherent(path)
    assert hot["open_calls"] == 0
    kind, payload = (await engine.log(path))[-1]
    assert (kind, payload["outcome"]) == ("tool_result", "failed")
    assert payload["content_blocks"][0]["text"] == INTERRUPTED_TEXT


async def test_restart_goes_back_to_the_last_message(engine: Engine) -> None:
    path = await engine.agent("first")
    await engine.turn(path)  # 2, 3
    await message(engine, path, "second")
    [call] = await engine.turn(path, [LOOK])  # 4 message, 5 output
    await crash(engine, path)
    resumed = await resume(engine.deps, engine.p, path, restart=True)
    assert resumed.voided == ((5, 7),), "the output, and the result that closes its call"
    hot = await engine.assert_coherent(path)
    assert (hot["turn_open"], hot["open_calls"], hot["deaths"]) == (True, 0, 0)
    assert hot["ready_at"] is not None
    rows = await engine.fetch("select outcome from tool_calls where id = $1", call)
    assert rows[0]["outcome"] == "canceled"
    with pytest.raises(Conflict):
        await submit_result(engine.deps, engine.p, path, call, "succeeded", [])
    await engine.turn(path)
    assert not (await engine.assert_coherent(path))["turn_open"]


async def test_restart_takes_a_running_step_away(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    await resume(engine.deps, engine.p, path, restart=True)
    assert await engine.save_output(claim) is None
    assert ("cancel", path.agent_id) in engine.hints
    await engine.turn(path)
    assert await status(engine, path) == "idle"


async def test_restart_twice_voids_again(engine: Engine) -> None:
    path = await engine.agent("go")
    for _ in range(2):
        await engine.turn(path)
        await resume(engine.deps, engine.p, path, restart=True)
    hot = await engine.assert_coherent(path)
    assert hot["history_version"] == 2
    assert [(r.lower, r.upper) for r in hot["void"]] == [(3, 5)]


async def test_restart_needs_a_message(engine: Engine) -> None:
    path = await engine.agent()
    with pytest.raises(Conflict):
        await resume(engine.deps, engine.p, path, restart=True)


async def test_the_flat_status_tells_the_story(engine: Engine) -> None:
    path = await engine.agent("go")
    shown = await agent_status(engine.deps, engine.p, path)
    assert (shown.row.status, shown.next_action, shown.output, shown.usage) == ("running", "model", None, {})
    [call] = await engine.turn(path, [LOOK], text="Looking.")
    shown = await agent_status(engine.deps, engine.p, path)
    assert (shown.row.status, shown.next_action, shown.output) == ("waiting", "external_result", "Looking.")
    assert (shown.row.last_step, shown.row.step_kind, shown.row.step_state) == (1, "model", "succeeded")
    await submit_result(engine.deps, engine.p, path, call, "succeeded", [])
    await engine.turn(path, [LOOK], text="")
    await cancel_agent(engine.deps, engine.p, path)
    shown = await agent_status(engine.deps, engine.p, path)
    assert (shown.row.status, shown.next_action, shown.output) == ("idle", "input", "Looking.")
    assert shown.usage == {"input_tokens_total": 20}


def test_errors_are_told_apart() -> None:
    assert issubclass(IdempotencyKeyConflict, Conflict)
    assert StateTransitionConflict.code == "state_transition_conflict"
