"""The lines above the input that change all the time: the open part of an answer, what is on its way, the help line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from prompt_toolkit.formatted_text import StyleAndTextTuples
from rich.cells import set_cell_size

from omnara.cli.chat.attach import Attachment
from omnara.cli.chat.outbox import Message
from omnara.cli.chat.screen import tail
from omnara.visible import visible

__all__ = ["Bar", "live_view"]

SHOWN_WAITING: Final = 3


class Bar(msgspec.Struct, frozen=True):
    """What the help line depends on."""

    working: bool
    status: str
    stopping: bool
    away: bool
    hint: str
    doing: str

    @property
    def text(self) -> str:
        """The help line: what is going on, and which keys do what now."""
        if self.away:
            return "no connection, trying again · what you send waits · /quit leaves"
        if self.stopping:
            return "stopping · Ctrl-C again leaves"
        if self.hint:
            return f"{self.hint} · /help"
        if self.working:
            state = self.doing or (self.status if self.status in ("paused", "pausing", "crashed") else "working")
            return f"{state} · Enter queues · Alt-Enter steers · Ctrl-C stops · /help"
        held = f"{self.status} · " if self.status in ("paused", "pausing", "crashed") else ""
        return f"{held}Enter sends · /attach FILE · /help · Ctrl-D leaves"


def live_view(
    bar: Bar, open_text: str, waiting: Sequence[Message], attached: Sequence[Attachment], width: int
) -> StyleAndTextTuples:
    """Return the live lines for a terminal of `width` columns, each with its line break."""
    room = width - 1
    rows: StyleAndTextTuples = [("", f"{row}\n") for row in tail(open_text, room)] if open_text.strip() else []
    for message in waiting[:SHOWN_WAITING]:
        rows.append(("fg:ansicyan", _row(f"  {_on_its_way(message, bar)}: {message.text}", room)))
    if len(waiting) > SHOWN_WAITING:
        rows.append(("fg:ansicyan", _row(f"  … and {len(waiting) - SHOWN_WAITING} more", room)))
    if attached:
        names = ", ".join(f"{attachment.name} ({attachment.size:,} bytes)" for attachment in attached)
        rows.append(("fg:ansimagenta", _row(f"  attached: {names}", room)))
    rows.append(("fg:ansibrightblack", _row(f"─ {bar.text}", room)))
    return rows


def _on_its_way(message: Message, bar: Bar) -> str:
    if bar.away:
        return "waits for the server"
    if message.steering:
        return "steering"
    return "queued" if bar.working else "sending"


def _row(text: str, width: int) -> str:
    """Return one row: cut with an ellipsis if it is wider than `width` columns, and with its line break."""
    line = visible(" ".join(text.split(" ")).replace("\n", " "))
    cut = set_cell_size(line, width - 1).rstrip()
    return f"{line}\n" if cut == line.rstrip() else f"{cut}…\n"
