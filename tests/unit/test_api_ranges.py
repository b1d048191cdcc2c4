"""Ranges and validators: what is understood exactly, and what is ignored."""

from __future__ import annotations

import pytest

from omnara.api.ranges import Span, names_tag, span_of


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None),
        ("bytes=0-", Span(0, 10)),
        ("bytes=0-0", Span(0, 1)),
        ("Bytes=2-5", Span(2, 6)),
        ("bytes=2-99", Span(2, 10)),
        ("bytes=9-", Span(9, 10)),
        ("bytes=-3", Span(7, 10)),
        ("bytes=-99", Span(0, 10)),
        ("bytes=10-", Span(10, 10)),
        ("bytes=10-12", Span(10, 10)),
        ("bytes=-0", Span(10, 10)),
        ("bytes=5-2", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
        ("bytes=a-b", None),
        ("bytes=٣-", None),
        ("bytes=" + "9" * 40 + "-", None),
    ],
)
def test_spans(header: str | None, span: Span | None) -> None:
    assert span_of(header, 10) == span


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (None, False),
        ("*", True),
        ('"a"', True),
        ('W/"a"', True),
        ('"b", "a"', True),
        ('"b"', False),
        ("a", False),
        ("", False),
    ],
)
def test_tags(header: str | None, named: bool) -> None:
    assert names_tag(header, '"a"') is named
