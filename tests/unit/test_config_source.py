"""Reading config sources: foreign text in, plain values or a fault out, in bounded time."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from omnara.domain.config_source import MAX_DEPTH, SourceError, join_path, read_source


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_yaml_follows_the_core_rules() -> None:
    source = """
version: v1
on: yes
date: 2026-01-01
octal: 0x10
number: -3
float: 2.5e1
nothing: ~
empty:
truth: TRUE
quoted: "5"
tagged: !!str 5
block: |
  a
  b
list: [1, 2]
shared: &s {k: 1}
again: *s
"""
    assert read_source(source, "yaml") == {
        "version": "v1", "on": "yes", "date": "2026-01-01", "octal": "0x10", "number": -3, "float": 25.0,
        "nothing": None, "empty": None, "truth": True, "quoted": "5", "tagged": "5", "block": "a\nb\n",
        "list": [1, 2], "shared": {"k": 1}, "again": {"k": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "must be a mapping"),
        ("- a", "must be a mapping"),
        ("just text", "must be a mapping"),
        ("a: 1\n---\nb: 2", "more than one document"),
        ("a: [1, 2", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("\tx: 1", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("a: 1\na: 2", "twice"),
        ("1: a", "every key must be text"),
        ("? [a]\n: b", "every key must be text"),
        ("<<: {a: 1}", "merge keys"),
        ("a: *x", "alias"),
        ("a: &x [*x]", "alias"),
        ("a: !!python/object/apply:os.system [id]", "tags"),
        ("a: !custom 1", "tags"),
        ("a: !!int 5", "tags"),
        ("a: 1234567890123456789012", "18 digits"),
        ("a: 1e999", "not finite"),
        ("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "levels deep"),
        ("a: " + "[" * 100_000, "not valid YAML"),
        ("a: [" + "1," * 20_001 + "]", "more than 20000 values"),
        (bomb(12), "more than 20000 values"),
        ("a: " + "x" * 600_000, "larger than"),
    ],
)
def test_bad_yaml(source: str, message: str) -> None:
    started = time.thread_time()
    with pytest.raises(SourceError, match=message):
        read_source(source, "yaml")
    assert time.thread_time() - started < 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "not one JSON document"),
        ("{", "not one JSON document"),
        ("{} {}", "not one JSON document"),
        ("a: 1", "not one JSON document"),
        ("[]", "must be a mapping"),
        ("null", "must be a mapping"),
        ('{"a": NaN}', "not one JSON document"),
        ('{"a": 1e999}', "not one JSON document"),
        ('{"a": 123456789012345678901234567890}', "64 bits"),
        ('{"a":' * 50_000, "not one JSON document"),
        ('{"a":' + "[" * 70 + "]" * 70 + "}", "levels deep"),
        ("{" + ",".join(f'"k{n}":1' for n in range(20_001)) + "}", "more than 20000"),
        ('{"a": "\ud800"}', "not one JSON document"),
    ],
)
def test_bad_json(source: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_source(source, "json")


def test_text_is_cleaned() -> None:
    assert read_source('{"a\\u0000": "b\\u0000c"}', "json") == {"a\ufffd": "b\ufffdc"}


def test_faults_never_echo_the_text() -> None:
    with pytest.raises(SourceError) as caught:
        read_source("password: [sk-very-secret", "yaml")
    assert "secret" not in str(caught.value)
    assert "line 2, column 1" in str(caught.value)


def test_paths() -> None:
    assert join_path("", "a") == "a"
    assert join_path("a", "b-c_1") == "a.b-c_1"
    assert join_path("a", "b.c") == 'a."b.c"'
    assert len(join_path("a", "x" * 500)) < 80


words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"))
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcde", min_size=1), inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.dictionaries(st.text("abcde", min_size=1), plain, max_size=4))
def test_what_yaml_writers_write_is_read_back(value: dict[str, Any]) -> None:
    assert read_source(msgspec.json.encode(value).decode(), "json") == value
    text = yaml.safe_dump(value, allow_unicode=False, default_style='"') if value else "{}"
    if "!!" in text:
        # The writer tags what it cannot say in this style; that is refused, not misread.
        with contextlib.suppress(SourceError):
            assert read_source(text, "yaml") == value
    else:
        assert read_source(text, "yaml") == value


@settings(deadline=None)
@given(st.text())
def test_any_text_gives_a_mapping_or_a_fault(text: str) -> None:
    for source_format in ("yaml", "json"):
        try:
            read = read_source(text, source_format)  # type: ignore[arg-type]
        except SourceError:
            continue
        assert isinstance(read, dict)
