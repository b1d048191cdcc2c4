"""Who is alive: nothing waits, a lost connection is not death, death is found in moments, no claim stays behind.

Rules A, B and C of coordination §0. K (keepalives and limits on every connection), M (the pool's reset) and N (poolers)
are tested with the connections themselves; a network that drops packets needs network namespaces, so here a proxy goes
silent instead, and the lease is what notices.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import UTC, datetime
from uuid import UUID

import asyncpg
import pytest

from omnara import probes
from omnara.db import workers as workers_db
from omnara.db.connection import ConnectSettings, ConnKind, connect
from omnara.db.locks import worker_key
from omnara.db.sched import ALWAYS, claim_agents
from omnara.db.workers import ServerStart
from omnara.domain.content import TextBlock
from omnara.engine.recovery import release_orphans
from omnara.maintenance.upkeep import Upkeep
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from tests.support.crashing import crash, locked, step_states, terminate, until_claimed, until_worker_is
from tests.support.engine import FAST, Engine, Replica, built_in, engine_on
from tests.support.tcp_proxy import proxied
from tests.support.waiting import until

EPOCH = datetime.fromtimestamp(0, UTC)
DEAD = "update workers set state = 'dead', ended_at = clock_timestamp() where id = $1"


class Talker:
    """A model that answers when told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.calls = 0

    async def __call__(self, _call: ModelCall) -> Outcome:
        self.calls += 1
        await self.go.wait()
        return say("hello")


async def claimed_by(engine: Engine, agent: UUID) -> tuple[UUID | None, int]:
    hot = await engine.hot(agent)
    return hot["worker_id"], hot["epoch"]


# --- A: nobody waits for a lock ---------------------------------------------------------------------------


async def test_no_connection_pins_a_snapshot_or_waits_for_a_lock(database: str) -> None:
    """Three replicas look at each other, one of them busy: no session of theirs waits, or holds an xmin for long."""
    talker = Talker()
    async with engine_on(database, talker) as engine:
        [agent] = await engine.add_agents()
        await engine.start(3)
        await engine.say(agent)
        await until(lambda: talker.calls == 1, "the model is being called")
        looks = 0
        seen: Counter[tuple[int, datetime]] = Counter()

        async def looked() -> bool:
            nonlocal looks
            looks += 1
            # 200 ms, since the columns of one row of this view are not read at one moment.
            held = await engine.sql.fetch(
                """select pid, query_start from pg_stat_activity
                   where datname = current_database() and pid <> pg_backend_pid()
                     and application_name like 'omnara:%'
                     and (wait_event_type = 'Lock' or (backend_xmin is not null
                          and greatest(state_change, query_start) < clock_timestamp() - interval '200 milliseconds'))"""
            )
            seen.update(tuple(row) for row in held)
            # What is seen again and again holds on; what was under way while all of Postgres stood still, is not.
            assert max(seen.values(), default=0) < 5
            return looks >= 40

        await until(looked, "forty looks")
        talker.go.set()
        await engine.until_idle(agent)


async def test_probing_never_waits_for_a_worker_that_is_being_judged(database: str) -> None:
    async with engine_on(database, lambda _: say("hello")) as engine:
        first, second = await engine.start(2)
        other = await asyncpg.connect(database)
        async with other.transaction():
            await other.execute("select 1 from workers where id = $1 for update", first.identity.worker_id)
            for _ in range(2):  # the first may have been under way
                before = second.identity.last_renewal
                await until(lambda: second.identity.last_renewal > before, "the other worker's thread goes on")  # noqa: B023 - awaited here
            # A look that waits for the row ends after a second with the session, and another session goes on.
            assert second.identity.verdicts.regained == float("-inf")
        await other.close()


# --- B: a lost connection is not death --------------------------------------------------------------------


