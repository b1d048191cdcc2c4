"""When a look at another worker is evidence of its death, on a clock that the test sets.

The database's own clock runs on; what is expired, gone or unseen there is written by the test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from uuid import UUID

import pytest
import pytest_asyncio

from omnara.db import workers as db
from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.locks import hold_identity, worker_key
from omnara.ids import new_uuid
from omnara.worker import verdicts
from omnara.worker.verdicts import IdentityTimes, Verdicts

LEASE_S = 30.0
GRACE_S = 0.0
"""None after a start of Postgres and after a regained session, so that the other rules are seen alone."""
LATE = "update workers set lease_expires_at = clock_timestamp() - interval '1 second' where id = any($1)"
BEFORE = "update workers set attached_at = $2::timestamptz - interval '1 second' where id = $1"


class Clock:
    """What `monotonic` says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(verdicts, "monotonic", made)
    return made


@pytest_asyncio.fixture(loop_scope="session")
async def judge(connect_settings: ConnectSettings) -> AsyncIterator[Connection]:
    """The session of the worker that judges."""
    connection = await connect(connect_settings, ConnKind.SESSION)
    yield connection
    await connection.close()


@pytest_asyncio.fixture(loop_scope="session")
async def other(connect_settings: ConnectSettings) -> AsyncIterator[Connection]:
    """The session of the worker that is judged."""
    connection = await connect(connect_settings, ConnKind.SESSION)
    yield connection
    await connection.close()


async def registered(connection: Connection, *, holds: bool = True) -> UUID:
    worker_id = new_uuid()
    key = worker_key(worker_id)
    assert not holds or await hold_identity(connection, key)
    await db.register_worker(connection, worker_id, lock_key=key, roles=["worker"], version="t", lease_s=LEASE_S)
    return worker_id


def attached(grace_s: float = GRACE_S, *, again: bool = False) -> Verdicts:
    made = Verdicts(IdentityTimes(lease_s=LEASE_S, renew_s=5.0, probe_s=0.1, grace_s=grace_s))
    made.attached(again=again)
    return made


async def watch(
    made: Verdicts, clock: Clock, connection: Connection, own: UUID, seconds: float, *, by: float = 2
) -> list[UUID]:
    """Look every so many seconds, and return whom the looks have declared dead."""
    dead = []
    for _ in range(int(seconds / by)):
        clock.now += by
        live, found = await made.look(connection, own)
        assert live
        dead += found
    return dead


async def state_of(connection: Connection, worker: UUID) -> str:
    return str(await connection.fetchval("select state from workers where id = $1", worker))


async def test_a_lease_that_ran_out_is_judged_when_it_was_watched_for_its_length(
    judge: Connection, other: Connection, clock: Clock
) -> None:
    own, late = await registered(judge), await registered(other)
    made = attached()
    await judge.execute(LATE, [late])
    assert await made.look(judge, own) == (True, [])
    assert await watch(made, clock, judge, own, LEASE_S - 2) == []
    assert await watch(made, clock, judge, own, 2) == [late]
    assert await state_of(judge, late) == "lapsed"


async def test_who_was_watched_while_it_lasted_is_judged_as_it_runs_out(
    judge: Connection, other: Connection, clock: Clock
) -> None:
    own, late = await registered(judge), await registered(other)
    made = attached()
    assert await watch(made, clock, judge, own, 2 * LEASE_S) == [], "the database says that it has not run out"
    # The end of its lease stays as it was seen; the test moves it by what the clock of the database cannot be moved.
    seen = await judge.fetchval(f"{LATE} returning lease_expires_at", [late])
    made._watched[late].expires_at = seen
    assert await watch(made, clock, judge, own, 2) == [late]


@pytest.mark.parametrize("standstills", [1, 3])
async def test_a_standstill_of_the_database_is_no_watching(
    judge: Connection, other: Connection, clock: Clock, standstills: int
) -> None:
    """However long: it answers nobody meanwhile, so nobody can renew."""
    own, late = await registered(judge), await registered(other)
    made = attached()
    assert await watch(made, clock, judge, own, LEASE_S * 0.4) == []
    await judge.execute(LATE, [late])
    for _ in range(standstills):
        clock.now += 10 * LEASE_S
        assert await made.look(judge, own) == (True, [])
    await db.renew_lease(other, late, LEASE_S)
    assert await watch(made, clock, judge, own, LEASE_S) == []
    assert await state_of(judge, late) == "live"


async def test_slow_answers_postpone_a_verdict_and_do_not_prevent_it(
    judge: Connection, other: Connection, clock: Clock
) -> None:
    own, late = await registered(judge), await registered(other)
    made = attached()
    await judge.execute(LATE, [late])
    assert await watch(made, clock, judge, own, 9 * LEASE_S, by=LEASE_S) == []
    assert await watch(made, clock, judge, own, 3 * LEASE_S, by=LEASE_S) == [late]


