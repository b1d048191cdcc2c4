"""Queries, orders and cursors of resource lists. Source: api.md §7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar

from msgspec import UNSET, Meta, UnsetType

from omnara.api.cursors import Binding, Position
from omnara.api.omnara.decode import PageQuery, given
from omnara.api.omnara.types.scalars import CreatedResourceListSort, ResourceListSort
from omnara.db.listing import ListOrder
from omnara.engine.reads import glob_pattern

T = TypeVar("T")

NameFilter = Annotated[str, Meta(min_length=1, max_length=200)]
_FIELDS: Final[dict[str, Any]] = {"name": "name", "created_at": "created_at", "updated_at": "updated_at"}


class ResourceQuery(PageQuery, frozen=True, kw_only=True):
    """Filter and order of a resource list."""

    name: NameFilter | UnsetType = UNSET
    sort: ResourceListSort = "-created_at"


class CreatedQuery(PageQuery, frozen=True, kw_only=True):
    """Filter and order of a list of things that never change."""

    name: NameFilter | UnsetType = UNSET
    sort: CreatedResourceListSort = "-created_at"


class ResourceList:
    """One request for a page: its order for the database, and the cursor after what came back.

    `parts` are the scope and further filters that a cursor is bound to. Raises InvalidRequest for a bad cursor or glob.
    """

    def __init__(self, name: str, query: ResourceQuery | CreatedQuery, *parts: str | None) -> None:
        glob, cursor = given(query.name), given(query.cursor)
        self._binding = Binding(name, (*parts, glob, query.sort))
        self._limit = query.limit
        position = None if cursor is None else self._binding.decode(cursor)
        self.order = ListOrder(
            field=_FIELDS[query.sort.removeprefix("-")],
            descending=query.sort.startswith("-"),
            pattern=None if glob is None else glob_pattern(glob),
            after=None if position is None else (position.key, position.id),
            limit=query.limit,
        )

    def page(self, rows: Sequence[T]) -> Sequence[T]:
        """Return the rows that belong on the page."""
        return rows[: self._limit]

    def next_cursor(self, rows: Sequence[tuple[Any, ...]]) -> str | None:
        """Return the cursor after the page; each row is (sort value, item with an `id`, …). None on the last page."""
        if len(rows) <= self._limit:
            return None
        key, item = rows[self._limit - 1][:2]
        return self._binding.encode(Position(key, _id_of(item)))


def _id_of(item: Any) -> Any:
    return item.id if hasattr(item, "id") else item.row.id
