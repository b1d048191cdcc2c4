"""A machine that nobody makes is out of reach: its calls are told why, and what is being made is waited for."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.db import process_ends
from omnara.db import provisioning as places
from omnara.db import runtimes as runtime_rows
from omnara.engine.machines import provisioning
from omnara.engine.machines.provisioning import Times
from omnara.engine.machines.sweeps import sweep
from omnara.machines.providers.protocol import Resource
from tests.integration.test_machine_tools import scripted
from tests.support.engine import Engine, engine_on
from tests.support.hand_machine import HandMachine, call_states, processes, results, until_call
from tests.support.waiting import until

RUN = ("run_command", {"command": "make"})


@pytest.fixture(autouse=True)
def _old_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of the tests is younger than the grace."""
    queries = process_ends._SQL
    text = queries["unreachable"].replace("pg_postmaster_start_time()", "'-infinity'::timestamptz")
    monkeypatch.setattr(process_ends, "_SQL", {name: queries[name] for name in queries} | {"unreachable": text})


class Waiting:
    """An agent that names no machine, whose command has waited for its sandbox for a minute."""

    def __init__(self, engine: Engine, agent: UUID) -> None:
        self.engine = engine
        self.agent = agent

    @classmethod
    async def begin(cls, engine: Engine) -> Waiting:
        """Let the agent ask for its first command."""
        [agent] = await engine.add_agents(tools={"run_command": "always_allow"})
        await engine.start()
        await engine.say(agent)
        await until_call(engine, agent, "run_command", "waiting")
        found = cls(engine, agent)
        await found.age()
        return found

    @property
    def deps(self) -> Any:
        """A replica's."""
        return self.engine.replicas[0].deps

    async def age(self, seconds: float = 60.0) -> None:
        """Let what waits, and the machine, have waited for so long."""
        past = "now() - make_interval(secs => $1)"
        await self.engine.sql.execute(f"update processes set created_at = {past} where state = 'queued'", seconds)
        await self.engine.sql.execute(
            f"update machines set next_reconcile_after = {past}, updated_at = {past}, activated_at = {past}", seconds
        )

    async def told(self) -> dict[str, Any] | None:
        """Sweep; what the last call was told, if that was what the sweep did."""
        if not (await sweep(self.deps)).unreachable:
            return None
        value: dict[str, Any] = (await results(self.engine, self.agent))[-1][1]
        return value


async def claimed(waiting: Waiting, host: str = "this engine") -> Any:
    """A replica takes what is to be made."""
    worker = await waiting.engine.sql.fetchval("select id from workers where state = 'live' limit 1")
    async with waiting.deps.db.acquire() as connection:
        return await provisioning.claim_due(connection, worker, [("docker", host)], Times(), 8)


async def test_without_an_engine_the_call_is_told_what_is_missing_and_a_later_one_runs(database: str) -> None:
    async with engine_on(database, scripted([RUN], [RUN])) as engine:
        waiting = await Waiting.begin(engine)
        told = await waiting.told()
        assert told is not None
        assert (told["error_code"], told["retryable"], told["machine_state"]) == (
            "machine_unreachable", True, "provisioning",
        )  # fmt: skip
        assert "OMNARA_DOCKER_HOST" in told["error"]
        # The model tries again, and now there is an engine.
        await until_call(engine, waiting.agent, "run_command", "waiting")
        [machine] = await claimed(waiting)
        assert await provisioning.completed(waiting.deps, machine, Resource(resource_id="r")) == "active"
        hand = HandMachine(waiting.deps, machine.id)
        await hand.connect()
        offer = await hand.take()
        first, second = await processes(engine, waiting.agent)
        assert (first["state"], first["reason_code"], first["granted_at"]) == ("failed", "machine_unreachable", None)
        assert offer.process_id.startswith("prc_")
        await hand.finished(offer.process_id, "ok\n")
        await engine.until_idle(waiting.agent)
        assert second["id"] != first["id"]
        assert (await results(engine, waiting.agent))[-1][1]["output"] == "ok\n"
        assert (await waiting.engine.sql.fetchval("select lifecycle_state from machines")) == "active"


async def test_what_is_being_made_is_waited_for(database: str) -> None:
    """Also by a command whose machine waits its turn, and whoever else has no engine."""
    async with engine_on(database, scripted([RUN])) as engine:
        waiting = await Waiting.begin(engine)
        [machine] = await claimed(waiting)
        assert await waiting.told() is None
        # Another's: it waits, since somebody is at work at a place where it can be made.
        [second] = await engine.add_agents(tools={"run_command": "always_allow"})
        await engine.say(second)
        await until_call(engine, second, "run_command", "waiting")
        await waiting.age()
        assert await waiting.told() is None
        assert len(await claimed(waiting, "another engine")) == 1
        assert await waiting.told() is None
        # An attempt that failed is followed by another.
        await provisioning.failed(waiting.deps, machine, "no room", None, Times())
        assert await waiting.told() is None
        assert (await call_states(engine, waiting.agent))["run_command"] == ["waiting"]


async def test_a_provider_that_cannot_be_asked_has_the_grace_and_then_its_own_words(database: str) -> None:
    async with engine_on(database, scripted([RUN])) as engine:
        waiting = await Waiting.begin(engine)
        for ago, answered in ((0, False), (20, False), (40, True)):
            await engine.sql.execute("update machines set next_reconcile_after = now()")
            [machine] = await claimed(waiting)
            assert await waiting.told() is None, "somebody tries"
            await engine.sql.execute("update machines set updated_at = now() - make_interval(secs => $1)", ago)
            await provisioning.put_off(waiting.deps, machine, "the engine is not ready", Times())
            told = await waiting.told()
            assert (told is not None) is answered
        assert told is not None
        assert "the engine is not ready" in told["error"]
        rows = await engine.sql.fetch("select lifecycle_state, lifecycle_reason_code, provision_attempts from machines")
        assert [tuple(row) for row in rows] == [("provisioning", "provider_unavailable", 0)], "nothing is given up"


