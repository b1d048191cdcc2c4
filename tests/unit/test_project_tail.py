"""How often the end of a project's log is looked at, and what a database that is slow or away changes about it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime

import pytest

from omnara.api import project_tail
from omnara.api.project_tail import GAP_S, Pace, ProjectTail
from omnara.db.project_log import Here, Mark
from omnara.errors import Unavailable
from omnara.ids import new_uuid
from tests.support.waiting import until


def test_looks_of_a_large_project_are_a_tenth_of_the_time() -> None:
    pace = Pace()
    assert [pace.after(0.5) for _ in range(3)] == [GAP_S, 5.0, 5.0]


def test_one_look_that_took_long_is_followed_by_the_next_at_once() -> None:
    """A database that stood still for four seconds is no large project: streams would be silent for forty."""
    pace = Pace()
    assert [pace.after(took_s) for took_s in (0.001, 4.0, 0.001, 0.001)] == [GAP_S] * 4


async def test_a_look_that_failed_is_made_again_after_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has waited for an answer for as long as an answer may take, which says nothing about the project either."""
    now, looks = 0.0, 0

    async def look(_tail: ProjectTail) -> None:
        nonlocal now, looks
        now += 15.0
        looks += 1
        raise Unavailable("the database is away")

    monkeypatch.setattr(project_tail, "monotonic", lambda: now)
    monkeypatch.setattr(ProjectTail, "look", look)
    here = Here(Mark("1:1:", datetime.now(UTC), "1"), "database")
    tail = ProjectTail(new_uuid(), new_uuid(), lambda: pytest.fail("nothing is read"), here)
    running = asyncio.create_task(tail.run(0.01))
    try:
        await until(lambda: looks >= 4, "it looks again and again", limit_s=20)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
