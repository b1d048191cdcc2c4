"""After the contest: does Postgres agree with what was counted, and does every invariant hold?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from omnara.db.checks import run_checks
from omnara.db.connection import ConnectSettings, ConnKind, connect

__all__ = ["Counted", "double_executions", "look", "wrong_with"]


class Counted(msgspec.Struct, frozen=True):
    """What the database holds: steps that ended well, steps by state otherwise, checks that are broken."""

    succeeded: int
    others: dict[str, int]
    broken: list[str]


async def look(dsn: str) -> Counted:
    """Count the journal and run `sql/checks`."""
    conn = await connect(ConnectSettings(dsn=dsn), ConnKind.ADMIN)
    try:
        rows = await conn.fetch("select state, count(*) from steps group by state")
        states = {row[0]: int(row[1]) for row in rows}
        checks = await run_checks(conn)
    finally:
        await conn.close()
    broken = [f"{check.name}: {check.broken[0]}" for check in checks if check.broken]
    return Counted(states.pop("succeeded", 0), states, broken)


def wrong_with(name: str, counted: Counted, saved: int) -> list[str]:
    """Return what must not be: steps counted that are not saved or the other way round, broken invariants."""
    wrong = [f"{name}: {text}" for text in counted.broken]
    if counted.succeeded != saved:
        wrong.append(f"{name}: {saved} steps were counted and {counted.succeeded} are in Postgres")
    if counted.others:
        wrong.append(f"{name}: steps that did not succeed: {counted.others}")
    return wrong


def double_executions(ledgers: Iterable[Path]) -> tuple[int, int]:
    """Return how many executions the ledgers hold in all, and how many were of a step that had been executed."""
    seen: set[str] = set()
    total = 0
    for path in ledgers:
        with path.open(encoding="ascii") as lines:
            for line in lines:
                total += 1
                seen.add(line)
    return total, total - len(seen)
