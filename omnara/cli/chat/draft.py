"""An answer from its first delta to its event: what may be printed now, and what was printed already.

Deltas are a preview that can break off: a killed server asks the model again, a dropped frame leaves a hole. Whatever
happens, each character of the saved answer is printed exactly once, unless another attempt says something else; then a
`Restart` tells the reader that what stands above is void.
"""

from __future__ import annotations

import msgspec

from omnara.cli.chat.blocks import whole_blocks
from omnara.client import Delta, Event

__all__ = ["Draft", "Piece", "Restart", "answer_text"]


class Piece(msgspec.Struct, frozen=True):
    """Markdown source of one or more whole blocks, to be printed now."""

    source: str


class Restart(msgspec.Struct, frozen=True):
    """What was printed of this answer does not count; it begins again."""


_SEPARATOR = "\n\n"


def answer_text(event: Event) -> str:
    """Return the text of a model output, its blocks as paragraphs."""
    texts = [str(block.get("text", "")) for block in event.content_blocks if block.get("type") == "text"]
    return _SEPARATOR.join(text for text in texts if text)


class Draft:
    """The answer that is being written. Feed it all deltas and outputs in the order of the stream."""

    def __init__(self) -> None:
        self._printed = ""
        self._call = ""
        self._next_seq = 1
        self._block = -1
        self._text = ""
        self._whole = 0
        self.doing = ""
        """What the model does while it writes no text: `thinking` or `calling NAME`."""

    @property
    def open_text(self) -> str:
        """The part of the answer that is not printed yet, for a live view."""
        return self._text[len(self._printed) :] if self._text.startswith(self._printed) else ""

    def delta(self, delta: Delta) -> list[Piece | Restart]:
        """Take a delta; return what it completes. A hole in the numbering ends the preview of that attempt."""
        if delta.model_call_context_id != self._call:
            self._call, self._next_seq, self._block = delta.model_call_context_id, 1, -1
            self._text, self._whole, self.doing = "", 0, ""
        if delta.seq != self._next_seq:
            self.doing = "writing" if self._next_seq > 0 else ""
            return []
        self._next_seq += 1
        self._note(delta.event)
        text = delta.event.get("delta")
        if delta.event.get("kind") != "text_delta" or not isinstance(text, str) or not text:
            return []
        index = delta.event.get("block_index", 0)
        if index != self._block and self._text:
            self._text += _SEPARATOR
        self._block = index
        self._text += text
        self._whole = whole_blocks(self._text, self._whole)
        return self._advance(self._whole)

    def saved(self, event: Event) -> list[Piece | Restart]:
        """Take the saved output; return what of it is still unprinted. The draft is empty afterwards."""
        self._text = answer_text(event)
        pieces = self._advance(len(self._text), final=True)
        self.clear()
        return pieces

    def abandoned(self) -> list[Piece | Restart]:
        """Return what was shown but not printed of an answer that will not be saved. The draft is empty afterwards."""
        rest = self.open_text
        self.clear()
        return [Piece(rest)] if rest.strip() else []

    def clear(self) -> None:
        """Forget the answer."""
        self._printed = self._text = ""
        self._whole = 0
        # The attempt stays known: late deltas of it must not look like the beginning of another one.
        self._next_seq = -1
        self.doing = ""

    def _advance(self, end: int, *, final: bool = False) -> list[Piece | Restart]:
        pieces: list[Piece | Restart] = []
        if self._contradicts(final=final):
            pieces.append(Restart())
            self._printed = ""
        if end > len(self._printed):
            source = self._text[len(self._printed) : end]
            if source.strip():
                self._printed = self._text[:end]
                pieces.append(Piece(source))
        return pieces

    def _contradicts(self, *, final: bool) -> bool:
        """Whether the text is another one than the printed beginning. Blanks at its end make no difference."""
        common = min(len(self._printed), len(self._text))
        rest = self._printed[common:]
        return self._printed[:common] != self._text[:common] or (final and bool(rest.strip()))

    def _note(self, event: dict[str, object]) -> None:
        if event.get("kind") != "block_start":
            return
        block = event.get("block")
        kind = block.get("kind") if isinstance(block, dict) else None
        if kind == "tool_use" and isinstance(block, dict):
            self.doing = f"calling {block.get('tool_name', 'a tool')}"
        else:
            self.doing = "thinking" if kind == "thinking" else ""
