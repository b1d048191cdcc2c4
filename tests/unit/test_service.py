"""The supervisor: order, readiness, drain, failure; and the owner of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from omnara.clock import Deadline, monotonic
from omnara.metrics import Metrics
from omnara.service import Crashed, Service, Shutdown, Stopped, Supervisor, Tasks


class Part:
    """A service whose every move is written down."""

    def __init__(self, name: str, journal: list[str], **moves: Callable[[], Awaitable[None]]) -> None:
        self.name = name
        self._journal = journal
        self._moves = moves
        self.reached: dict[str, asyncio.Event] = {move: asyncio.Event() for move in ("start", "drain", "stop")}

    async def _do(self, move: str) -> None:
        self._journal.append(f"{move} {self.name}")
        self.reached[move].set()
        if move in self._moves:
            await self._moves[move]()

    async def start(self) -> None:
        await self._do("start")

    async def watch(self) -> None:
        if "watch" in self._moves:
            await self._moves["watch"]()
        await asyncio.Event().wait()

    async def drain(self, deadline: Deadline) -> None:
        await self._do("drain")

    async def stop(self) -> None:
        await self._do("stop")


def supervisor(*parts: Service, drain_s: float = 5.0) -> Supervisor:
    return Supervisor(parts, drain_timeout_s=drain_s, metrics=Metrics.create())


async def forever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("broken")


async def test_parts_start_in_order_and_stop_in_reverse() -> None:
    journal: list[str] = []
    shutdown = Shutdown()
    watched = supervisor(Part("a", journal), Part("b", journal))
    ready: list[bool] = []

    def on_ready() -> None:
        ready.append(watched.ready)
        shutdown.request()

    assert await watched.run(shutdown, on_ready=on_ready) == Stopped()
    assert ready == [True]
    assert not watched.ready
    assert [entry for entry in journal if not entry.startswith("drain")] == ["start a", "start b", "stop b", "stop a"]
    assert {"drain a", "drain b"} <= set(journal)


async def test_a_failure_ends_the_process_without_a_drain() -> None:
    journal: list[str] = []
    ended = await supervisor(Part("a", journal), Part("b", journal, watch=fail)).run(Shutdown())
    assert isinstance(ended, Crashed)
    assert (ended.service, str(ended.error)) == ("b", "broken")
    assert journal == ["start a", "start b", "stop b", "stop a"]


async def test_a_part_that_ends_by_itself_is_a_failure() -> None:
    class Quitter(Part):
        async def watch(self) -> None:
            return

    ended = await supervisor(Quitter("a", [])).run(Shutdown())
    assert isinstance(ended, Crashed)
    assert "ended by itself" in str(ended.error)


async def test_a_failed_start_stops_what_had_started_and_itself() -> None:
    journal: list[str] = []
    watched = supervisor(Part("a", journal), Part("b", journal, start=fail), Part("c", journal))
    with pytest.raises(ValueError, match="broken"):
        await watched.run(Shutdown())
    assert journal == ["start a", "start b", "stop b", "stop a"]


async def test_a_stop_during_the_start_does_not_wait_for_it() -> None:
    journal: list[str] = []
    shutdown = Shutdown()
    part = Part("a", journal, start=forever)
    running = asyncio.create_task(supervisor(part).run(shutdown))
    await part.reached["start"].wait()
    shutdown.request()
    assert await asyncio.wait_for(running, 20) == Stopped()
    assert journal == ["start a", "stop a"]


async def test_a_second_request_cuts_the_drain_short() -> None:
    journal: list[str] = []
    shutdown = Shutdown()
    part = Part("slow", journal, drain=forever)
    watched = supervisor(part, drain_s=60)
    running = asyncio.create_task(watched.run(shutdown, on_ready=shutdown.request))
    await part.reached["drain"].wait()
    assert not watched.ready
    begun = monotonic()
    shutdown.request()
    assert await running == Stopped()
    assert monotonic() - begun < 30
    assert journal[-1] == "stop slow"


async def test_a_drain_that_hangs_ends_with_its_time() -> None:
    journal: list[str] = []
    shutdown = Shutdown()
    watched = supervisor(Part("slow", journal, drain=forever), Part("quick", journal), drain_s=0.05)
    assert await asyncio.wait_for(watched.run(shutdown, on_ready=shutdown.request), 20) == Stopped()
    assert journal[-1] == "stop slow"


async def test_a_failing_drain_or_stop_does_not_keep_the_others_from_stopping() -> None:
    journal: list[str] = []
    shutdown = Shutdown()
    watched = supervisor(Part("a", journal), Part("b", journal, drain=fail, stop=fail))
    assert await watched.run(shutdown, on_ready=shutdown.request) == Stopped()
    assert journal[-1] == "stop a"


async def test_cancellation_stops_everything() -> None:
    journal: list[str] = []
    begun = asyncio.Event()
    running = asyncio.create_task(supervisor(Part("a", journal)).run(Shutdown(), on_ready=begun.set))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert journal == ["start a", "stop a"]


async def test_tasks_report_the_first_failure_also_to_a_late_watcher() -> None:
    tasks = Tasks()
    failing = tasks.spawn(fail(), "failing")
    await asyncio.wait([failing])
    with pytest.raises(ValueError, match="broken"):
        await tasks.watch()
    await tasks.close()


async def test_closed_tasks_are_all_gone_and_take_no_more() -> None:
    tasks = Tasks()
    started = [tasks.spawn(forever(), f"t{number}") for number in range(3)]
    finished = tasks.spawn(asyncio.sleep(0), "finished")
    await finished
    assert len(tasks) == 3
    await tasks.close()
    assert all(task.cancelled() for task in started)
    assert len(tasks) == 0
    with pytest.raises(RuntimeError, match="closed"):
        tasks.spawn(forever(), "late")
