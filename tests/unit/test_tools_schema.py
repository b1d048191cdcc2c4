"""Schemas of strangers: what is refused, and that neither schema nor input can fetch, hang or crash."""

from __future__ import annotations

import random
import socket
import time
from typing import Any

import pytest

from omnara.tools import schema as schema_module
from omnara.tools.schema import InvalidSchema, check_input, check_tool_schema
from omnara.tools.schema_cost import Cost, measure

OK: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string", "pattern": "^/[a-z/]+$"}, "n": {"type": "integer", "minimum": 0}},
    "required": ["path"],
    "additionalProperties": False,
}


def wrap(part: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": part}, **more}


def nested(levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}}
    return value


def doubling(levels: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, levels):
        definitions[f"d{level}"] = {"allOf": [{"$ref": f"#/$defs/d{level - 1}"}] * 2}
    return wrap({"$ref": f"#/$defs/d{levels - 1}"}, **{"$defs": definitions})


FILTER = wrap(
    {"$ref": "#/$defs/f"},
    **{
        "$defs": {
            "f": {
                "anyOf": [
                    wrap({"type": "array", "items": {"$ref": "#/$defs/f"}}),
                    {"type": "object", "properties": {"not": {"$ref": "#/$defs/f"}}},
                    {"type": "string"},
                ]
            }
        }
    },
)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        OK,
        FILTER,
        wrap({"$ref": "#"}),
        wrap({"type": "array", "items": {"$ref": "#"}}, **{"$id": "https://x.example/s"}),
        wrap({"$ref": "#/definitions/a~1b"}, definitions={"a/b": {"type": "string"}}),
        wrap(
            {"type": "array", "items": [{"type": "string"}]}, **{"$schema": "http://json-schema.org/draft-07/schema#"}
        ),
        wrap({"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$"}),
        wrap({"type": "string", "pattern": r"^.{1,255}$"}),
        wrap({"type": "string", "format": "made-up"}),
        wrap({"$ref": "#/properties/y"}, required=["x"]) | {"properties": {"x": {"$ref": "#/properties/y"}, "y": {}}},
        nested(50),
        wrap({"type": "string"}, **{"x-vendor": {"$ref": "http://ignored.example/"}}),
    ],
)
def test_schemas_that_can_be_used(schema: dict[str, Any]) -> None:
    assert check_tool_schema(schema) == []


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        ([], "", "must be an object"),
        (None, "", "must be an object"),
        ({}, "/type", 'must be "object"'),
        ({"type": "string"}, "/type", 'must be "object"'),
        ({"type": ["object", "null"]}, "/type", 'must be "object"'),
        ({"type": "object", "anyOf": [{}]}, "/anyOf", "alternatives"),
        ({"type": "object", "properties": []}, "/properties", "must be an object"),
        ({"type": "object", "required": "x"}, "/required", "list of names"),
        ({"type": "object", "required": ["x"]}, "/required/0", "no declared property"),
        (wrap({}, required=["x", 3]), "/required/1", "no declared property"),
        (wrap({"type": "strng"}), "/properties/x/type", "not valid"),
        (wrap(5), "/properties/x", "object or a boolean"),
        (wrap({"pattern": "("}), "/properties/x/pattern", "not a regular expression"),
        (wrap({"pattern": 5}), "/properties/x/pattern", "not of type"),
        (wrap({"pattern": "(a{1000}){1000}"}), "/properties/x/pattern", "not a regular expression"),
        (wrap({"patternProperties": {"(": {}}}), "/properties/x/patternProperties/(", "regex"),
        (wrap({"$ref": "https://evil.example/s"}), "/properties/x/$ref", "only references into"),
        (wrap({"$ref": "file:///etc/passwd"}), "/properties/x/$ref", "only references into"),
        (wrap({"$ref": "#anchor"}), "/properties/x/$ref", "only references into"),
        (wrap({"$ref": 5}), "/properties/x/$ref", "only references into"),
        (wrap({"$ref": "#/nowhere"}), "/properties/x/$ref", "nowhere"),
        (wrap({"$ref": "#/required/9"}, required=["x"]), "/properties/x/$ref", "nowhere"),
        (wrap({"$dynamicRef": "#x"}), "/properties/x", "$dynamicRef"),
        (wrap({"$id": "https://x.example/inner"}), "/properties/x", "$id"),
        ({"type": "object", "$schema": "http://127.0.0.1:1/meta"}, "", "meta-schema"),
        (wrap({"$ref": "#/properties/x"}), "", "leads back to itself"),
        (doubling(30), "", "too complex"),
        (nested(150), "", "nested too deeply"),
        (nested(400), "", "nested too deeply"),
        (wrap({"description": "x" * 200_000}), "", "larger than"),
        ({"type": "object", "properties": {f"p{i}": {"a": {}} for i in range(6000)}}, "", "more than 5000"),
    ],
)
def test_schemas_that_are_refused(schema: Any, path: str, reason: str) -> None:
    start = time.process_time()
    problems = check_tool_schema(schema)
    assert time.process_time() - start < 3
    assert problems
    assert problems[0].path == path
    assert reason in problems[0].message


