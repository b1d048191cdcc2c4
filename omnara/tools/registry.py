"""The built-in tools that this server can run, and the catalog that tells clients about them.

Only what works is listed: a config that names another tool is refused when it is compiled, not when a model calls it.
Source: api.md §14; contract schema ToolCatalog.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Final

import msgspec

from omnara.tools.builtin import (
    ask_question,
    machine_files,
    machine_processes,
    machines,
    read_file,
    search_files,
    web_fetch,
)
from omnara.tools.protocol import (
    ALWAYS_ALLOW,
    ALWAYS_ASK,
    ALWAYS_DENY,
    UNSUPPORTED,
    PermissionMode,
    PermissionSelection,
    Tool,
    ToolCallRequest,
    ToolContext,
    ToolExecutor,
    ToolResult,
    failed,
    interrupted,
)
from omnara.tools.schema import check_input, malformed

__all__ = [
    "BUILT_IN",
    "CUSTOM_DEFAULT",
    "FILE_TOOLS",
    "MACHINE_TOOLS",
    "MCP_DEFAULT",
    "PERMISSION_MODES",
    "POOL_TOOLS",
    "SHOWN_CHARS",
    "Catalog",
    "CatalogEntry",
    "PermissionProfile",
    "catalog",
    "execute",
    "offered",
    "unsupported",
]

_MACHINE: Final = (
    machine_processes.RUN_COMMAND,
    machine_processes.READ_PROCESS,
    machine_processes.WRITE_PROCESS,
    machine_processes.STOP_PROCESS,
    machine_processes.LIST_PROCESSES,
    machines.LIST_MACHINES,
    machines.INSPECT_MACHINE,
    machine_files.UPLOAD_FILE,
    machine_files.DOWNLOAD_FILE,
)
_POOL: Final = (machines.CREATE_MACHINE, machines.DELETE_MACHINE)
_SHIPPED: Final = (ask_question.TOOL, read_file.TOOL, search_files.TOOL, web_fetch.TOOL, *_MACHINE, *_POOL)
_TOOLS: Final = {tool.name: tool for tool in sorted(_SHIPPED, key=lambda tool: tool.name)}

BUILT_IN: Final[Mapping[str, Tool]] = MappingProxyType(_TOOLS)
"""Built-in tools by name, sorted."""

SHOWN_CHARS: Final[Mapping[str, int]] = {
    tool.name: tool.shown_chars for tool in BUILT_IN.values() if tool.shown_chars is not None
}
"""How many characters of a text result a model is shown; results are stored longer. Source: engine.md §7."""

FILE_TOOLS: Final = (read_file.TOOL.name, search_files.TOOL.name)
"""Tools that every agent may use as soon as it has a file to read; others are its config's choice."""

MACHINE_TOOLS: Final = tuple(tool.name for tool in _MACHINE)
"""Tools that a config with machines gets unless it says otherwise. Source: features.md (default tools)."""

POOL_TOOLS: Final = tuple(tool.name for tool in _POOL)
"""And those that it gets when a pool is among its machines."""

_EXECUTORS: Final[dict[str, ToolExecutor]] = {
    machine_files.UPLOAD_FILE.name: machine_files.upload,
    machine_files.DOWNLOAD_FILE.name: machine_files.download,
    read_file.TOOL.name: read_file.execute,
    search_files.TOOL.name: search_files.execute,
    web_fetch.TOOL.name: web_fetch.execute,
}

CUSTOM_DEFAULT: Final = PermissionSelection(ALWAYS_ALLOW)
MCP_DEFAULT: Final = PermissionSelection(ALWAYS_ASK)
"""Source: engine.md §7 (defaults)."""

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}

PERMISSION_MODES: Final[Mapping[str, PermissionMode]] = {
    mode.name: mode
    for mode in (
        PermissionMode(ALWAYS_ALLOW, "Always allow", "Calls run without asking.", _NO_PARAMETERS),
        PermissionMode(ALWAYS_ASK, "Always ask", "Each call waits until a person allows or denies it.", _NO_PARAMETERS),
        PermissionMode(ALWAYS_DENY, "Always deny", "Calls are refused without asking.", _NO_PARAMETERS),
    )
}


class PermissionProfile(msgspec.Struct, frozen=True):
    """Contract schema ToolPermissionProfile."""

    default_permission: PermissionSelection
    permission_modes: tuple[PermissionMode, ...]


class CatalogEntry(msgspec.Struct, frozen=True):
    """Contract schema ToolCatalogEntry."""

    name: str
    description: str
    default_permission: PermissionSelection
    permission_modes: tuple[PermissionMode, ...]


class Catalog(msgspec.Struct, frozen=True):
    """Contract schema ToolCatalog."""

    built_in_tools: tuple[CatalogEntry, ...]
    custom_tool_permissions: PermissionProfile
    mcp_tool_permissions: PermissionProfile


@cache
def catalog() -> Catalog:
    """Return what the catalog route serves: the built-in tools sorted by name, and the profiles of other tools."""
    modes = tuple(PERMISSION_MODES.values())
    entries = tuple(
        CatalogEntry(
            tool.name,
            tool.description,
            tool.default_permission,
            tuple(PERMISSION_MODES[name] for name in tool.permission_modes),
        )
        for tool in BUILT_IN.values()
    )
    return Catalog(entries, PermissionProfile(CUSTOM_DEFAULT, modes), PermissionProfile(MCP_DEFAULT, modes))


@contextmanager
def offered(tool: Tool, run: ToolExecutor) -> Iterator[None]:
    """Offer one more built-in tool in this process for the length of the block: for benches and tests.

    A server offers what it ships with; the catalog does not show this one.
    """
    _TOOLS[tool.name], _EXECUTORS[tool.name] = tool, run
    try:
        yield
    finally:
        del _TOOLS[tool.name], _EXECUTORS[tool.name]


async def execute(call: ToolCallRequest, ctx: ToolContext) -> ToolResult:
    """Run a built-in call that is authorised and whose start is committed; return its single result.

    The input is checked once more, since a call may have waited over a release. After the overall cap the call is
    interrupted: its effect may have happened. Faults of ours are raised, for the caller to log and record as failed.
    Source: engine.md §7 (five minutes).
    """
    tool, run = BUILT_IN.get(call.name), _EXECUTORS.get(call.name)
    if tool is None or run is None:
        return unsupported(call.name)
    problems = check_input(tool.input_schema, call.input)
    if problems:
        return malformed(problems)
    try:
        async with asyncio.timeout(ctx.limits.overall_s):
            return await run(call, ctx)
    except TimeoutError:
        return interrupted()


def unsupported(name: str) -> ToolResult:
    """Return the failed result of a call to a tool that the agent does not have. Source: engine.md §7."""
    return failed(f"There is no tool named {name[:100]!r}.", UNSUPPORTED)
