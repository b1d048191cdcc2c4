"""Lines that break anywhere and runtimes that are killed anywhere: no command runs twice, no effect is had twice, and
everything comes to an end that the server knows."""

from __future__ import annotations

import asyncio
import contextlib
import random
from uuid import uuid4

import pytest

from omnara.machines import wire
from omnara.machines.link import Link, LinkClosed, memory_link
from omnara.machines.runtime import Ended, Runtime, Timing
from tests.support.model_server_side import ModelServerSide
from tests.support.scripted_home import ScriptedHome

TIMING = Timing(settle_s=0.001, resend_s=0.001, watch_s=1, quiesce_s=1, restart_wait_s=0.001)
NAMES = [f"prc_{number}" for number in range(6)]


class World:
    """One home, one server's model, and what goes wrong between them."""

    def __init__(self, seed: int, *, act: bool) -> None:
        self.dice = random.Random(seed)
        self.home = ScriptedHome()
        self.home.effect_s = 0.003
        self.server = ModelServerSide(NAMES, act=act)
        self.runtime = self._fresh()
        self.troubles = 40

    def _fresh(self) -> Runtime:
        return Runtime(self.home, instance_id=uuid4(), timing=TIMING)

    def bad_luck(self, chance: float) -> bool:
        """Whether something goes wrong now; in the end all goes well."""
        if self.troubles <= 0 or self.dice.random() >= chance:
            return False
        self.troubles -= 1
        return True

    async def run(self) -> None:
        """Connect again and again until everything is over, and then once more without trouble."""
        while not (self.server.done and not self.runtime.busy):
            await self._connection()
        self.troubles = 0
        while await self.runtime.claims() or self.runtime.busy:
            await self._connection()
        await self.runtime.close()

    async def _connection(self) -> None:
        claims = await self.runtime.claims()
        if self.bad_luck(0.1):
            return  # the registration did not arrive
        directives = self.server.register(claims)
        if self.bad_luck(0.1):
            return  # its answer did not
        await self.runtime.reconcile(directives)
        mine, its = memory_link()
        serving = asyncio.ensure_future(self.runtime.serve(its, 60_000))
        try:
            await self._talk(mine, serving)
        except LinkClosed:
            pass
        finally:
            await mine.close(1006)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        if self.bad_luck(0.3):
            await self.runtime.close()  # killed: what it knew is gone, the home stays
            self.runtime = self._fresh()

    async def _talk(self, mine: Link[wire.FromServer, wire.FromDaemon], serving: asyncio.Future[Ended]) -> None:
        while not (self.server.done and not self.runtime.busy):
            for offer in self.server.offers():
                if self.dice.random() < 0.5:
                    await mine.send(offer)
            if self.bad_luck(0.03):
                return
            self._live()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.002):
                    frame = await mine.receive()
                    if self.bad_luck(0.05):
                        return  # it did not arrive
                    answer = self.server.take(frame)
                    if self.bad_luck(0.05):
                        return  # the answer did not
                    if isinstance(answer, wire.ReportAck) and self.bad_luck(0.05):
                        answer = wire.ReportAck(ack_status="transient_error", report_id=answer.report_id)
                    if answer is not None:
                        await mine.send(answer)
            if serving.done():
                serving.result()

    def _live(self) -> None:
        """Some of what runs prints something or comes to its end."""
        for name, one in self.home.all.items():
            row = self.server.rows[name]
            acting = row.action in ("queued", "accepted") and self.troubles > 0
            if not one.record.execution_committed or one.record.exit is not None:
                continue
            if self.dice.random() < 0.05:
                self.home.prints(name, b"x")
            if self.dice.random() < 0.03 and not acting:
                self.home.ends(name, self.dice.choice([0, 0, 3]))


@pytest.mark.parametrize("act", [False, True])
@pytest.mark.parametrize("seed", range(8))
async def test_nothing_happens_twice_whatever_breaks(seed: int, act: bool) -> None:
    world = World(seed, act=act)
    async with asyncio.timeout(60):
        await world.run()
    for name, row in world.server.rows.items():
        assert row.over
        one = world.home.all.get(name)
        assert world.home.executed[name] <= 1
        assert one is None or len(one.effects) <= 1
        if row.state in ("exited", "failed") and row.reason in ("", "nonzero_exit"):
            assert world.home.executed[name] == 1
        if row.action == "applied":
            assert one is not None
            assert len(one.effects) == 1
        ends = {(event.state, event.exit_code) for event in row.ends_told}
        assert len(ends) <= 1, "one process has one end, however often it is told"
    assert await world._fresh().claims() == [], "nothing is left to be claimed"