def test_problems_are_sorted_by_path() -> None:
    problems = check_tool_schema({"type": "array", "required": ["b", "a"], "anyOf": []})
    assert [problem.path for problem in problems] == ["/anyOf", "/required/0", "/required/1", "/type"]


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a schema must not open a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for target in ("http://127.0.0.1:1/s", "https://evil.example/s", "file:///etc/passwd", "//evil.example/s"):
        assert check_tool_schema(wrap({"$ref": target}))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "path"),
        ({"path": 1}, "/path: "),
        ({"path": "no"}, "/path: the value does not match '^/[a-z/]+$'"),
        ({"path": "/a", "n": -1}, "/n: "),
        ({"path": "/a", "z": 1}, "z"),
        ([], "not of type"),
        ({"path": "/a", "n": float("nan")}, "/n: "),
        ({"path": "\ud800"}, "cannot be checked"),
    ],
)
def test_inputs_that_do_not_fit(value: Any, message: str) -> None:
    (first, *_) = check_input(OK, value)
    assert message in first


def test_inputs_that_fit() -> None:
    assert check_input(OK, {"path": "/etc/x", "n": 10**40}) == []
    assert check_input(FILTER, {"x": {"x": ["a", {"not": "b"}]}}) == []


def test_messages_are_few_and_short() -> None:
    problems = check_input(
        {"type": "object", "additionalProperties": {"type": "integer"}}, {f"k{i}": "y" * 5000 for i in range(100)}
    )
    assert len(problems) == 5
    assert all(len(problem) <= 300 for problem in problems)


def test_deep_inputs_are_refused_at_once() -> None:
    value: Any = "x"
    for _ in range(100_000):
        value = [value]
    start = time.process_time()
    assert check_input({"type": "object"}, {"a": value}) == ["the input is nested deeper than 64 levels"]
    assert time.process_time() - start < 2


def test_a_branching_recursive_schema_bounds_the_depth_of_its_inputs() -> None:
    cost = measure(FILTER)
    assert isinstance(cost, Cost)
    assert cost.recursive
    assert 6 < cost.max_levels < 64
    value: Any = "x"
    for _ in range(cost.max_levels + 1):
        value = {"not": value}
    assert check_input(FILTER, {"x": value}) == [f"the input is nested deeper than {cost.max_levels} levels"]


def test_work_is_counted_per_value() -> None:
    cost = measure(doubling(10))
    assert isinstance(cost, Cost)
    assert cost.at(1) > 2**9
    many = wrap({"type": "array", "items": doubling(12)["properties"]["x"]}, **{"$defs": doubling(12)["$defs"]})
    assert check_input(many, {"x": ["s"] * 10}) == []
    assert check_input(many, {"x": ["s"] * 10_000}) == ["the input is too large for its schema"]


@pytest.mark.parametrize(
    "pattern", ["^(a+)+$", "[ab]*a[ab]{3000}c", r"(?:(?!.*c)[ab])*c$", r"^(a+|b+|ab)*\1c$", "((?=[ab]*c)a|b)*c$"]
)
def test_catastrophic_patterns_end_soon(pattern: str) -> None:
    schema = wrap({"type": "string", "pattern": pattern})
    assert check_tool_schema(schema) == []
    source = random.Random(1)
    texts = ["a" * 8000 + "b", "".join(source.choice("ab") for _ in range(8000))]
    start = time.process_time()
    for text in texts:
        assert check_input(schema, {"x": text})
    assert time.process_time() - start < 5


def test_text_beyond_the_budget_of_patterns_is_refused_but_other_text_is_not() -> None:
    schema = {"type": "object", "properties": {"x": {"pattern": "a"}, "body": {"type": "string"}}}
    assert check_input(schema, {"x": "a", "body": "z" * 500_000}) == []
    assert "too long for a pattern" in check_input(schema, {"x": "a" * 8193})[0]
    lists = wrap({"type": "array", "items": {"pattern": "a"}})
    assert check_input(lists, {"x": ["a" * 8000] * 2}) == []
    assert "too long for a pattern" in check_input(lists, {"x": ["a" * 8000] * 3})[0]
    assert check_input(lists, {"x": ["a" * 8000] * 2}) == []
    names = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}
    assert check_input(names, {"a": 1}) == []
    assert check_input(names, {"a" * 20_000: 1}) == ["the input has too many or too long property names"]


def test_a_schema_is_compiled_once_and_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = schema_module._compile_new
    monkeypatch.setattr(schema_module, "_compile_new", lambda text: made.append(text) or real(text))
    mine = wrap({"const": "compiled once"})
    for _ in range(3):
        check_input(mine, {})
    assert len(made) == 1
    for number in range(schema_module._CACHE_ENTRIES + 10):
        check_input(wrap({"const": number}), {})
    assert len(schema_module._cache) == schema_module._CACHE_ENTRIES
    check_input(mine, {})
    assert len(made) == 1 + schema_module._CACHE_ENTRIES + 10 + 1


def test_a_schema_that_should_not_be_here_raises() -> None:
    with pytest.raises(InvalidSchema, match="only references"):
        check_input(wrap({"$ref": "https://evil.example"}), {})
