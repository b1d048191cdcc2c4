"""Random lives of workers, statement by statement: at most one claim of an agent can write, none is left behind.

Three workers with sessions of their own claim, renew, expire, probe, declare each other dead, lose their session,
attach again and save with every claim that they ever had. A model beside them remembers which claim is the newest.
Source: DESIGN §2 (invariant 2), §3; coordination §1, §3, §5.
"""

from __future__ import annotations

import itertools
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnara.db import workers as db
from omnara.db.advance import advance
from omnara.db.locks import hold_identity, worker_key
from omnara.db.sched import ALWAYS, claim_agents
from omnara.domain.claim import Claim
from omnara.engine.model_step import Next, advance_for
from omnara.engine.recovery import release_claim, release_orphans
from omnara.ids import new_uuid
from omnara.providers.in_process import say
from tests.support.engine import Engine, engine_on

OPERATIONS = ("claim", "renew", "expire", "judge", "attach", "cut", "sweep", "save", "old", "back", "take")
_tokens = itertools.count(1)


class Life:
    """One worker: its session, and every claim that it ever had, whether or not it knows of a loss."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.id = new_uuid()
        self.session: asyncpg.Connection | None = None
        self.claims: list[Claim] = []

    async def begin(self) -> asyncpg.Connection:
        """A new identity."""
        session = await self.connect()
        self.id = new_uuid()
        key = worker_key(self.id)
        assert await hold_identity(session, key)
        await db.register_worker(session, self.id, lock_key=key, roles=["worker"], version="t", lease_s=60)
        self.claims = []
        return session

    async def connect(self) -> asyncpg.Connection:
        """A new session."""
        await self.cut()
        self.session = await asyncpg.connect(self._dsn)
        return self.session

    async def cut(self) -> None:
        """Lose the session; the server has noticed when this returns."""
        if self.session is not None:
            await self.session.close()
            self.session = None


class World:
    """The workers, the agents and the newest claim of each agent."""

    def __init__(self, engine: Engine, lives: list[Life], agents: list[UUID]) -> None:
        self.engine = engine
        self.lives = lives
        self.agents = agents
        self.newest: dict[UUID, tuple[UUID, int, int]] = {}

    async def do(self, operation: str, life: Life) -> None:
        """One statement or two of one worker."""
        sql: Any = self.engine.sql
        if operation == "claim":
            await self._claim(life, sql)
        elif operation == "renew" and life.session is not None:
            await db.renew_lease(life.session, life.id, 60)  # type: ignore[arg-type]
        elif operation == "expire":
            await sql.execute("update workers set lease_expires_at = now() - interval '1 s' where id = $1", life.id)
        elif operation == "judge" and life.session is not None:
            await self._judge(life)
        elif operation == "attach":
            await self._attach(life)
        elif operation == "cut":
            await life.cut()
        elif operation == "sweep":
            await release_orphans(self.engine.replicas[0].deps, 1000)
            await self._nothing_is_left()
        elif operation == "take":
            await sql.execute(
                """update agent_sched set worker_id = null, claim_token = null, epoch = epoch + 1,
                          inputs_gen = inputs_gen + 1, ready_at = now() where agent_id = $1""",
                self.agents[0],
            )
        elif life.claims:
            await self._write(operation, life, sql)

    async def _claim(self, life: Life, sql: Any) -> None:
        # On the claimer's connection, which outlives the session: only the workers row speaks for the claim.
        state = await sql.fetchval("select state from workers where id = $1", life.id)
        claims = await claim_agents(sql, life.id, limit=2, since=ALWAYS, token=next(_tokens), suspects=True)
        assert not claims or state == "live"
        for claim in claims:
            life.claims.append(claim)
            self.newest[claim.agent_id] = (life.id, claim.claim_token, claim.epoch)

    async def _judge(self, life: Life) -> None:
        session: Any = life.session
        found = [probe for probe in await db.probe_workers(session, life.id) if probe.worker_id != life.id]
        gone = [probe.worker_id for probe in found if probe.gone]
        lapsed = [(probe.worker_id, probe.lease_expires_at) for probe in found if probe.left_s < 0]
        rows = await self.engine.sql.fetch("select id, lease_expires_at < now() as late from workers")
        late = {row["id"]: row["late"] for row in rows}
        for dead in await db.declare_dead(session, gone, lapsed):
            other = next(other for other in self.lives if other.id == dead)
            assert other.session is None or late[dead], "a worker with its session and lease is not dead"
            state = await self.engine.sql.fetchval("select state from workers where id = $1", dead)
            assert state == ("lapsed" if other.session is not None else "dead")

    async def _attach(self, life: Life) -> None:
        session: Any = await life.connect()
        assert await hold_identity(session, worker_key(life.id))
        state = await self.engine.sql.fetchval("select state from workers where id = $1", life.id)
        attached = await db.reattach_worker(session, life.id, 60)
        assert attached == (state == "live")
        if not attached:
            await life.begin()

    async def _write(self, operation: str, life: Life, sql: Any) -> None:
        claim = life.claims[-1] if operation != "old" else life.claims[0]
        row = await sql.fetchrow(
            "select worker_id, claim_token, epoch from agent_sched where agent_id = $1", claim.agent_id
        )
        mine = tuple(row) == (life.id, claim.claim_token, claim.epoch)
        if mine:
            assert self.newest[claim.agent_id] == (life.id, claim.claim_token, claim.epoch)
        if operation == "back":
            assert await release_claim(self.engine.replicas[0].deps, claim, life.id) == mine
        else:
            item = msgspec.structs.replace(advance_for(claim, Next("retry", ready_s=0.0)), gen=0)
            assert (len(await advance(sql, life.id, [item], 5)) == 1) == mine

    async def _nothing_is_left(self) -> None:
        left = await self.engine.sql.fetchval(
            """select count(*) from agent_sched s left join workers w on w.id = s.worker_id
               where s.worker_id is not null and w.state is distinct from 'live'"""
        )
        assert left == 0

    async def at_most_one_writer(self) -> None:
        """Of all the claims that anybody remembers, at most one for each agent would be accepted."""
        rows = await self.engine.sql.fetch("select agent_id, worker_id, claim_token, epoch from agent_sched")
        held = {row["agent_id"]: (row["worker_id"], row["claim_token"], row["epoch"]) for row in rows}
        for agent in self.agents:
            fences = [
                (life.id, claim.claim_token, claim.epoch)
                for life in self.lives
                for claim in life.claims
                if claim.agent_id == agent
            ]
            assert sum(fence == held[agent] for fence in fences) <= 1
            assert len(set(fences)) == len(fences)


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    story=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2)), min_size=10, max_size=50),
)
async def test_at_most_one_claim_of_an_agent_can_write(database: str, story: list[tuple[str, int]]) -> None:
    async with engine_on(database, lambda _: say("never")) as engine:
        [replica] = await engine.start()
        replica.worker._claimer.pause()
        await replica.sweep.stop()
        await replica.identity.stop()
        agents = await engine.add_agents(3)
        lives = [Life(database) for _ in range(3)]
        world = World(engine, lives, agents)
        try:
            for life in lives:
                await life.begin()
            await engine.sql.execute("update agent_sched set ready_at = now() where agent_id = any($1)", agents)
            for operation, number in story:
                await world.do(operation, lives[number])
                await world.at_most_one_writer()
        finally:
            for life in lives:
                await life.cut()
            await engine.sql.execute("update workers set state = 'dead', ended_at = now() where state = 'live'")
            await release_orphans(replica.deps, 1000)
            await engine.sql.execute("update agent_sched set ready_at = null")
