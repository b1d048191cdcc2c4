"""`omnara demo --machine docker`, with the smallest image, and stopped in the middle."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from omnara.cli.demo.workplace import workplace
from omnara.errors import ConfigurationError
from omnara.machines.providers.docker import MACHINE, DockerProvider
from omnara.settings import load
from tests.e2e.test_demo import small_folder
from tests.e2e.test_demo_machines import audited, check, interrupted, scratch, seed_of
from tests.support.docker_engine import BUSYBOX_IMAGE, SANDBOX_IMAGE, has_image, missing

__all__ = ["scratch", "small_folder"]


@pytest_asyncio.fixture(loop_scope="session")
async def image(provider: DockerProvider) -> AsyncIterator[str]:
    """A name of the small image that nobody else uses, by which the demo's containers are known."""
    tag = uuid.uuid4().hex[:12]
    async with provider.engine.call() as docker:
        await docker.images.tag(BUSYBOX_IMAGE, f"{BUSYBOX_IMAGE}-demo", tag=tag)
    name = f"{BUSYBOX_IMAGE}-demo:{tag}"
    yield name
    async with provider.engine.call() as docker:
        await docker.images.delete(name)


async def machines_of(provider: DockerProvider, image: str) -> list[str]:
    """The machines that have a container of the image under this name."""
    found = []
    for one in await provider.engine.containers({}):
        shown = await provider.engine.shown(one["Id"])
        if shown is not None and shown["Config"]["Image"] == image:
            found.append(shown["Config"]["Labels"][MACHINE])
    return found


@pytest.mark.timeout(200)
async def test_commands_in_a_container_outlive_the_server(
    provider: DockerProvider, image: str, small_folder: Path, scratch: Path
) -> None:
    options = ("--seed", str(seed_of("command_running")), "--folder", str(small_folder), "--image", image)
    check(await audited("docker", *options, scratch=scratch), "docker", "command_running")
    assert await machines_of(provider, image) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_the_sandbox_is_the_default(provider: DockerProvider, small_folder: Path, scratch: Path) -> None:
    if not await has_image(provider, SANDBOX_IMAGE):
        missing(f"there is no image {SANDBOX_IMAGE} (Containerfile, target sandbox)")
    for point in ("command_handed_over", "command_outlives"):
        verdict = await audited("docker", "--seed", str(seed_of(point)), "--folder", str(small_folder), scratch=scratch)
        check(verdict, "docker", point)


@pytest.mark.timeout(200)
async def test_an_interrupted_demo_leaves_no_container(
    provider: DockerProvider, image: str, small_folder: Path, scratch: Path
) -> None:
    seen: list[str] = []

    async def look() -> None:
        seen.extend(await machines_of(provider, image))

    await interrupted("docker", "--folder", str(small_folder), "--image", image, scratch=scratch, meanwhile=look)
    assert len(seen) == 1
    assert await machines_of(provider, image) == []
    assert await provider.engine.volumes({MACHINE: seen[0]}) == []


async def test_a_missing_image_is_told_with_the_way_to_make_it(provider: DockerProvider) -> None:
    place = workplace("docker", load({}), "omnara-no-such-image")
    try:
        with pytest.raises(ConfigurationError, match="docker pull omnara-no-such-image"):
            await place.check()
    finally:
        await place.close()
