"""What came of it, counted from outside the server: nothing here believes what the server says about itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from omnara.cli.demo.commands import Commands
from omnara.cli.demo.database import Database
from omnara.cli.demo.hands import Hands, report_in
from omnara.cli.demo.plan import CommandPlan, KillPlan
from omnara.client import Event
from omnara.db.demo import LogFaults
from omnara.domain.content import INTERRUPTED_TEXT

__all__ = ["Blow", "Requests", "Verdict", "judge"]


class Blow(msgspec.Struct, frozen=True):
    """The kill, as seen from outside. Times in seconds; `events` are those streamed before it, sequence and id."""

    events: dict[int, str]
    outputs: int
    requests: int
    recovery_s: float
    restart_s: float


class Requests(msgspec.Struct, frozen=True):
    """The model server's log: how many requests came, and of those after the kill the turns that they asked for."""

    total: int
    turns_after: tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result as one object. `problems` is empty when all is right; `commands` is there with --machine."""

    ok: bool
    seed: int
    killed: str
    point: str
    files: int
    bytes: int
    report_matches_disk: bool
    steps_saved: int
    steps_repeated: int
    steps_lost: int
    model_requests: int | None
    model_calls_retried: int | None
    page_hits: int
    page_interrupted: bool
    log_gaps: int
    duplicate_results: int
    stream_reconnects: int
    recovery_s: float
    restart_s: float
    total_s: float
    problems: list[str]
    commands: Commands | None = None


class Facts(msgspec.Struct, frozen=True):
    """What was counted. `lost` are events that were shown before the kill and are gone or changed."""

    matches: bool
    page_hits: int
    repeated: int
    lost: int
    retried: int | None
    interrupted: bool
    stop_code: int


def judge(
    plan: KillPlan | CommandPlan,
    blow: Blow,
    hands: Hands,
    *,
    expected: dict[str, Any],
    requests: Requests | None,
    page_hits: int,
    database: Database,
    stop_code: int,
    total_s: float,
    commands: Commands | None = None,
) -> Verdict:
    """Compare everything with everything. `requests` is None with a real provider, whose log nobody can see."""
    matches = _same_report(report_in(hands.events[-1]), expected)
    facts = _count(blow, hands, requests, database, page_hits, matches, stop_code)
    found = [*_problems(plan, facts, database.faults), *(() if commands is None else commands.problems())]
    return Verdict(
        ok=not found,
        seed=plan.seed,
        killed=plan.description,
        point=plan.point,
        files=expected["count"],
        bytes=expected["bytes"],
        report_matches_disk=matches,
        steps_saved=sum(count.steps for count in database.steps if count.state == "succeeded"),
        steps_repeated=facts.repeated,
        steps_lost=facts.lost + database.faults.gaps,
        model_requests=None if requests is None else requests.total,
        model_calls_retried=facts.retried,
        page_hits=page_hits,
        page_interrupted=facts.interrupted,
        log_gaps=database.faults.gaps,
        duplicate_results=database.faults.duplicate_results,
        stream_reconnects=hands.reconnects,
        recovery_s=round(blow.recovery_s, 3),
        restart_s=round(blow.restart_s, 3),
        total_s=round(total_s, 3),
        problems=found,
        commands=commands,
    )


def _count(
    blow: Blow, hands: Hands, requests: Requests | None, database: Database, page_hits: int, matches: bool, code: int
) -> Facts:
    return Facts(
        matches=matches,
        page_hits=page_hits,
        repeated=_repeated(blow, hands, requests, page_hits, database),
        lost=sum(database.ids.get(number) != key for number, key in blow.events.items()),
        retried=None if requests is None else requests.total - hands.outputs,
        interrupted=_interrupted(hands.events),
        stop_code=code,
    )


def _problems(plan: KillPlan | CommandPlan, facts: Facts, faults: LogFaults) -> Iterator[str]:
    """Yield a sentence for everything that is not as promised."""
    if not facts.matches:
        yield "the report differs from the files on disk"
    # The save that was cut may have begun the fetch: a call that never reached its page is told as interrupted, too.
    if facts.page_hits != 1 and not (facts.page_hits == 0 and facts.interrupted):
        yield f"the page was fetched {facts.page_hits} times instead of once"
    if facts.repeated:
        yield f"{facts.repeated} finished steps ran again"
    if facts.lost:
        yield f"{facts.lost} events that were shown before the kill are gone or changed"
    if faults.gaps or faults.duplicate_results:
        yield f"the log has {faults.gaps} gaps, and {faults.duplicate_results} calls have two results"
    if facts.retried is not None and not 0 <= facts.retried <= 1:
        yield f"{facts.retried} model calls were repeated; one kill explains one"
    if facts.interrupted and (plan.point == "mid_stream" or isinstance(plan, CommandPlan)):
        yield "a tool call was interrupted that nobody had interrupted"
    if plan.point == "tool_started" and not facts.interrupted:
        yield "the killed tool call does not say that it was interrupted"
    if facts.stop_code:
        yield f"the server ended with code {facts.stop_code} instead of 0"


def _repeated(blow: Blow, hands: Hands, requests: Requests | None, page_hits: int, database: Database) -> int:
    """Finished steps that ran again: asked of the model, fetched, handed to the client or saved a second time."""
    asked = 0 if requests is None else sum(turn < blow.outputs for turn in requests.turns_after)
    handed = sum(count - 1 for count in hands.executed.values())
    saved = sum(count.shared_outputs for count in database.steps if count.state == "succeeded")
    return asked + handed + saved + max(0, page_hits - 1)


def _interrupted(events: list[Event]) -> bool:
    return any(event.kind == "tool_result" and INTERRUPTED_TEXT in str(event.content_blocks) for event in events)


def _same_report(report: dict[str, Any] | None, expected: dict[str, Any]) -> bool:
    if report is None or not isinstance(report.get("files"), list):
        return False
    try:
        files = {entry["path"]: _facts(entry) for entry in report["files"]}
    except (TypeError, KeyError, AttributeError):
        return False
    wanted = {entry["path"]: _facts(entry) for entry in expected["files"]}
    return files == wanted and report.get("count") == expected["count"] and report.get("bytes") == expected["bytes"]


def _facts(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["size"], entry["sha256"], entry.get("lines")
