"""Files at the door: each kind is known by what it is, not by what it is called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnara.engine.artifacts_check import MEDIA_TYPES, Size, Unfit, check_file
from tests.support.pictures import GIF, JPEG, PDF, office, png, webp

OFFICE = "application/vnd.openxmlformats-officedocument."
GOOD = [
    ("image/png", png(640, 480), Size(640, 480)),
    ("image/jpeg", JPEG, Size(7, 5)),
    ("image/gif", GIF, Size(3, 2)),
    ("image/webp", webp(8001, 20), Size(8001, 20)),
    ("application/pdf", PDF, None),
    ("application/pdf", b"\n\n" + PDF, None),
    ("text/plain", "naïve".encode(), None),
    ("text/markdown", b"# a", None),
    ("text/csv", b"a,b\n", None),
    ("text/tab-separated-values", b"a\tb", None),
    (OFFICE + "wordprocessingml.document", office("word"), None),
    (OFFICE + "presentationml.presentation", office("ppt"), None),
    (OFFICE + "spreadsheetml.sheet", office("xl"), None),
]
BAD = [
    ("image/png", b"hi"),
    ("image/png", JPEG),
    ("image/jpeg", png()),
    ("image/png", png(0, 4)),
    ("image/png", png(40, 40)[:-30]),
    ("image/jpeg", JPEG[:24]),
    ("image/webp", webp(5, 5)[:-1]),
    ("application/pdf", b"PDF"),
    ("text/plain", b"a\x00b"),
    ("text/csv", b"\xff\xfe"),
    (OFFICE + "wordprocessingml.document", office("xl")),
    (OFFICE + "spreadsheetml.sheet", b"PK\x03\x04"),
]


@pytest.mark.parametrize(("media_type", "data", "size"), GOOD)
def test_good_files_pass(media_type: str, data: bytes, size: Size | None) -> None:
    assert check_file(media_type, data) == size


@pytest.mark.parametrize(("media_type", "data"), BAD)
def test_files_of_another_kind_are_refused(media_type: str, data: bytes) -> None:
    assert isinstance(check_file(media_type, data), Unfit)


def test_every_type_of_the_contract_is_tried() -> None:
    assert {media_type for media_type, _, _ in GOOD} == MEDIA_TYPES


def test_a_frame_is_found_behind_fill_bytes_and_a_profile() -> None:
    profile = b"\xff\xe2\xff\xff".ljust(65537, b"p") * 161
    assert check_file("image/jpeg", JPEG[:2] + profile + b"\xff" * 1_000_000 + JPEG[20:]) == Size(7, 5)


@pytest.mark.parametrize("filling", [b"\xff\xe0\x00\x02", b"\xff\x01"])
def test_a_picture_of_empty_segments_is_not_walked_through(filling: bytes) -> None:
    assert isinstance(check_file("image/jpeg", JPEG[:2] + filling * 100_000 + JPEG[20:]), Unfit)


@given(st.sampled_from([png(), JPEG, GIF, webp(4, 4), PDF]), st.integers(0, 60), st.binary(max_size=40))
def test_no_bytes_make_it_fail(start: bytes, cut: int, rest: bytes) -> None:
    for media_type in MEDIA_TYPES:
        check_file(media_type, start[:cut] + rest)
