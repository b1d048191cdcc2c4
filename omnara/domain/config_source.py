"""Reading the source text of an agent config: YAML or JSON in, plain JSON values out, whatever the text does.

The text comes from outside, so the reader is bounded in every direction that a YAML document can grow: bytes, depth,
values, and values *after* aliases are expanded (a few hundred bytes of anchors can stand for billions of values).
Values follow the YAML 1.2 core rules, so that `on` and `2026-01-01` stay text as they do in JSON.
Source: api.md §9 (one document only; every failure is `invalid_request`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
import yaml

from omnara.domain.text import clean

SourceFormat = Literal["yaml", "json"]

MAX_SOURCE_BYTES: Final = 512 * 1024
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 20_000
"""Values of the whole document with every alias written out."""


class SourceError(Exception):
    """The text cannot be read. `path` is where (empty: the document), `message` never repeats the text."""

    def __init__(self, message: str, path: str = "") -> None:
        self.path = path
        self.message = message
        super().__init__(f"{path}: {message}" if path else message)


def read_source(source: str, source_format: SourceFormat) -> dict[str, Any]:
    """Return the one mapping that `source` holds, with NUL and lone surrogates replaced. Raises SourceError."""
    if len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        raise SourceError(f"the source is larger than {MAX_SOURCE_BYTES} bytes")
    value = _read_json(source) if source_format == "json" else _read_yaml(source)
    if not isinstance(value, dict):
        raise SourceError("the document must be a mapping")
    cleaned: dict[str, Any] = clean(value)
    return cleaned


# --- JSON -------------------------------------------------------------------------------------------------


def _read_json(source: str) -> Any:
    try:
        value = msgspec.json.decode(source.encode("utf-8", "surrogatepass"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise SourceError("the source is not one JSON document") from None
    _measure(value)
    return value


def _measure(value: Any) -> None:
    """Refuse a JSON value that is too deep or too large. Iterative: depth is what is being checked."""
    pending: list[Iterator[Any]] = [iter((value,))]
    count = 0
    while pending:
        for item in pending[-1]:
            count += 1
            if count > MAX_VALUES:
                raise SourceError(f"the document holds more than {MAX_VALUES} values")
            if isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise SourceError("an integer does not fit into 64 bits")
            if isinstance(item, float) and not math.isfinite(item):
                raise SourceError("a number is not finite")
            if isinstance(item, (dict, list)):
                pending.append(iter(item.values() if isinstance(item, dict) else item))
                if len(pending) > MAX_DEPTH:
                    raise SourceError(f"the document is nested more than {MAX_DEPTH} levels deep")
                break
        else:
            pending.pop()


# --- YAML -------------------------------------------------------------------------------------------------

_STR_TAG: Final = "tag:yaml.org,2002:str"
_CORE_TAGS: Final = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str"))
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,18}")
_LONG_INTEGER: Final = re.compile(r"[-+]?[0-9]{19,}")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?")


class _Sized(msgspec.Struct):
    """A finished value and how many values it stands for once aliases are written out."""

    value: Any
    size: int


class _YamlReader:
    """Builds values straight from parser events: no tag can construct anything, and every step is counted."""

    def __init__(self, source: str) -> None:
        self._events = yaml.parse(source, Loader=yaml.CSafeLoader)
        self._anchors: dict[str, _Sized] = {}
        self._total = 0

    def document(self) -> Any:
        """Return the only document's value; None when there is none."""
        value: Any = None
        seen = False
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if seen:
                    raise SourceError("the source holds more than one document")
                seen = True
                value = self._node(next(self._events), 1, "").value
        return value

    def _node(self, event: yaml.Event, depth: int, path: str) -> _Sized:
        if depth > MAX_DEPTH:
            raise SourceError(f"the document is nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path)
        self._count(1)
        if isinstance(event, yaml.ScalarEvent):
            sized = _Sized(_scalar(event, path), 1)
        elif isinstance(event, yaml.SequenceStartEvent):
            sized = self._sequence(event, depth, path)
        elif isinstance(event, yaml.MappingStartEvent):
            sized = self._mapping(event, depth, path)
        else:
            raise SourceError("the source is not a YAML document", path)
        if event.anchor is not None:
            # Known only once complete, so a value cannot hold itself.
            self._anchors[event.anchor] = sized
        return sized

    def _alias(self, event: yaml.AliasEvent, path: str) -> _Sized:
        sized = self._anchors.get(event.anchor or "")
        if sized is None:
            raise SourceError("an alias refers to an anchor that is not complete before it", path)
        self._count(sized.size)
        return sized

    def _sequence(self, event: yaml.SequenceStartEvent, depth: int, path: str) -> _Sized:
        _check_tag(event.tag, path)
        items: list[Any] = []
        size = 1
        for item_event in self._events:
            if isinstance(item_event, yaml.SequenceEndEvent):
                break
            item = self._node(item_event, depth + 1, f"{path}[{len(items)}]")
            items.append(item.value)
            size += item.size
        return _Sized(items, size)

    def _mapping(self, event: yaml.MappingStartEvent, depth: int, path: str) -> _Sized:
        _check_tag(event.tag, path)
        pairs: dict[str, Any] = {}
        size = 1
        for key_event in self._events:
            if isinstance(key_event, yaml.MappingEndEvent):
                break
            key = self._node(key_event, depth + 1, path).value
            if not isinstance(key, str):
                raise SourceError("every key must be text", path)
            if key == "<<" and getattr(key_event, "implicit", (False,))[0]:
                raise SourceError("merge keys are not supported", path)
            if key in pairs:
                raise SourceError("a key is there twice", path)
            item = self._node(next(self._events), depth + 1, join_path(path, key))
            pairs[key] = item.value
            size += item.size + 1
        return _Sized(pairs, size)

    def _count(self, values: int) -> None:
        self._total += values
        if self._total > MAX_VALUES:
            raise SourceError(f"the document holds more than {MAX_VALUES} values")


def _scalar(event: yaml.ScalarEvent, path: str) -> Any:
    text: str = event.value
    if event.tag == _STR_TAG or (event.tag in (None, "!") and not event.implicit[0]):
        return text
    _check_tag(event.tag, path)
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _LONG_INTEGER.fullmatch(text):
        raise SourceError("an integer has more than 18 digits", path)
    if _FLOAT.fullmatch(text) is None:
        return text
    if not math.isfinite(float(text)):
        raise SourceError("a number is not finite", path)
    return float(text)


def _check_tag(tag: str | None, path: str) -> None:
    if tag is not None and tag not in _CORE_TAGS:
        raise SourceError("tags are not supported", path)


def _read_yaml(source: str) -> Any:
    try:
        return _YamlReader(source).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise SourceError(f"the source is not valid YAML{where}") from None
    except (yaml.YAMLError, UnicodeEncodeError, ValueError):
        raise SourceError("the source is not valid YAML") from None


def join_path(path: str, key: str) -> str:
    """Append a key to a dotted path; a key that would blur the path is quoted and cut short."""
    shown = key if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", key) else msgspec.json.encode(key[:64]).decode()
    return f"{path}.{shown}" if path else shown
