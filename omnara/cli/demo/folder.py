"""The folder under audit: what its two custom tools answer, and the report that a right audit has.

The report is computed here from the bytes on disk and never from what the agent was told.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec

from omnara.errors import ConfigurationError

__all__ = ["TOOLS", "Folder", "shipped_documents"]

MAX_FILES: Final = 400
MAX_FILE_BYTES: Final = 600_000
"""Base64 adds a third, and a tool result may hold 1 MiB of text. Source: contract, SubmitToolCallResultRequest."""

TOOLS: Final[tuple[dict[str, Any], ...]] = (
    {
        "name": "list_files",
        "description": "Lists the paths of all files in the folder, as a JSON array.",
        "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
    },
    {
        "name": "get_file",
        "description": "Returns one file as JSON: path, encoding (utf-8 or base64) and content.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "A path from list_files."}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
)


def shipped_documents() -> Path:
    """Return the folder of documents that comes with the package."""
    return Path(str(files("omnara.cli.demo") / "documents"))


class Folder:
    """A folder on disk, listed once at the start. Raises ConfigurationError if it does not suit the demo."""

    def __init__(self, root: Path, *, with_digest: bool = False) -> None:
        self._root = root
        self._with_digest = with_digest
        self.paths = sorted(
            path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and not path.is_symlink()
        )
        if not self.paths:
            raise ConfigurationError(f"{root} holds no file; give --folder another one")
        if len(self.paths) > MAX_FILES:
            raise ConfigurationError(f"{root} holds {len(self.paths)} files; the demo takes at most {MAX_FILES}")
        for path in self.paths:
            if (root / path).stat().st_size > MAX_FILE_BYTES:
                raise ConfigurationError(
                    f"{root / path} is larger than {MAX_FILE_BYTES} bytes; choose another --folder"
                )

    def answer(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return what a tool call yields, and whether it failed. Touches nothing outside the folder."""
        if tool == "list_files":
            return msgspec.json.encode(self.paths).decode(), False
        path = str(arguments.get("path", ""))
        if tool != "get_file" or path not in self.paths:
            return f"Error: there is no tool {tool} for the path {path!r}", True
        data = (self._root / path).read_bytes()
        try:
            content: dict[str, Any] = {"path": path, "encoding": "utf-8", "content": data.decode()}
        except UnicodeDecodeError:
            content = {"path": path, "encoding": "base64", "content": base64.b64encode(data).decode()}
        if self._with_digest:
            # A real model cannot compute a digest, so it gets to copy one; the scripted model computes its own.
            content = _measured(path, data) | {"content": content["content"][:2000]}
        return msgspec.json.encode(content).decode(), False

    def report(self) -> dict[str, Any]:
        """Return count, bytes and files as they are on disk now."""
        entries = [_measured(path, (self._root / path).read_bytes()) for path in self.paths]
        return {"count": len(entries), "bytes": sum(entry["size"] for entry in entries), "files": entries}


def _measured(path: str, data: bytes) -> dict[str, Any]:
    return {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
