"""What the demo shows: a line per event as it happens, and a table at the end."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from omnara.cli.agents import value_words
from omnara.cli.demo.commands import Commands
from omnara.cli.demo.verdict import Verdict
from omnara.client import Event
from omnara.clock import monotonic
from omnara.visible import visible

__all__ = ["Show"]


class Show:
    """Prints to standard output, or nothing at all when `silent` (then the JSON object is the only output)."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        # Into a file or a pipe, lines are as long as on a roomy screen.
        self._console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
        self._begun = monotonic()

    def say(self, text: str, style: str = "") -> None:
        """Print a line with the seconds since the start."""
        if not self._silent:
            line = Text.assemble((f"{monotonic() - self._begun:7.2f}", "dim"), "  ", (visible(text), style))
            self._console.print(line, no_wrap=True, overflow="ellipsis")

    def event(self, event: Event) -> None:
        """Print a durable event."""
        self.say(f"{event.sequence:>4}  {_describe(event)}", _STYLES.get(event.kind, ""))

    async def ask(self, question: str, options: list[str]) -> int:
        """Put a question to the user; without a terminal, or when silent, the first option is chosen."""
        if self._silent or not sys.stdin.isatty():
            self.say(f"      answered by itself: {question} → {options[0]}", "cyan")
            return 0
        listed = ", ".join(f"{number}: {option}" for number, option in enumerate(options, 1))
        while True:
            self._console.print(Text(visible(f"{question} ({listed}) ")), end="")
            answer = (await _line()).strip()
            if not answer:
                return 0
            if answer.isdigit() and 1 <= int(answer) <= len(options):
                return int(answer) - 1

    def verdict(self, verdict: Verdict) -> None:
        """Print the closing table."""
        if self._silent:
            return
        table = Table(title="Counted from outside the server", title_justify="left", show_header=False)
        rows = [
            ("killed (SIGKILL, whole process group)", verdict.killed),
            ("report against the files on disk", _mark(verdict.report_matches_disk, f"{verdict.files} files match")),
            ("steps saved", str(verdict.steps_saved)),
            ("finished steps repeated", _mark(not verdict.steps_repeated, str(verdict.steps_repeated))),
            ("steps lost", _mark(not verdict.steps_lost, str(verdict.steps_lost))),
            ("model requests, repeated by the kill", _model(verdict)),
            ("fetches of the page", _mark(verdict.page_hits == 1, str(verdict.page_hits))),
            ("gaps and duplicates in the log", f"{verdict.log_gaps} and {verdict.duplicate_results}"),
            ("kill → next step started", f"{verdict.recovery_s:.2f} s, new process included"),
            ("kill → new process ready", f"{verdict.restart_s:.2f} s"),
        ]
        if verdict.commands is not None:
            rows[2:2] = _commands(verdict.commands)
        for name, value in rows:
            table.add_row(name, value)
        self._console.print(table)
        for problem in verdict.problems:
            self._console.print(Text.assemble(("wrong:", "red"), " ", visible(problem)))
        if verdict.ok:
            machine = "" if verdict.commands is None else f" --machine {verdict.commands.machine}"
            self._console.print(f"[green]All is right.[/] The same again: omnara demo{machine} --seed {verdict.seed}")


_STYLES = {"model_output": "green", "tool_result": "blue", "agent_input": "magenta"}


def _describe(event: Event) -> str:
    text = " ".join(event.text.split())[:200]
    if event.kind == "model_output":
        calls = Counter(str(call["name"]) for call in event.tool_calls)
        names = ", ".join(f"{name} × {count}" if count > 1 else name for name, count in calls.items())
        return f"model    {text}{'  → ' + names if names else ''}"
    if event.kind == "tool_result":
        return f"result   {event.outcome}: {text or value_words(event)}"
    return f"{_INPUTS.get(event.input_kind or '', event.kind):<8} {text}"


_INPUTS = {"content": "message", "config_change": "config", "interaction_response": "answer", "control": "control"}


def _commands(commands: Commands) -> list[tuple[str, str]]:
    rows = [
        ("commands by the ledger on the machine", f"{commands.asked} ({commands.machine})"),
        ("commands that ran again", _mark(not commands.repeated, str(commands.repeated))),
        ("commands lost", _mark(not commands.lost, str(commands.lost))),
        ("left of the machine", _mark(not commands.left, ", ".join(commands.left) or "nothing")),
    ]
    if commands.not_started:
        rows.insert(3, ("handed over, never begun, and so told", str(commands.not_started)))
    return rows


def _model(verdict: Verdict) -> str:
    if verdict.model_requests is None:
        return "not visible with a real provider"
    return f"{verdict.model_requests}, {verdict.model_calls_retried}"


def _mark(good: bool, text: str) -> str:
    return f"[green]{escape(text)}[/]" if good else f"[red]{escape(text)}[/]"


async def _line() -> str:
    """Read a line from the terminal without a thread, so that Ctrl-C still ends the demo at once."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(sys.stdin, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(sys.stdin)
    return sys.stdin.readline()
