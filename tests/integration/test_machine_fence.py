"""The statements by which a claim holder settles a transactional call change nothing under another claim.

The lock on the hot row rules that out already; here the statements are asked alone, as if it did not.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnara.db import agents, machine_calls
from tests.support.engine_case import Call, Engine, engine

__all__ = ["engine"]


@pytest.mark.parametrize("field", ["worker", "claim_token", "epoch"])
async def test_a_settled_call_names_the_whole_claim(engine: Engine, field: str) -> None:
    path = await engine.agent("Begin.")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    saved = await engine.save_output(claim, [Call("look")])
    assert saved is not None
    worker_id, token, epoch = engine.worker_id, claim.claim_token, claim.epoch
    right = msgspec.structs.replace(claim)
    stale = claim if field == "worker" else msgspec.structs.replace(claim, **{field: getattr(claim, field) + 1})
    other = path.agent_id if field == "worker" else worker_id
    connection: Any
    async with engine.deps.db.acquire() as connection:
        await connection.execute("begin")
        take = "update agent_sched set worker_id = $2, claim_token = $3, epoch = $4 where agent_id = $1"
        await connection.execute(take, path.agent_id, worker_id, token, epoch)
        hot = await agents.lock_hot_row(connection, path.agent_id)
        assert hot is not None
        moved = msgspec.structs.replace(hot, next_sequence=hot.next_sequence + 7)
        assert not await machine_calls.park_call(connection, stale, other, saved[0])
        assert not await agents.write_claimed_row(connection, moved, other, stale.claim_token, stale.epoch)
        assert await agents.lock_hot_row(connection, path.agent_id) == hot
        assert await machine_calls.park_call(connection, right, worker_id, saved[0])
        assert await agents.write_claimed_row(connection, hot, worker_id, token, epoch)
        await connection.execute("rollback")
