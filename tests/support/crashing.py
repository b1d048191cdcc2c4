"""Sudden ends for the workers of a test: a process that dies, a session that is cut, an API caller with every right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

import asyncpg
import msgspec

from omnara.access.principals import Credential, OrgRole, Principal, PrincipalKind, ProjectGrant, ProjectRole
from omnara.ids import new_uuid
from tests.support.engine import Engine, Replica
from tests.support.waiting import until


async def crash(replica: Replica) -> UUID:
    """End a replica as `kill -9` would: nothing is signed off or given back, its locks go with its connections."""
    replica.stopped = True
    worker_id = replica.identity.worker_id
    loop = replica.identity._loop
    thread = replica.identity._thread
    assert loop is not None
    assert thread is not None
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    await asyncio.to_thread(thread.join, 10)
    await replica.sweep.stop()
    await replica.worker.stop()
    await replica.connection.close()
    await replica.deps.db.close()
    return worker_id


async def terminate(engine: Engine, *kinds: str) -> int:
    """Cut every connection of these kinds at the server; returns how many there were."""
    names = [f"omnara:{kind}" for kind in kinds]
    cut: int = await engine.sql.fetchval(
        """select count(pg_terminate_backend(pid)) from pg_stat_activity
           where datname = current_database() and application_name = any($1)""",
        names,
    )
    return cut


@contextlib.asynccontextmanager
async def locked(engine: Engine, agent_id: UUID) -> AsyncIterator[asyncpg.Connection]:
    """Hold the hot row of an agent in a transaction of another connection, which is yielded; commits on leaving."""
    connection = await asyncpg.connect(engine.dsn)
    try:
        async with connection.transaction():
            await connection.execute("select 1 from agent_sched where agent_id = $1 for no key update", agent_id)
            yield connection
    finally:
        await connection.close()


async def append_notice(engine: Engine, agent_id: UUID) -> int:
    """An event of the API's (a config change that changes nothing), written as the API writes it; its sequence."""
    async with locked(engine, agent_id) as connection:
        row = await connection.fetchrow(
            """update agent_sched set inputs_gen = inputs_gen + 1, next_sequence = next_sequence + 1
               where agent_id = $1 returning next_sequence - 1, turn_id, turn_sequence, config_id""",
            agent_id,
        )
        payload = {"agent_input_id": "ain_x", "input_kind": "config_change", "content_blocks": []}
        await connection.execute(
            """insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, is_semantic, payload)
               values ($1, $2, $3, 'agent_input', $4, $5, true, $6)""",
            agent_id,
            row[0],
            new_uuid(),
            row[1],
            row[2],
            msgspec.json.encode(payload).decode(),
        )
    sequence: int = row[0]
    return sequence


def owner(engine: Engine) -> Principal:
    """A caller who may do everything in the engine's project."""
    return Principal(
        kind=PrincipalKind.USER,
        credential=Credential.PERSONAL_TOKEN,
        id=new_uuid(),
        org_roles={engine.org_id: OrgRole.OWNER},
        project_grants={engine.project_id: ProjectGrant(engine.org_id, ProjectRole.ADMIN)},
        default_org_id=engine.org_id,
        default_project_id=engine.project_id,
    )


async def until_claimed(engine: Engine, agent_id: UUID, *, limit_s: float = 20.0) -> None:
    """Wait until some worker holds the agent."""

    async def claimed() -> bool:
        return (await engine.hot(agent_id))["worker_id"] is not None

    await until(claimed, "the agent is claimed", limit_s=limit_s)


async def until_worker_is(engine: Engine, worker_id: UUID, state: str, *, limit_s: float = 20.0) -> float:
    """Wait until the row of a worker has this state; returns how many seconds that took."""

    async def there() -> bool:
        return bool(await engine.sql.fetchval("select state from workers where id = $1", worker_id) == state)

    try:
        return await until(there, f"the worker is {state}", limit_s=limit_s)
    except AssertionError as error:
        rows = await engine.sql.fetch("select *, clock_timestamp() as now from workers")
        locks = await engine.sql.fetch("select * from pg_locks where locktype = 'advisory'")
        raise AssertionError(f"{error}; worker {worker_id} of {rows}, {locks}") from None


async def step_states(engine: Engine, agent_id: UUID) -> list[str]:
    """States of an agent's steps in order."""
    rows = await engine.sql.fetch("select state from steps where agent_id = $1 order by number", agent_id)
    return [row[0] for row in rows]
