"""The client's event parser: any cut of the bytes gives the same frames."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnara.client import sse
from omnara.client.errors import StreamBroken
from omnara.client.sse import Frame, FrameParser

STREAM = (
    b'\xef\xbb\xbf: ok\r\n\r\nid: 1\r\nevent: agent_input\r\ndata: {"a": "\xe2\x82\xac"}\r\n\r\n'
    b": heartbeat\n\nevent: tool_call_update\ndata:x\ndata: y\nretry: 5\n\n"
    b"id: 3\rdata: z\r\rid: 4\n\ndata\n\nid: 5\ndata: end\n\ndata: unfinished"
)
FRAMES = [
    Frame("agent_input", '{"a": "€"}', "1"),
    Frame("tool_call_update", "x\ny", None),
    Frame("message", "z", "3"),
    Frame("message", "", None),
    Frame("message", "end", "5"),
]


def parse(chunks: list[bytes]) -> list[Frame]:
    parser = FrameParser()
    return [frame for chunk in chunks for frame in parser.feed(chunk)]


def test_whole_and_byte_by_byte() -> None:
    assert parse([STREAM]) == FRAMES
    assert parse([STREAM[at : at + 1] for at in range(len(STREAM))]) == FRAMES


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parse([STREAM[a:b] for a, b in itertools.pairwise(edges)]) == FRAMES


def test_a_frame_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_FRAME_CHARS", 1000)
    for piece in (b"data: " + b"x" * 50 + b"\n", b"x" * 50):
        with pytest.raises(StreamBroken, match="longer"):
            parse([piece] * 100)
