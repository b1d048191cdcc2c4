"""The values of a config's document, checked one by one; every fault is kept with its path.

Source: api.md §9 (sorted path-message pairs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from omnara.domain.config_source import join_path
from omnara.domain.text import is_blank

MAX_SHOWN: Final = 50
"""Faults listed in one answer; the rest is counted."""


class Problem(msgspec.Struct, frozen=True, order=True):
    """A fault and where it is (dotted path, empty for the document)."""

    path: str
    message: str


def describe(problems: Iterable[Problem]) -> str:
    """Return the faults as one line, sorted by path and message."""
    ordered = sorted(set(problems))
    shown = "; ".join(f"{p.path}: {p.message}" if p.path else p.message for p in ordered[:MAX_SHOWN])
    return shown if len(ordered) <= MAX_SHOWN else f"{shown}; and {len(ordered) - MAX_SHOWN} more"


class Values:
    """Collects the faults of the values that are taken from a document; a value with a fault is None."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def text(self, mapping: Mapping[str, Any], key: str, path: str, longest: int) -> str | None:
        """A text that must be there, not blank, and at most `longest` characters."""
        value = mapping.get(key)
        where = join_path(path, key)
        if value is None:
            self.fault(where, "is required")
        elif not isinstance(value, str):
            self.fault(where, "must be text")
        elif is_blank(value):
            self.fault(where, "must not be blank")
        elif len(value) > longest:
            self.fault(where, f"must not be longer than {longest} characters")
        else:
            return value
        return None

    def positive(self, mapping: Mapping[str, Any], key: str, path: str) -> int | None:
        """A positive whole number, or None when it is not there."""
        value = mapping.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            self.fault(join_path(path, key), "must be a positive whole number below 2147483648")
            return None
        return value

    def number(self, mapping: Mapping[str, Any], key: str, low: int, high: int) -> float | None:
        """A number within bounds, or None when it is not there."""
        value = mapping.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            self.fault(key, f"must be a number from {low} to {high}")
            return None
        return float(value)

    def known_keys(self, mapping: Mapping[str, Any], known: frozenset[str], path: str) -> None:
        """Nothing but these keys."""
        for key in mapping:
            if key not in known:
                self.fault(join_path(path, key), "is not a known field")

    def fault(self, path: str, message: str) -> None:
        """Note a fault."""
        self.problems.append(Problem(path, message))