async def test_a_jump_of_the_databases_clock_is_nobodys_death(
    judge: Connection, other: Connection, clock: Clock
) -> None:
    """The machine was asleep: nothing of it shows on the clock of this process. Whoever lives renews then."""
    own, back, late = await registered(judge), await registered(other), await registered(other)
    made = attached()
    await watch(made, clock, judge, own, 2 * LEASE_S)
    await judge.execute(LATE, [own, back, late])
    assert await watch(made, clock, judge, own, LEASE_S * 0.4) == []
    await db.renew_lease(other, back, LEASE_S)
    assert await watch(made, clock, judge, own, 2 * LEASE_S) == [late]
    assert await state_of(judge, back) == "live"


async def test_a_longer_lease_than_the_own_is_watched_for_longer(
    judge: Connection, other: Connection, clock: Clock
) -> None:
    """Settings that are being changed: the judge has seen how much the other had left."""
    own, late = await registered(judge), await registered(other)
    made = attached()
    await db.renew_lease(other, late, 3 * LEASE_S)
    await watch(made, clock, judge, own, 4)
    await judge.execute(LATE, [late])
    assert await watch(made, clock, judge, own, 3 * LEASE_S - 2) == []
    assert await watch(made, clock, judge, own, 6) == [late]


async def test_a_lease_renewed_after_it_was_seen_is_let_be(judge: Connection, other: Connection) -> None:
    """Renewed by a statement that began before a standstill: what it wrote has run out, too, when it is there."""
    late = await registered(other)
    await judge.execute(LATE, [late])
    seen = await judge.fetchval("select lease_expires_at from workers where id = $1", late)
    await judge.execute("update workers set lease_expires_at = lease_expires_at + interval '1 ms' where id = $1", late)
    assert await db.declare_dead(judge, [], [(late, seen)]) == []
    seen = await judge.fetchval("select lease_expires_at from workers where id = $1", late)
    assert await db.declare_dead(judge, [], [(late, seen)]) == [late]


async def test_a_lost_lock_is_a_death_at_once_also_after_a_standstill(judge: Connection, clock: Clock) -> None:
    own, gone = await registered(judge), await registered(judge, holds=False)
    made = attached()
    clock.now += 10 * LEASE_S
    assert await made.look(judge, own) == (True, [gone])
    assert await state_of(judge, gone) == "dead"


async def test_one_that_takes_its_lock_again_is_not_taken_by_its_old_lease(
    judge: Connection, other: Connection
) -> None:
    """Only a lease that was judged may speak against it."""
    back = await registered(other)
    await judge.execute(LATE, [back])
    assert await db.declare_dead(judge, [back], []) == []


async def test_after_a_start_a_new_process_leaves_those_alone_that_are_not_back(
    judge: Connection, clock: Clock
) -> None:
    """A start may take longer than the grace, a long recovery for instance: then nobody has had a grace yet."""
    own, away, back = [await registered(judge, holds=number == 0) for number in range(3)]
    made = attached(grace_s=1e-3)
    await judge.execute(BEFORE, away, (await db.server_start(judge)).at)
    assert await made.look(judge, own) == (True, [back])
    clock.now += 1
    assert await made.look(judge, own) == (True, [away])


async def test_a_regained_session_judges_nobody_for_the_grace(judge: Connection, clock: Clock) -> None:
    own, gone = await registered(judge), await registered(judge, holds=False)
    made = attached(grace_s=2e-3, again=True)
    clock.now += 1e-3
    assert await made.look(judge, own) == (True, [])
    clock.now += 1
    assert await made.look(judge, own) == (True, [gone])


@pytest.mark.parametrize(("age_s", "dead"), [(0.0, False), (9.0, False), (11.0, True), (-5.0, True)])
async def test_after_a_start_nobody_is_declared_dead_for_the_grace(
    judge: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch, age_s: float, dead: bool
) -> None:
    """A negative age is of a clock that was set back: it says nothing about a start."""

    async def start(_connection: object) -> db.ServerStart:
        return db.ServerStart(datetime.fromtimestamp(0, UTC), age_s)

    own, gone = await registered(judge), await registered(judge, holds=False)
    monkeypatch.setattr(verdicts.db, "server_start", start)
    assert await attached(grace_s=10.0).look(judge, own) == (True, [gone] if dead else [])


async def test_a_worker_that_is_not_live_any_more_judges_nobody(judge: Connection, clock: Clock) -> None:
    own, gone = await registered(judge), await registered(judge, holds=False)
    made = attached()
    await judge.execute("update workers set state = 'lapsed', ended_at = clock_timestamp() where id = $1", own)
    assert await made.look(judge, own) == (False, [])
    assert await state_of(judge, gone) == "live"
