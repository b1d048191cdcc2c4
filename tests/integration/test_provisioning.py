"""Places of pool machines at a provider that does what a test says: attempts, late answers, removal, replacement."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from omnara import probes
from omnara.db import provisioning as places
from omnara.domain.processes import LIVE
from omnara.engine.machines import provisioning
from omnara.engine.machines.sweeps import sweep
from omnara.ids import IdKind, encode
from omnara.machines.processes import Home
from omnara.machines.providers.protocol import (
    MachineSpec,
    ProviderUnavailable,
    ProvisionFailed,
    Resource,
    ResourceState,
)
from tests.contract.server import api_server, invariants_hold
from tests.support.docker_fleet import QUICK, TIMES, Fleet, Held
from tests.support.scripted_home import ScriptedHome
from tests.support.waiting import until


class Place:
    """A provider whose machines are entries of a dictionary; each call does first what `before` says."""

    name = "docker"
    provision_timeout_s = 60.0

    def __init__(self) -> None:
        self.machines: dict[str, MachineSpec] = {}
        self.homes: dict[str, ScriptedHome] = {}
        self.calls: list[str] = []
        self.before: Callable[[str, MachineSpec], Any] | None = None
        self.made = 0

    async def host(self) -> str:
        return "here"

    async def close(self) -> None:
        """Nothing is open."""

    def validate(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Everything goes."""

    async def _called(self, what: str, machine: MachineSpec) -> None:
        self.calls.append(what)
        if self.before is not None:
            found = self.before(what, machine)
            if asyncio.iscoroutine(found):
                await found

    async def prepare(self, machine: MachineSpec) -> None:
        await self._called("prepare", machine)

    async def provision(self, machine: MachineSpec) -> Resource:
        found = self.machines.get(machine.allocation_name)
        if found is None or found.generation < machine.generation:
            self.made += 1
            self.machines[machine.allocation_name] = machine
        resource = Resource(
            resource_id=f"{machine.allocation_name}-{machine.generation}", host="here", sandbox_url="x:"
        )
        await self._called("provision", machine)
        return resource

    async def inspect(self, machine: MachineSpec, resource_id: str | None) -> tuple[ResourceState, Resource | None]:
        await self._called("inspect", machine)
        there = self.machines.get(machine.allocation_name)
        return ("running" if there is not None else "terminated"), None

    async def delete(self, machine: MachineSpec, resource_id: str | None) -> None:
        await self._called("delete", machine)
        self.machines.pop(machine.allocation_name, None)

    async def sleep(self, machine: MachineSpec, resource_id: str) -> None:
        await self._called("sleep", machine)

    async def wake(self, machine: MachineSpec, resource_id: str) -> None:
        await self._called("wake", machine)

    async def open_home(self, machine: MachineSpec, resource_id: str) -> Home:
        await self._called("open_home", machine)
        return self.homes.setdefault(resource_id, ScriptedHome())


class Gate:
    """Calls of one kind to a place that are held from `reached` until `open`; with `once`, only the first."""

    def __init__(self, place: Place, kind: str, *, once: bool = False) -> None:
        self._reached, self._open = asyncio.Event(), asyncio.Event()
        self._kind, self._once = kind, once
        place.before = self.pass_through

    async def pass_through(self, called: str, _: MachineSpec) -> bool:
        """Wait if it is such a call; whether it was."""
        if called != self._kind or (self._once and self._reached.is_set()):
            return False
        self._reached.set()
        await self._open.wait()
        return True

    async def reached(self) -> None:
        """Wait for the first such call."""
        async with asyncio.timeout(20):
            await self._reached.wait()

    def open(self) -> None:
        """Let them go on."""
        self._open.set()


@pytest.fixture
def place() -> Place:
    return Place()


@pytest_asyncio.fixture(loop_scope="session")
async def replica(database: str, place: Place) -> AsyncIterator[Fleet]:
    async with api_server(database, **QUICK) as server:
        made = Fleet(server, place, TIMES)  # type: ignore[arg-type]
        await made.start()
        try:
            yield made
            await invariants_hold(server)
        finally:
            await made.stop()


async def driven(held: Held) -> None:
    """Wait until a machine is online."""

    async def online() -> bool:
        query = "select state from machine_connections where machine_id = $1"
        return bool((await held.fleet.fetch(query, held.machine.id))[0]["state"] == "online")

    await until(online, "it is driven", limit_s=20)


def failing(times: int, what: str, error: Callable[[], Exception]) -> Callable[[str, MachineSpec], None]:
    left = times

    def before(called: str, _: MachineSpec) -> None:
        nonlocal left
        if called == what and left:
            left -= 1
            raise error()

    return before


