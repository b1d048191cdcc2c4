"""A worker driven by hand: the engine's own statements, so that a test decides what happens between them."""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.db.advance import advance
from omnara.db.locks import hold_identity, worker_key
from omnara.db.sched import ALWAYS, claim_agents
from omnara.db.snapshot import read_for_step
from omnara.domain.advance import Advance
from omnara.domain.claim import Claim
from omnara.domain.content import TextBlock
from omnara.engine.model_step import Begun, Next, accept_output, advance_for, begin_model, save_output
from omnara.engine.plan import StepPlan
from omnara.ids import new_uuid
from omnara.providers.protocol import Completed, ModelTarget
from tests.support.engine import Engine

PLAN = StepPlan(new_uuid(), None, ModelTarget(revision_id="", provider="", api_format="", slug=""), "", (), {})


async def hand_worker(engine: Engine) -> UUID:
    """A live worker row without a process behind it. This session holds its lock, or a running replica would declare it
    dead."""
    worker_id = new_uuid()
    assert await hold_identity(engine.sql, worker_key(worker_id))  # type: ignore[arg-type]
    await engine.sql.execute(
        """insert into workers (id, lock_key, roles, version, lease_expires_at)
           values ($1, $2, '{worker}', 'test', clock_timestamp() + interval '1 hour')""",
        worker_id, worker_key(worker_id),
    )
    return worker_id


async def take(engine: Engine, worker_id: UUID) -> Claim:
    """Claim the only ready agent by hand."""
    [claim] = await claim_agents(engine.sql, worker_id, limit=1, since=ALWAYS, token=77, suspects=True)  # type: ignore[arg-type]
    return claim


async def begun_by_hand(engine: Engine, agent: UUID) -> tuple[UUID, Claim, Begun]:
    """Claim an agent with one message and begin its model step, with the engine's own statements."""
    worker_id = await hand_worker(engine)
    await engine.say(agent)
    claim = await take(engine, worker_id)
    _, inputs = await read_for_step(engine.sql, agent, 1, 0)  # type: ignore[arg-type]
    plan = msgspec.structs.replace(PLAN, config_id=claim.config_id)
    begin = begin_model(claim, plan, tuple(inputs[:1]), 1)
    done = (await advance(engine.sql, worker_id, [advance_for(claim, Next("model", begin))], 5))[0]  # type: ignore[arg-type]
    assert done.begun
    claim.follow(done)
    assert begin.call_id is not None
    assert done.turn_id is not None
    begun = Begun(begin.call_id, done.turn_id, done.turn_sequence, done.step_number, 1, done.next_sequence - 1)
    return worker_id, claim, begun


def answer(claim: Claim, begun: Begun, text: str = "hello", following: Next = Next("idle")) -> Advance:  # noqa: B008
    """The save of an answer without calls."""
    output = accept_output(begun, PLAN, Completed("end_turn", (TextBlock(text),)))
    return save_output(claim, begun, output, "{}", following)
