"""A real Docker engine for tests: found, or a reason to skip; with an image made of one static program."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from aiodocker.exceptions import DockerError

from omnara.ids import IdKind, encode, new_uuid
from omnara.machines.docker import DockerHome
from omnara.machines.processes import OutputSlice, ProcessRecord, ProcessSpec
from omnara.machines.providers.docker import DockerProvider
from omnara.machines.providers.protocol import MachineSpec, ProviderUnavailable, Resource

BUSYBOX_IMAGE = "omnara-test-busybox"
SANDBOX_IMAGE = "omnara-sandbox"
ENDLESS = 1 << 62


def missing(reason: str) -> None:
    """Skip the test; in CI, which installs everything, fail instead, unless it said that no engine runs there."""
    without = os.environ.get("OMNARA_TESTS_WITHOUT_DOCKER")
    if without:
        pytest.skip(without)
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


async def engine_for_tests() -> DockerProvider:
    """Return a provider over the engine of this machine, with the small image on it; skips without one."""
    provider = DockerProvider(os.environ.get("OMNARA_DOCKER_HOST"))
    try:
        await provider.host()
    except ProviderUnavailable as error:
        await provider.close()
        missing(f"there is no Docker engine: {error}")
    if not await has_image(provider, BUSYBOX_IMAGE):
        program = shutil.which("busybox") or "/bin/busybox"
        if not Path(program).exists():
            await provider.close()
            missing("the test's image is made of a static busybox (package busybox-static)")
        await asyncio.to_thread(import_busybox, program)
    return provider


async def has_image(provider: DockerProvider, image: str) -> bool:
    """True when the engine has an image."""
    try:
        async with provider.engine.call() as docker:
            await docker.images.inspect(image)
    except DockerError:
        return False
    return True


def import_busybox(
    program: str,
    endpoint: str | None = None,
    image: str = BUSYBOX_IMAGE,
    *changes: str,
    without: str = "",
    shut: str = "",
) -> None:
    """Make the small image: a file system with nothing but busybox under all its names; or one that differs from it."""
    names = subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(program, "bin/busybox")
        if shut:
            entry = tarfile.TarInfo(f"{shut}/")
            entry.type, entry.mode = tarfile.DIRTYPE, 0o700
            archive.addfile(entry)
        for name in names:
            if name not in ("busybox", without):
                entry = tarfile.TarInfo(f"bin/{name}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                archive.addfile(entry)
    docker = ["docker", *(() if endpoint is None else ("-H", endpoint))]
    options = [word for change in changes for word in ("-c", change)]
    words = [*docker, "import", *options, "-", image]
    subprocess.run(words, input=buffer.getvalue(), check=True, capture_output=True)


@contextlib.contextmanager
def odd_image(*changes: str, without: str = "", shut: str = "") -> Iterator[str]:
    """The small image with instructions of a Containerfile, without a program, or with a directory for root alone."""
    image = f"omnara-test-{new_id()[4:]}"
    import_busybox(shutil.which("busybox") or "/bin/busybox", None, image, *changes, without=without, shut=shut)
    try:
        yield image
    finally:
        subprocess.run(["docker", "rmi", "-f", image], check=True, capture_output=True)


def new_id(kind: IdKind = IdKind.PROCESS) -> str:
    """A public id."""
    return encode(kind, new_uuid())


class Box(msgspec.Struct):
    """A machine on the engine, and its home."""

    provider: DockerProvider
    spec: MachineSpec
    resource: Resource
    home: DockerHome

    async def start(self, command: str, wait_s: float = 0.05, **fields: object) -> ProcessRecord:
        """Prepare and execute a command."""
        spec = ProcessSpec(process_id=new_id(), command=command, **fields)  # type: ignore[arg-type]
        await self.home.prepare(spec)
        return await self.home.execute(spec.process_id, wait_s)

    async def end(self, process_id: str, within_s: float = 20.0) -> ProcessRecord:
        """Wait for a command's end."""
        async with asyncio.timeout(within_s):
            while True:
                record = await self.home.watch(process_id, ENDLESS, within_s)
                if record.exit is not None:
                    return record

    async def run(self, command: str, **fields: object) -> tuple[ProcessRecord, str]:
        """Run a command to its end; the record and the first 64 KiB of its output."""
        record = await self.start(command, 5.0, **fields)
        if record.exit is None:
            record = await self.end(record.process_id)
        return record, (await self.read(record.process_id)).data.decode("utf-8", "replace")

    async def read(self, process_id: str, cursor: int = 0) -> OutputSlice:
        """Read output."""
        return await self.home.read(process_id, cursor, 65_536)

    async def until_output(self, process_id: str, text: str, within_s: float = 20.0) -> str:
        """Wait until the output has a text; all of it."""
        end = 0
        async with asyncio.timeout(within_s):
            while True:
                found = (await self.read(process_id)).data.decode("utf-8", "replace")
                if text in found:
                    return found
                end = max(end, len(found))
                await self.home.watch(process_id, end, 5.0)


def machine_spec(image: str, **config: object) -> MachineSpec:
    """A machine that nobody else has, in an installation of its own."""
    machine = encode(IdKind.MACHINE, new_uuid())
    return MachineSpec(
        machine_id=machine,
        installation_id=f"test-{machine[-10:]}",
        allocation_name=f"omnara-test-{machine[4:]}",
        config={"image": image, **config},
        memory_mb=256,
    )


@contextlib.asynccontextmanager
async def box(provider: DockerProvider, image: str, **config: object) -> AsyncIterator[Box]:
    """Make a machine; removed with everything at the end."""
    spec = machine_spec(image, **config)
    try:
        resource = await provider.provision(spec)
        made = Box(provider, spec, resource, await provider.open_home(spec, resource.resource_id))
        try:
            yield made
        finally:
            await made.home.close()
    finally:
        await provider.delete(spec, None)
