"""When a container that does not answer is given up: that ends all that runs there, so only after a long silence."""

from __future__ import annotations

from uuid import uuid4

import pytest

from omnara.engine.machines.provisioning import Times
from omnara.fleet import reached
from omnara.fleet.reached import Reached

STUCK_S = 90.0


@pytest.fixture
def places() -> Reached:
    return Reached(None, [], uuid4, Times(stuck_s=STUCK_S))  # type: ignore[arg-type]


def looks(places: Reached, monkeypatch: pytest.MonkeyPatch, *times: float) -> list[bool]:
    """Find one machine silent at these times; whether each look gives it up."""
    machine, found = uuid4(), []
    for now in times:
        monkeypatch.setattr(reached, "monotonic", lambda now=now: now)
        found.append(places._stuck(machine, running=True))
    return found


def test_a_machine_that_stays_silent_is_given_up(places: Reached, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks(places, monkeypatch, 0, 45, 89, 91) == [False, False, False, True]


def test_two_short_silences_are_no_long_one(places: Reached, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks(places, monkeypatch, 0, 5, 95, 100, 180) == [False] * 5
    assert len(places._silent) == 1, "what was silent once is not remembered"
