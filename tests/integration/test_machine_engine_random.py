"""Anything in any order: a machine that loses answers, crashes and comes back, while agents cancel and time runs out.

Whatever happens, a command runs at most once, what the server says never ran has not run, and each call has one result.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.db import process_ends
from omnara.engine.cancel import cancel_agent
from omnara.engine.lifecycle import archive
from omnara.engine.machines.sweeps import sweep
from omnara.ids import IdKind, decode, new_uuid
from omnara.machines.registration import ProcessDirective
from tests.support.engine_case import Engine
from tests.support.machine_floor import Floor, Job, applied, at, claim, finished, local, started

NEVER_RAN = {
    "agent_canceled_before_grant",
    "execution_not_started",
    "machine_unreachable",
    "process_not_accepted",
}


class Local(msgspec.Struct):
    """What the machine has of a process. `live`: its supervisor; `report`: how it ended, until it is acknowledged."""

    job: Job
    phase: str = "prepared"
    live: bool = True
    committed: bool = False
    report: Any = None
    told_started: bool = False
    effects: dict[UUID, int] = msgspec.field(default_factory=dict)
    done: set[UUID] = msgspec.field(default_factory=set)


class Machine:
    """A daemon that keeps to the protocol, with everything that may be lost lost at random."""

    def __init__(self, floor: Floor, dice: random.Random) -> None:
        self.floor = floor
        self.dice = dice
        self.jobs: list[Job] = []
        self.has: dict[UUID, Local] = {}
        self.runs: dict[UUID, int] = {}
        self.effects: dict[UUID, int] = {}
        self.online = True

    def luck(self, chance: float) -> bool:
        return self.dice.random() < chance

    def pick(self, *phases: str) -> Local | None:
        found = [each for each in self.has.values() if each.phase in phases]
        return self.dice.choice(found) if found else None

    def run(self, each: Local) -> None:
        """The execution bit is taken, and the command runs: nothing may do that twice."""
        assert not each.committed
        each.phase, each.committed = "accepted", True
        self.runs[each.job.id] = self.runs.get(each.job.id, 0) + 1

    # --- what the machine does --------------------------------------------------------------------------

    async def look(self) -> None:
        if not self.online:
            return
        pending = await self.floor.pending()
        for offer in pending.processes:
            job = next(job for job in self.jobs if job.id == decode(IdKind.PROCESS, offer.process_id))
            self.has.setdefault(job.id, Local(job))
        for process_id in pending.terminations:
            each = self.has.get(process_id)
            if each is not None and each.phase == "accepted" and each.live:
                self.end(each, state="killed", exit_code=None, state_reason_code="terminate_requested")
        for action in pending.actions:
            await self.act(
                decode(IdKind.PROCESS, action.process_id), decode(IdKind.PROCESS_ACTION, action.process_action_id)
            )

    async def act(self, process_id: UUID, action_id: UUID) -> None:
        each = self.has.get(process_id)
        if each is None or each.phase != "accepted" or not each.live:
            return
        granted = await self.floor.accept_action(each.job, action_id)
        if granted is not None and self.luck(0.8) and each.phase == "accepted":
            self.perform(each, action_id)

    def perform(self, each: Local, action_id: UUID) -> None:
        each.effects[action_id] = len(each.effects) + 1
        self.effects[action_id] = self.effects.get(action_id, 0) + 1

    async def accept(self) -> None:
        each = self.pick("prepared")
        if each is None or not self.online:
            return
        granted = await self.floor.accept(each.job)
        if granted and self.luck(0.7):
            self.run(each)
        elif not granted and self.luck(0.5):
            self.has.pop(each.job.id, None)

    async def report(self) -> None:
        each = self.pick("accepted", "terminal")
        if each is None:
            return
        for action_id in [found for found in each.effects if found not in each.done]:
            ack = await self.floor.report(applied(each.job, action_id))
            if ack.ack_status in ("committed", "cleanup_only"):
                each.done.add(action_id)
        if each.phase == "accepted" and not each.told_started:
            ack = await self.floor.report(started(each.job.id))
            each.told_started = ack.ack_status in ("committed", "cleanup_only")
            assert ack.ack_status != "permanent_reject", ack
        elif each.phase == "terminal":
            ack = await self.floor.report(each.report)
            assert ack.ack_status != "permanent_reject", ack
            if ack.ack_status != "transient_error" and self.luck(0.7):
                self.has.pop(each.job.id, None)

    async def finish(self) -> None:
        each = self.pick("accepted")
        if each is not None and each.live:
            self.end(each)

    def end(self, each: Local, **how: Any) -> None:
        each.phase, each.live = "terminal", False
        each.report = finished(each.job.id, "out\n", ended_at=at(5), **how)

    async def crash(self) -> None:
        each = self.pick("prepared", "accepted")
        if each is not None:
            each.live = False

    async def cut(self) -> None:
        await self.floor.lose(self.dice.choice([0, 0, 0, 0, 31]))
        self.online = False

    async def register(self) -> None:
        claims = [
            claim(
                each.job,
                each.phase,
                live=each.live,
                committed=each.committed,
                actions=[local(action, seq) for action, seq in each.effects.items() if action not in each.done],
            )
            for each in self.has.values()
        ]
        before = dict(self.has)
        registered = await self.floor.register(claims, instance=new_uuid() if self.luck(0.3) else None)
        self.online = True
        for directive in registered.directives:
            self.follow(before[decode(IdKind.PROCESS, directive.process_id)], directive)

    def follow(self, each: Local, directive: ProcessDirective) -> None:
        if directive.disposition == "start":
            assert each.live
            if not each.committed:
                self.run(each)
        elif directive.disposition == "close_preparation":
            assert not each.committed
            self.has.pop(each.job.id, None)
        elif directive.disposition == "release":
            self.has.pop(each.job.id, None)
        for action in directive.actions:
            if action.disposition == "apply":
                self.perform(each, decode(IdKind.PROCESS_ACTION, action.process_action_id))

    # --- what others do ---------------------------------------------------------------------------------

    async def cancel(self) -> None:
        await cancel_agent(self.floor.deps, self.floor.engine.p, self.dice.choice(self.jobs).path)

    async def archive(self) -> None:
        if self.luck(0.1):
            await archive(self.floor.deps, self.floor.engine.p, self.dice.choice(self.jobs).path)

    async def sweep(self) -> None:
        await sweep(self.floor.deps)

    async def wait(self) -> None:
        await self.floor.age(self.dice.choice([5, 5, 5, 40, 301]))

    async def queue(self) -> None:
        path = self.dice.choice(self.jobs).path
        if (await self.floor.engine.hot(path))["gate"] == "open":
            self.jobs.append(await self.floor.queue(path, None))

    async def write(self) -> None:
        each = self.pick("accepted")
        if each is not None and each.told_started and not each.effects:
            rows = await self.floor.sql.fetch("select state from processes where id = $1", each.job.id)
            if rows[0]["state"] == "running":
                await self.floor.act(each.job, "write", {"data": "x"}, waits=False)


@pytest.fixture(autouse=True)
def _old_server(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = dict(process_ends._SQL)
    queries["unreachable"] = queries["unreachable"].replace("pg_postmaster_start_time()", "'-infinity'::timestamptz")
    monkeypatch.setattr(process_ends, "_SQL", queries)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 60))])
async def test_whatever_happens_a_command_runs_once_and_a_call_has_one_result(engine: Engine, seed: int) -> None:
    dice = random.Random(seed)
    floor = await Floor.make(engine)
    machine = Machine(floor, dice)
    for _ in range(3):
        machine.jobs += await floor.jobs(3)
    own: list[Callable[[], Awaitable[None]]] = [
        *[machine.look] * 4, *[machine.accept] * 5, *[machine.report] * 4, *[machine.finish] * 2, *[machine.write] * 2,
        machine.crash, machine.cut, *[machine.register] * 3,
    ]  # fmt: skip
    others: list[Callable[[], Awaitable[None]]] = [
        machine.cancel, machine.archive, machine.sweep, machine.sweep, machine.wait, machine.report,
    ]  # fmt: skip
    for round_ in range(80):
        # Not so much goes wrong that nothing runs at all.
        crowd = dice.sample(others, 2) if round_ > 15 and machine.luck(0.3) else [machine.sweep]
        await asyncio.gather(dice.choice(own)(), *(other() for other in crowd))
        if machine.luck(0.1):
            await machine.queue()
    await settle(machine)
    for job in machine.jobs:
        state, reason = await floor.state(job)
        assert state in ("exited", "failed", "killed", "unknown"), (state, reason)
        assert machine.runs.get(job.id, 0) <= 1
        assert not (state == "failed" and reason in NEVER_RAN and machine.runs.get(job.id)), "it did run"
        assert job.call_id is None or await floor.told(job) is not None
        await engine.assert_coherent(job.path)
    assert set(machine.effects.values()) <= {1}, "an action was performed twice"


async def settle(machine: Machine) -> None:
    """Let the machine come back for good and say all that it knows, and the rest run out of time."""
    machine.dice = random.Random(0)
    for _ in range(6):
        await machine.register()
        for each in list(machine.has.values()):
            if each.phase == "accepted" and each.live:
                machine.end(each)
        for _ in range(2 * len(machine.has)):
            await machine.report()
    machine.has.clear()
    await machine.register()
    await machine.floor.age(400)
    await sweep(machine.floor.deps)
