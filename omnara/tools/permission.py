"""What happens to a call before it may run: the order of the checks, as one pure function.

Source: engine.md §7 (permission order); api.md §12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omnara.tools.interactions import Form, denied, permission_form
from omnara.tools.protocol import ALWAYS_ALLOW, ALWAYS_ASK, ALWAYS_DENY, Tool, ToolResult
from omnara.tools.registry import unsupported
from omnara.tools.schema import check_input, malformed

__all__ = ["Authorised", "Authorization", "Completed", "NeedsPermission", "authorise"]


class Authorised(msgspec.Struct, frozen=True):
    """The call may run now."""

    tool: Tool


class NeedsPermission(msgspec.Struct, frozen=True):
    """A person has to answer the form first."""

    tool: Tool
    form: Form


class Completed(msgspec.Struct, frozen=True):
    """The call ends here without having run."""

    result: ToolResult


Authorization = Authorised | NeedsPermission | Completed


def authorise(tool: Tool | None, name: str, tool_input: Mapping[str, Any], mode: str) -> Authorization:
    """Decide about a call to `tool` (None: the agent has no tool of that name) under a permission mode.

    Unknown tool, then bad input, then the mode. Raises ValueError for a mode that no release knows, which a compiled
    config cannot contain. Source: engine.md §7.
    """
    if tool is None:
        return Completed(unsupported(name))
    problems = check_input(tool.input_schema, tool_input)
    if problems:
        return Completed(malformed(problems))
    if mode == ALWAYS_ALLOW:
        return Authorised(tool)
    if mode == ALWAYS_ASK:
        return NeedsPermission(tool, permission_form(name, tool_input))
    if mode == ALWAYS_DENY:
        return Completed(denied(f"The agent's configuration does not allow {name} to run."))
    raise ValueError(f"unknown permission mode {mode!r}")
