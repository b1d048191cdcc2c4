"""Files between machines and artifacts: `upload_file` takes one from a machine, `download_file` puts one there.

The names say what a machine does. The work is an internal process on the machine, fed and read by this server, so a cut
in the middle has an unknown outcome as with any other effect outside. Source: features.md (upload and download tools).
"""

from __future__ import annotations

from typing import Any, Final

from omnara.tools.builtin.machine_processes import MACHINE_SCHEMAS
from omnara.tools.files import PATH_SCHEMA
from omnara.tools.protocol import UNSUPPORTED, Effect, Tool, ToolCallRequest, ToolContext, ToolResult, failed

__all__ = ["DOWNLOAD_FILE", "MAX_FILE_BYTES", "UPLOAD_FILE", "download", "upload"]

MAX_FILE_BYTES: Final = 10 * 1024 * 1024
"""Source: api.md §13."""

_MACHINE_PATH: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": 4096,
    "description": "Path on the machine; a relative one starts at its working directory.",
}


def _tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Tool:
    schema = {
        "type": "object",
        "properties": {**properties, **MACHINE_SCHEMAS},
        "required": required,
        "additionalProperties": False,
    }
    return Tool(
        name=name, description=description, input_schema=schema, type="built_in", effect=Effect.OUTSIDE, exact=True
    )


UPLOAD_FILE: Final = _tool(
    "upload_file",
    "Store a file of a machine, up to 10 MiB, as an attachment of this conversation, so that the user gets it and you "
    "can read it with read_file. Text, PNG, JPEG, GIF, WebP and PDF are accepted.",
    {
        "path": _MACHINE_PATH,
        "filename": {"type": "string", "minLength": 1, "maxLength": 255, "description": "Name of the attachment."},
    },
    ["path"],
)

DOWNLOAD_FILE: Final = _tool(
    "download_file",
    "Write an attachment of this conversation to a file on a machine. Missing directories are made; an existing file "
    "is replaced.",
    {"artifact": PATH_SCHEMA, "path": _MACHINE_PATH},
    ["artifact", "path"],
)


async def upload(call: ToolCallRequest, ctx: ToolContext) -> ToolResult:
    """Run `upload_file`. Raises Unavailable."""
    if ctx.machine_files is None:
        return failed("This server has no machines.", UNSUPPORTED)
    return await ctx.machine_files.upload(call.agent_id, call.id, call.input)


async def download(call: ToolCallRequest, ctx: ToolContext) -> ToolResult:
    """Run `download_file`. Raises Unavailable."""
    if ctx.machine_files is None:
        return failed("This server has no machines.", UNSUPPORTED)
    return await ctx.machine_files.download(call.agent_id, call.id, call.input)
