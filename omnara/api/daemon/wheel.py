"""The wheel that the server serves: its own code, packed, so that a daemon always speaks the protocol of its server.

Nothing is fetched from anywhere and nothing has to be built beforehand: a checkout, an installed package and an image
serve what they run. The same code gives the same bytes on every replica, since script and wheel may come from two.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

import omnara
from omnara import __version__

__all__ = ["REQUIRES", "Wheel", "own_wheel"]

REQUIRES: Final = (
    "aiohttp>=3.12,<4",
    "click>=8.1",
    "msgspec>=0.19",
    "structlog>=24.4",
    "uvloop>=0.21; sys_platform != 'win32'",
)
"""What a daemon imports. The server's other libraries (models, Postgres, documents) stay off others' machines."""

_VERSION: Final = f"{__version__}+daemon"
"""A local version, so that nobody takes an environment with few libraries for one that can serve."""
_INFO: Final = f"omnara-{_VERSION}.dist-info"
_METADATA: Final = "".join(
    f"{line}\n"
    for line in (
        "Metadata-Version: 2.1",
        "Name: omnara",
        f"Version: {_VERSION}",
        "Summary: The daemon of one omnara server",
        "Requires-Python: >=3.11",
        *(f"Requires-Dist: {requirement}" for requirement in REQUIRES),
    )
)
_WHEEL: Final = "Wheel-Version: 1.0\nGenerator: omnara\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_ENTRY_POINTS: Final = "[console_scripts]\nomnara = omnara.cli:main\n"
_LEFT_OUT: Final = frozenset({"__pycache__", "sql"})


class Wheel(msgspec.Struct, frozen=True):
    """A packed wheel: the name that pip wants it to have, and its SHA-256 in hex."""

    filename: str
    sha256: str
    content: bytes


@functools.cache
def own_wheel() -> Wheel:
    """Pack this process's own code, once. Takes some tenths of a second of file reading: call it in a thread.

    Nothing is compressed: compressors differ between builds of Python, and replicas must agree on the digest.
    """
    files = dict(_package(Path(omnara.__file__).resolve().parent))
    files |= {
        f"{_INFO}/METADATA": _METADATA.encode(),
        f"{_INFO}/WHEEL": _WHEEL.encode(),
        f"{_INFO}/entry_points.txt": _ENTRY_POINTS.encode(),
    }
    record = f"{_INFO}/RECORD"
    files[record] = _record(files, record).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)  # dated 1980, whenever the files were written
            entry.external_attr = 0o644 << 16
            entry.create_system = 3
            archive.writestr(entry, content)
    content = packed.getvalue()
    return Wheel(f"omnara-{_VERSION}-py3-none-any.whl", hashlib.sha256(content).hexdigest(), content)


def _package(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the package's files in order. The server's SQL is of no use to a daemon."""
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.is_file() and path.suffix != ".pyc" and not _LEFT_OUT.intersection(inside.parts):
            yield f"omnara/{inside.as_posix()}", path.read_bytes()


def _record(files: dict[str, bytes], own_name: str) -> str:
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    return "".join((*lines, f"{own_name},,\n"))
