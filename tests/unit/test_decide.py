"""The order of choice of `decide`, rule by rule."""

from __future__ import annotations

from uuid import UUID

import pytest

from omnara.domain.step import (
    CallModel,
    Decision,
    Idle,
    OpenCall,
    Park,
    RunTools,
    Situation,
    Waiting,
    WaitingInput,
    decide,
)

READY = OpenCall(UUID(int=1), 0, "web_fetch", "built_in", {}, "ready")
RUNNING = OpenCall(UUID(int=2), 1, "web_fetch", "built_in", {}, "running")
CUSTOM = OpenCall(UUID(int=3), 2, "list_files", "custom", {}, "ready")
ASKED = OpenCall(UUID(int=4), 3, "web_fetch", "built_in", {}, "awaiting_permission")
STEER_1 = WaitingInput(UUID(int=5), "steering", 1024, "[]", None, None)
STEER_2 = WaitingInput(UUID(int=6), "steering", 2048, "[]", None, None)
QUEUED = WaitingInput(UUID(int=7), "queued", 512, "[]", None, None)


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        pytest.param(Situation(False), Idle(), id="nothing to do"),
        pytest.param(Situation(False, queued=QUEUED), CallModel((QUEUED,), 1), id="a queued input opens a turn"),
        pytest.param(Situation(True), CallModel((), 1), id="the turn wants the model"),
        pytest.param(Situation(True, attempt=2), CallModel((), 3), id="the next attempt"),
        pytest.param(Situation(True, attempt=2, retry_in_s=4.0), Park(4.0), id="a retry that is not due"),
        pytest.param(Situation(True, attempt=2, retry_in_s=-0.1), CallModel((), 3), id="a retry that is due"),
        pytest.param(Situation(True, queued=QUEUED), CallModel((), 1), id="the turn comes before the queue"),
        pytest.param(
            Situation(True, queued=QUEUED, retry_in_s=9.0), Park(9.0), id="a queued input waits for a parked turn"
        ),
        pytest.param(
            Situation(True, steering=(STEER_1, STEER_2), attempt=5, retry_in_s=9.0, queued=QUEUED),
            CallModel((STEER_1, STEER_2), 1),
            id="all steering at once, with a fresh budget",
        ),
        pytest.param(Situation(True, (READY, CUSTOM), (STEER_1,)), RunTools((READY,)), id="runnable calls win"),
        pytest.param(Situation(True, (CUSTOM,), (STEER_1,), QUEUED), Waiting(), id="an open batch blocks steering"),
        pytest.param(Situation(True, (ASKED, RUNNING)), Waiting(), id="waiting for a person"),
    ],
)
def test_choice(situation: Situation, expected: Decision) -> None:
    assert decide(situation) == expected
