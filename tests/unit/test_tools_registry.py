"""The catalog of what can be run, and execution by name with its bounds."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.domain.content import INTERRUPTED_TEXT, StructuredDataBlock, TextBlock
from omnara.tools import registry
from omnara.tools.extract import Extractor
from omnara.tools.protocol import ToolCallRequest, ToolContext, ToolLimits, ToolResult, succeeded
from omnara.tools.registry import BUILT_IN, MACHINE_TOOLS, POOL_TOOLS, SHOWN_CHARS, catalog, execute
from omnara.tools.schema import check_tool_schema


def call(name: str, tool_input: dict[str, Any]) -> ToolCallRequest:
    return ToolCallRequest(UUID(int=1), UUID(int=2), name, tool_input)


def context(limits: ToolLimits | None = None) -> ToolContext:
    return ToolContext(extractor=Extractor(), limits=limits or ToolLimits())


def test_the_catalog_lists_what_can_be_run_sorted_by_name() -> None:
    served = msgspec.json.decode(msgspec.json.encode(catalog()))
    names = [entry["name"] for entry in served["built_in_tools"]]
    assert names == sorted(["ask_question", "read_file", "search_files", "web_fetch", *MACHINE_TOOLS, *POOL_TOOLS])
    assert set(served) == {"built_in_tools", "custom_tool_permissions", "mcp_tool_permissions"}
    for entry in served["built_in_tools"]:
        assert set(entry) == {"name", "description", "default_permission", "permission_modes"}
        assert entry["default_permission"] == {"mode": "always_allow", "parameters": {}}
        assert [mode["name"] for mode in entry["permission_modes"]] == ["always_allow", "always_ask", "always_deny"]
        for mode in entry["permission_modes"]:
            assert set(mode) == {"name", "label", "description", "parameters_schema"}
    assert served["custom_tool_permissions"]["default_permission"]["mode"] == "always_allow"
    assert served["mcp_tool_permissions"]["default_permission"]["mode"] == "always_ask"


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_our_own_schemas_pass_the_checks_for_those_of_others(name: str) -> None:
    assert check_tool_schema(BUILT_IN[name].input_schema) == []


@pytest.mark.parametrize("name", ["nope", "", "ask_question"])
async def test_what_cannot_be_run_is_unsupported(name: str) -> None:
    result = await execute(call(name, {}), context())
    assert (result.outcome, result.error_code) == ("failed", "unsupported")


@pytest.mark.parametrize(
    "tool_input",
    [{}, {"url": 1}, {"url": "x", "timeout": 0}, {"url": "x", "timeout": 121}, {"url": "x", "format": "pdf"}],
)
async def test_bad_input_is_malformed(tool_input: dict[str, Any]) -> None:
    result = await execute(call("web_fetch", tool_input), context())
    assert (result.outcome, result.error_code) == ("failed", "malformed")
    (block,) = result.content_blocks
    assert isinstance(block, StructuredDataBlock)
    assert block.value["error_code"] == "malformed"
    assert block.value["error"]


async def test_the_overall_cap_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = asyncio.Event()

    async def forever(_: ToolCallRequest, __: ToolContext) -> ToolResult:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return succeeded()

    monkeypatch.setattr(registry, "_EXECUTORS", {"web_fetch": forever})
    result = await execute(call("web_fetch", {"url": "x"}), context(ToolLimits(overall_s=0.01)))
    assert result == ToolResult("failed", (TextBlock(INTERRUPTED_TEXT),), "async_tool_interrupted")
    assert gone.is_set()


async def test_cancellation_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started = asyncio.Event()

    async def forever(_: ToolCallRequest, __: ToolContext) -> ToolResult:
        started.set()
        await asyncio.Event().wait()
        return succeeded()

    monkeypatch.setattr(registry, "_EXECUTORS", {"web_fetch": forever})
    task = asyncio.create_task(execute(call("web_fetch", {"url": "x"}), context()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_fault_of_ours_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: ToolCallRequest, __: ToolContext) -> ToolResult:
        raise ZeroDivisionError

    monkeypatch.setattr(registry, "_EXECUTORS", {"web_fetch": broken})
    with pytest.raises(ZeroDivisionError):
        await execute(call("web_fetch", {"url": "x"}), context())


def test_what_is_shown_of_a_result_follows_the_tools() -> None:
    assert SHOWN_CHARS == {"web_fetch": 30_000}
