"""A pool's machines on a real engine through the whole server: made, driven, lost, replaced, asleep, idle, removed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.ids import IdKind, encode, new_uuid
from omnara.machines.providers.docker import DockerProvider
from omnara.machines.providers.protocol import ProvisionFailed
from tests.contract.server import invariants_hold
from tests.support.docker_engine import BUSYBOX_IMAGE, machine_spec
from tests.support.docker_fleet import Fleet, Held, fleet, remove_everything
from tests.support.waiting import until


@pytest_asyncio.fixture(loop_scope="session")
async def replica(database: str, provider: DockerProvider) -> AsyncIterator[Fleet]:
    installation = ""
    try:
        async with fleet(database, provider) as made:
            installation = str(await made.reached.installation())
            yield made
            await invariants_hold(made.server)
    finally:
        await remove_everything(provider, installation)


async def kill(provider: DockerProvider, container: str) -> None:
    async with provider.engine.call() as docker:
        await docker.containers.container(container).kill()


async def test_a_command_waits_for_its_machine_and_runs_in_it(replica: Fleet) -> None:
    held = await replica.machine(BUSYBOX_IMAGE)
    process_id = await held.queue("echo hello; exit 3", wait_ms=5000)
    row = await held.until_process(process_id, "failed")
    assert (row["exit_code"], row["reason_code"]) == (3, "nonzero_exit")
    machine = await held.row()
    assert (machine["lifecycle_state"], machine["generation"], machine["provision_attempts"]) == ("active", 1, 0)
    assert machine["resource_host"] == await replica.reached.provider("docker").host()  # type: ignore[attr-defined]
    view = (await replica.fetch("select * from sandboxes where agent_id = $1", held.agent_id))[0]
    assert (view["container_id"], view["state"]) == (machine["resource_id"], "running")


async def test_a_killed_container_is_replaced_and_waiting_commands_go_to_the_new_one(
    replica: Fleet, provider: DockerProvider
) -> None:
    held = await replica.machine(BUSYBOX_IMAGE)
    await held.run("echo kept >file")
    running = await held.queue("echo ran >>log; sleep 600")
    await held.until_process(running, "running")
    first = await held.row()
    began = time.monotonic()
    await kill(provider, first["resource_id"])
    waiting = await held.queue('cat file; [ "$(cat log)" = ran ]')
    row = await held.until_process(running, "unknown")
    assert row["reason_code"] == "local_process_missing_after_daemon_reconnect"
    await held.until_process(waiting, "exited")
    assert time.monotonic() - began < 20
    second = await held.row()
    assert (second["generation"], second["lifecycle_state"]) == (2, "active")
    assert second["resource_id"] != first["resource_id"]
    assert "replaced" in second["lifecycle_reason_message"]
    assert (await provider.inspect(machine_spec(BUSYBOX_IMAGE), first["resource_id"]))[0] == "terminated"


async def test_an_idle_machine_whose_container_ended_is_replaced_unasked(
    replica: Fleet, provider: DockerProvider
) -> None:
    held = await replica.machine(BUSYBOX_IMAGE)
    await held.run("true")
    async with provider.engine.call() as docker:
        await docker.containers.container((await held.row())["resource_id"]).delete(force=True)
    await held.until_state("active", generation=2)
    await held.run("true")


async def test_a_machine_that_cannot_be_made_is_given_up_with_its_commands(replica: Fleet) -> None:
    held = await replica.machine("localhost:9/no/such:image")
    process_id = await held.queue("echo never")
    row = await held.until_process(process_id, "failed", 40)
    assert row["granted_at"] is None
    machine = await held.until_state("deleted")
    assert machine["lifecycle_reason_code"] == "startup_or_daemon_bootstrap_failed"
    assert "cannot be pulled" in machine["lifecycle_reason_message"]
    assert machine["provision_attempts"] == 3


async def test_a_machine_that_is_deleted_leaves_nothing(replica: Fleet, provider: DockerProvider) -> None:
    held = await replica.machine(BUSYBOX_IMAGE)
    process_id = await held.queue("sleep 600")
    await held.until_process(process_id, "running")
    path = f"/api/v1/orgs/{replica.server.org}/machine-pools/{await pool_of(held)}"
    answer = await replica.server.call("DELETE", path)
    assert answer.status in (200, 204), answer
    assert (await held.until_process(process_id, "unknown"))["reason_code"]
    await held.until_state("deleted")
    assert await provider.owned(str(await replica.reached.installation())) == []


async def test_an_idle_machine_goes_and_one_with_a_command_stays(replica: Fleet) -> None:
    idle = await replica.machine(BUSYBOX_IMAGE, delete_after_idle_minutes=5)
    busy = await replica.machine(BUSYBOX_IMAGE, delete_after_idle_minutes=5)
    process_id = await busy.queue("sleep 600")
    await busy.until_process(process_id, "running")
    machine = await idle.until_state("deleted")
    assert machine["lifecycle_reason_code"] == "machine_idle"
    assert (await busy.row())["lifecycle_state"] == "active"
    assert (await busy.process(process_id))["state"] == "running"


async def asleep(replica: Fleet, provider: DockerProvider) -> Held:
    """A machine with a file that fell asleep because nothing happened."""
    held = await replica.machine(BUSYBOX_IMAGE, provider_options='{"sleep_after_ms": 30000}')
    await held.run("echo one >file")
    await replica.fetch(
        "update machines set last_activity_at = now() - interval '1 minute', activated_at = now() - interval '1 minute'"
        " where id = $1",
        held.machine.id,
    )

    async def paused() -> bool:
        async with provider.engine.call() as docker:
            shown = await docker.containers.container((await held.row())["resource_id"]).show()
        return bool(shown["State"]["Status"] == "paused")

    await until(paused, "the container is paused", limit_s=20)
    assert (await held.row())["asleep_since"] is not None
    return held


async def test_a_machine_whose_container_ended_in_its_sleep_gets_another(
    replica: Fleet, provider: DockerProvider
) -> None:
    held = await asleep(replica, provider)
    async with provider.engine.call() as docker:
        await docker.containers.container((await held.row())["resource_id"]).delete(force=True)
    await held.run('[ "$(cat file)" = one ]')
    machine = await held.row()
    assert (machine["asleep_since"], machine["wake_attempts"], machine["generation"]) == (None, 0, 2)
    assert "while it slept" in machine["lifecycle_reason_message"]


async def test_a_machine_sleeps_and_a_command_wakes_it(replica: Fleet, provider: DockerProvider) -> None:
    held = await asleep(replica, provider)
    began = time.monotonic()
    await held.run('[ "$(cat file)" = one ]')
    assert time.monotonic() - began < 15
    machine = await held.row()
    assert (machine["asleep_since"], machine["generation"]) == (None, 1)


async def test_a_machine_that_falls_asleep_after_it_was_woken_is_woken_again(
    replica: Fleet, provider: DockerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine pauses late: by then a command has come and the machine is driven again."""
    real, woken = provider.sleep, asyncio.Event()

    async def late(*args: Any) -> None:
        async with asyncio.timeout(20):
            await woken.wait()
        await real(*args)

    monkeypatch.setattr(provider, "sleep", late)
    held = await replica.machine(BUSYBOX_IMAGE, provider_options='{"sleep_after_ms": 30000}')
    await held.run("echo one >file")
    await replica.fetch(
        "update machines set last_activity_at = now() - interval '1 minute', activated_at = now() - interval '1 minute'"
        " where id = $1",
        held.machine.id,
    )

    async def marked() -> bool:
        return (await held.row())["asleep_since"] is not None

    await until(marked, "it is to sleep", limit_s=20)
    running = await held.queue("sleep 1; echo two >>file")
    await held.until_process(running, "running")
    woken.set()
    await held.until_process(running, "exited")
    await held.run('[ "$(cat file | tr -d "\\n")" = onetwo ]')
    assert (await held.row())["generation"] == 1


