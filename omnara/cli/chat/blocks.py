"""Where a Markdown text that is still being written may be cut: after blocks that no later word can change.

A finished block is rendered once and scrolls away; only the open one is shown as it grows. So formatted text needs no
second printing.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["whole_blocks"]

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")


def whole_blocks(text: str, start: int = 0) -> int:
    """Return the place up to which `text` consists of whole blocks; `start` is such a place found earlier.

    A block ends at a blank line after which a line without indentation follows, or with the line that closes its
    fence. Blank lines inside a fence, and inside a list whose next line is indented, end nothing.
    """
    done = at = start
    fence = ""
    blank = False
    while at < len(text):
        newline = text.find("\n", at)
        complete = newline >= 0
        line = text[at : newline if complete else len(text)]
        end = newline + 1 if complete else len(text)
        if fence:
            if complete and _closes(line, fence):
                fence, done = "", end
        elif not line.strip():
            blank = True
        else:
            if blank and not line[0].isspace():
                done = at
            blank = False
            opening = _FENCE.match(line)
            if opening and complete:
                fence = opening[1]
        at = end
    return done


def _closes(line: str, fence: str) -> bool:
    """Whether a line ends a fence: the same character at least as often, and nothing else."""
    mark = line.strip()
    return len(mark) >= len(fence) and not mark.strip(fence[0])
