"""Which files a request shows: the newest that fit, and a reason for every other one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from omnara.db.artifacts import ArtifactRow
from omnara.engine.artifacts_shown import REFUSED, _choose, _shown_images
from omnara.ids import new_uuid
from omnara.providers.protocol import ModelTarget

MIB = 1024 * 1024
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


def row(media_type: str = "image/png", size: int = 1000, side: int | None = 100) -> ArtifactRow:
    now = datetime.now(UTC)
    return ArtifactRow(new_uuid(), new_uuid(), new_uuid(), b"", size, media_type, None, side, 1, now, 1, "postgres")


def target(api_format: str = "anthropic_messages", **more: Any) -> ModelTarget:
    return ModelTarget(revision_id="", provider="", slug="", api_format=api_format, **more)


def refusals(rows: list[ArtifactRow], to: ModelTarget, refused: frozenset[str] = frozenset()) -> dict[str, str]:
    return _choose({str(number): row for number, row in enumerate(rows)}, to, refused)


def test_what_fits_is_shown() -> None:
    rows = [row(), row("application/pdf"), row("text/plain", 9 * MIB), row("image/gif")]
    assert refusals(rows, target()) == {}


@pytest.mark.parametrize(
    ("file", "to", "why"),
    [
        (row(size=4 * MIB), target(), "too large a picture"),
        (row(side=8001), target(), "8001 x 1 pixels"),
        (row(DOCX), target(), "of this type"),
        (row(DOCX), target("openai_responses"), None),
        (row(size=4 * MIB), target("openai_responses"), None),
        (row(), target(input_modalities=("text",)), "takes no images"),
        (row("application/pdf"), target(input_modalities=("text", "image")), "takes no files"),
        (row("text/csv"), target(input_modalities=("text",)), None),
        (row(), target(input_modalities=("text", "image")), None),
    ],
)
def test_what_a_model_does_not_take_is_told(file: ArtifactRow, to: ModelTarget, why: str | None) -> None:
    found = refusals([file], to)
    assert (why is None) == (found == {})
    if why is not None:
        assert why in found["0"]


def test_the_newest_have_the_room() -> None:
    rows = [row("application/pdf", 9 * MIB), row("application/pdf", 7 * MIB), row("application/pdf", 9 * MIB), row()]
    found = refusals(rows, target())
    assert set(found) == {"0"}
    assert "newer files" in found["0"]


def test_pictures_leave_by_halves_so_that_the_beginning_of_requests_stays() -> None:
    shown = [_shown_images(count, 20) for count in range(60)]
    assert shown[:21] == list(range(21))
    assert max(shown) == 20
    assert min(shown[20:]) == 11
    changes = [count for count in range(21, 60) if count - shown[count] != count - 1 - shown[count - 1]]
    assert changes == [21, 31, 41, 51]
    found = refusals([row() for _ in range(25)], target())
    assert set(found) == {str(number) for number in range(10)}


def test_what_was_refused_takes_no_room() -> None:
    found = refusals([row() for _ in range(21)], target(), frozenset({"20"}))
    assert found == {"20": REFUSED}
