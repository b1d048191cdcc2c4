"""Path ids, query parameters and headers: strict reading, with the same types that the OpenAPI document shows."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec
from aiohttp import web
from multidict import MultiMapping

from omnara import ids
from omnara.api.body import fault
from omnara.errors import ValidationFailed
from omnara.ids import IdKind

Q = TypeVar("Q", bound=msgspec.Struct)

INT64_MAX: Final = 2**63 - 1
MAX_KEY: Final = 255
"""Characters of an Idempotency-Key. Source: api.md §8."""
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
_DEEP: Final = re.compile(r"(\w+)\[([^\[\]]+)\]")
_BOOLEANS: Final = {"true": True, "false": False}


def path_ids(match_info: Mapping[str, str], kinds: Mapping[str, IdKind]) -> dict[str, UUID]:
    """Decode the ids of a path. Raises ValidationFailed for a malformed one. Source: api.md §1."""
    found: dict[str, UUID] = {}
    for name, kind in kinds.items():
        try:
            found[name] = ids.decode(kind, match_info[name])
        except ids.InvalidPublicId:
            raise ValidationFailed(f"the path needs an id that starts with {kind.value}_") from None
    return found


def query(values: MultiMapping[str], shape: type[Q] | None) -> Q | None:
    """Read the query into `shape`. Undeclared, repeated and malformed parameters raise ValidationFailed."""
    if shape is None:
        if values:
            raise ValidationFailed("this route takes no query parameters")
        return None
    kinds = _kinds(shape)
    raw: dict[str, Any] = {}
    for full_name, text in values.items():
        name, key = _deep(full_name, kinds)
        if name not in kinds or (kinds[name] is dict) is (key is None):
            raise ValidationFailed("undeclared query parameter")
        if key is not None:
            _add_to_map(raw.setdefault(name, {}), name, key, _value(name, text, str))
            continue
        if name in raw:
            raise ValidationFailed(f"query parameter {name} is given twice")
        raw[name] = _value(name, text, kinds[name])
    try:
        return msgspec.convert(raw, shape)
    except msgspec.ValidationError as error:
        raise fault(error) from None


def _deep(full_name: str, kinds: Mapping[str, type]) -> tuple[str, str | None]:
    """Split `metadata[color]`, the form of parameters that are maps, into both names."""
    found = _DEEP.fullmatch(full_name)
    if found is None or kinds.get(found.group(1)) is not dict:
        return full_name, None
    return found.group(1), found.group(2)


def _add_to_map(entries: dict[str, str], name: str, key: str, value: str) -> None:
    if key in entries or "\0" in key:
        raise ValidationFailed(f"a key of query parameter {name} is malformed or given twice")
    entries[key] = value


def _value(name: str, text: str, kind: type) -> Any:
    if kind is int:
        return integer(name, text)
    if kind is bool:
        if text not in _BOOLEANS:
            raise ValidationFailed(f"{name} is true or false")
        return _BOOLEANS[text]
    if "\0" in text:
        raise ValidationFailed(f"{name} holds a NUL character")
    return text


def integer(name: str, text: str) -> int:
    """Read a decimal number that fits 64 bits. Raises ValidationFailed."""
    if _INTEGER.fullmatch(text) is None or abs(int(text)) > INT64_MAX:
        raise ValidationFailed(f"{name} is a whole number")
    return int(text)


@functools.cache
def _kinds(shape: type[msgspec.Struct]) -> dict[str, type]:
    hints = typing.get_type_hints(shape)
    return {field.encode_name: _plain(hints[field.name]) for field in msgspec.structs.fields(shape)}


def _plain(hint: Any) -> type:
    """Return int, bool, str or dict: what the text of a parameter is turned into."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = typing.get_args(hint) if union or typing.get_origin(hint) is typing.Annotated else (hint,)
    if any(typing.get_origin(option) is dict for option in options):
        return dict
    for kind in (bool, int):
        if kind in options:
            return kind
    return str


def idempotency_key(request: web.Request) -> str | None:
    """Return the Idempotency-Key, or None without one. Raises ValidationFailed. Source: api.md §8."""
    values = request.headers.getall("Idempotency-Key", [])
    if not values:
        return None
    key = values[0]
    # Bytes that are no UTF-8 arrive as lone surrogates, which no text column takes.
    if len(values) > 1 or not 1 <= len(key) <= MAX_KEY or not key.isprintable():
        raise ValidationFailed(f"Idempotency-Key has 1 to {MAX_KEY} printable characters and is given once")
    return key


def last_event_id(request: web.Request) -> int | None:
    """Return the Last-Event-ID, or None without one. Raises ValidationFailed for anything but a sequence."""
    values = request.headers.getall("Last-Event-ID", [])
    if not values:
        return None
    number = integer("Last-Event-ID", values[0]) if len(values) == 1 else -1
    if number < 0:
        raise ValidationFailed("Last-Event-ID is the sequence of an event")
    return number
