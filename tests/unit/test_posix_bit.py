"""The execution bit: taken once, in room that is there before, and never forgotten."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnara.machines.posix.keeper import files


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    files.fresh_files(fd, b"{}", {"piece_bytes": 7})
    yield fd
    os.close(fd)


def test_a_fresh_directory_has_room_for_all_that_comes_later(directory: int, tmp_path: Path) -> None:
    assert files.read_bit(directory) is None
    assert files.read_exit(directory) is None
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    files.take_bit(directory, {"started_at": "now"})
    files.fill_bit(directory, {"pid": 7})
    files.write_exit(directory, {"state": "exited"})
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == sizes
    assert files.read_bit(directory) == ({"started_at": "now"}, {"pid": 7})
    assert files.read_exit(directory) == {"state": "exited"}
    assert files.read_meta(directory) == {"piece_bytes": 7}


def test_whoever_waits_for_the_end_can_read_it_when_told(directory: int) -> None:
    told = []
    for state in ("exited", "failed"):
        files.write_exit(directory, {"state": state}, written=lambda: told.append(files.read_exit(directory)))
    assert told == [{"state": "exited"}] * 2


def test_the_bit_is_taken_once(directory: int) -> None:
    files.take_bit(directory, {"started_at": "first"})
    with pytest.raises(FileExistsError):
        files.take_bit(directory, {"started_at": "second"})
    assert files.read_bit(directory) == ({"started_at": "first"}, None)


@pytest.mark.parametrize("content", [b"", b'{"started', b" " * 4095, b"\0" * 4096, b"{" + b" " * 4095])
def test_what_is_left_of_a_damaged_bit_counts_as_taken(directory: int, tmp_path: Path, content: bytes) -> None:
    whole = (tmp_path / files.PROCESS).read_bytes()
    (tmp_path / files.PROCESS).write_bytes(whole[:4096] + content + (whole[8192:] if len(content) == 4096 else b""))
    assert files.read_bit(directory) == ({}, None)
    with pytest.raises(FileExistsError):
        files.take_bit(directory, {"started_at": "again"})


def test_files_that_are_there_are_not_filled_again(directory: int) -> None:
    with pytest.raises(FileExistsError):
        files.fresh_files(directory, b"{}", {})
