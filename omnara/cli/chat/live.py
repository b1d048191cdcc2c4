"""The lines above the input that change all the time: the open part of an answer, what is on its way, the help line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from prompt_toolkit.formatted_text import StyleAndTextTuples
from rich.cells import cell_len, set_cell_size

from omnara.cli.chat.attach import Attachment
from omnara.cli.chat.outbox import Message
from omnara.cli.chat.screen import tail
from omnara.visible import visible

__all__ = ["Bar", "live_view"]

SHOWN_WAITING: Final = 3
_BETWEEN: Final = " · "
_HELP: Final = " · /help"


class Bar(msgspec.Struct, frozen=True):
    """What the help line depends on."""

    working: bool
    status: str
    stopping: bool
    away: bool
    hint: str
    doing: str
    taken: frozenset[str] = frozenset()

    def text(self, width: int) -> str:
        """Return the help line: what is going on, and which keys do what now; the more important first, if room is."""
        first, *others = self._items()
        line = _cut(first, width - len(_HELP))
        for item in others:
            if cell_len(line) + cell_len(item) + len(_BETWEEN) + len(_HELP) <= width:
                line += _BETWEEN + item
        return line + _HELP

    def _items(self) -> list[str]:
        if self.away:
            return ["no connection, trying again", "what you send waits"]
        if self.stopping:
            return ["stopping", "Ctrl-C again leaves"]
        if self.hint:
            return [self.hint]
        held = self.status if self.status in ("paused", "pausing", "crashed") else ""
        if self.working:
            return [held or self.doing or "working", "Enter queues", "Alt-Enter steers", "Ctrl-C stops"]
        return [*([held] if held else []), "Enter sends", "/attach FILE", "Ctrl-D leaves"]


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
    rows.append(("fg:ansibrightblack", _row(f"─ {bar.text(room - 2)}", room)))
    return rows


def _on_its_way(message: Message, bar: Bar) -> str:
    if message.key not in bar.taken:
        return "waits for the server" if bar.away else "sending"
    return "steering" if message.steering else "queued"


def _row(text: str, width: int) -> str:
    """Return one row: cut with an ellipsis if it is wider than `width` columns, and with its line break."""
    return _cut(visible(text.replace("\n", " ")), width) + "\n"


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"
