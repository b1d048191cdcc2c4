"""When a container is killed because nothing can be said to it: on the engine's count alone, and not at once."""

from __future__ import annotations

from typing import Any

import pytest
from aiodocker.exceptions import DockerError

from omnara.machines.docker.channel import Channel
from omnara.machines.docker.home import DockerHome
from omnara.machines.docker.records import Reply
from omnara.machines.processes import HomeLost

PROCESS, ACTION = "prc_a", "pac_b"


class Container:
    """Tells how many processes it has, one count after the other, and whether it was killed."""

    def __init__(self, counts: list[Any]) -> None:
        self.counts = counts
        self.killed = 0

    async def stats(self, *, stream: bool) -> list[dict[str, Any]]:
        assert not stream
        count = self.counts.pop(0)
        if isinstance(count, Exception):
            raise count
        return [{"pids_stats": count}]

    async def kill(self) -> None:
        self.killed += 1


class Line:
    """A line that answers once it has been opened for the `good`th time."""

    closed = False

    def __init__(self, good: float) -> None:
        self.good = good
        self.opened = 0

    async def open(self, *_: Any) -> Line:
        self.opened += 1
        if self.opened < self.good:
            raise HomeLost("the container does not answer")
        return self

    async def request(self, line: str, body: bytes) -> Reply:
        return Reply((), b"")


def full(current: int = 510) -> dict[str, int]:
    return {"current": current, "limit": 512}


NEVER = float("inf")


@pytest.mark.parametrize(
    ("good", "counts", "killed", "answered"),
    [
        (NEVER, [full(), full()], 1, False),
        (NEVER, [full(500)], 0, False),
        (NEVER, [full(), full(300)], 0, False),
        (NEVER, [{}], 0, False),
        (NEVER, [{"current": 900, "limit": 0}], 0, False),
        (NEVER, [DockerError(500, "not now")], 0, False),
        (NEVER, [full(), TimeoutError()], 0, False),
        (2, [], 0, True),
        (3, [full()], 0, True),
    ],
    ids=["full", "slow", "full for a moment", "no count", "no limit", "engine away", "and then away", "2nd", "3rd"],
)
@pytest.mark.parametrize("how", ["terminate", "stop"])
async def test_only_a_container_that_is_full_and_stays_so_is_killed(
    monkeypatch: pytest.MonkeyPatch, how: str, good: float, counts: list[Any], killed: int, answered: bool
) -> None:
    container, line = Container(list(counts)), Line(good)
    monkeypatch.setattr(Channel, "open", line.open)
    home = DockerHome(container)  # type: ignore[arg-type]
    told = home.signal(PROCESS, ACTION, 1, "terminate") if how == "terminate" else home.stop(PROCESS, "why")
    if answered:
        await told
    else:
        with pytest.raises(HomeLost):
            await told
    assert (container.killed, container.counts) == (killed, [])
    assert line.opened <= 4


async def test_what_ends_nothing_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    container, line = Container([full(), full()]), Line(NEVER)
    monkeypatch.setattr(Channel, "open", line.open)
    home = DockerHome(container)  # type: ignore[arg-type]
    for asked in (home.signal(PROCESS, ACTION, 1, "interrupt"), home.read(PROCESS, 0, 10), home.processes()):
        with pytest.raises(HomeLost):
            await asked
    assert container.killed == 0
