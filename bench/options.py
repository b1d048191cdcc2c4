"""What can be changed on the command line. The defaults are the sizes of DESIGN §9: only they make a result count."""

from __future__ import annotations

import msgspec

__all__ = ["Options"]


MINUTES = 10.0
"""How long `steps --minutes` has to run to count. Source: DESIGN §9."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` is per contestant, in seconds. Of the others, each scenario uses what it has a meaning for."""

    database_url: str | None = None
    server_url: str | None = None
    key: str | None = None
    model: str | None = None
    agents: int = 256
    seconds: float = 30.0
    slots: int = 32
    kills: int = 20
    restarts: int = 5
    rounds: int = 200
    processes: tuple[int, ...] = (1, 2, 4)
    events: tuple[int, ...] = (10, 1000, 10_000)
    streams: tuple[tuple[int, int], ...] = ((500, 20), (2000, 5))
    minutes: float | None = None
    peer: str | None = None
    peer_pool: int | None = None

    @property
    def default_sizes(self) -> bool:
        """Whether every size is the one of DESIGN §9."""
        plain = Options()
        sizes = ("agents", "seconds", "slots", "kills", "restarts", "rounds", "processes", "events", "streams")
        if self.minutes is not None and self.minutes < MINUTES:
            return False
        return all(getattr(self, name) == getattr(plain, name) for name in sizes)
