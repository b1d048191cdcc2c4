"""However the network cuts a stream, the events are the same, and they are those of the standard."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from omnara.providers.sse import SseParser

lines = st.one_of(
    st.sampled_from([b"", b"", b"data", b"data:", b": note", b"event: e", b"id: 1", b"datax: 1"]),
    st.binary(max_size=8).map(lambda raw: b"data: " + raw.replace(b"\r", b"").replace(b"\n", b"")),
)
streams = st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\r", b"\r\n"])), max_size=20).map(
    lambda parts: b"".join(line + end for line, end in parts)
)


def reference(stream: bytes) -> list[bytes]:
    """The standard, read literally on the whole stream."""
    whole = stream.removeprefix(b"\xef\xbb\xbf")
    ended = re.split(rb"\r\n|\r|\n", whole)[:-1]  # the last line has no end
    events, data = [], []
    for line in ended:
        if not line:
            if data and b"\n".join(data):
                events.append(b"\n".join(data))
            data = []
        elif not line.startswith(b":"):
            name, _, value = line.partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
    return events


@settings(max_examples=400, deadline=None)
@given(st.booleans(), streams, st.lists(st.integers(0, 200), max_size=12))
def test_cuts_do_not_matter(bom: bool, stream: bytes, cuts: list[int]) -> None:
    stream = (b"\xef\xbb\xbf" if bom else b"") + stream
    edges = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    pieces = [stream[low:high] for low, high in pairwise(edges)]
    parser = SseParser()
    assert [event for piece in pieces for event in parser.feed(piece)] == reference(stream)