async def test_a_machine_that_was_made_and_that_no_server_reaches(database: str) -> None:
    async with engine_on(database, scripted([RUN])) as engine:
        waiting = await Waiting.begin(engine)
        [machine] = await claimed(waiting)
        assert await provisioning.completed(waiting.deps, machine, Resource(resource_id="r")) == "active"
        assert await waiting.told() is None, "it was only just made"
        await waiting.age()
        told = await waiting.told()
        assert told is not None
        assert (told["error_code"], told["machine_state"]) == ("machine_unreachable", "active")


# --- who comes while that is found ------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [False, True])
async def test_a_machine_that_comes_while_its_call_is_given_up_keeps_it(
    database: str, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """It is looked at again when everything is locked: a place that is just being made counts, and so does a daemon."""
    async with engine_on(database, scripted([RUN])) as engine:
        waiting = await Waiting.begin(engine)
        if made:
            [machine] = await claimed(waiting)
            assert await provisioning.completed(waiting.deps, machine, Resource(resource_id="r")) == "active"
            await waiting.age()
        find, found = process_ends.unreachable, []

        async def meanwhile(connection: Any, seconds: float, limit: int, among: Any = None) -> Any:
            seen = await find(connection, seconds, limit, among)
            found.append(len(seen))
            if among is None and made:
                # One task may hold one connection of the pool.
                await asyncio.create_task(HandMachine(waiting.deps, machine.id).connect())
            elif among is None:
                await asyncio.create_task(claimed(waiting))
            return seen

        monkeypatch.setattr(process_ends, "unreachable", meanwhile)
        assert await waiting.told() is None
        assert found == [1, 0], "it was found, and then not again"
        [process] = await processes(engine, waiting.agent)
        assert process["state"] == "queued"
        assert (await call_states(engine, waiting.agent))["run_command"] == ["waiting"]


async def silent(waiting: Waiting) -> Any:
    """A machine that was made long ago, and to which no daemon came; as whoever looks after it finds it."""
    [machine] = await claimed(waiting)
    assert await provisioning.completed(waiting.deps, machine, Resource(resource_id="r")) == "active"
    await waiting.age(Times().startup_s + 1)
    async with waiting.deps.db.acquire() as connection:
        [found] = await places.silent_daemons(connection, [("docker", "this engine")], UUID(int=0), Times().daemon_s)
    assert found.never
    assert found.made_s > Times().startup_s
    return found.machine


async def test_a_machine_whose_daemon_came_meanwhile_is_not_given_up(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody had come when it was looked at; that is asked again under its lock, after whoever is about to come."""
    async with engine_on(database, scripted([RUN])) as engine:
        waiting = await Waiting.begin(engine)
        machine, deps = await silent(waiting), waiting.deps
        hand = HandMachine(deps, machine.id)
        comes, go = asyncio.Event(), asyncio.Event()
        registered = runtime_rows.registered

        async def slowly(*arguments: Any) -> None:
            await registered(*arguments)
            comes.set()
            await go.wait()

        async def held_up() -> bool:
            query = "select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            return bool(await engine.sql.fetch(query))

        monkeypatch.setattr(runtime_rows, "registered", slowly)
        coming = asyncio.create_task(hand.connect())
        async with asyncio.timeout(20):
            await comes.wait()
        giving_up = asyncio.create_task(provisioning.give_up(deps, machine, "no daemon", Times()))
        await until(held_up, "it waits for the registration")
        go.set()
        await coming
        assert not await giving_up
        await hand.disconnect()
        assert not await provisioning.give_up(deps, machine, "no daemon", Times()), "its line is down, but one came"
        assert await engine.sql.fetchval("select lifecycle_state from machines") == "active"
        await hand.connect()
        await hand.finished((await hand.take()).process_id, "ok\n")
        await engine.until_idle(waiting.agent)
        assert [outcome for outcome, _ in await results(engine, waiting.agent)] == ["succeeded"]


async def test_a_machine_to_whose_new_place_no_daemon_came_is_given_up(database: str) -> None:
    """One that came to an earlier place does not count; what went another way since it was looked at is left alone."""
    async with engine_on(database, scripted([RUN])) as engine:
        waiting = await Waiting.begin(engine)
        machine, deps = await silent(waiting), waiting.deps
        await HandMachine(deps, machine.id).connect()
        await engine.sql.execute(
            "update machine_runtimes set created_at = now() - interval '1 hour', session_id = null,"
            " disconnected_at = now() - interval '50 minutes'"
        )
        other = msgspec.structs.replace(machine, lifecycle_version=machine.lifecycle_version + 1)
        assert not await provisioning.give_up(deps, other, "no daemon", Times())
        patient = msgspec.structs.replace(Times(), startup_s=Times().startup_s + 60)
        assert not await provisioning.give_up(deps, machine, "no daemon", patient)
        assert await provisioning.give_up(deps, machine, "no daemon", Times())
        row = await engine.sql.fetchrow("select lifecycle_state, lifecycle_reason_message from machines")
        assert tuple(row) == ("deleting", "no daemon")
        await engine.until_idle(waiting.agent)
        assert [outcome for outcome, _ in await results(engine, waiting.agent)] == ["failed"]
        assert not await provisioning.give_up(deps, machine, "no daemon", Times()), "once"
