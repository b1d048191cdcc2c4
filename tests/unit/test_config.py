"""Config documents: every fault is found, none is echoed, and equal meanings get equal hashes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnara.domain.config import (
    BuiltInTool,
    CustomTool,
    Definition,
    ModelChoice,
    Permission,
    canonical_json,
    compiled,
    decode_definition,
)
from omnara.domain.config_check import BuiltIn, Draft, Offer, Problem, check_document, describe
from omnara.domain.model_limits import Effective, Limits, narrow
from omnara.tools.schema import check_tool_schema

OFFER = Offer(
    {
        "web_fetch": BuiltIn(frozenset({"always_allow", "always_ask", "always_deny"})),
        "post": BuiltIn(frozenset({"always_allow"})),
    },
    lambda schema: [(p.path, p.message) for p in check_tool_schema(schema)],
)
MODEL = {"provider_config": "p", "name": "m"}
LOOK = {"type": "custom", "description": "d", "input_schema": {"type": "object", "properties": {}}}


def faults(**changes: Any) -> list[Problem]:
    result = check_document({"instruction": "i", "model": MODEL} | changes, OFFER)
    return sorted(result) if isinstance(result, list) else []


def draft(**changes: Any) -> Draft:
    result = check_document({"instruction": "i", "model": MODEL} | changes, OFFER)
    assert isinstance(result, Draft), result
    return result


def test_defaults_are_filled_in() -> None:
    made = draft(instruction="  Do.  ", tools={"web_fetch": None, "look": LOOK, "off": LOOK | {"enabled": False}})
    assert made.instruction == "Do."
    allow = Permission("always_allow", {})
    assert made.tools == {"web_fetch": BuiltInTool(allow), "look": CustomTool("d", LOOK["input_schema"], allow)}  # type: ignore[arg-type]


@pytest.mark.parametrize("permission", ["always_ask", {"mode": "always_ask"}, {"mode": "always_ask", "parameters": {}}])
def test_permission_in_short_and_long(permission: Any) -> None:
    assert draft(tools={"web_fetch": {"permission": permission}}).tools["web_fetch"].permission.mode == "always_ask"


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"instruction": None}, "instruction"),
        ({"instruction": " \n"}, "instruction"),
        ({"instruction": 5}, "instruction"),
        ({"model": None}, "model"),
        ({"model": []}, "model"),
        ({"model": {"name": "m"}}, "model.provider_config"),
        ({"model": MODEL | {"size": 1}}, "model.size"),
        ({"model": MODEL | {"context_window_tokens": True}}, "model.context_window_tokens"),
        ({"model": MODEL | {"context_window_tokens": 0}}, "model.context_window_tokens"),
        ({"model": MODEL | {"default_max_output_tokens": 2**40}}, "model.default_max_output_tokens"),
        ({"model": MODEL | {"default_max_output_tokens": 1.5}}, "model.default_max_output_tokens"),
        ({"model": MODEL | {"cache_retention": "ever"}}, "model.cache_retention"),
        ({"model": MODEL | {"cache_retention": ["short"]}}, "model.cache_retention"),
        ({"model": MODEL | {"reasoning": "high"}}, "model.reasoning"),
        ({"model": MODEL | {"reasoning": {}}}, "model.reasoning.effort"),
        ({"model": MODEL | {"fallback_models": MODEL}}, "model.fallback_models"),
        ({"model": MODEL | {"fallback_models": [MODEL] * 6}}, "model.fallback_models"),
        ({"model": MODEL | {"fallback_models": ["anthropic/small"]}}, "model.fallback_models.0"),
        ({"model": MODEL | {"fallback_models": [MODEL, {"name": "m"}]}}, "model.fallback_models.1.provider_config"),
        ({"model": MODEL | {"fallback_models": [MODEL | {"size": 1}]}}, "model.fallback_models.0.size"),
        ({"version": "v2"}, "version"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"surprise": 1}, "surprise"),
        ({"tools": []}, "tools"),
        ({"tools": {"x" * 65: {}}}, "tools." + '"' + "x" * 64 + '"'),
        ({"tools": {"a-b": LOOK}}, "tools.a-b"),
        ({"tools": {"mcp__x": LOOK}}, "tools.mcp__x"),
        ({"tools": {"ghost": {}}}, "tools.ghost"),
        ({"tools": {"web_fetch": 3}}, "tools.web_fetch"),
        ({"tools": {"web_fetch": {"description": "d"}}}, "tools.web_fetch.description"),
        ({"tools": {"web_fetch": {"input_schema": {}}}}, "tools.web_fetch.input_schema"),
        ({"tools": {"web_fetch": {"type": "mcp"}}}, "tools.web_fetch.type"),
        ({"tools": {"web_fetch": LOOK}}, "tools.web_fetch"),
        ({"tools": {"web_fetch": {"enabled": "no"}}}, "tools.web_fetch.enabled"),
        ({"tools": {"post": {"permission": {"mode": "always_ask"}}}}, "tools.post.permission.mode"),
        ({"tools": {"web_fetch": {"permission": {"mode": ["always_ask"]}}}}, "tools.web_fetch.permission.mode"),
        ({"tools": {"web_fetch": {"permission": []}}}, "tools.web_fetch.permission"),
        (
            {"tools": {"web_fetch": {"permission": {"mode": "always_ask", "parameters": {"a": 1}}}}},
            "tools.web_fetch.permission.parameters",
        ),
        ({"tools": {"look": LOOK | {"description": ""}}}, "tools.look.description"),
        ({"tools": {"look": LOOK | {"input_schema": None}}}, "tools.look.input_schema"),
        ({"tools": {"look": LOOK | {"input_schema": {"type": "array"}}}}, "tools.look.input_schema.type"),
        (
            {"tools": {"look": LOOK | {"input_schema": {"type": "object", "required": ["a"]}}}},
            "tools.look.input_schema.required.0",
        ),
        ({"tools": {f"t{n}": LOOK for n in range(129)}}, "tools"),
        ({"machine_sources": [{"machine_pool_name": "p"}]}, "machine_sources.0"),
        ({"mcp": {"linear": {"url": "https://x"}}}, "mcp"),
        ({"skills": ["skl_x"]}, "skills"),
    ],
)
def test_faults_have_paths(changes: dict[str, Any], path: str) -> None:
    assert path in [problem.path for problem in faults(**changes)]


def test_a_schema_that_reaches_outside_is_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:1/x"}}}
    assert faults(tools={"look": LOOK | {"input_schema": schema}})


def test_parts_for_later_may_be_empty() -> None:
    draft(machine_sources=[], mcp={}, skills=None)
    assert [p.message for p in faults(skills=["x"])] == ["is not supported yet"]


def test_all_faults_come_sorted_in_one_answer() -> None:
    found = faults(version="v9", instruction="", model={}, tools={"ghost": {}})
    text = describe(reversed(found))
    assert text == "; ".join(f"{p.path}: {p.message}" for p in found)
    assert text.index("instruction") < text.index("model.name") < text.index("tools.ghost") < text.index("version")
    many = describe(Problem(f"p{n:03}", "m") for n in range(80))
    assert many.endswith("and 30 more")


# --- hashes -----------------------------------------------------------------------------------------------


def definition(**changes: Any) -> Definition:
    values: dict[str, Any] = {"version": "v1", "instruction": "i", "model": ModelChoice("mdl_x"), "tools": {}}
    return Definition(**(values | changes))


def test_the_hash_is_over_key_sorted_json_in_gos_encoding() -> None:
    made = compiled(definition(instruction="a<b> & \u2028", temperature=1.0))
    text = (
        '{"instruction":"a\\u003cb\\u003e \\u0026 \\u2028","model":{"configured_model_id":"mdl_x"},'
        '"temperature":1,"tools":{},"version":"v1"}'
    )
    assert made.text == text
    assert made.definition_hash == hashlib.sha256(text.encode()).hexdigest()
    assert made.instruction_hash == hashlib.sha256("a<b> & \u2028".encode()).hexdigest()
    assert decode_definition(made.text) == made.definition


def test_order_of_tools_does_not_matter() -> None:
    allow = Permission("always_allow", {})
    one = definition(tools={"a": BuiltInTool(allow), "b": BuiltInTool(allow)})
    two = definition(tools={"b": BuiltInTool(allow), "a": BuiltInTool(allow)})
    assert compiled(one).definition_hash == compiled(two).definition_hash


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_canonical_json_is_json_and_stable(value: Any) -> None:
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text
    assert json.loads(text) == value


# --- limits -----------------------------------------------------------------------------------------------

MODEL_LIMITS = Effective(
    context_window_tokens=1000,
    max_output_tokens=100,
    default_max_output_tokens=50,
    cache_retention="short",
    reasoning_effort="",
)


def test_layers_only_narrow() -> None:
    grant = Limits(context_window_tokens=5000, max_output_tokens=80, cache_retention="none")
    config = Limits(context_window_tokens=500, default_max_output_tokens=90, reasoning_effort="high")
    assert narrow(MODEL_LIMITS, grant, config) == Effective(
        context_window_tokens=500,
        max_output_tokens=80,
        default_max_output_tokens=80,
        cache_retention="none",
        reasoning_effort="high",
    )


def test_output_always_fits_into_the_window() -> None:
    made = narrow(MODEL_LIMITS, Limits(context_window_tokens=60))
    assert (made.max_output_tokens, made.request_max_output_tokens) == (59, 50)


@given(*(st.none() | st.integers(1, 10_000) for _ in range(6)))
def test_narrowing_never_widens(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> None:
    grant = Limits(context_window_tokens=a, max_output_tokens=b, default_max_output_tokens=c)
    config = Limits(context_window_tokens=d, max_output_tokens=e, default_max_output_tokens=f)
    made = narrow(MODEL_LIMITS, grant, config)
    assert made.context_window_tokens <= 1000
    assert made.max_output_tokens <= 100
    assert made.request_max_output_tokens <= made.max_output_tokens
