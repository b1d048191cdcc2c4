"""Machines on a real engine: made once, owned, confined, removed; and what a command cannot reach from inside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time

import msgspec
import pytest

from omnara.ids import IdKind
from omnara.machines.docker.layout import config_of
from omnara.machines.processes import HomeLost
from omnara.machines.providers.docker import DockerProvider
from omnara.machines.providers.protocol import InvalidOptions, ProviderUnavailable, ProvisionFailed
from tests.support.docker_engine import BUSYBOX_IMAGE, SANDBOX_IMAGE, Box, box, machine_spec, new_id

PAC = [new_id(IdKind.PROCESS_ACTION) for _ in range(3)]


async def test_attempts_at_once_make_one_container(provider: DockerProvider) -> None:
    spec = machine_spec(BUSYBOX_IMAGE)
    try:
        made = await asyncio.gather(*(provider.provision(spec) for _ in range(4)), return_exceptions=True)
        ids = {each.resource_id for each in made if not isinstance(each, BaseException)}
        assert len(ids) == 1, made
        again = await provider.provision(spec)
        assert again.resource_id in ids
        assert again.host == await provider.host()
        owned = await provider.owned(spec.installation_id)
        assert sorted(thing.kind for thing in owned) == ["container", "volume"]
        assert {thing.machine_id for thing in owned} == {spec.machine_id}
    finally:
        await provider.delete(spec, None)
    assert await provider.owned(spec.installation_id) == []
    assert await provider.inspect(spec, None) == ("terminated", None)
    await provider.delete(spec, None)


async def test_what_belongs_to_others_is_left_alone(small: Box) -> None:
    provider = small.provider
    stranger = msgspec.structs.replace(small.spec, installation_id="another")
    assert await provider.inspect(stranger, small.resource.resource_id) == ("unknown", None)
    await provider.delete(stranger, small.resource.resource_id)
    with pytest.raises(ProvisionFailed, match="somebody else"):
        await provider.provision(stranger)
    cousin = msgspec.structs.replace(small.spec, machine_id="mch_other")
    await provider.delete(cousin, small.resource.resource_id)
    assert (await provider.inspect(small.spec, None))[0] == "running"
    assert (await small.run("echo here"))[1] == "here\n"


async def test_the_next_generation_takes_the_name_and_keeps_the_files(small: Box) -> None:
    provider = small.provider
    _, _ = await small.run("echo kept >file")
    lost = await small.start("sleep 60")
    second = msgspec.structs.replace(small.spec, generation=2)
    resource = await provider.provision(second)
    assert resource.resource_id != small.resource.resource_id
    with pytest.raises(HomeLost):
        await small.home.processes()
    with pytest.raises(ProvisionFailed, match="newer"):
        await provider.provision(small.spec)
    after = Box(provider, second, resource, await provider.open_home(second, resource.resource_id))
    try:
        found = {each.process_id: each for each in await after.home.processes()}
        assert not found[lost.process_id].supervisor_live
        assert found[lost.process_id].execution_committed
        assert (await after.run("cat file"))[1] == "kept\n"
    finally:
        await after.home.close()


async def test_sleep_and_wake(small: Box) -> None:
    provider, spec, resource_id = small.provider, small.spec, small.resource.resource_id
    record = await small.start("while :; do echo tick; sleep 0.05; done", 1.0)
    for _ in range(2):
        await provider.sleep(spec, resource_id)
    assert (await provider.inspect(spec, resource_id))[0] == "inactive"
    for _ in range(2):
        await provider.wake(spec, resource_id)
    assert (await provider.inspect(spec, resource_id))[0] == "running"
    end = (await small.home.watch(record.process_id, 0, 1.0)).output_end
    assert (await small.home.watch(record.process_id, end, 5.0)).output_end > end
    await provider.sleep(spec, resource_id)
    await provider.delete(spec, resource_id)
    assert await provider.owned(spec.installation_id) == []
    with pytest.raises(ProviderUnavailable):
        await provider.wake(spec, "no-such-container")


async def test_a_killed_container_is_told_in_moments(small: Box) -> None:
    record = await small.start("sleep 60")
    waiting = asyncio.create_task(small.home.watch(record.process_id, 1 << 62, 60))
    await asyncio.sleep(0)
    began = time.monotonic()
    async with small.provider.engine.call() as docker:
        await docker.containers.container(small.resource.resource_id).kill()
    with pytest.raises(HomeLost):
        await waiting
    assert time.monotonic() - began < 30
    assert (await small.provider.inspect(small.spec, small.resource.resource_id))[0] == "terminated"


async def test_a_fork_bomb_is_contained_and_can_be_ended(small: Box) -> None:
    bomb = await small.start("b() { b | b & sleep 60; }; b", 0.5)
    began = time.monotonic()
    try:
        await small.home.signal(bomb.process_id, PAC[1], 1, "terminate")
        await small.end(bomb.process_id)
        _, output = await small.run("echo well")
        assert output == "well\n"
    except HomeLost:
        # Too full for one process more: the container was killed, and is replaced as after a crash.
        assert (await small.provider.inspect(small.spec, None))[0] == "terminated"
    assert time.monotonic() - began < 60
    async with small.provider.engine.call() as docker:
        shown = await docker.containers.container(small.resource.resource_id).show()
    assert shown["HostConfig"]["PidsLimit"] == 512


@pytest.mark.parametrize("image", [BUSYBOX_IMAGE, SANDBOX_IMAGE])
async def test_the_time_limit_of_what_takes_every_process_counts(provider: DockerProvider, image: str) -> None:
    """Nobody else can fork, not even to wait a moment before what pays no heed to SIGTERM is killed."""
    async with box(provider, image, pids_limit=40) as made:
        command = """trap '' TERM; awk 'BEGIN { for (;;) system("sleep 600 &") }'"""
        taker = await made.start(command, 0.0, timeout_seconds=2)
        ended = None
        async with asyncio.timeout(30):
            while ended is None:
                with contextlib.suppress(HomeLost):  # nor can a line be opened meanwhile
                    ended = (await made.end(taker.process_id)).exit
        assert ended.reason_code == "timeout"
        assert (await made.run("echo well"))[1] == "well\n"


async def test_orphans_of_orphans_are_reaped(small: Box) -> None:
    await small.run("i=0; while [ $i -lt 500 ]; do (setsid sleep 0.05 &); i=$((i + 1)); done")
    _, output = await small.run("sleep 0.3; ps -o stat,args | grep -c '^Z' || true")
    assert output.strip() == "0"


async def test_secrets_are_in_no_place_that_outlives_the_start(small: Box) -> None:
    canary = "canary-6f1c2d"
    record = await small.start("echo got ${#TOKEN}; sleep 60", 5.0, env={"TOKEN": canary})
    assert (await small.until_output(record.process_id, "got")) == f"got {len(canary)}\n"
    async with small.provider.engine.call() as docker:
        container = docker.containers.container(small.resource.resource_id)
        shown = await container.show()
        texts = [json.dumps(shown), json.dumps(await container.top(ps_args="axww -o pid,args"))]
        texts += [json.dumps(await docker.containers.exec(found).inspect()) for found in shown["ExecIDs"] or ()]
    assert shown["ExecIDs"], "our own line is an exec"
    assert all(canary not in text for text in texts)
    _, output = await small.run("find /home /run/omnara /tmp -type f | xargs grep -l canary-6f1c; echo searched")
    assert output == "searched\n"


ESCAPES = [
    ("ls /var/run/docker.sock /run/docker.sock", "No such file"),
    (
        "cat /proc/1/root/etc/shadow; cat /proc/sysrq-trigger; echo 1 >/proc/sys/kernel/panic",
        "ermission denied|Read-only",
    ),
    ("mount -t tmpfs none /tmp", "ermission denied|perm|not found"),
    ("echo x >/etc/passwd", "Read-only file system"),
    ("mkdir /home/other", "ermission denied"),
    ("cat /proc/kcore | head -c 1", "ermission denied|No such file|can't open|perm"),
    ("mknod /tmp/disk b 254 0", "ermitted|ermission"),
    ("chroot / true; unshare -U true", "ermitted|ermission"),
    ("dd if=/dev/vda of=/dev/null count=1", "No such file"),
    ("ls /var/lib/docker/volumes", "No such file"),
]


@pytest.mark.parametrize(("command", "refusal"), ESCAPES)
async def test_what_leads_out_is_refused(machine: Box, command: str, refusal: str) -> None:
    _, output = await machine.run(command)
    assert re.search(refusal, output), output


async def test_without_privileges_and_without_a_network(machine: Box) -> None:
    _, status = await machine.run("cat /proc/self/status; cat /proc/net/dev; ls /sys/class/net")
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    assert {lines[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert lines["NoNewPrivs"].strip() == "1"
    assert status.split()[-1] == "lo"


async def test_with_a_network_link_local_addresses_lead_nowhere(provider: DockerProvider) -> None:
    async with box(provider, BUSYBOX_IMAGE, network="bridge") as made:
        assert made.resource.details["ip_address"]
        _, routes = await made.run("ip route; ip route del blackhole 169.254.0.0/16 2>&1")
        assert "blackhole 169.254.0.0/16" in routes
        assert "blackhole 100.100.100.200" in routes
        assert "ot permitted" in routes
        _, output = await made.run("nc -w 2 169.254.169.254 80 </dev/null 2>&1; echo status $?")
        assert "status 1" in output
        assert [thing.kind for thing in await provider.owned(made.spec.installation_id)] == ["container", "volume"]


async def test_limits_are_the_machines(small: Box) -> None:
    async with small.provider.engine.call() as docker:
        host = (await docker.containers.container(small.resource.resource_id).show())["HostConfig"]
    assert (host["NanoCpus"], host["Memory"], host["MemorySwap"]) == (10**9, 256 * 2**20, 256 * 2**20)
    assert (host["Init"], host["ReadonlyRootfs"], host["RestartPolicy"]["Name"]) == (True, True, "no")
    assert (host["LogConfig"]["Type"], host["NetworkMode"], host["Privileged"]) == ("none", "none", False)


async def test_an_image_that_is_not_there_and_cannot_be_pulled(provider: DockerProvider) -> None:
    spec = machine_spec("localhost:9/no/such:image")
    with pytest.raises(ProvisionFailed, match="cannot be pulled"):
        await provider.prepare(spec)
    with pytest.raises(ProvisionFailed, match=r"missing on the engine"):
        await provider.provision(spec)
    await provider.delete(spec, None)


async def test_an_engine_that_is_away() -> None:
    provider = DockerProvider("unix:///no/such/docker.sock")
    spec = machine_spec(BUSYBOX_IMAGE)
    try:
        for call in (
            provider.host(),
            provider.provision(spec),
            provider.inspect(spec, None),
            provider.delete(spec, None),
        ):
            with pytest.raises(ProviderUnavailable):
                await call
        home = await provider.open_home(spec, "x")
        with pytest.raises(HomeLost):
            await home.processes()
    finally:
        await provider.close()


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"network": "host"}, {}),
        ({"network": "container:x"}, {}),
        ({"user": "0:0"}, {}),
        ({"user": "root"}, {}),
        ({"image": "--privileged"}, {}),
        ({"image": "a//b"}, {}),
        ({"image": "a/../../info"}, {}),
        ({"image": "a/"}, {}),
        ({"image": "a" * 256}, {}),
        ({"image": "a"}, {"image": "b"}),
        ({"pids_limit": 0}, {}),
        ({"privileged": True}, {}),
        ({}, {"volumes": ["/:/host"]}),
        ({}, {"sleep_after_ms": 5}),
        ({"image": 5}, {}),
    ],
    ids=str,
)
def test_configurations_that_are_refused(config: dict[str, object], options: dict[str, object]) -> None:
    with pytest.raises(InvalidOptions):
        config_of(config, options)