async def test_a_lost_session_is_attached_again_and_the_running_step_is_saved(database: str) -> None:
    talker = Talker()
    async with engine_on(database, talker) as engine:
        [agent] = await engine.add_agents()
        await engine.start(2)
        await engine.say(agent)
        await until(lambda: talker.calls == 1, "the model is being called")
        before = await claimed_by(engine, agent)
        ids = {replica.identity.worker_id for replica in engine.replicas}
        renewed = await engine.sql.fetch("select id, attached_at from workers order by id")
        # Both sessions at once, so that neither process may judge the other. Claimers and savers go too.
        assert await terminate(engine, "session", "claimer", "saver", "api") >= 4

        async def attached_again() -> bool:
            rows = await engine.sql.fetch("select id, attached_at from workers where state = 'live' order by id")
            return all(row["attached_at"] > old["attached_at"] for row, old in zip(rows, renewed, strict=True))

        await until(attached_again, "both identities are attached again")
        assert await claimed_by(engine, agent) == before
        talker.go.set()
        await engine.until_idle(agent)
        assert talker.calls == 1, "the call that was in flight was saved, not repeated"
        assert await step_states(engine, agent) == ["succeeded"]
        assert {replica.identity.worker_id for replica in engine.replicas} == ids
        assert await engine.sql.fetchval("select count(*) from workers") == 2


async def test_one_lost_session_of_several_is_not_judged_before_its_grace(database: str) -> None:
    """Only one process loses its session: the LISTEN connection shares the key, so the others see it alive."""
    talker = Talker()
    async with engine_on(database, talker) as engine:
        [agent] = await engine.add_agents()
        await engine.start(1)
        await engine.say(agent)
        await until(lambda: talker.calls == 1, "the model is being called")
        [first] = engine.replicas
        listen = await connect(ConnectSettings(dsn=database), ConnKind.LISTEN)
        await first.identity.hold(listen)
        await engine.start(1)
        before = await claimed_by(engine, agent)
        pid = await engine.sql.fetchval(
            """select min(pid) from pg_stat_activity where datname = current_database()
               and application_name = 'omnara:session'"""
        )
        attached = await engine.sql.fetchval("select attached_at from workers where id = $1", first.identity.worker_id)
        await engine.sql.fetchval("select pg_terminate_backend($1)", pid)

        async def attached_again() -> bool:
            row = await engine.sql.fetchrow(
                "select state, attached_at from workers where id = $1", first.identity.worker_id
            )
            assert row["state"] == "live"
            return bool(row["attached_at"] > attached)

        await until(attached_again, "the same identity is attached again")
        talker.go.set()
        await engine.until_idle(agent)
        assert (await claimed_by(engine, agent))[1] == before[1]
        listen.terminate()


