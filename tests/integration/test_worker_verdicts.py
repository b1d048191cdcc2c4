"""When a look at another worker is evidence of its death, on a clock that the test sets.

The database's own clock runs on; what is expired, gone or unseen there is written by the test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
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
UNSEEN = """update workers
            set lease_expires_at = pg_postmaster_start_time() + make_interval(secs => $2) - interval '1 second'
            where id = $1"""


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


async def watch(made: Verdicts, clock: Clock, connection: Connection, own: UUID, seconds: float) -> list[UUID]:
    """Look every two seconds, the own lease renewed; whom the looks have declared dead."""
    dead = []
    for _ in range(int(seconds / 2)):
        clock.now += 2
        await db.renew_lease(connection, own, LEASE_S)
        dead += (await made.look(connection, own))[1]
    return dead


async def test_a_lease_is_judged_after_a_whole_lease_without_a_silence(
    judge: Connection, other: Connection, clock: Clock
) -> None:
    own, late = await registered(judge), await registered(other)
    made = attached()
    await judge.execute(LATE, [late])
    assert await watch(made, clock, judge, own, LEASE_S - 2) == []
    assert await watch(made, clock, judge, own, 2) == [late]
    assert await judge.fetchval("select state from workers where id = $1", late) == "lapsed"


@pytest.mark.parametrize("silent", ["the look", "the renewal"])
async def test_after_a_silence_of_the_database_the_others_have_time_to_renew(
    judge: Connection, other: Connection, clock: Clock, silent: str
) -> None:
    own, late = await registered(judge), await registered(other)
    made = attached()
    assert await watch(made, clock, judge, own, 2 * LEASE_S) == []
    await judge.execute(LATE, [late])
    clock.now += LEASE_S / 5
    if silent == "the renewal":
        made.heard()
        clock.now += 1
    assert await made.look(judge, own) == (True, [])
    assert await watch(made, clock, judge, own, LEASE_S - 4) == []
    await db.renew_lease(other, late, LEASE_S)
    assert await watch(made, clock, judge, own, LEASE_S) == []
    await judge.execute(LATE, [late])
    assert await watch(made, clock, judge, own, 2) == [late], "and is judged again afterwards"


async def test_whoever_has_lost_its_own_lease_judges_no_lease(
    judge: Connection, other: Connection, clock: Clock
) -> None:
    """A machine that was asleep: no clock of this process shows it, the database's does."""
    own, late = await registered(judge), await registered(other)
    made = attached()
    await watch(made, clock, judge, own, 2 * LEASE_S)
    await judge.execute(LATE, [own, late])
    assert await made.look(judge, own) == (True, [])
    assert await watch(made, clock, judge, own, LEASE_S - 2) == []
    assert await watch(made, clock, judge, own, 2) == [late]


async def test_a_lost_lock_is_a_death_at_once_also_after_a_silence(judge: Connection, clock: Clock) -> None:
    own, gone = await registered(judge), await registered(judge, holds=False)
    made = attached()
    clock.now += LEASE_S / 5
    assert await made.look(judge, own) == (True, [gone])
    assert await judge.fetchval("select state from workers where id = $1", gone) == "dead"


async def test_one_that_came_back_in_time_is_not_taken_by_its_old_lease(
    judge: Connection, other: Connection, clock: Clock
) -> None:
    """Its lock could be taken and its lease had run out; only the lock may count while leases are not judged."""
    own, back = await registered(judge), await registered(other, holds=False)
    made = attached()
    await judge.execute(LATE, [back])

    async def look_and_attach(*args: object) -> list[db.Probe]:
        probes = await probe_workers(*args)
        assert await hold_identity(other, worker_key(back))
        return probes

    probe_workers, verdicts.db.probe_workers = verdicts.db.probe_workers, look_and_attach
    try:
        assert await made.look(judge, own) == (True, [])
    finally:
        verdicts.db.probe_workers = probe_workers


async def test_one_not_seen_since_a_start_gets_the_grace_from_a_new_process(judge: Connection, clock: Clock) -> None:
    """A start that takes longer than the grace, such as a long recovery: then nobody has had a grace yet."""
    own, unseen, seen = [await registered(judge, holds=number == 0) for number in range(3)]
    made = attached(grace_s=1e-3)
    await judge.execute(UNSEEN, unseen, LEASE_S)
    assert await made.look(judge, own) == (True, [seen])
    clock.now += 1
    assert await made.look(judge, own) == (True, [unseen])


async def test_a_worker_that_is_not_live_any_more_judges_nobody(judge: Connection, clock: Clock) -> None:
    own, gone = await registered(judge), await registered(judge, holds=False)
    made = attached()
    await judge.execute("update workers set state = 'lapsed', ended_at = clock_timestamp() where id = $1", own)
    assert await made.look(judge, own) == (False, [])
    assert await judge.fetchval("select state from workers where id = $1", gone) == "live"
