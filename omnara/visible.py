"""Text of others on a terminal: what a model, a tool or a caller wrote must be read, never obeyed.

A terminal takes commands inside the text it shows: it can be made to write the clipboard, hide lines or show rows that
are not there. So everything that comes from a server passes here before it is printed.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["visible", "visible_json"]

_COMMANDS: Final = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
"""C0 and C1 controls, DEL, line and paragraph separators, marks that reorder text, halves of surrogate pairs."""

_INVISIBLE: Final = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2060-\u2065\u206a-\u206f\u3164\ufeff"
    "\uffa0\ufff9-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Characters without a shape of their own: with them two names look the same that are not."""

_JOINERS: Final = "\u200c\u200d\ufe00-\ufe0f"
"""They shape what stands before them, in emoji and in scripts such as Persian or Hindi; after Latin letters, digits,
Greek and Cyrillic they only hide."""

_ANY: Final = re.compile(f"[{_COMMANDS}]")
_IN_NAMES: Final = re.compile(f"[{_COMMANDS}{_INVISIBLE}]|(?<![\u0600-\u1fff\u2070-\U0010ffff])[{_JOINERS}]")
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str, *, lines: bool = False) -> str:
    """Return `text` with everything that a terminal would obey spelled out, as in `\\x1b`, and what nobody could see.

    `lines`: line breaks and tabs stay, for text that is meant to have several lines; so does what only cannot be seen,
    since such a text is no name that is compared with another.
    """
    return (_ANY if lines else _IN_NAMES).sub(
        lambda found: found[0] if lines and found[0] in "\n\t" else _spelled(found[0]), text
    )


def visible_json(text: str) -> str:
    """Return formatted JSON with the same characters as JSON escapes: the value stays what it is."""
    return _ANY.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def _spelled(character: str) -> str:
    code = ord(character)
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return _NAMED.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