async def test_nobody_is_declared_dead_just_after_a_start_of_postgres(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's age is inside the grace: a worker whose locks are gone stays live until the grace is over."""
    young = True
    asked = 0

    async def start(_connection: object) -> ServerStart:
        nonlocal asked
        asked += 1
        return ServerStart(EPOCH, 0.01 if young else 1000.0)

    monkeypatch.setattr(workers_db, "server_start", start)
    talker = Talker()
    async with engine_on(database, talker) as engine:
        [agent] = await engine.add_agents()
        [first] = await engine.start()
        await engine.say(agent)
        await until(lambda: talker.calls == 1, "the model is being called")
        await engine.start()
        dead = await crash(first)
        looks = asked
        await until(lambda: asked >= looks + 5, "it was looked at five times")
        assert await engine.sql.fetchval("select state from workers where id = $1", dead) == "live"
        young = False
        await until_worker_is(engine, dead, "dead")
        talker.go.set()
        await engine.until_idle(agent)
        assert talker.calls == 2


async def test_a_new_process_declares_nobody_dead_just_after_a_promotion(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby has been running for long and has no locks; a worker that is not back yet is not dead."""

    async def old(_connection: object) -> ServerStart:
        return ServerStart(EPOCH, 3600.0)

    monkeypatch.setattr(workers_db, "server_start", old)
    talker = Talker()
    async with engine_on(database, talker) as engine:
        [agent] = await engine.add_agents()
        [first] = await engine.start()
        await engine.say(agent)
        await until(lambda: talker.calls == 1, "the model is being called")
        assert await engine.sql.fetchval("select created_at from installation where name = 'timeline'") == EPOCH
        away = await crash(first)
        # As if the database that both knew had been another one's primary.
        await engine.sql.execute("update installation set value = '0000ABCD' where name = 'timeline'")
        [second] = await engine.start(death_grace_s=1.5)
        since = await engine.sql.fetchval("select created_at from installation where name = 'timeline'")
        await until_worker_is(engine, away, "dead", limit_s=20)
        ended = await engine.sql.fetchval("select ended_at from workers where id = $1", away)
        assert 1.5 <= (ended - since).total_seconds() < 20
        await until(lambda: talker.calls == 2, "the agent is taken over")
        # From then on the timeline is known, and deaths are found at once, by new processes too.
        await engine.sql.execute("update installation set created_at = now() - interval '1 h' where name = 'timeline'")
        gone = await crash(second)
        await engine.start(death_grace_s=120)
        await until_worker_is(engine, gone, "dead")
        talker.go.set()
        await engine.until_idle(agent)


async def test_a_process_that_just_regained_its_session_judges_nobody(database: str) -> None:
    async with engine_on(database, lambda _: say("hello")) as engine:
        [first] = await engine.start()
        [second] = await engine.start(death_grace_s=1.5)
        other = await asyncpg.connect(database)  # stands for its LISTEN connection: the first one finds it alive
        await other.execute("select pg_advisory_lock_shared($1)", worker_key(second.identity.worker_id))
        lost = second.identity.last_renewal
        regained = second.identity.verdicts.regained
        await terminate_one(engine, second)
        await until(lambda: second.identity.verdicts.regained > regained, "the session is back")
        back = second.identity.verdicts.regained
        await other.close()
        dead = await crash(first)
        await until_worker_is(engine, dead, "dead", limit_s=20)
        # Monotonic clock of this process: the thread wrote when it was back, and judged no sooner than its grace.
        from omnara.clock import monotonic

        assert monotonic() - back >= 1.5
        assert lost < back


async def terminate_one(engine: Engine, replica: Replica) -> None:
    """Cut the session of one replica, found by the lock that it holds."""
    key = worker_key(replica.identity.worker_id)
    cut = await engine.sql.fetchval(
        """select count(pg_terminate_backend(pid)) from pg_locks
           where locktype = 'advisory'
             and pid in (select pid from pg_stat_activity where application_name = 'omnara:session')
             and classid = $1::bigint::oid and objid = $2::bigint::oid""",
        key >> 32,
        key & 0xFFFFFFFF,
    )
    assert cut == 1


async def test_a_declared_death_makes_a_new_identity_and_the_late_result_is_refused(database: str) -> None:
    talker = Talker()
    async with engine_on(database, talker) as engine:
        [agent] = await engine.add_agents()
        [first] = await engine.start()
        await engine.say(agent)
        await until(lambda: talker.calls == 1, "the model is being called")
        old = first.identity.worker_id
        await engine.sql.execute(DEAD, old)
        await until(lambda: first.identity.worker_id != old, "a new identity")
        await until(lambda: talker.calls == 2, "the call is made again under the new identity")
        talker.go.set()
        await engine.until_idle(agent)
        assert await step_states(engine, agent) == ["interrupted", "succeeded"]
        assert [kind for _, kind, _ in await engine.events(agent)].count("model_output") == 1


async def test_a_declared_death_is_noticed_at_the_next_look_and_not_at_the_next_renewal(database: str) -> None:
    async with engine_on(database, lambda _: say("hello")) as engine:
        [replica] = await engine.start(worker_lease_s=600.0, worker_renew_s=200.0)
        old = replica.identity.worker_id
        await engine.sql.execute(DEAD, old)
        await until(lambda: replica.identity.worker_id != old, "a new identity")


async def test_a_main_loop_that_hangs_makes_no_new_identity(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could do nothing with one, and would lose it again after each lease."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        [replica] = await engine.start()
        old, runs, asked = replica.identity.worker_id, False, 0

        def main_runs() -> bool:
            nonlocal asked
            asked += 1
            return runs

        monkeypatch.setattr(replica.identity, "_main_runs", main_runs)
        await engine.sql.execute(DEAD, old)
        looked = asked
        await until(lambda: asked >= looked + 5, "it looks around five times")
        assert replica.identity.worker_id == old
        runs = True
        await until(lambda: replica.identity.worker_id != old, "a new identity")


async def test_a_new_identity_of_a_process_that_lost_its_session_judges_nobody_for_the_grace(database: str) -> None:
    async with engine_on(database, lambda _: say("hello")) as engine:
        [replica] = await engine.start(death_grace_s=600.0)
        old = replica.identity.worker_id
        assert replica.identity.verdicts.regained == float("-inf")
        await engine.sql.execute(DEAD, old)
        await until(lambda: replica.identity.verdicts.regained > 0, "it begins again")
        assert replica.identity.worker_id != old


async def test_a_key_that_stays_taken_is_tried_again_with_another_session(database: str) -> None:
    """Somebody keeps the key for longer than the attach waits: the worker must not go on half attached."""
    talker = Talker()
    async with engine_on(database, talker) as engine:
        [agent] = await engine.add_agents()
        [replica] = await engine.start()
        worker_id = replica.identity.worker_id
        talker.go.set()
        await engine.say(agent)
        await engine.until_idle(agent)  # the claimer is connected, so no claim of before the loss is still on its way
        keeper = await asyncpg.connect(database)
        keeping = asyncio.create_task(keeper.execute("select pg_advisory_lock($1)", worker_key(worker_id)))

        async def queued() -> bool:
            return bool(await engine.sql.fetchval("select count(*) from pg_locks where not granted"))

        await until(queued, "the keeper is next")
        await terminate(engine, "session")
        await keeping
        await until(lambda: not replica.worker._attached.is_set(), "the worker knows that it is detached")
        await engine.say(agent)

        async def second_session() -> bool:
            return bool(
                await engine.sql.fetchval(
                    """select count(*) from pg_stat_activity where datname = current_database()
                       and application_name = 'omnara:session' and query like '%advisory%'"""
                )
            )

        await until(second_session, "it asks for its key")
        assert (await engine.hot(agent))["worker_id"] is None, "a detached worker claims nothing"
        await until(lambda: not replica.worker._attached.is_set(), "still detached")
        await asyncio.wait_for(_released_after_a_refusal(engine, keeper), 20)
        await until(replica.worker._attached.is_set, "attached again")
        await engine.until_idle(agent)
        assert talker.calls == 2
        assert replica.identity.worker_id == worker_id


async def _released_after_a_refusal(engine: Engine, keeper: asyncpg.Connection) -> None:
    """Keep the key until the attaching session has given up once (its backend is another one), then let go."""
    sessions: set[int] = set()

    async def gave_up() -> bool:
        rows = await engine.sql.fetch(
            """select pid from pg_stat_activity where datname = current_database()
               and application_name = 'omnara:session'"""
        )
        sessions.update(row[0] for row in rows)
        return len(sessions) >= 2

    await until(gave_up, "a second session tries")
    await keeper.close()


async def test_a_detached_worker_starts_no_effect_and_saves_what_ends(database: str) -> None:
    """Tools wait for the identity; the model's answer that asked for them is saved all the same."""
    ran = asyncio.Event()
    talker = asyncio.Event()

    async def act(_call: ToolCallRequest) -> ToolResult:
        ran.set()
        return succeeded(TextBlock("done"))

    async def script(call: ModelCall) -> Outcome:
        if len(call.context.messages()) > 1:
            return say("done")
        await talker.wait()
        return ask(call, ("act", {}))

    with built_in("act", act):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"act": "always_allow"})
            [replica] = await engine.start()
            await engine.say(agent)
            await until_claimed(engine, agent)
            replica.worker.detached()
            talker.set()

            async def saved() -> bool:
                return await engine.sql.fetchval("select count(*) from tool_calls where state = 'running'") == 1

            await until(saved, "the answer is saved")
            await asyncio.sleep(0)
            assert not ran.is_set()
            replica.worker.attached(replica.identity.worker_id, is_new=False)
            await engine.until_idle(agent)
            assert ran.is_set()


