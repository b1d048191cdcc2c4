"""How much work a JSON Schema can cause, found before it is ever applied.

References make small schemas do unbounded work: thirty definitions that each apply the one before twice check the
same value a billion times. Schemas come from tenants and are applied on the event loop, so the work per value is
computed from the schema alone, for values nested 0, 1, 2, … levels deep, and bounds what is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

__all__ = ["MAX_LEVELS", "MAX_WORK", "Cost", "SchemaProblem", "measure"]

MAX_SUBSCHEMAS: Final = 5_000
MAX_LEVELS: Final = 64
"""Levels of nesting that an input may have. Model inputs have a handful; the encoders give up at about a thousand."""

MAX_WORK: Final = 50_000
"""Most steps for one value along one path. A step takes about 20 ns, so this is about a millisecond."""

_MIN_LEVELS: Final = 6

_HERE_ONE: Final = ("not", "if", "then", "else")
_HERE_LIST: Final = ("allOf", "anyOf", "oneOf")
_HERE_MAP: Final = ("dependentSchemas", "dependencies")
_BELOW_ONE: Final = (
    "additionalProperties",
    "unevaluatedProperties",
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "propertyNames",
)
_BELOW_LIST: Final = ("prefixItems", "items")
_DEFINITIONS: Final = ("$defs", "definitions")
_REFUSED: Final = ("$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", "$anchor")


class SchemaProblem(msgspec.Struct, frozen=True, order=True):
    """A fault of a schema: where (JSON pointer) and what."""

    path: str
    message: str


class Cost(msgspec.Struct, frozen=True):
    """Work per value by its levels of nesting, as far as it is bearable; `work[-1]` stands for all deeper values
    when `recursive` is False. `patterns` tells whether regular expressions meet values or property names."""

    work: tuple[int, ...]
    recursive: bool
    patterns: bool

    @property
    def max_levels(self) -> int:
        """Levels of nesting that a value may have."""
        return len(self.work) - 1 if self.recursive else MAX_LEVELS

    def at(self, levels: int) -> int:
        """Work for one value nested `levels` deep, which must not exceed `max_levels`."""
        return self.work[min(levels, len(self.work) - 1)]


class _Node(msgspec.Struct):
    """A subschema with the places of those it applies: to the same value, and to values inside it."""

    here: list[int]
    either: list[int]
    every: list[int]
    weight: int


def measure(schema: Mapping[str, Any]) -> Cost | SchemaProblem:
    """Return the cost of a schema, or the problem that makes it unusable. Never fetches and never recurses deeply."""
    reader = _Reader(schema)
    problem = reader.read()
    if problem is not None:
        return problem
    order = _inner_first(reader.nodes)
    if order is None:
        return SchemaProblem("", "a reference leads back to itself without going into the value")
    return _costs(reader.nodes, order, reader.patterns)


class _Reader:
    """Collects the subschemas of a document and resolves its references, which must be local pointers."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._places: dict[int, int] = {}
        self._queue: list[tuple[Any, str]] = []
        self.nodes: list[_Node] = []
        self.patterns = False

    def read(self) -> SchemaProblem | None:
        """Fill `nodes`; the root is the first. Return the first problem found."""
        self._place(self._root, "")
        done = 0
        while done < len(self._queue):
            if len(self._queue) > MAX_SUBSCHEMAS:
                return SchemaProblem("", f"the schema has more than {MAX_SUBSCHEMAS} subschemas")
            schema, path = self._queue[done]
            problem = self._read_one(self.nodes[done], schema, path)
            if problem is not None:
                return problem
            done += 1
        return None

    def _place(self, schema: Any, path: str) -> int:
        place = self._places.get(id(schema)) if isinstance(schema, dict) else None
        if place is None:
            place = len(self._queue)
            self._places[id(schema)] = place
            self._queue.append((schema, path))
            self.nodes.append(_Node([], [], [], 1))
        return place

    def _read_one(self, node: _Node, schema: Any, path: str) -> SchemaProblem | None:
        if isinstance(schema, bool):
            return None
        if not isinstance(schema, Mapping):
            return SchemaProblem(path, "a schema must be an object or a boolean")
        for keyword in _REFUSED:
            if keyword in schema:
                return SchemaProblem(path, f"{keyword} is not supported")
        if "$id" in schema and path:
            return SchemaProblem(path, "$id is supported at the top only")
        self.patterns = self.patterns or "pattern" in schema or "patternProperties" in schema
        self._here(node, schema, path)
        self._below(node, schema, path)
        for keyword in _DEFINITIONS:
            for name, part in _mapping(schema.get(keyword)):
                self._place(part, f"{path}/{keyword}/{name}")
        return self._reference(node, schema, path) if "$ref" in schema else None

    def _here(self, node: _Node, schema: Mapping[str, Any], path: str) -> None:
        for keyword in _HERE_ONE:
            if keyword in schema:
                node.here.append(self._place(schema[keyword], f"{path}/{keyword}"))
        for keyword in _HERE_LIST:
            for index, part in _sequence(schema.get(keyword)):
                node.here.append(self._place(part, f"{path}/{keyword}/{index}"))
        for keyword in _HERE_MAP:
            for name, part in _mapping(schema.get(keyword)):
                if not isinstance(part, list):
                    node.here.append(self._place(part, f"{path}/{keyword}/{name}"))

    def _below(self, node: _Node, schema: Mapping[str, Any], path: str) -> None:
        for keyword in _BELOW_ONE:
            if keyword in schema and not isinstance(schema[keyword], list):
                node.every.append(self._place(schema[keyword], f"{path}/{keyword}"))
        for keyword in _BELOW_LIST:
            for index, part in _sequence(schema.get(keyword)):
                node.either.append(self._place(part, f"{path}/{keyword}/{index}"))
        for name, part in _mapping(schema.get("properties")):
            node.either.append(self._place(part, f"{path}/properties/{name}"))
        for name, part in _mapping(schema.get("patternProperties")):
            node.every.append(self._place(part, f"{path}/patternProperties/{name}"))
        if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
            # Finding out what was evaluated goes through everything once more.
            node.weight = 2

    def _reference(self, node: _Node, schema: Mapping[str, Any], path: str) -> SchemaProblem | None:
        reference = schema["$ref"]
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            return SchemaProblem(f"{path}/$ref", "only references into the schema itself (#/…) are supported")
        target: Any = self._root
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(target):
                target = target[int(key[:9])]
            else:
                return SchemaProblem(f"{path}/$ref", "the reference leads nowhere")
        node.here.append(self._place(target, reference[1:]))
        return None


