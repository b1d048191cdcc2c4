"""When claims and runs are taken to differ: once old enough, or twice in a row."""

from __future__ import annotations

from uuid import UUID

from omnara.domain.claim import HeldClaim
from omnara.worker.reconcile import Reconciler

AGENT = UUID(int=1)
KEY = (AGENT, 7)
HELD = {KEY: HeldClaim(AGENT, 7, 1, 1, 0, 1)}
RUNS = {KEY: (1, 1)}


def test_a_run_is_stopped_at_the_second_look_only() -> None:
    reconciler = Reconciler()
    assert reconciler.compare(RUNS, {}, [KEY]).stop == ()
    assert reconciler.compare(RUNS, {}, [KEY]).stop == (KEY,)


def test_a_run_that_is_found_again_is_left_alone() -> None:
    reconciler = Reconciler()
    reconciler.compare(RUNS, {}, [KEY])
    assert reconciler.compare(RUNS, HELD, [KEY]).stop == ()
    assert reconciler.compare(RUNS, {}, [KEY]).stop == ()


def test_an_unknown_claim_is_released_when_it_is_old_enough() -> None:
    patient = Reconciler(release_after_s=3600)
    first = patient.compare({}, HELD, [])
    assert (first.release, first.again) == ((), True)
    assert patient.compare({}, HELD, []).release == ()
    hasty = Reconciler(release_after_s=0)
    assert hasty.compare({}, HELD, []).release == (HELD[KEY],)


def test_a_claim_whose_run_began_meanwhile_is_known() -> None:
    reconciler = Reconciler(release_after_s=0)
    assert reconciler.compare({}, HELD, [KEY]).release == ()


def test_a_run_that_is_ahead_of_the_database_is_stopped_at_once() -> None:
    """A failover brought the claim back from before its last step or its last event."""
    reconciler = Reconciler()
    for place in ((2, 1), (1, 2)):
        found = reconciler.compare({KEY: place}, HELD, [KEY])
        assert (found.stop, found.release, found.again) == ((KEY,), (), True)
    assert reconciler.compare(RUNS, {KEY: HeldClaim(AGENT, 7, 1, 2, 0, 9)}, [KEY]).stop == ()
