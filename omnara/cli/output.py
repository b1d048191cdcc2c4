"""How commands print: a table for people, JSON for programs, and coroutines run to their end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import click
import msgspec

from omnara.visible import visible, visible_json

__all__ = ["json_option", "print_json", "print_line", "print_table", "run"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """Add `--json` to a command, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(command)


def print_json(value: Any) -> None:
    """Print `value` as indented JSON on standard output; Structs, UUIDs and times included."""
    click.echo(visible_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()))


def print_line(text: str, *, lines: bool = False, err: bool = False) -> None:
    """Print text that others may have written, harmless to a terminal; line breaks in it only with `lines`."""
    click.echo(visible(text, lines=lines), err=err)


def print_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], *, empty: str) -> None:
    """Print rows under their columns, or the sentence `empty`. Ids are never cut, whatever the width.

    Into a file or a pipe, each row is one line with tabs between its cells.
    """
    if not rows:
        print_line(empty)
        return
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, cells)
        return
    for line in (columns, *cells):
        click.echo("\t".join(line))


def _draw(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Draw a table that fits the terminal. Cells are no markup: `[bold]` in a name is part of the name."""
    # Imported here: rich takes longer to load than most commands run.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "id")
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    Console().print(table)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.isoformat(sep=" ", timespec="seconds") if hasattr(value, "isoformat") else visible(str(value))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in an event loop of its own, on uvloop. SIGTERM cancels it, as Ctrl-C does."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_cancelled_by_sigterm(work))


async def _cancelled_by_sigterm(work: Coroutine[Any, Any, T]) -> T:
    """Cancel this task at SIGTERM, so that what a command has started is cleaned up."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        raise click.Abort from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
