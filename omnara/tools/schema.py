"""Input schemas of tools: checked when a config is compiled, applied to every call.

Both sides are foreign: the schema comes from a tenant and the input from a model. So nothing is fetched, regular
expressions have bounds, and the work is bounded by `schema_cost`; what does not fit is a message, not an exception.
Source: api.md §9, §12; engine.md §7.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

import jsonschema_rs
import msgspec

from omnara.tools.protocol import MALFORMED, ToolResult, failed
from omnara.tools.schema_cost import MAX_LEVELS, Cost, SchemaProblem, measure

__all__ = ["MAX_SCHEMA_BYTES", "InvalidSchema", "SchemaProblem", "check_input", "check_tool_schema", "malformed"]

MAX_SCHEMA_BYTES: Final = 128 * 1024
"""Size of one tool's schema as JSON. Every request to a model carries it."""

_MAX_TOTAL_WORK: Final = 5_000_000
_MAX_PROBLEMS: Final = 5
_MAX_MESSAGE_CHARS: Final = 300
_MAX_PATTERN_CHARS: Final = 8_192
_MAX_PATTERN_TOTAL: Final = 16_384
_MAX_NAME_CHARS: Final = 16_384
_CACHE_ENTRIES: Final = 512

_PATTERN_OPTIONS: Final = jsonschema_rs.FancyRegexOptions(
    backtrack_limit=1_000, size_limit=1 << 20, dfa_size_limit=1 << 20
)


class InvalidSchema(ValueError):
    """A schema that `check_tool_schema` would have refused reached `check_input`."""


class _Compiled(msgspec.Struct, frozen=True):
    validator: Any
    cost: Cost
    budget: _PatternBudget


class _PatternBudget:
    """Characters that regular expressions may still look at in the present check."""

    def __init__(self) -> None:
        self.left = _MAX_PATTERN_TOTAL

    def spend(self, text: str) -> None:
        """Account for one match. Raises ValueError when the text, or all texts together, are too long."""
        self.left -= len(text)
        if len(text) > _MAX_PATTERN_CHARS or self.left < 0:
            raise ValueError(f"too long for a pattern to be checked (at most {_MAX_PATTERN_CHARS} characters)")


def _pattern_keyword(budget: _PatternBudget) -> type:
    class Pattern:
        """The `pattern` keyword within a budget: matching is linear, but the factor is the tenant's choice."""

        def __init__(self, parent: dict[str, Any], value: Any, path: list[str | int]) -> None:
            self._pattern = value
            self._matcher = jsonschema_rs.Draft202012Validator(
                {"pattern": value}, pattern_options=_PATTERN_OPTIONS, offline=True
            )

        def validate(self, instance: Any) -> None:
            """Raise ValueError unless the instance is no string or matches."""
            if isinstance(instance, str):
                budget.spend(instance)
                if not self._matcher.is_valid(instance):
                    raise ValueError(f"the value does not match {self._pattern!r}")

    return Pattern


def check_tool_schema(schema: Any) -> list[SchemaProblem]:
    """Return what is wrong with the input schema of a custom tool, sorted by path; nothing when it can be used.

    It must be an object schema whose required names are declared properties, small, free of references to the outside
    and of patterns that the engine refuses. Alternatives at the top are refused too, because model providers do.
    Source: api.md §9.
    """
    if not isinstance(schema, dict):
        return [SchemaProblem("", "the input schema must be an object")]
    problems = sorted(_shape_problems(schema))
    if problems:
        return problems
    try:
        _compile(schema)
    except InvalidSchema as error:
        return [error.args[1]]
    return []


def _shape_problems(schema: dict[str, Any]) -> list[SchemaProblem]:
    problems = []
    if schema.get("type") != "object":
        problems.append(SchemaProblem("/type", 'must be "object"'))
    problems += [
        SchemaProblem(f"/{keyword}", "alternatives are not possible at the top of an input schema")
        for keyword in ("anyOf", "oneOf", "allOf", "enum", "not")
        if keyword in schema
    ]
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        problems.append(SchemaProblem("/properties", "must be an object"))
    elif not isinstance(required, list):
        problems.append(SchemaProblem("/required", "must be a list of names"))
    else:
        problems += [
            SchemaProblem(f"/required/{index}", "names no declared property")
            for index, name in enumerate(required)
            if not isinstance(name, str) or name not in properties
        ]
    return problems


