"""What machines may ask for at once."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

from omnara.api.daemon import gate as module
from omnara.api.daemon.gate import AT_ONCE, REMEMBERED, SOCKETS, WAITING, Gate
from omnara.errors import Unauthorized, Unavailable
from omnara.metrics import Metrics


class Lab:
    """A gate, and what it has counted."""

    def __init__(self, turns: int = 2) -> None:
        self.metrics = Metrics.create()
        self.turns = asyncio.Semaphore(turns)
        self.gate = Gate(self.turns, self.metrics)

    def refused(self, bound: str) -> float:
        return float(self.metrics.machine_requests_refused.labels(bound)._value.get())


async def test_a_token_has_a_few_requests_at_once_and_another_one_its_own() -> None:
    lab = Lab()
    with ExitStack() as stack:
        visits = [stack.enter_context(lab.gate.visit("a")) for _ in range(AT_ONCE)]
        for _ in range(3):
            with pytest.raises(Unavailable, match="this token") as refusal, lab.gate.visit("a"):
                pass
            assert refusal.value.retry_after_s > 0
        stack.enter_context(lab.gate.visit("b"))
        visits[0].leave()
        visits[0].leave()
        stack.enter_context(lab.gate.visit("a"))
        with pytest.raises(Unavailable), lab.gate.visit("a"):
            pass
    assert lab.refused("token") == 4
    assert not lab.gate._inside, "who is gone is forgotten"


async def test_a_machine_has_a_few_sockets() -> None:
    lab, machine, other = Lab(), uuid4(), uuid4()
    with ExitStack() as stack:
        for _ in range(SOCKETS):
            stack.enter_context(lab.gate.socket(machine))
        with pytest.raises(Unavailable, match="sockets"), lab.gate.socket(machine):
            pass
        stack.enter_context(lab.gate.socket(other))
    with lab.gate.socket(machine):
        assert lab.refused("socket") == 1
    assert not lab.gate._sockets


async def look(lab: Lab, key: str, known: asyncio.Event, seen: list[str]) -> None:
    async with lab.gate.lookup(key):
        seen.append(key)
        await known.wait()
        if key.startswith("bad"):
            raise Unauthorized


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_tokens_that_nobody_knows_are_looked_up_one_at_a_time_beside_the_good_ones() -> None:
    lab, answered, seen = Lab(), asyncio.Event(), list[str]()
    answered.set()
    await look(lab, "good", answered, seen)
    answered.clear()
    flood = [asyncio.create_task(look(lab, f"bad-{number}", answered, seen)) for number in range(50)]
    await settled()
    assert seen == ["good", "bad-0"]
    daemon = asyncio.create_task(look(lab, "good", answered, seen))
    await settled()
    assert seen == ["good", "bad-0", "good"], "it does not stand in their line"
    answered.set()
    ends = await asyncio.gather(daemon, *flood, return_exceptions=True)
    assert ends[0] is None
    assert all(isinstance(end, Unauthorized) for end in ends[1:])
    assert list(lab.gate._good) == ["good"]


async def test_a_token_that_is_good_no_more_is_forgotten_and_an_outage_says_nothing() -> None:
    lab, answered, seen = Lab(), asyncio.Event(), list[str]()
    answered.set()
    await look(lab, "good", answered, seen)
    with pytest.raises(Unavailable):
        async with lab.gate.lookup("good"):
            raise Unavailable("away")
    assert list(lab.gate._good) == ["good"]
    with pytest.raises(Unauthorized):
        async with lab.gate.lookup("good"):
            raise Unauthorized
    assert not lab.gate._good


async def test_what_is_remembered_is_bounded() -> None:
    lab, answered, seen = Lab(), asyncio.Event(), list[str]()
    answered.set()
    for number in range(REMEMBERED + 5):
        await look(lab, f"{number}", answered, seen)
    assert len(lab.gate._good) == REMEMBERED
    assert "0" not in lab.gate._good


async def hold(lab: Lab, until: asyncio.Event, key: str | None = None) -> None:
    with lab.gate.visit(key or str(uuid4())) as visit:
        async with visit.turn():
            await until.wait()


async def test_a_token_has_one_turn_at_a_time() -> None:
    lab, until = Lab(turns=2), asyncio.Event()
    mad = [asyncio.create_task(hold(lab, until, "mad")) for _ in range(AT_ONCE)]
    await settled()
    assert not lab.turns.locked()
    other = asyncio.create_task(hold(lab, until))
    await settled()
    assert lab.turns.locked(), "another one has the other turn"
    until.set()
    await asyncio.gather(other, *mad)
    assert not lab.turns.locked()
    assert not lab.gate._inside


async def test_the_line_is_bounded_and_may_be_left() -> None:
    lab, until = Lab(turns=1), asyncio.Event()
    waiting = [asyncio.create_task(hold(lab, until)) for _ in range(WAITING + 1)]
    await settled()
    for _ in range(2):
        with pytest.raises(Unavailable, match="too many machines"):
            await hold(lab, until)
    waiting[-1].cancel()
    await asyncio.gather(waiting[-1], return_exceptions=True)
    last = asyncio.create_task(hold(lab, until))
    until.set()
    await asyncio.gather(last, *waiting[:-1])
    assert lab.refused("line") == 2
    assert lab.gate._waiting == 0
    assert not lab.turns.locked()


async def test_waiting_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    lab, until = Lab(turns=1), asyncio.Event()
    holder: asyncio.Task[Any] = asyncio.create_task(hold(lab, until))
    await settled()
    with pytest.raises(Unavailable, match="too many machines"):
        await hold(lab, until)
    until.set()
    await holder
    assert lab.refused("line") == 1