async def test_orphans_are_removed_and_what_has_a_machine_is_not(replica: Fleet, provider: DockerProvider) -> None:
    held = await replica.machine(BUSYBOX_IMAGE)
    await held.run("true")
    installation = str(await replica.reached.installation())
    machine_id = encode(IdKind.MACHINE, new_uuid())
    orphan = machine_spec(BUSYBOX_IMAGE)
    orphan = type(orphan)(**{name: getattr(orphan, name) for name in orphan.__struct_fields__} | {
        "installation_id": installation, "machine_id": machine_id})  # fmt: skip
    with contextlib.suppress(ProvisionFailed):  # it may be removed before it was waited for
        await provider.provision(orphan)

    async def gone() -> bool:
        return machine_id not in {thing.machine_id for thing in await provider.owned(installation)}

    await until(gone, "the orphan is removed", limit_s=15)
    owned = await provider.owned(installation)
    assert sorted(thing.kind for thing in owned) == ["container", "volume"]
    await held.run("true")


async def test_two_replicas_make_one_machine(database: str, provider: DockerProvider, replica: Fleet) -> None:
    async with fleet(database, provider):
        held = await asyncio.gather(*(replica.machine(BUSYBOX_IMAGE) for _ in range(4)))
        for each in held:
            await each.run('echo once >>log; [ "$(cat log)" = once ]')
        owned = await provider.owned(str(await replica.reached.installation()))
        assert len([thing for thing in owned if thing.kind == "container"]) == 4


async def pool_of(held: Held) -> str:
    """A machine's pool, by its public id."""
    return encode(IdKind.MACHINE_POOL, (await held.row())["pool_id"])
