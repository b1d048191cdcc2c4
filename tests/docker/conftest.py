"""A real engine, shared by these tests; each test has containers of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from omnara.machines.providers.docker import DockerProvider
from tests.support.docker_engine import BUSYBOX_IMAGE, SANDBOX_IMAGE, Box, box, engine_for_tests, has_image, missing


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def provider() -> AsyncIterator[DockerProvider]:
    """A provider over this machine's engine."""
    made = await engine_for_tests()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="session", scope="module", params=[BUSYBOX_IMAGE, SANDBOX_IMAGE])
async def machine(request: pytest.FixtureRequest, provider: DockerProvider) -> AsyncIterator[Box]:
    """A running machine, of an image with nothing but busybox and of the sandbox."""
    if not await has_image(provider, request.param):
        missing(f"there is no image {request.param} (Containerfile, target sandbox)")
    async with box(provider, request.param) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def small(provider: DockerProvider) -> AsyncIterator[Box]:
    """A running machine for one test, of the image with nothing but busybox."""
    async with box(provider, BUSYBOX_IMAGE) as made:
        yield made