def check_input(schema: Mapping[str, Any], value: Any) -> list[str]:
    """Return what is wrong with a call's input: at most five messages for the model, none when it fits.

    Bounded work; compiled schemas are kept (least recently used go first). Raises InvalidSchema for a schema that
    `check_tool_schema` refuses.
    """
    compiled = _compile(schema)
    count, levels, names = _extent(value)
    if levels > compiled.cost.max_levels:
        return [f"the input is nested deeper than {compiled.cost.max_levels} levels"]
    if count * compiled.cost.at(levels) > _MAX_TOTAL_WORK:
        return ["the input is too large for its schema"]
    if compiled.cost.patterns and names > _MAX_NAME_CHARS:
        return ["the input has too many or too long property names"]
    compiled.budget.left = _MAX_PATTERN_TOTAL
    try:
        if compiled.validator.is_valid(value):
            return []
        compiled.budget.left = _MAX_PATTERN_TOTAL
        return [_message(error) for error in islice(compiled.validator.iter_errors(value), _MAX_PROBLEMS)]
    except ValueError as error:
        # Not a verdict about the schema but about text or numbers that the checker cannot represent.
        return [_cut(f"the input cannot be checked: {error}")]


def malformed(problems: list[str]) -> ToolResult:
    """Return the failed result of a call whose input does not fit. Source: api.md §12; engine.md §7."""
    return failed("The input does not fit the tool's schema: " + "; ".join(problems), MALFORMED)


def _message(error: jsonschema_rs.ValidationError) -> str:
    path = "".join(f"/{part}" for part in error.instance_path)
    return _cut(f"{path}: {error.message}" if path else error.message)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 1] + "…"


def _extent(value: Any) -> tuple[int, int, int]:
    """Return the number of values, the levels of nesting (stopping beyond the limit) and the length of all names."""
    count, levels, names = 0, 0, 0
    layer = [value]
    while layer and levels <= MAX_LEVELS:
        count += len(layer)
        inner: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                names += sum(map(len, item))
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        layer = inner
        levels += bool(layer)
    return count, levels, names


_cache: OrderedDict[str, _Compiled | InvalidSchema] = OrderedDict()
_known: OrderedDict[int, tuple[Mapping[str, Any], _Compiled]] = OrderedDict()
"""Schemas by identity, each kept alive by its entry: those of compiled configs and of the registry never change."""


def _compile(schema: Mapping[str, Any]) -> _Compiled:
    known = _known.get(id(schema))
    if known is not None:
        return known[1]
    compiled = _compile_text(schema)
    _known[id(schema)] = (schema, compiled)
    if len(_known) > _CACHE_ENTRIES:
        _known.popitem(last=False)
    return compiled


def _compile_text(schema: Mapping[str, Any]) -> _Compiled:
    try:
        text = json.dumps(schema, ensure_ascii=False)
    except (RecursionError, ValueError, TypeError) as error:
        raise InvalidSchema("", SchemaProblem("", "the schema is not plain JSON, or nested too deeply")) from error
    entry = _cache.get(text)
    if entry is None:
        entry = _cache[text] = _compile_new(text)
        if len(_cache) > _CACHE_ENTRIES:
            _cache.popitem(last=False)
    else:
        _cache.move_to_end(text)
    if isinstance(entry, InvalidSchema):
        raise InvalidSchema(*entry.args)
    return entry


def _compile_new(text: str) -> _Compiled | InvalidSchema:
    if len(text) > MAX_SCHEMA_BYTES:
        return _invalid("", f"the schema is larger than {MAX_SCHEMA_BYTES} bytes")
    # Parsed anew: nobody can change the copy that the validator and the cost belong to.
    schema = json.loads(text)
    cost = measure(schema)
    if isinstance(cost, SchemaProblem):
        return _invalid(cost.path, cost.message)
    budget = _PatternBudget()
    try:
        validator = jsonschema_rs.validator_for(
            schema,
            pattern_options=_PATTERN_OPTIONS,
            keywords={"pattern": _pattern_keyword(budget)},
            offline=True,
            validate_formats=False,
        )
    except jsonschema_rs.ValidationError as error:
        path = [str(part) for part in error.instance_path]
        # The message of our own keyword class would show its making instead of the reason.
        unread = path[-1:] == ["pattern"] and "keyword class" in error.message
        message = "not a regular expression that is supported" if unread else error.message
        return _invalid("".join(f"/{part}" for part in path), message)
    except jsonschema_rs.ReferencingError as error:
        return _invalid("", str(error))
    except ValueError as error:
        # The library's own bound on recursion, the only other complaint it has about plain JSON.
        return _invalid("", f"the schema is nested too deeply ({error})")
    return _Compiled(validator, cost, budget)


def _invalid(path: str, message: str) -> InvalidSchema:
    problem = SchemaProblem(path, _cut(message))
    return InvalidSchema(f"{path}: {problem.message}", problem)
