"""How deeply JSON is nested, asked without decoding it: decoders give up at a depth that depends on who calls them.

What one of them just took, the next may refuse, and then it is in the log already.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["nested_deeper"]

_NO_STRUCTURE: Final = re.compile(r'"(?:[^"\\]+|\\.?)*+"?|[^"\[\]{}]++', re.DOTALL)
"""Strings, one without an end too, and all else but brackets. It never gives up on a quote, so it is linear."""

_EMPTY: Final = re.compile(r"\[\]|\{\}")


def nested_deeper(text: str, levels: int) -> bool:
    """Whether a JSON text has more than so many levels. False for brackets that do not match: that is no JSON."""
    if text.count("[") + text.count("{") <= levels:
        return False
    rest = _NO_STRUCTURE.sub("", text)
    for _ in range(levels):
        # Peels off the innermost level: a few passes over a text that only gets shorter.
        peeled = _EMPTY.sub("", rest)
        if len(peeled) == len(rest):
            return False
        rest = peeled
    return bool(rest)
