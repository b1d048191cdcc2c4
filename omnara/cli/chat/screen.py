"""The terminal: a line editor at the bottom, a live view above it, and everything final scrolling away over both.

One `prompt_toolkit` session lives as long as the chat. Output is written where the editor stood, and the editor is
drawn again below it, so nobody's typing is torn apart by an answer. The terminal is never asked where its cursor is:
some do not answer, and the answers of others would end up in the input.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Final

from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import Completer
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle, PromptSession
from rich.cells import chop_cells
from rich.console import Console, Group, RenderableType

from omnara.visible import visible

__all__ = ["Screen", "tail"]

REDRAW_S: Final = 0.03
"""Deltas may come by the thousand; a person sees thirty pictures a second."""
LIVE_LINES: Final = 8
"""Lines of the open part of an answer that are shown while it grows."""
MIN_WIDTH: Final = 20

Live = Callable[[int], StyleAndTextTuples]
"""Returns what stands above the input, at a width in columns; ends with a line break unless empty."""


class Screen:
    """Draws and reads. `on_line(text, steer)` gets each line.

    `on_interrupt(text)` gets each Ctrl-C with the unsent line, and says whether that is to be cleared.
    """

    def __init__(
        self,
        live: Live,
        on_line: Callable[[str, bool], None],
        on_interrupt: Callable[[str], bool],
        completer: Completer | None = None,
    ) -> None:
        self._live = live
        self._on_line = on_line
        self._on_interrupt = on_interrupt
        self._output = create_output()
        if isinstance(self._output, Vt100_Output):
            self._output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            message=self._message,
            key_bindings=self._keys(),
            completer=completer,
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            enable_suspend=True,
            erase_when_done=True,
            output=self._output,
        )
        self._session.app.min_redraw_interval = REDRAW_S
        self._session.default_buffer.accept_handler = self._accept

    @property
    def width(self) -> int:
        """Columns of the terminal now."""
        return max(MIN_WIDTH, self._output.get_size().columns)

    async def run(self) -> None:
        """Edit and draw until `close`. Cancellation restores the terminal."""
        await self._session.prompt_async(handle_sigint=False)

    def close(self) -> None:
        """End `run`."""
        if self._session.app.is_running and not self._session.app.is_done:
            self._session.app.exit(result="")

    def refresh(self) -> None:
        """Draw the live view again, soon."""
        self._session.app.invalidate()

    def show(self, parts: Sequence[RenderableType]) -> None:
        """Print above the editor, for good. May be called at any time, also when the editor is not there."""
        if not parts:
            return
        text = rendered(parts, self.width)
        app = self._session.app
        drawn = app.is_running and not app.is_done
        if drawn:
            app.renderer.erase()
        self._output.write_raw(text.replace("\n", "\r\n"))
        self._output.flush()
        if drawn:
            app.invalidate()

    def _message(self) -> StyleAndTextTuples:
        return [*self._live(self.width), ("class:prompt", "> ")]

    def _accept(self, buffer: Buffer) -> bool:
        self._on_line(buffer.text, False)
        return False

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _steer(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            self._on_line(buffer.text, True)
            buffer.append_to_history()
            buffer.reset()

        @keys.add("c-c")
        @keys.add("<sigint>")
        def _interrupt(event: KeyPressEvent) -> None:
            if self._on_interrupt(event.current_buffer.text):
                event.current_buffer.reset()

        @keys.add("c-d")
        def _leave(event: KeyPressEvent) -> None:
            if not event.current_buffer.text:
                self.close()

        return keys


def rendered(parts: Sequence[RenderableType], width: int) -> str:
    """Return the parts as text for a terminal of `width` columns, colours as the terminal has them."""
    # The last column stays free: a character there makes some terminals add an empty line.
    console = Console(file=io.StringIO(), force_terminal=True, width=width - 1, highlight=False, legacy_windows=False)
    with console.capture() as captured:
        # As a group: texts that are printed by themselves lose what they say about being wrapped.
        console.print(Group(*parts))
    return captured.get()


def tail(text: str, width: int, lines: int = LIVE_LINES) -> list[str]:
    """Return the last `lines` rows of a growing text, folded at `width` columns and harmless to a terminal."""
    rows: list[str] = []
    for line in reversed(visible(text[-(lines + 1) * width :], lines=True).expandtabs(4).split("\n")):
        rows[:0] = chop_cells(line, width) if line else [""]
        if len(rows) >= lines:
            break
    return rows[-lines:]
