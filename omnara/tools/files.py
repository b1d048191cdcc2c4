"""What the file tools may see: the artifacts of the agent that calls them and its machines, and no other's.

An interface, so that tools know nothing of where files are kept. Source: features.md (files, `/artifacts`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import UUID

import msgspec

from omnara.domain.content import ResultBlock

if TYPE_CHECKING:
    from omnara.tools.protocol import ToolResult

PATH_SCHEMA: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": 300,
    "description": "The attachment: its id, as in art_…, or /artifacts/art_….",
}
_PATH: Final = re.compile(r"(?:/?artifacts/)?(art_[a-z2-7]{26})(?:/.*)?")


class StoredFile(msgspec.Struct, frozen=True):
    """A file of an agent. `handle` is the store's own."""

    artifact_id: str
    media_type: str
    filename: str
    size: int
    handle: object

    @property
    def is_text(self) -> bool:
        """Whether the content is UTF-8 text."""
        return self.media_type.startswith("text/")


class FileStore(Protocol):
    """The files of agents. Failures are raised as `omnara.errors.Unavailable`."""

    async def find(self, agent_id: UUID, artifact_id: str) -> StoredFile | None:
        """Return a file of this agent."""
        ...

    async def texts(self, agent_id: UUID, limit: int) -> list[StoredFile]:
        """Return the newest text files of this agent."""
        ...

    async def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        """Return the bytes from `start` up to `stop`."""
        ...

    async def spill(self, agent_id: UUID, tool: str, blocks: Sequence[ResultBlock]) -> list[ResultBlock]:
        """Return a result's blocks; too big ones are put into a file, and a preview of it returned."""
        ...


class MachineFiles(Protocol):
    """Files between an agent's machines and its artifacts. Failures are raised as `omnara.errors.Unavailable`."""

    async def upload(self, agent_id: UUID, call_id: UUID, tool_input: dict[str, Any]) -> ToolResult:
        """Make a file of a machine an artifact of the agent."""
        ...

    async def download(self, agent_id: UUID, call_id: UUID, tool_input: dict[str, Any]) -> ToolResult:
        """Write an artifact of the agent to a file of a machine."""
        ...


def artifact_in(path: str) -> str | None:
    """The artifact that a model names: by its id, or as a path below /artifacts."""
    match = _PATH.fullmatch(path.strip())
    return None if match is None else match.group(1)
