"""Runs `sql/checks/`: queries that must return no row, one for each invariant that a query can see.

Used by `omnara doctor`, and by every test that kills something.
"""

from __future__ import annotations

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import sql_root


class CheckResult(msgspec.Struct, frozen=True):
    """One check: its file's name, what it says must hold, and the first rows that break it as text."""

    name: str
    meaning: str
    broken: tuple[str, ...]


async def run_checks(connection: Connection, *, shown: int = 5) -> list[CheckResult]:
    """Run every check in order of name. Reads whole tables: for tests, doctors and operators, not for a timer."""
    results = []
    for path in sorted((sql_root() / "checks").glob("*.sql")):
        text = path.read_text(encoding="utf-8")
        meaning = " ".join(line.removeprefix("--").strip() for line in text.splitlines() if line.startswith("--"))
        rows = await connection.fetch(text)
        results.append(CheckResult(path.stem, meaning, tuple(str(dict(row)) for row in rows[:shown])))
    return results