async def delete(held: Held) -> None:
    """Hand the machine to its removal, as the deletion of its pool does."""
    from omnara.engine.machines.closing_down import end_pool_machine

    deps = held.fleet.server.deps
    async with deps.db.transaction() as connection:
        await connection.fetch("select from machines where id = $1 for no key update", held.machine.id)
        told = await end_pool_machine(connection, held.machine.id, "machine_pool_deleted")
    told.tell(deps)


async def test_an_attempt_that_fails_is_followed_by_another(replica: Fleet, place: Place) -> None:
    place.before = failing(2, "provision", lambda: ProvisionFailed("no room", resource=Resource(resource_id="half")))
    held = await replica.machine("image")
    row = await held.until_state("active")
    assert (row["generation"], row["resource_host"], row["lifecycle_reason_code"]) == (1, "here", "")
    assert place.calls.count("provision") == 3
    assert place.made == 1


async def test_what_was_made_is_known_although_it_failed_after_that(replica: Fleet, place: Place) -> None:
    place.before = failing(9, "provision", lambda: ProvisionFailed("no room", resource=Resource(resource_id="half")))
    held = await replica.machine("image")
    process_id = await held.queue("echo never")
    row = await held.until_state("deleted")
    assert (row["resource_id"], row["provision_attempts"]) == ("half", 3)
    assert row["lifecycle_reason_message"] == "no room"
    assert (await held.process(process_id))["state"] == "failed"
    assert place.machines == {}


async def test_a_place_that_is_away_costs_no_attempt_and_deletes_nothing(replica: Fleet, place: Place) -> None:
    place.before = failing(5, "prepare", lambda: ProviderUnavailable("away"))
    held = await replica.machine("image")
    row = await held.until_state("active")
    assert row["provision_attempts"] == 0
    assert place.calls.count("prepare") == 6
    assert "delete" not in place.calls


async def test_an_answer_that_comes_after_the_deletion_leaves_nothing(replica: Fleet, place: Place) -> None:
    making = Gate(place, "provision")
    held = await replica.machine("image")
    await making.reached()
    await delete(held)
    assert (await held.row())["lifecycle_state"] == "deleting"
    making.open()
    await held.until_state("deleted", limit_s=20)
    await until(lambda: not place.machines, "nothing is left", limit_s=20)


async def test_an_answer_that_comes_after_somebody_else_took_over_removes_nothing(replica: Fleet, place: Place) -> None:
    """The place of a name is the same for both: what came too late is what the other one has made active."""
    making = Gate(place, "provision", once=True)
    held = await replica.machine("image")
    await making.reached()
    lapse = "update machines set claimed_until = now(), next_reconcile_after = now() where id = $1"
    await replica.fetch(lapse, held.machine.id)
    await held.until_state("active")
    with probes.expect("machine_made_too_late", machine_id=held.machine.id) as late:
        making.open()
        await late.wait()
    assert len(place.machines) == 1, "it is there still"
    assert (await held.row())["lifecycle_state"] == "active"


@pytest.mark.parametrize("error", [ProvisionFailed("late"), ProviderUnavailable("late")], ids=["failed", "away"])
async def test_what_an_attempt_leaves_that_fails_after_the_deletion_is_removed(
    replica: Fleet, place: Place, error: Exception
) -> None:
    """Its claim lapsed and somebody else removed the machine, so nobody else would ever look for it."""
    making = Gate(place, "provision")

    async def late(called: str, machine: MachineSpec) -> None:
        if await making.pass_through(called, machine):
            place.machines[machine.allocation_name] = machine
            raise error

    place.before = late
    held = await replica.machine("image")
    await making.reached()
    await delete(held)
    await replica.fetch("update machines set claimed_until = now() where id = $1", held.machine.id)
    await held.until_state("deleted", limit_s=20)
    assert place.calls.count("delete") == 1
    making.open()
    await until(lambda: place.calls.count("delete") == 2 and not place.machines, "nothing is left", limit_s=20)


async def test_what_is_made_while_somebody_else_removes_the_machine_is_removed(replica: Fleet, place: Place) -> None:
    """Who removes it may have looked before this was there."""
    making, removing = Gate(place, "provision"), Gate(place, "delete", once=True)

    async def slow(called: str, machine: MachineSpec) -> None:
        await making.pass_through(called, machine)
        await removing.pass_through(called, machine)

    place.before = slow
    held = await replica.machine("image")
    await making.reached()
    await delete(held)
    await replica.fetch("update machines set claimed_until = now() where id = $1", held.machine.id)
    await removing.reached()
    making.open()
    await until(lambda: place.calls.count("delete") == 2 and not place.machines, "it is removed", limit_s=20)
    assert (await held.row())["lifecycle_state"] == "deleting"
    removing.open()
    await held.until_state("deleted", limit_s=20)


