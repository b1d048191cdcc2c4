"""The folder under audit: what its two custom tools answer, and the report that a right audit has.

The report is computed here from the bytes on disk and never from what the agent was told.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec

from omnara.errors import ConfigurationError

__all__ = ["TOOLS", "Folder", "shipped_documents"]

MAX_FILES: Final = 200
MAX_FILE_BYTES: Final = 36_000
MAX_TOTAL_BYTES: Final = 250_000
"""The model has to see every byte, or it cannot hash them: a result over 50 KiB would be shown in part, and a
conversation that outgrows the model's window would be summarised. Base64 adds a third.
"""
MAX_TEXT_BYTES: Final = 48_000

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
    """A folder on disk, listed once at the start: `paths` are the files for the audit, `left_out` counts the others.

    Raises ConfigurationError if no file suits the demo.
    """

    def __init__(self, root: Path, *, with_digest: bool = False) -> None:
        self._root = root
        self._with_digest = with_digest
        found = sorted(
            path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and not path.is_symlink()
        )
        if not found:
            raise ConfigurationError(f"{root} holds no file; give --folder another one")
        self.paths = list(self._fitting(found))
        self.left_out = len(found) - len(self.paths)
        if not self.paths:
            raise ConfigurationError(
                f"{root} holds no readable file of at most {MAX_FILE_BYTES} bytes (hidden ones do not count); "
                "give --folder another one"
            )

    def _fitting(self, paths: list[str]) -> Iterator[str]:
        """Yield readable files that are small enough and not hidden, as many as fit into the model's window."""
        number = total = 0
        for path in paths:
            size = (self._root / path).stat().st_size
            hidden = any(part.startswith(".") for part in path.split("/"))
            fits = not hidden and size <= MAX_FILE_BYTES and total + size <= MAX_TOTAL_BYTES and number < MAX_FILES
            if fits and path.isprintable() and os.access(self._root / path, os.R_OK):
                number, total = number + 1, total + size
                yield path

    def answer(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return what a tool call yields, and whether it failed. Touches nothing outside the folder."""
        if tool == "list_files":
            return msgspec.json.encode(self.paths).decode(), False
        path = str(arguments.get("path", ""))
        if tool != "get_file" or path not in self.paths:
            return f"Error: there is no tool {tool} for the path {path!r}", True
        data = (self._root / path).read_bytes()
        content = _enclosed(path, data)
        if self._with_digest:
            # A real model cannot compute a digest, so it gets to copy one; the scripted model computes its own.
            content = _measured(path, data) | {"content": content["content"][:2000]}
        return msgspec.json.encode(content).decode(), False

    def archive(self) -> bytes:
        """Return the files as a compressed tar in base64 text, for a machine that can unpack it."""
        packed = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as tar,
        ):
            for path in self.paths:
                data = (self._root / path).read_bytes()
                entry = tarfile.TarInfo(path)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        return base64.encodebytes(packed.getvalue())

    def report(self, *, lines: bool = False) -> dict[str, Any]:
        """Return count, bytes and files as they are on disk now; with `lines`, also how many each of them has."""
        entries = [_measured(path, (self._root / path).read_bytes(), lines=lines) for path in self.paths]
        return {"count": len(entries), "bytes": sum(entry["size"] for entry in entries), "files": entries}


def _enclosed(path: str, data: bytes) -> dict[str, Any]:
    """Text as it is, unless escapes would make it too long; anything else in base64."""
    coded = {"path": path, "encoding": "base64", "content": base64.b64encode(data).decode()}
    try:
        plain = {"path": path, "encoding": "utf-8", "content": data.decode()}
    except UnicodeDecodeError:
        return coded
    return plain if len(msgspec.json.encode(plain)) <= MAX_TEXT_BYTES else coded


def _measured(path: str, data: bytes, *, lines: bool = False) -> dict[str, Any]:
    measured: dict[str, Any] = {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if lines:
        # The last line counts whether or not it has an end, as programs that look for lines count it.
        measured["lines"] = data.count(b"\n") + (data[-1:] not in (b"", b"\n"))
    return measured
