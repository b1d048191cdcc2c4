"""Running out of file descriptors: whose fault it is said to be, and how it is kept from happening."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import structlog
from aiohttp import web

from omnara.descriptors import connection_cap, exhausted, raise_limit
from omnara.domain.content import StructuredDataBlock
from omnara.ids import new_uuid
from omnara.providers import Failed, ModelGateway
from omnara.tools.allow_list import AllowList
from omnara.tools.extract import Extractor
from omnara.tools.protocol import ToolCallRequest, ToolContext, ToolResult
from omnara.tools.registry import execute
from tests.support.agent_log import Driver
from tests.unit.test_providers_failures import FORMATS, target


@contextlib.contextmanager
def soft_limit(soft: int) -> Iterator[None]:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """No descriptor can be opened inside the block: those above the lowest free one are forbidden."""
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    with soft_limit(lowest):
        yield


@pytest.fixture
async def site() -> AsyncIterator[str]:
    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="a page")

    app = web.Application()
    app.router.add_get("/", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


async def get(url: str) -> ToolResult:
    context = ToolContext(extractor=Extractor(), allow=AllowList(loopback=True))
    return await execute(ToolCallRequest(new_uuid(), new_uuid(), "web_fetch", {"url": url}), context)


def facts(result: ToolResult) -> dict[str, Any]:
    (block,) = result.content_blocks
    assert isinstance(block, StructuredDataBlock)
    return dict(block.value)


async def test_a_page_is_not_called_unreachable_for_want_of_descriptors(site: str) -> None:
    assert (await get(site)).outcome == "succeeded"
    with none_left():
        result = await get(site)
    assert (result.outcome, facts(result)["error_code"]) == ("failed", "tool_fault")
    assert "This server" in facts(result)["error"]


async def test_a_name_is_not_called_unknown_for_want_of_descriptors() -> None:
    name = "https://no-such-host.invalid/"
    await get(name)  # the resolver's own libraries are loaded by now
    with none_left():
        result = await get(name)
    assert facts(result)["error_code"] == "tool_fault"
    assert facts(await get(name))["error_code"] == "web_fetch_dns_failed"


@pytest.mark.parametrize("api_format", FORMATS)
async def test_a_model_call_is_tried_again(site: str, api_format: str) -> None:
    gateway = ModelGateway()
    try:
        driver = Driver(gateway, target(site.rstrip("/"), api_format))
        driver.log.user("go")
        with none_left():
            outcome = await driver.attempt()
    finally:
        await gateway.close()
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.ambiguous) == ("transient", False)
    assert outcome.message == "this server has no file descriptor left for a connection"


def test_what_counts_as_exhausted() -> None:
    wrapped = RuntimeError("x")
    wrapped.__cause__ = OSError(errno.ENFILE, "x")
    assert exhausted(wrapped)
    assert not exhausted(ConnectionRefusedError(errno.ECONNREFUSED, "x"))
    assert not exhausted(socket.gaierror(socket.EAI_NONAME, "x"))


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with soft_limit(256), structlog.testing.capture_logs() as logged:
        assert raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
    assert logged[0]["before"] == 256


def test_clients_get_at_most_half() -> None:
    with soft_limit(512):
        assert connection_cap(100) == 100
        with structlog.testing.capture_logs() as logged:
            assert connection_cap(4096) == 256
    assert [line["log_level"] for line in logged] == ["warning"]
