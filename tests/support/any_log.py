"""Logs as no engine would write them: what a fold must survive, since a damaged log is read all the same."""

from __future__ import annotations

from hypothesis import strategies as st

from omnara.domain.content import TextBlock, ToolCallBlock
from omnara.domain.events import EventMeta
from tests.support.agent_log import Log, call_block

Void = list[tuple[int, int]]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Any order of events, sensible or not: calls answered in any order, twice, late or never."""
    log = Log()
    calls: list[ToolCallBlock] = []
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["user", "blank", "text", "calls", "result", "config", "cancel", "error", "empty"]))
        if kind == "user":
            log.user(draw(st.sampled_from(["hi", "more"])))
        elif kind == "blank":
            log.user(" ")
        elif kind in ("text", "calls"):
            new = [call_block() for _ in range(draw(st.integers(1, 3)))] if kind == "calls" else []
            calls += new
            seen = draw(st.integers(max(0, log.last - 2), log.last))
            log.output(TextBlock("said"), *new, meta=EventMeta(frontier=seen))
        elif kind == "result" and calls:
            log.result(draw(st.sampled_from(calls)).tool_call_id, TextBlock("R"))
        elif kind == "config":
            log.config_change()
        elif kind == "cancel":
            log.cancel()
        elif kind == "error":
            log.error("no")
        else:
            log.output(TextBlock(""))
    return log


voids = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 14)).map(lambda ends: (min(ends), max(ends))), max_size=2)