async def test_what_was_fetched_for_a_machine_that_is_gone_makes_nothing(replica: Fleet, place: Place) -> None:
    fetching = Gate(place, "prepare")
    held = await replica.machine("image")
    await fetching.reached()
    await delete(held)
    fetching.open()
    await held.until_state("deleted", limit_s=20)
    assert (place.calls.count("provision"), place.calls.count("delete")) == (0, 1)


async def test_a_driver_that_lost_its_claim_replaces_nothing(replica: Fleet, place: Place) -> None:
    """What it could not speak to may well answer the one that drives the machine now."""
    held = await replica.machine("image")
    await held.until_state("active")
    await driven(held)
    deps = replica.server.deps
    async with deps.db.acquire() as connection:
        machine = await places.machine_at(connection, held.machine.id)
    assert machine is not None
    late = msgspec.structs.replace(machine, claim_token=machine.claim_token + 1)
    assert not await provisioning.replace(deps, late, "it did not answer")
    assert (await held.row())["generation"] == 1
    assert await provisioning.replace(deps, machine, "it did not answer")
    await held.until_state("active", generation=2)


async def test_removal_is_tried_until_it_succeeds(replica: Fleet, place: Place) -> None:
    held = await replica.machine("image")
    await held.until_state("active")
    place.before = failing(5, "delete", lambda: ProviderUnavailable("away"))
    await delete(held)
    row = await held.until_state("deleted")
    assert row["delete_attempts"] == 6
    assert row["deleted_at"] is not None
    assert place.machines == {}


@pytest.mark.parametrize("fails", [0, 1])
async def test_a_lost_place_is_replaced_once_under_the_same_machine(replica: Fleet, place: Place, fails: int) -> None:
    held = await replica.machine("image")
    first = await held.until_state("active")
    await driven(held)
    place.machines.clear()
    place.homes[first["resource_id"]].gone = True
    place.before = failing(fails, "prepare", lambda: ProvisionFailed("no room"))
    await held.queue("echo hello")
    second = await held.until_state("active", generation=2)
    assert second["lifecycle_version"] > first["lifecycle_version"]
    assert "was replaced; what ran in it is lost" in second["lifecycle_reason_message"]
    await driven(held)
    assert place.made == 2


async def test_a_worker_that_dies_in_the_middle_is_followed_by_another(
    replica: Fleet, place: Place, database: str
) -> None:
    making = Gate(place, "provision", once=True)
    held = await replica.machine("image")
    await making.reached()
    claimed = await held.row()
    assert claimed["claimed_until"] is not None
    # As the sweep does for the dead.
    await replica.fetch(
        "update machines set worker_id = null, claim_token = null, claimed_until = null where id = $1", held.machine.id
    )
    row = await held.until_state("active")
    assert row["generation"] == 1
    assert place.made == 1


async def asleep(replica: Fleet, place: Place) -> Held:
    """A machine that fell asleep because nothing happened on it."""
    held = await replica.machine("image", provider_options='{"sleep_after_ms": 30000}')
    await held.until_state("active")
    await driven(held)
    await idle_for_long(held)
    await until(lambda: "sleep" in place.calls, "it is put to sleep", limit_s=20)
    return held


async def idle_for_long(held: Held) -> None:
    """Nothing has happened on a machine for an hour."""
    await held.fleet.fetch(
        "update machines set last_activity_at = now() - interval '1 hour', activated_at = now() - interval '1 hour'"
        " where id = $1",
        held.machine.id,
    )


async def test_a_wake_that_fails_is_tried_again_however_often(replica: Fleet, place: Place) -> None:
    """The attempts come further and further apart; the command waits for them all."""
    held = await asleep(replica, place)
    place.before = failing(6, "wake", lambda: ProviderUnavailable("not now"))
    process_id = await held.queue("echo here")
    await until(lambda: place.calls.count("wake") >= 7, "it is tried seven times", limit_s=60)
    assert (await held.process(process_id))["state"] != "failed", "its time was not over"

    async def awake() -> bool:
        return (await held.row())["asleep_since"] is None

    await until(awake, "it is awake", limit_s=20)
    assert (await held.row())["wake_attempts"] == 0


