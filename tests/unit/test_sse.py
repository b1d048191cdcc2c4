"""The event stream parser: what the format allows, and its bounds."""

from __future__ import annotations

import time

import pytest

from omnara.providers.sse import SseParser, StreamTooLarge


def parse(*chunks: bytes) -> list[bytes]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"\xef\xbb\xbfdata: a\r\n\r\ndata:b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"event: x\nid: 1\nretry: 5\n: note\ndata: a\ndata:  b\ndata:\ndata\n\n", [b"a\n b\n\n"]),
        (b": ping\n\n\n\nevent: only\n\n", []),
        (b"data: never ended\n", []),
        (b"data:\n\n", []),
        (b"database: x\ndata: y\n\n", [b"y"]),
        (b"data: \xe2\x82\xac \xf0\x9f\x98\x80\n\n", ["€ 😀".encode()]),
    ],
)
def test_streams(stream: bytes, events: list[bytes]) -> None:
    assert parse(stream) == events
    assert parse(*(stream[at : at + 1] for at in range(len(stream)))) == events


def test_a_carriage_return_at_a_chunk_edge_ends_one_line() -> None:
    assert parse(b"data: a\r", b"\n\r", b"\ndata: b\r", b"\r", b"data: c\n\n") == [b"a", b"b", b"c"]


def test_bounds_are_enforced_for_lines_events_and_the_response() -> None:
    with pytest.raises(StreamTooLarge, match="event is larger than 10 bytes"):
        SseParser(max_event=10).feed(b"data: 12345678901\n\n")
    held = SseParser(max_event=10)
    held.feed(b"data: 123")
    with pytest.raises(StreamTooLarge):
        held.feed(b"4567890")
    lines = SseParser(max_event=10)
    lines.feed(b"data: 12345\n")
    with pytest.raises(StreamTooLarge):
        lines.feed(b"data: 67890\n")
    total = SseParser(max_total=20)
    total.feed(b"data: a\n\ndata: b\n\n")
    with pytest.raises(StreamTooLarge, match="response is larger than 20 bytes"):
        total.feed(b"data: c\n\n")
    assert SseParser(max_event=10).feed(b"data: 1234567890\n\n") == [b"1234567890"]


def test_a_line_of_many_megabytes_arrives_in_small_pieces_at_linear_cost() -> None:
    parser = SseParser()
    payload = b"x" * (20 * 1024 * 1024)
    stream = b"data: " + payload + b"\n\n"
    started = time.process_time()
    events = [event for at in range(0, len(stream), 4096) for event in parser.feed(stream[at : at + 4096])]
    assert events == [payload]
    assert time.process_time() - started < 2.0  # joining at every piece would take minutes
