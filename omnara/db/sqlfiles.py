"""SQL lives in files; this module finds and reads them.

A query has a name, says what it does and which index it relies on, and is found by `grep`. A mistake in a file
(a duplicate, an empty statement, two statements under one name) stops the process at import, not at the first call.

Format of `sql/queries/<group>.sql`::

    -- name: claim_agents
    -- Takes the oldest ready agents for one worker.
    -- Index: agent_sched_ready.
    with ...
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

import omnara

_NAME: Final = re.compile(r"^--\s*name:\s*(?P<name>\S+)\s*$")
_IDENTIFIER: Final = re.compile(r"[a-z][a-z0-9_]*")
_TOKEN: Final = re.compile(
    r"""--[^\n]*                        # comment to the end of the line
      | /\*.*?\*/                       # block comment
      | '(?:[^']|'')*'                  # string
      | "(?:[^"]|"")*"                  # quoted identifier
      | (?P<tag>\$(?:[A-Za-z_]\w*)?\$).*?(?P=tag)   # dollar-quoted string
      | ;
      | [^-/'"$;]+ | .""",
    re.VERBOSE | re.DOTALL,
)


class SqlFileError(Exception):
    """A file under `sql/` is missing or malformed. A fault of the build, never of the input."""


class Query(msgspec.Struct, frozen=True):
    """One named statement. `text` starts with a `/* group.name */` mark, so that pg_stat_activity shows who it is."""

    name: str
    description: str
    index: str
    text: str


@functools.cache
def sql_root() -> Path:
    """Return the directory with `migrations/`, `queries/` and `checks/`: inside the wheel, else the checkout's.

    Raises `SqlFileError` when neither is there.
    """
    package = Path(omnara.__file__).resolve().parent
    for candidate in (package / "sql", package.parent / "sql"):
        if (candidate / "queries").is_dir():
            return candidate
    raise SqlFileError(f"no SQL files beside {package}: the installation is incomplete")


class Queries(Mapping[str, str]):
    """The statements of one group: `Queries("sched")["claim_agents"]` is SQL text ready for the driver."""

    def __init__(self, group: str, *, root: Path | None = None) -> None:
        path = (sql_root() if root is None else root) / "queries" / f"{group}.sql"
        if not path.is_file():
            raise SqlFileError(f"no query file {path.name}")
        self._group = group
        self._queries = parse_queries(group, path.read_text(encoding="utf-8"))

    def __getitem__(self, name: str) -> str:
        try:
            return self._queries[name].text
        except KeyError:
            raise SqlFileError(f"no query {self._group}.{name}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._queries

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)

    def describe(self, name: str) -> Query:
        """Return the query with its description and index, for contract tests and `doctor`."""
        if name not in self._queries:
            raise SqlFileError(f"no query {self._group}.{name}")
        return self._queries[name]


def query_groups(root: Path | None = None) -> tuple[str, ...]:
    """Return the names of all query files, sorted."""
    base = sql_root() if root is None else root
    return tuple(sorted(path.stem for path in (base / "queries").glob("*.sql")))


def parse_queries(group: str, source: str) -> dict[str, Query]:
    """Split a query file into its statements.

    Raises `SqlFileError` on a duplicate or odd name, text before the first name, a statement that is missing, and
    two statements under one name.
    """
    found: dict[str, Query] = {}
    name: str | None = None
    lines: list[str] = []
    for line in [*source.splitlines(), "-- name: end_of_file_"]:
        match = _NAME.match(line)
        if match is None:
            lines.append(line)
            continue
        if name is not None:
            if name in found:
                raise SqlFileError(f"query {group}.{name} is there twice")
            found[name] = _make_query(group, name, lines)
        elif any(text.strip() and not text.startswith("--") for text in lines):
            raise SqlFileError(f"{group}.sql has a statement before its first name")
        name, lines = match["name"], []
    return found


def _make_query(group: str, name: str, lines: list[str]) -> Query:
    if not _IDENTIFIER.fullmatch(name):
        raise SqlFileError(f"query name {group}.{name} is not a lower-case identifier")
    head = 0
    while head < len(lines) and (lines[head].startswith("--") or not lines[head].strip()):
        head += 1
    notes = [line.removeprefix("--").strip().partition("Index:") for line in lines[:head] if line.startswith("--")]
    description = " ".join(text.strip() for text, _, _ in notes if text.strip())
    index = "; ".join(names.strip().rstrip(".") for _, _, names in notes if names.strip())
    statements = split_statements("\n".join(lines[head:]))
    if len(statements) != 1:
        raise SqlFileError(f"query {group}.{name} has {len(statements)} statements, not one")
    return Query(name, description, index, f"/* {group}.{name} */ {statements[0]}")


def split_statements(source: str) -> list[str]:
    """Split SQL at its semicolons, leaving those in strings, comments and dollar quotes alone.

    Pieces that hold nothing but comments and blanks are left out.
    """
    pieces: list[list[str]] = [[]]
    meaningful = [False]
    for match in _TOKEN.finditer(source):
        token = match.group()
        if token == ";":  # noqa: S105 - a piece of SQL, not a credential
            pieces.append([])
            meaningful.append(False)
            continue
        pieces[-1].append(token)
        if token.strip() and not token.startswith(("--", "/*")):
            meaningful[-1] = True
    return ["".join(piece).strip() for piece, real in zip(pieces, meaningful, strict=True) if real]
