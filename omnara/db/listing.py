"""Pages of resource lists, which sort by a name or a time in either direction and filter by name.

The sort value travels as text, times to the microsecond, so one statement serves every order and a cursor holds
exactly what the database compares. Source: api.md §7.
"""

from __future__ import annotations

from typing import Literal
from uuid import UUID

import msgspec

SortField = Literal["name", "created_at", "updated_at"]


class ListOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a list, and in which order. `pattern` is an ILIKE pattern, `after` a (sort value, id) key."""

    field: SortField = "created_at"
    descending: bool = True
    pattern: str | None = None
    after: tuple[str, UUID] | None = None
    limit: int = 50

    def values(self) -> tuple[str, bool, str | None, str | None, UUID | None, int]:
        """Return the first six parameters of every list statement; one row more than the page tells if there is one."""
        value, last_id = self.after or (None, None)
        return self.field, self.descending, self.pattern, value, last_id, self.limit + 1
