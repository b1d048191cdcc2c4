"""What became of a save whose answer was lost, judged from the hot row and the evidence."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import msgspec

from omnara.domain.advance import Advance, Advanced, BeginStep, ClaimLost, CloseStep, NewEvent
from omnara.domain.claim import ClaimState
from omnara.worker.saver import judge

WORKER, AGENT, TURN = UUID(int=1), UUID(int=2), UUID(int=3)
BEGIN = BeginStep("model", 1, TURN, TURN, call_id=UUID(int=5))
EVENT = NewEvent(UUID(int=4), "model_output", TURN, 1, "{}")
ITEM = Advance(
    AGENT, 7, 3, 10, TURN, 1, 5, 20, "begin", close=CloseStep(5, "succeeded", "model"), events=(EVENT,), begin=BEGIN
)
BEFORE = ClaimState(WORKER, 7, 3, 20, 10, TURN, 1, 5, None, False, "started", None, datetime.now(UTC))


def test_nothing_happened_is_saved_again() -> None:
    assert judge(ITEM, BEFORE, WORKER) is None


def test_saved_and_begun() -> None:
    state = msgspec.structs.replace(
        BEFORE, next_sequence=21, step_number=6, step_state="succeeded", event_sequence=20, inputs_gen=12
    )
    done = judge(ITEM, state, WORKER)
    assert isinstance(done, Advanced)
    assert (done.begun, done.kept, done.first_sequence, done.step_number) == (True, True, 20, 6)
    # What producers wrote after the begin has not been read: the next save must not match their generation.
    assert done.inputs_gen == 10


def test_saved_and_given_back() -> None:
    state = msgspec.structs.replace(
        BEFORE,
        worker_id=None,
        claim_token=None,
        next_sequence=21,
        step_state="succeeded",
        event_sequence=20,
        ready=True,
    )
    done = judge(ITEM, state, WORKER)
    assert isinstance(done, Advanced)
    assert (done.begun, done.kept, done.ready) == (False, False, True)


def test_taken_away_before_the_save() -> None:
    state = msgspec.structs.replace(BEFORE, worker_id=UUID(int=9), epoch=4, step_state="interrupted")
    assert judge(ITEM, state, WORKER) == ClaimLost()


def test_another_workers_save_of_the_same_step_is_no_evidence() -> None:
    state = msgspec.structs.replace(BEFORE, worker_id=None, claim_token=None, epoch=4, step_state="canceled")
    assert judge(ITEM, state, WORKER) == ClaimLost()


def test_a_begin_alone_is_known_by_its_step() -> None:
    item = msgspec.structs.replace(ITEM, close=None, events=())
    assert judge(item, BEFORE, WORKER) is None
    done = judge(item, msgspec.structs.replace(BEFORE, step_number=6), WORKER)
    assert isinstance(done, Advanced)
    assert done.begun


def test_the_agent_is_gone() -> None:
    assert judge(ITEM, None, WORKER) == ClaimLost()


def test_a_claim_that_came_back_from_before_the_step_is_lost() -> None:
    """A failover lost commits: the claim is there, and what the save would follow is not."""
    for lost in ({"step_number": 4}, {"next_sequence": 19}):
        state = msgspec.structs.replace(BEFORE, **lost)
        assert judge(ITEM, state, WORKER) == ClaimLost()
    assert judge(ITEM, msgspec.structs.replace(BEFORE, next_sequence=22), WORKER) is None, "somebody else has written"
