"""The kinds of value that a setting can have, and how their text is read.

Apart from `settings` so that the table there stays a table. Nothing here looks at the environment; every failure is a
`ValueError` that says what the text should look like and never repeats it, since it may be a secret.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

__all__ = ["Address", "Role", "Spec", "default_text", "parse"]

Role = Literal["api", "worker", "maintenance"]
_NO_PATH: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Line breaks and such, and how Python reads bytes that are no UTF-8."""
ROLES: Final[tuple[Role, ...]] = ("api", "worker", "maintenance")


class Spec(msgspec.Struct, frozen=True):
    """What is known about a setting besides its type and default.

    `low` and `high` are inclusive bounds, in the unit of the field (`_s`: seconds, `_bytes`: bytes).
    A `secret` is left out of `repr` and of every table.
    """

    env: str
    meaning: str
    low: float | None = None
    high: float | None = None
    secret: bool = False


class Address(msgspec.Struct, frozen=True):
    """Where a listener binds. An empty host means every interface; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_ADDRESS: Final = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^\[\]:]*)):(?P<port>\d{1,5})")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
_DURATION_UNITS: Final[Mapping[str, float]] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE: Final = re.compile(r"(\d+)\s*(KiB|MiB|GiB)?")
_SIZE_UNITS: Final[Mapping[str, int]] = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse(field: str, kind: Any, spec: Spec, text: str) -> Any:
    """Return the value that `text` stands for in a field of type `kind`. Raises ValueError with what is expected."""
    value = _reader(field, _without_none(kind))(text.strip())
    if isinstance(value, int | float):
        _check_bounds(value, spec)
    return value


def default_text(value: Any) -> str:
    """Return a default as a person would write it in the environment; an empty text when there is none."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, frozenset):
        return ",".join(role for role in ROLES if role in value)
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def _reader(field: str, kind: Any) -> Callable[[str], Any]:
    if typing.get_origin(kind) is Literal:
        return lambda text: _choice(typing.get_args(kind), text)
    if kind is float:
        return _duration
    if kind is int:
        return _size if field.endswith("_bytes") else _integer
    readers: dict[Any, Callable[[str], Any]] = {
        str: _text,
        Path: _path,
        Address: _address,
        frozenset[Role]: _roles,
        tuple[str, ...]: _names,
    }
    return readers[kind]


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty; unset it instead")
    return text


def _path(text: str) -> Path:
    try:
        path = Path(_text(text)).expanduser().absolute()
    except (OSError, RuntimeError):  # no working directory, or nobody's home
        raise ValueError("must be an absolute path, or one that leads somewhere from here") from None
    if _NO_PATH.search(str(path)):
        raise ValueError("must be UTF-8 without control characters, which neither Postgres nor JSON would take")
    return path


def _integer(text: str) -> int:
    if not re.fullmatch(r"\d{1,15}", text):
        raise ValueError("must be a whole number such as 64")
    return int(text)


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError("must be a number of bytes such as 1048576 or 64MiB")
    return int(found[1]) * _SIZE_UNITS[found[2] or ""]


def _duration(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError("must be a duration such as 20, 2.5s, 250ms or 10m (plain numbers are seconds)")
    return float(found[1]) * _DURATION_UNITS[found[2] or "s"]


def _choice(choices: tuple[str, ...], text: str) -> str:
    if text.lower() not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}")
    return text.lower()


def _address(text: str) -> Address:
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError("must be HOST:PORT such as 127.0.0.1:8080, :8080 (every interface) or [::1]:8080")
    return Address(found["six"] or found["host"] or "", int(found["port"]))


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _roles(text: str) -> frozenset[Role]:
    names = _names(text)
    chosen = frozenset(role for role in ROLES if role in names)
    if not chosen or len(chosen) != len(names):
        raise ValueError(f"must be a comma-separated list out of {', '.join(ROLES)}")
    return chosen


def _check_bounds(value: float, spec: Spec) -> None:
    if (spec.low is not None and value < spec.low) or (spec.high is not None and value > spec.high):
        low = "" if spec.low is None else f"at least {spec.low:g}"
        high = "" if spec.high is None else f"at most {spec.high:g}"
        raise ValueError(f"must be {' and '.join(part for part in (low, high) if part)}")