async def test_a_silent_network_is_noticed_by_the_lease_and_the_late_worker_saves_nothing(database: str) -> None:
    """The packets of one replica are held back for longer than its lease; another goes on, the late one is refused."""
    talker = Talker()
    fast = {"worker_lease_s": 1.0, "worker_renew_s": 0.2}
    async with proxied(database) as (proxy, dsn), engine_on(database, talker) as engine:
        [agent] = await engine.add_agents()
        engine.dsn = dsn
        [first] = await engine.start(**fast)
        engine.dsn = database
        await engine.say(agent)
        await until(lambda: talker.calls == 1, "the model is being called")
        old = first.identity.worker_id
        await engine.start(**fast)
        proxy.go_silent()
        await until_worker_is(engine, old, "lapsed", limit_s=20)
        await until(lambda: talker.calls == 2, "the other worker makes the call")
        assert (await engine.hot(agent))["deaths"] == 0, "a lost lease is no death"
        talker.go.set()
        await engine.until_idle(agent)
        proxy.flow()
        await until(lambda: first.identity.worker_id != old, "the late worker has a new identity", limit_s=20)
        await until(lambda: first.worker.running == 0, "and has stopped its step")
        assert await step_states(engine, agent) == ["interrupted", "succeeded"]
        assert [kind for _, kind, _ in await engine.events(agent)].count("model_output") == 1


