"""What a tool is to the rest of the server: its description, its result, and what it is given to run.

Tools never raise for what can be expected to go wrong: they return a failed result that tells the model, in
words and with a code, what happened. Exceptions are left for faults of ours. Source: engine.md §7; api.md §12.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, Literal, Protocol
from uuid import UUID

import msgspec

from omnara.domain.content import INTERRUPTED_TEXT, ResultBlock, StructuredDataBlock, TextBlock
from omnara.domain.events import Outcome
from omnara.tools.extract import Extractor
from omnara.tools.files import FileStore, MachineFiles
from omnara.tools.ssrf import AllowList, HttpSessionFactory, Resolver, open_session

__all__ = [
    "ALWAYS_ALLOW",
    "ALWAYS_ASK",
    "ALWAYS_DENY",
    "INTERRUPTED_CODE",
    "MALFORMED",
    "UNSUPPORTED",
    "Effect",
    "PermissionMode",
    "PermissionSelection",
    "Tool",
    "ToolCallRequest",
    "ToolContext",
    "ToolExecutor",
    "ToolLimits",
    "ToolResult",
    "failed",
    "interrupted",
    "succeeded",
]

MALFORMED: Final = "malformed"
"""Code of a call whose input does not fit the schema. Source: engine.md §7."""

UNSUPPORTED: Final = "unsupported"
"""Code of a call to a tool that does not exist for this agent. Source: engine.md §7."""

INTERRUPTED_CODE: Final = "async_tool_interrupted"
"""Code of a call that was cut off by its deadline or a cancellation. Source: engine.md §7."""

ALWAYS_ALLOW: Final = "always_allow"
ALWAYS_ASK: Final = "always_ask"
ALWAYS_DENY: Final = "always_deny"

ToolType = Literal["built_in", "custom", "mcp"]


class Effect(StrEnum):
    """What running a tool does, which decides how the engine treats it.

    OUTSIDE: acts on the world; its start is committed first and it is never repeated. INTERNAL: only reads or
    writes our own database. WAIT: something durable completes it later (a question, a client). TRANSACTIONAL: changes
    our own state, in one transaction with what becomes of the call, so it stays ready until then and is never
    interrupted; the transaction completes it, or leaves it to something durable. Source: engine.md §7 (phases).
    """

    OUTSIDE = "outside"
    INTERNAL = "internal"
    WAIT = "wait"
    TRANSACTIONAL = "transactional"


class PermissionSelection(msgspec.Struct, frozen=True):
    """A chosen mode. Contract schema ToolPermissionSelection."""

    mode: str
    parameters: Mapping[str, Any] = {}


class PermissionMode(msgspec.Struct, frozen=True):
    """A mode that can be chosen. Contract schema ToolPermissionMode."""

    name: str
    label: str
    description: str
    parameters_schema: Mapping[str, Any]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that a model may be offered.

    `shown_chars` bounds how much of a stored text result goes into a request to a model; None shows all of it.
    `exact`: an input with characters that cannot be stored is refused, since replacing them would change what is done.
    """

    name: str
    description: str
    input_schema: Mapping[str, Any]
    type: ToolType
    effect: Effect
    default_permission: PermissionSelection = PermissionSelection(ALWAYS_ALLOW)
    permission_modes: tuple[str, ...] = (ALWAYS_ALLOW, ALWAYS_ASK, ALWAYS_DENY)
    shown_chars: int | None = None
    exact: bool = False


class ToolResult(msgspec.Struct, frozen=True):
    """How a call ended. `error_code` repeats the code inside the structured block, for the journal and metrics."""

    outcome: Outcome
    content_blocks: tuple[ResultBlock, ...]
    error_code: str | None = None


class ToolCallRequest(msgspec.Struct, frozen=True):
    """A call to execute. `input` has been decoded from the model's JSON and cleaned of NUL and lone surrogates."""

    id: UUID
    agent_id: UUID
    name: str
    input: dict[str, Any]


class ToolLimits(msgspec.Struct, frozen=True):
    """Bounds of what tools may use. Sizes in bytes, times in seconds. Source: engine.md §7."""

    overall_s: float = 300.0
    fetch_bytes: int = 5 * 1024 * 1024
    fetch_redirects: int = 5
    stored_chars: int = 100_000


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the process gives to its tools. Without `files` long results stay as they are and there is nothing to read;
    without `machine_files` no file goes to or comes from a machine.
    Built once and shared: tools keep no state of their own in it."""

    extractor: Extractor
    allow: AllowList = AllowList()
    resolver: Resolver | None = None
    open_session: HttpSessionFactory = open_session
    limits: ToolLimits = ToolLimits()
    files: FileStore | None = None
    machine_files: MachineFiles | None = None


class ToolExecutor(Protocol):
    """Runs one call of one built-in tool.

    Returns failed results for expected failures. Cancellation is passed on: the caller decides what to record.
    """

    async def __call__(self, call: ToolCallRequest, ctx: ToolContext) -> ToolResult:
        """Run the call and return its single result."""
        ...


def succeeded(*blocks: ResultBlock) -> ToolResult:
    """Return a successful result."""
    return ToolResult("succeeded", blocks)


def failed(error: str, error_code: str, **details: Any) -> ToolResult:
    """Return a failed result whose structured block holds `error`, `error_code` and the details.

    Source: api.md §12 (structured error and error_code).
    """
    return ToolResult(
        "failed", (StructuredDataBlock({"error": error, "error_code": error_code, **details}),), error_code
    )


def interrupted() -> ToolResult:
    """Return the result of a call whose outside effect may or may not have happened. Source: DESIGN §2, invariant 4."""
    return ToolResult("failed", (TextBlock(INTERRUPTED_TEXT),), INTERRUPTED_CODE)
