"""Kept output against a model: one long string of which only the newest pieces can be read."""

from __future__ import annotations

import os
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st

from omnara.machines.posix.keeper.output import OutputReader, OutputWriter

PIECE = 7

steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.binary(max_size=40)),
        st.tuples(st.just("reopen"), st.just(b"")),
        st.tuples(st.just("read"), st.tuples(st.integers(0, 200), st.integers(0, 50))),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(steps=steps, pieces=st.integers(2, 4))
def test_reads_are_the_model(steps: list[tuple[str, object]], pieces: int) -> None:
    """What is read is what was written there; what is gone is older than what must be kept; nothing is invented."""
    with tempfile.TemporaryDirectory() as place:
        directory = os.open(place, os.O_RDONLY)
        try:
            _walk(directory, steps, pieces)
        finally:
            os.close(directory)


def _walk(directory: int, steps: list[tuple[str, object]], pieces: int) -> None:
    writer, reader, model = OutputWriter(directory, PIECE, pieces), OutputReader(directory, PIECE), b""
    for kind, value in steps:
        if isinstance(value, bytes):
            if kind == "append":
                writer.append(value)
                model += value
            else:
                writer.close()
        elif isinstance(value, tuple):
            _compare(reader, model, *value)
        start, end = reader.span()
        assert end == writer.end == len(model)
        assert len(model) - PIECE * pieces <= start <= max(0, len(model) - PIECE * (pieces - 1))
    writer.close()


def _compare(reader: OutputReader, model: bytes, cursor: int, size: int) -> None:
    start = reader.span()[0]
    begin, data = reader.read(cursor, size)
    assert begin == max(cursor, start)
    assert data == model[begin : begin + size]