async def test_a_blocked_event_loop_does_not_lose_the_lease(database: str) -> None:
    """Synchronous work holds the loop for longer than a lease: the thread renews, and the other's thread looks on."""
    talker = Talker()
    async with engine_on(database, talker) as engine:
        [agent] = await engine.add_agents()
        first, second = await engine.start(2, worker_lease_s=0.6, worker_renew_s=0.1)
        await engine.say(agent)
        await until(lambda: talker.calls == 1, "the model is being called")
        ids = {first.identity.worker_id, second.identity.worker_id}
        time.sleep(1.0)  # noqa: ASYNC251 - this is the fault that is tested
        states = await engine.sql.fetch("select id, state from workers")
        assert {row["id"] for row in states} == ids
        assert {row["state"] for row in states} == {"live"}
        talker.go.set()
        await engine.until_idle(agent)
        assert await step_states(engine, agent) == ["succeeded"]


# --- C: claims of the dead are always released ------------------------------------------------------------


async def test_a_killed_worker_is_found_and_its_agents_go_on(database: str) -> None:
    talker = Talker()
    async with engine_on(database, talker) as engine:
        agents = await engine.add_agents(20)
        [first] = await engine.start(worker_lease_s=120)
        for agent in agents:
            await engine.say(agent)
        await until(lambda: talker.calls == 20, "twenty calls are in flight")
        await engine.start(worker_lease_s=120)
        dead = await crash(first)
        await until_worker_is(engine, dead, "dead")  # long before its lease is over
        talker.go.set()
        await engine.until_idle(*agents)
        for agent in agents:
            assert await step_states(engine, agent) == ["interrupted", "succeeded"]


async def test_a_claim_that_commits_while_its_worker_is_judged_is_released(database: str) -> None:
    """The claim holds the workers row FOR SHARE: no verdict is written meanwhile, and the release comes after it."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        [agent] = await engine.add_agents()
        [sweeper] = await engine.start()
        sweeper.worker._claimer.pause()
        await sweeper.sweep.stop()
        worker_id = await lone_worker(engine)
        await engine.say(agent)
        claimer = await asyncpg.connect(database)
        judge = await connect(ConnectSettings(dsn=database), ConnKind.SESSION)
        end = await engine.sql.fetchval(
            "update workers set lease_expires_at = now() - interval '1 s' where id = $1 returning lease_expires_at",
            worker_id,
        )
        async with claimer.transaction():
            [claim] = await claim_agents(claimer, worker_id, limit=5, since=ALWAYS, token=9, suspects=True)  # type: ignore[arg-type]
            assert await workers_db.declare_dead(judge, [], [(worker_id, end)]) == []
        assert await workers_db.declare_dead(judge, [], [(worker_id, end)]) == [worker_id]
        released = await release_orphans(sweeper.deps, 5)
        assert released.agents == (claim.agent_id,)
        assert await claim_agents(claimer, worker_id, limit=5, since=ALWAYS, token=9, suspects=True) == []  # type: ignore[arg-type]
        await claimer.close()
        await judge.close()
        sweeper.worker._claimer.resume(sweeper.identity.worker_id)
        await engine.until_idle(agent)


async def lone_worker(engine: Engine) -> UUID:
    """A live worker row whose lock nobody tries (the key is held here)."""
    from omnara.ids import new_uuid

    worker_id = new_uuid()
    key = worker_key(worker_id)
    await engine.sql.execute("select pg_advisory_lock_shared($1)", key)
    await engine.sql.execute(
        """insert into workers (id, lock_key, roles, version, lease_expires_at)
           values ($1, $2, '{worker}', 'test', clock_timestamp() + interval '1 hour')""",
        worker_id,
        key,
    )
    return worker_id


async def test_one_bad_row_does_not_keep_the_claims_of_the_others(database: str) -> None:
    """Of three orphans the middle one cannot be released: its row contradicts itself."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        agents = sorted(await engine.add_agents(3))
        worker_id = await lone_worker(engine)
        for agent in agents:
            await engine.say(agent)
        claims = await claim_agents(engine.sql, worker_id, limit=5, since=ALWAYS, token=9, suspects=True)  # type: ignore[arg-type]
        assert len(claims) == 3
        bad = agents[1]
        # A running call that the hot row does not count: taking the claim away would count below zero.
        await engine.sql.execute("update agent_sched set batch_sequence = 1 where agent_id = $1", bad)
        await engine.sql.execute(
            """insert into tool_calls (agent_id, output_sequence, ordinal, id, turn_id, turn_sequence, provider_call_id,
                                       name, type, input, state)
               select $1, 1, 0, gen_random_uuid(), turn_id, 1, 'p', 'x', 'built_in', '{}', 'running'
               from agent_sched where agent_id = $1""",
            bad,
        )
        await engine.sql.execute(DEAD, worker_id)
        [replica] = await engine.start()
        await engine.until_idle(agents[0], agents[2])
        assert (await engine.hot(bad))["worker_id"] == worker_id
        count, oldest_s = await orphaned(replica)
        assert count == 1, "an operator sees that one stays"
        assert oldest_s is not None
        assert 0 < oldest_s < 60
        await engine.sql.execute("delete from tool_calls where agent_id = $1", bad)
        await engine.sql.execute("update agent_sched set batch_sequence = null where agent_id = $1", bad)
        await engine.until_idle(*agents)
        await until(lambda: replica.worker.running == 0, "no run is left")
        assert await orphaned(replica) == (0, 0)


