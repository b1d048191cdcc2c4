"""Registration: who becomes a machine's runtime, and every row of the two tables of reconciliation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omnara.access import tokens
from omnara.access.tokens import TokenKind
from omnara.db.fleet import MachineClaim
from omnara.engine.machines import identity, runtimes
from omnara.engine.machines.runtimes import Failure, RuntimeEnded
from omnara.errors import Conflict, Gone, NotWakeCapable, PendingWork, RuntimeUnregistered, Unauthorized, Unavailable
from omnara.ids import new_uuid
from tests.support.engine_case import Engine
from tests.support.machine_floor import Floor, Job, applied, claim, failed, local, pac, prc, seen

WAITING = "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database())"
MISSING = "local_process_missing_after_daemon_reconnect"


async def in_state(floor: Floor, state: str) -> Job:
    """A command in a state; its call waits, unless the command runs or has ended."""
    job = await floor.job()
    if state != "queued":
        await floor.accept(job)
    if state in ("running", "exited"):
        await floor.started(job)
    if state == "exited":
        await floor.finished(job)
    return job


# --- who ------------------------------------------------------------------------------------------------------


async def test_the_same_process_gets_the_same_runtime_again(engine: Engine) -> None:
    floor = await Floor.make(engine)
    first, session = floor.runtime_id, floor.session_id
    registered = await floor.register(channel=False)
    assert registered.runtime.id == first
    assert registered.runtime.session_id is None, "the old channel is fenced off"
    assert await runtimes.beat(floor.deps, first, session, floor.instance) == RuntimeEnded("")
    row = (await floor.sql.fetch("select * from machines where id = $1", floor.machine.id))[0]
    assert (row["current_runtime_id"], row["observed_platform"]) == (first, "linux/amd64")


async def test_a_new_process_replaces_the_old_one_which_is_gone(engine: Engine) -> None:
    floor = await Floor.make(engine)
    old, old_runtime, old_session = floor.instance, floor.runtime_id, floor.session_id
    await floor.register(instance=new_uuid())
    assert floor.runtime_id != old_runtime
    ended = await runtimes.beat(floor.deps, old_runtime, old_session, old)
    assert ended == RuntimeEnded("daemon_runtime_replaced")
    with pytest.raises(Gone) as caught:
        await floor.register(instance=old)
    assert caught.value.code == "gone"


@pytest.mark.parametrize(
    ("reason", "revives"),
    [
        ("daemon_lease_expired", True),
        ("machine_asleep", True),
        ("daemon_ended", False),
        ("authorization_revoked", False),
    ],
)
async def test_how_a_runtime_ended_says_whether_it_comes_back(engine: Engine, reason: str, revives: bool) -> None:
    floor = await Floor.make(engine)
    first = floor.runtime_id
    await floor.sql.fetch(
        "update machine_runtimes set state = 'ended', ended_at = now(), session_id = null, state_reason_code = $1",
        reason,
    )
    await floor.sql.fetch("update machines set asleep_since = now(), wake_until = now(), wake_attempts = 2")
    if not revives:
        with pytest.raises(Gone):
            await floor.register()
        return
    assert (await floor.register()).runtime.id == first
    row = (await floor.sql.fetch("select asleep_since, wake_until, wake_attempts from machines"))[0]
    assert tuple(row) == (None, None, 0)


async def test_another_version_is_another_daemon(engine: Engine) -> None:
    floor = await Floor.make(engine)
    with pytest.raises(Gone):
        await floor.register(version="1.2.4")


@pytest.mark.parametrize("state", ["provisioning", "deleting", "deleted"])
async def test_a_machine_that_is_not_active_is_tried_again(engine: Engine, state: str) -> None:
    floor = await Floor.make(engine, register=False)
    await floor.sql.fetch(
        "update machines set lifecycle_state = $1, deleted_at = case when $1 = 'deleted' then now() end", state
    )
    if state == "deleted":
        await floor.sql.fetch("update machine_grants set deleted_at = now()")
        await floor.sql.fetch("update agent_machine_bindings set state = 'released'")
    with pytest.raises(Unavailable):
        await floor.register()


async def test_a_grant_comes_before_or_after_a_registration(engine: Engine) -> None:
    floor = await Floor.make(engine)
    jobs = await floor.jobs(6)
    claims = [claim(job, "prepared", committed=False) for job in jobs]
    results = await asyncio.gather(floor.register(claims, channel=False), *(floor.accept(job) for job in jobs))
    registered, granted = results[0], results[1:]
    for directive, was_granted, job in zip(registered.directives, granted, jobs, strict=True):  # type: ignore[union-attr]
        assert directive.disposition == ("start" if was_granted else "close_preparation")
        assert (await floor.state(job))[0] == ("starting" if was_granted else "queued")


async def test_who_drives_a_machine_no_more_registers_nothing_for_it(engine: Engine) -> None:
    """What it saw there is from before its successor: taken as true, it would end a command that runs."""
    floor = await Floor.make(engine)
    job = await in_state(floor, "running")
    runtime = floor.runtime_id
    query = "update machines set worker_id = $2, claim_token = 7, generation = 2 where id = $1"
    await floor.sql.fetch(query, floor.machine.id, new_uuid())
    for token, generation in ((6, 2), (7, 1)):
        with pytest.raises(Gone):
            await floor.register(instance=new_uuid(), driver=MachineClaim(floor.machine.id, token, generation))
    await floor.sql.fetch("update machines set worker_id = null, claim_token = null")
    with pytest.raises(Gone):
        await floor.register(instance=new_uuid(), driver=MachineClaim(floor.machine.id, 7, 2))
    assert await floor.state(job) == ("running", "")
    assert (await floor.sql.fetch("select current_runtime_id from machines"))[0][0] == runtime
    await floor.sql.fetch(query, floor.machine.id, new_uuid())
    driver = MachineClaim(floor.machine.id, 7, 2)
    registered = await floor.register([claim(job)], instance=new_uuid(), driver=driver)
    assert [directive.disposition for directive in registered.directives] == ["retain"]


# --- the first table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "claimed", "disposition", "after", "result"),
    [
        ("queued", ("preparing", True, False), "close_preparation", ("queued", ""), None),
        ("queued", ("prepared", False, False), "close_preparation", ("queued", ""), None),
        ("starting", ("terminal", False, True), "retain", ("starting", ""), None),
        ("starting", ("accepted", True, True), "retain", ("starting", ""), None),
        ("starting", ("prepared", True, False), "start", ("starting", ""), None),
        ("starting", ("accepted", True, False), "start", ("starting", ""), None),
        (
            "starting",
            ("prepared", False, False),
            "release",
            ("failed", "execution_not_started"),
            "execution_not_started",
        ),
        ("starting", ("accepted", False, True), "release", ("unknown", MISSING), MISSING),
        ("running", ("accepted", False, True), "release", ("unknown", MISSING), "told"),
        ("running", ("terminal", False, True), "retain", ("running", ""), "told"),
        ("running", ("accepted", True, True), "retain", ("running", ""), "told"),
        ("exited", ("prepared", True, False), "close_preparation", ("exited", ""), "told"),
        ("exited", ("accepted", True, True), "release", ("exited", ""), "told"),
        ("exited", ("terminal", False, True), "release", ("exited", ""), "told"),
        # What contradicts: taken out of service, never again.
        (
            "queued",
            ("accepted", True, True),
            "release",
            ("unknown", "reconciliation_conflict"),
            "reconciliation_conflict",
        ),
        (
            "queued",
            ("terminal", False, True),
            "release",
            ("unknown", "reconciliation_conflict"),
            "reconciliation_conflict",
        ),
        ("running", ("prepared", True, False), "close_preparation", ("unknown", "reconciliation_conflict"), "told"),
        # No claim.
        ("queued", None, None, ("queued", ""), None),
        ("starting", None, None, ("unknown", MISSING), MISSING),
        ("running", None, None, ("unknown", MISSING), "told"),
        ("exited", None, None, ("exited", ""), "told"),
    ],
)
async def test_processes_are_reconciled(
    engine: Engine, state: str, claimed: Any, disposition: str | None, after: tuple[str, str], result: str | None
) -> None:
    floor = await Floor.make(engine)
    job = await in_state(floor, state)
    claims = [claim(job, claimed[0], live=claimed[1], committed=claimed[2])] if claimed else []
    registered = await floor.register(claims)
    assert [(d.process_id, d.supervisor_instance_id, d.disposition) for d in registered.directives] == (
        [(prc(job.id), "s1", disposition)] if claimed else []
    )
    assert await floor.state(job) == after
    told = await floor.told(job)
    if result is None:
        assert told is None
    elif result == "told":
        assert told is not None
        assert told[1]["state"] == "running", "the first result stands"
    else:
        assert told is not None
        assert (told[0], told[1]["error_code"], told[1].get("retryable", False)) == (
            "failed", result, result == "execution_not_started",
        )  # fmt: skip
    await engine.assert_coherent(job.path)
    if after[0] == "queued":
        assert await floor.accept(job), "offered again"
        await floor.finished(job)
    elif after[0] in ("unknown", "failed"):
        assert not await floor.accept(job)
        late = await floor.finished(job)
        assert late.ack_status == "cleanup_only", "what comes late is noted, and forgotten"
        assert await floor.state(job) == after
        again = await floor.register(claims)
        assert {d.disposition for d in again.directives} <= {"release", "close_preparation"}, "and never started again"


async def test_a_claim_of_nothing_known_is_released(engine: Engine) -> None:
    floor = await Floor.make(engine)
    other = await Floor.make(engine)
    theirs = await other.running()
    nothing = Job(theirs.path, None, new_uuid())
    write = new_uuid()
    registered = await floor.register([claim(theirs, actions=[local(write, 1)]), claim(nothing)])
    assert [d.disposition for d in registered.directives] == ["release", "release"]
    assert [(a.process_action_id, a.disposition) for a in registered.directives[0].actions] == [(pac(write), "release")]
    assert await other.state(theirs) == ("running", "")
    await other.finished(theirs)


# --- the second table -----------------------------------------------------------------------------------------


async def acted(floor: Floor, state: str, kind: str = "write") -> tuple[Job, Any, Any]:
    """A running command with an action in a state, for which a call waits while it is open."""
    job = await floor.running()
    action, call = await floor.act(job, kind, {"data": "x"} if kind == "write" else {"max_bytes": 5})
    if state != "queued":
        await floor.accept_action(job, action)
    if state == "applied":
        await floor.report(applied(job, action, seen("", 3) if kind == "read" else None))
    if state == "failed":
        await floor.report(failed(job, action, "broken"))
    return job, action, call


@pytest.mark.parametrize(
    ("state", "position", "live", "closed", "disposition", "after"),
    [
        ("accepted", "terminal", False, False, "retain", ("accepted", "")),
        ("accepted", "effect_committed", True, False, "retain", ("accepted", "")),
        ("accepted", "effect_committed", False, False, "release", ("unknown", "local_action_outcome_unrecoverable")),
        ("accepted", None, True, False, "apply", ("accepted", "")),
        ("accepted", None, True, True, "release", ("failed", "process_action_not_delivered")),
        ("accepted", None, False, False, "release", ("failed", "process_action_not_delivered")),
        ("applied", "terminal", True, False, "settle", ("applied", "")),
        ("applied", "effect_committed", True, False, "retain", ("applied", "")),
        ("failed", None, True, False, "release", ("failed", "broken")),
        ("queued", None, True, False, None, ("queued", "")),
        ("queued", "effect_committed", True, False, "release", ("unknown", "reconciliation_conflict")),
        ("queued", "terminal", True, False, "settle", ("unknown", "reconciliation_conflict")),
    ],
)
async def test_actions_are_reconciled(
    engine: Engine, state: str, position: Any, live: bool, closed: bool, disposition: str | None, after: tuple[str, str]
) -> None:
    floor = await Floor.make(engine)
    job, action, call = await acted(floor, state)
    actions = [local(action, 1, position)] if position else []
    told = claim(job, live=live, committed=True, action_admission_closed=closed, actions=actions)
    if not live:
        # A dead supervisor with an end on disk: the process is kept, and reported later.
        told = claim(job, "terminal", live=False, committed=True, actions=actions)
    registered = await floor.register([told])
    (directive,) = registered.directives
    assert directive.disposition == "retain"
    assert [(a.process_action_id, a.seq, a.action_kind, a.disposition) for a in directive.actions] == (
        [(pac(action), 1, "write", disposition)] if disposition else []
    )
    if disposition == "apply":
        assert bytes(directive.actions[0].payload) == b'{"data":"x"}'
    assert await floor.action(action) == after
    result = await floor.result(job.path, call)
    assert (result is None) == (after[0] in ("queued", "accepted"))
    if result is not None and after[1]:
        assert result[1]["error_code"] == after[1]
    await engine.assert_coherent(job.path)
    await end_all(floor, job, action)


async def end_all(floor: Floor, job: Job, action: Any) -> None:
    """Let nothing wait when a test is over."""
    if (await floor.action(action))[0] == "queued":
        await floor.accept_action(job, action)
    if (await floor.action(action))[0] == "accepted":
        await floor.report(applied(job, action))
    await floor.finished(job)


async def test_reads_are_done_again(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job, action, call = await acted(floor, "accepted", "read")
    registered = await floor.register([claim(job)])
    assert registered.directives[0].actions == []
    assert await floor.action(action) == ("queued", "")
    assert await floor.accept_action(job, action) is not None
    assert (await floor.report(applied(job, action, seen("", 3)))).ack_status == "committed"
    assert await floor.result(job.path, call) is not None
    registered = await floor.register([claim(job)])
    assert [a.disposition for a in registered.directives[0].actions] == ["release"], "an applied read"
    registered = await floor.register([claim(job, resolved_action_seq=1)])
    assert registered.directives[0].actions == []
    await floor.finished(job)


async def test_a_lost_process_takes_its_actions_along_but_not_its_reads(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.running()
    accepted, call = await floor.act(job, "write", {"data": "x"})
    await floor.accept_action(job, accepted)
    queued, _ = await floor.act(job, "interrupt", waits=False)
    stop, _ = await floor.act(job, "terminate", waits=False)
    read, _ = await floor.act(job, "read", {"max_bytes": 9}, waits=False)
    await floor.register([])
    assert await floor.state(job) == ("unknown", MISSING)
    assert await floor.action(accepted) == ("unknown", "local_action_outcome_unrecoverable")
    assert await floor.action(queued) == ("failed", "process_terminal")
    assert await floor.action(stop) == ("failed", "process_state_unknown")
    assert [a.process_action_id for a in (await floor.pending()).actions] == [pac(read)]
    assert (await floor.result(job.path, call) or ("", {}))[1]["error_code"] == "local_action_outcome_unrecoverable"
    await floor.accept_action(job, read)
    await floor.report(applied(job, read, seen("", 3)))


async def test_many_agents_are_reconciled_in_one_registration(engine: Engine) -> None:
    floor = await Floor.make(engine)
    jobs = [job for _ in range(4) for job in await floor.jobs(5)]
    for job in jobs:
        await floor.accept(job)
    await floor.register([claim(job, live=False) for job in jobs[::2]])
    for job in jobs:
        assert await floor.state(job) == ("unknown", MISSING)
        assert await floor.told(job) is not None
        assert (await engine.assert_coherent(job.path))["ready_at"] is not None


# --- end, sleep, failures -------------------------------------------------------------------------------------


async def test_a_runtime_ends_once(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.running()
    row = await runtimes.end(floor.deps, floor.machine.id, floor.runtime_id)
    assert (row.state, row.state_reason_code) == ("ended", "daemon_ended")
    assert await floor.state(job) == ("running", ""), "it runs on"
    for again in (runtimes.end, runtimes.sleep):
        with pytest.raises(RuntimeUnregistered):
            await again(floor.deps, floor.machine.id, floor.runtime_id)
    await floor.register([claim(job)], instance=new_uuid())
    assert await floor.state(job) == ("running", ""), "the next daemon claims it"
    await floor.finished(job)


async def test_a_machine_sleeps_only_without_work_and_if_it_can_be_woken(engine: Engine) -> None:
    floor = await Floor.make(engine)
    with pytest.raises(NotWakeCapable):
        await runtimes.sleep(floor.deps, floor.machine.id, floor.runtime_id)
    await floor.sql.fetch("update machines set sandbox_url = 'https://sandbox'")
    job = await floor.job()
    with pytest.raises(PendingWork):
        await runtimes.sleep(floor.deps, floor.machine.id, floor.runtime_id)
    await floor.accept(job)
    await floor.finished(job)
    row = await runtimes.sleep(floor.deps, floor.machine.id, floor.runtime_id)
    assert row.state_reason_code == "machine_asleep"
    assert (await floor.sql.fetch("select asleep_since from machines"))[0]["asleep_since"] is not None
    ended = await runtimes.beat(floor.deps, floor.runtime_id, floor.session_id, floor.instance)
    assert ended == RuntimeEnded("machine_asleep")


async def test_the_last_trouble_is_kept_until_a_daemon_is_back(engine: Engine) -> None:
    floor = await Floor.make(engine)
    text = b"x" * 5000 + "é\0".encode()
    await runtimes.record_failure(
        floor.deps, floor.machine.id, Failure(stage="startup_script", exit_status=3, text=text)
    )
    query = (
        "select failure_report ->> 'stage' as stage, length(failure_report ->> 'output_tail') as size, "
        "(failure_report ->> 'reported_at')::timestamptz <= now() as timed, "
        "failure_report -> 'output_truncated' as cut from machines"
    )
    assert tuple((await floor.sql.fetch(query))[0]) == ("startup_script", 4095, True, "true")
    await floor.register()
    assert (await floor.sql.fetch("select failure_report from machines"))[0][0] is None
    with pytest.raises(Conflict):
        await runtimes.record_failure(floor.deps, floor.machine.id, Failure(stage="daemon_uninstalled"))
    job = await floor.job()
    await floor.accept(job)
    await runtimes.end(floor.deps, floor.machine.id, floor.runtime_id)
    await runtimes.record_failure(floor.deps, floor.machine.id, Failure(stage="daemon_uninstalled"))
    assert await floor.state(job) == ("unknown", "daemon_uninstalled")
    assert (await floor.told(job) or ("", {}))[1]["error_code"] == "daemon_uninstalled"


async def test_the_first_daemon_of_a_pool_machine_makes_every_other_token_worthless(engine: Engine) -> None:
    floor = await Floor.make(engine, register=False)
    pool = new_uuid()
    await floor.sql.fetch(
        "insert into machine_pools (id, org_id, name, provider, max_total_machines) values ($1, $2, 'p', 'docker', 3)",
        pool, floor.machine.org_id,
    )  # fmt: skip
    await floor.sql.fetch("update machines set source_kind = 'pool', pool_id = $1", pool)
    mine = await identity.authenticate_daemon(floor.deps, floor.machine.token)
    other = tokens.generate(TokenKind.DAEMON)
    await floor.sql.fetch(
        "insert into machine_daemon_tokens (id, org_id, machine_id, token_hash) values ($1, $2, $3, $4)",
        new_uuid(), floor.machine.org_id, floor.machine.id, other.hash,
    )  # fmt: skip
    await floor.register()
    assert await identity.authenticate_daemon(floor.deps, other.text) is not None, "a driver has no token"
    await floor.register(token_id=mine.token_id, instance=new_uuid())
    assert (await identity.authenticate_daemon(floor.deps, floor.machine.token)).token_id == mine.token_id
    with pytest.raises(Unauthorized):
        await identity.authenticate_daemon(floor.deps, other.text)
    await floor.sql.fetch("update machine_daemon_tokens set revoked_at = now()")
    with pytest.raises(Unauthorized):
        await floor.register(token_id=mine.token_id)
