"""Output as text: read in whatever pieces, it says the same, and no character is damaged on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnara.machines.processes import OutputSlice
from omnara.machines.runtime.output import Seen, seen


def _slice(whole: bytes, cursor: int, max_bytes: int, *, closed: bool = True) -> OutputSlice:
    data = whole[cursor : cursor + max_bytes]
    return OutputSlice(
        data=data, cursor=cursor, next_cursor=cursor + len(data), end=len(whole), dropped=False, closed=closed
    )


def _read_all(whole: bytes, max_bytes: int) -> str:
    text, cursor = "", 0
    while cursor < len(whole):
        found = seen(_slice(whole, cursor, max_bytes), max_bytes)
        assert found.next_cursor > cursor, "every read of a closed output gets on"
        assert len(found.text.encode()) <= found.next_cursor - found.cursor
        assert found.truncated == (found.next_cursor < len(whole))
        text += found.text
        cursor = found.next_cursor
    return text


_BYTES = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=20).map(str.encode),
    st.lists(st.sampled_from([b"a", b"\xe2\x82\xac", b"\xf0\x9f\x98\x80", b"\xe2\x82", b"\xf0", b"\x80", b"\xff"])).map(
        b"".join
    ),
)


@given(whole=_BYTES, max_bytes=st.integers(4, 70))
def test_pieces_say_what_the_whole_says(whole: bytes, max_bytes: int) -> None:
    assert _read_all(whole, max_bytes) == _read_all(whole, 1_000)


@given(text=st.text(max_size=30), max_bytes=st.integers(4, 40))
def test_no_character_is_ever_damaged(text: str, max_bytes: int) -> None:
    assert _read_all(text.encode(), max_bytes) == text


@given(whole=_BYTES, max_bytes=st.integers(1, 3))
def test_the_smallest_reads_get_to_the_end_too(whole: bytes, max_bytes: int) -> None:
    _read_all(whole, max_bytes)


def test_half_a_character_waits_for_its_rest_while_the_process_runs() -> None:
    assert seen(_slice(b"a\xe2\x82", 0, 100, closed=False), 100) == Seen("a", 0, 1, False)
    assert seen(_slice(b"a\xe2\x82", 1, 100, closed=False), 100) == Seen("", 1, 1, False)
    assert seen(_slice(b"a\xe2\x82\xac", 1, 100, closed=False), 100) == Seen("€", 1, 4, False)


def test_half_a_character_at_the_very_end_becomes_a_question_mark() -> None:
    assert seen(_slice(b"a\xe2\x82", 0, 100), 100) == Seen("a?", 0, 3, False)


def test_a_cursor_inside_a_character_loses_no_more_than_that_character() -> None:
    assert seen(_slice("€uro".encode(), 1, 100), 100).text == "??uro"


def test_a_character_longer_than_the_read_does_not_hold_it_up() -> None:
    assert seen(_slice("€".encode(), 0, 2), 2) == Seen("?", 0, 2, True)


@pytest.mark.parametrize("data", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_what_is_no_utf8_becomes_question_marks(data: bytes) -> None:
    found = seen(_slice(data, 0, 100), 100)
    assert set(found.text) == {"?"}
    assert found.next_cursor == len(data)