async def orphaned(replica: Replica) -> tuple[float | None, float | None]:
    """What the metrics say of agents whose worker is gone."""
    async with replica.deps.db.acquire() as connection:
        await Upkeep(replica.deps, ConnectSettings(dsn=""))._read_gauges(connection)
    value = replica.deps.metrics.registry.get_sample_value
    return value("omnara_orphaned_agents"), value("omnara_orphaned_oldest_seconds")


async def test_a_locked_orphan_does_not_keep_the_others(database: str) -> None:
    """Somebody holds a hot row for as long as it likes: the sweep passes it over, and comes back (field report B58)."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        agents = sorted(await engine.add_agents(3))
        worker_id = await lone_worker(engine)
        for agent in agents:
            await engine.say(agent)
        await claim_agents(engine.sql, worker_id, limit=5, since=ALWAYS, token=9, suspects=True)  # type: ignore[arg-type]
        async with locked(engine, agents[0]):
            await engine.sql.execute(DEAD, worker_id)
            await engine.start()
            await engine.until_idle(agents[1], agents[2], limit_s=20)
            assert (await engine.hot(agents[0]))["worker_id"] == worker_id
        await engine.until_idle(agents[0], limit_s=20)


async def test_reconcile_and_cancel_hints_survive_a_broken_claimer_connection(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claimer's connection breaks while the worker asks for its claims: both loops go on afterwards."""
    from omnara.db.hintwire import Hint, Kind
    from omnara.worker import worker as worker_module

    real = worker_module.own_claims
    broken = 0

    async def breaking(connection: asyncpg.Connection, worker_id: UUID) -> object:
        nonlocal broken
        if broken < 3:
            broken += 1
            await connection.execute("select pg_terminate_backend(pg_backend_pid())")
        return await real(connection, worker_id)

    monkeypatch.setattr(worker_module, "own_claims", breaking)
    talker = Talker()
    async with engine_on(database, talker) as engine:
        [agent] = await engine.add_agents()
        [replica] = await engine.start()
        await engine.say(agent)
        await until(lambda: talker.calls == 1, "the model is being called")
        with probes.expect("reconciled") as reconciled:
            for bus in engine.hints.buses:
                bus.publish(Hint(Kind.CANCEL, (str(agent),)))
            await reconciled.wait(2)
        assert broken == 3
        assert FAST.reconcile_s < 1
        watching = asyncio.create_task(replica.worker.watch())
        await asyncio.sleep(0)
        assert not watching.done(), "no loop of the worker has ended"
        watching.cancel()
        talker.go.set()
        await engine.until_idle(agent)
        assert await step_states(engine, agent) == ["succeeded"]