async def test_a_fault_of_one_wake_ends_nothing_else(replica: Fleet, place: Place) -> None:
    """What nobody foresaw costs one attempt: the maker of machines goes on, and tries again when that has run out."""
    held = await asleep(replica, place)
    place.before = failing(1, "wake", lambda: RuntimeError("what nobody foresaw"))
    await held.queue("echo here")
    await until(lambda: "wake" in place.calls, "it is tried", limit_s=20)
    await replica.fetch("update machines set wake_until = now() - interval '1 hour' where id = $1", held.machine.id)
    await driven(held)
    assert place.calls.count("wake") == 2


async def test_a_wake_that_never_succeeds_lets_what_waits_give_up_in_its_time(database: str, place: Place) -> None:
    """And the next command is another reason to try."""
    async with api_server(database, **QUICK, machine_grace_s=1.0) as server:
        replica = Fleet(server, place, TIMES)  # type: ignore[arg-type]
        await replica.start()
        try:
            held = await asleep(replica, place)
            place.before = failing(10**6, "wake", lambda: ProviderUnavailable("not now"))
            process_id = await held.queue("echo never")

            async def given_up() -> bool:
                await sweep(server.deps)
                return bool((await held.process(process_id))["state"] == "failed")

            await until(given_up, "it is given up", limit_s=20)
            row = await held.process(process_id)
            assert row["reason_code"] == "machine_unreachable"
            assert (await held.row())["lifecycle_state"] == "active"
            place.before = None
            await held.queue("echo here")
            before = len(place.calls)
            await until(lambda: "wake" in place.calls[before:], "it is tried again", limit_s=20)
        finally:
            await replica.stop()


async def test_a_place_that_stays_away_lets_what_waits_give_up_and_is_tried_on(database: str, place: Place) -> None:
    """What another replica then makes slowly is waited for; what was given up never runs."""
    async with api_server(database, **QUICK, machine_grace_s=1.5) as server:
        replica = Fleet(server, place, TIMES)  # type: ignore[arg-type]
        await replica.start()
        try:
            place.before = failing(10**6, "prepare", lambda: ProviderUnavailable("not now"))
            held = await replica.machine("image")
            first = await held.queue("echo never")

            async def given_up() -> bool:
                await sweep(server.deps)
                return bool((await held.process(first))["state"] == "failed")

            await until(given_up, "it is given up", limit_s=20)

            async def waits() -> bool:
                row = await held.row()
                assert row["lifecycle_state"] == "provisioning"
                assert row["lifecycle_reason_code"] == "provider_unavailable"
                return bool(row["provision_attempts"] == 0)  # one that is under way counts until it is over

            await until(waits, "no attempt is spent")
            fetching = Gate(place, "prepare")
            await fetching.reached()
            second = await held.queue("echo here")
            await replica.fetch("update processes set created_at = now() - interval '1 minute'")
            assert (await sweep(server.deps)).unreachable == 0, "it is being made"
            await replica.fetch("update processes set created_at = now() where id = $1", second)
            fetching.open()
            assert (await held.until_state("active"))["lifecycle_reason_code"] == ""
            await held.until_process(second, "running")
            assert (await held.process(first))["granted_at"] is None
            assert (await held.process(first))["reason_code"] == "machine_unreachable"
        finally:
            await replica.stop()


async def test_two_replicas_and_many_machines(replica: Fleet, place: Place, database: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(api_server(database, **QUICK))
        second = Fleet(server, place, msgspec.structs.replace(TIMES, look_s=0.03))  # type: ignore[arg-type]
        await second.start()
        stack.push_async_callback(second.stop)
        held = await asyncio.gather(*(replica.machine("image") for _ in range(12)))
        for each in held:
            await each.until_state("active")
        assert place.calls.count("provision") == place.made == 12


async def test_nothing_is_open_on_a_machine_that_is_gone(replica: Fleet) -> None:
    """Its agent is archived while a command runs: with the machine goes whoever would have reported."""
    held = await replica.machine("image")
    await driven(held)
    process_id = await held.queue("sleep 600")
    await held.until_process(process_id, "running")
    answer = await replica.server.call("DELETE", f"/agents/{encode(IdKind.AGENT, held.agent_id)}")
    assert answer.status == 200
    await held.until_state("deleted")
    assert (await held.process(process_id))["state"] not in LIVE
    runtimes = await replica.fetch("select state from machine_runtimes where machine_id = $1", held.machine.id)
    assert [row["state"] for row in runtimes] == ["ended"]