def _mapping(value: Any) -> Iterator[tuple[str, Any]]:
    return iter(value.items()) if isinstance(value, Mapping) else iter(())


def _sequence(value: Any) -> Iterator[tuple[int, Any]]:
    return enumerate(value) if isinstance(value, list) else iter(())


def _inner_first(nodes: list[_Node]) -> list[int] | None:
    """Order the nodes so that those applied to the same value come first; None when they go in a circle."""
    waiting = [len(node.here) for node in nodes]
    users: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        for inner in node.here:
            users[inner].append(place)
    order = [place for place, count in enumerate(waiting) if not count]
    for place in order:
        for user in users[place]:
            waiting[user] -= 1
            if not waiting[user]:
                order.append(user)
    return order if len(order) == len(nodes) else None


def _costs(nodes: list[_Node], order: list[int], patterns: bool) -> Cost | SchemaProblem:
    below = [0] * len(nodes)
    work: list[int] = []
    for level in range(MAX_LEVELS + 1):
        costs = [0] * len(nodes)
        for place in order:
            node = nodes[place]
            inside = max((below[child] for child in node.either), default=0) + sum(below[child] for child in node.every)
            costs[place] = min(node.weight * (1 + inside + sum(costs[inner] for inner in node.here)), MAX_WORK + 1)
        if costs[0] > MAX_WORK:
            if level <= _MIN_LEVELS:
                return SchemaProblem("", "the schema is too complex: it applies too many subschemas to one value")
            return Cost(tuple(work), recursive=True, patterns=patterns)
        work.append(costs[0])
        if costs == below:
            return Cost(tuple(work), recursive=False, patterns=patterns)
        below = costs
    return Cost(tuple(work), recursive=True, patterns=patterns)
