"""Names that people give to things: what every list, log and terminal can show. Source: api.md §7 (name filters)."""

from __future__ import annotations

from typing import Final

from omnara.domain.text import clean_text, has_controls
from omnara.errors import InvalidRequest

MAX_NAME_CHARS: Final = 256
"""As for agents."""


def checked_name(text: str, *, field: str = "name") -> str:
    """Return a name as it is stored. Raises InvalidRequest for one that is blank, padded, too long or has controls."""
    if has_controls(text):
        raise InvalidRequest(f"{field} must not have control characters or line breaks")
    name = clean_text(text)
    if not name.strip():
        raise InvalidRequest(f"{field} must not be blank")
    if name != name.strip():
        raise InvalidRequest(f"{field} must not begin or end with blanks")
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{field} must not be longer than {MAX_NAME_CHARS} characters")
    return name
