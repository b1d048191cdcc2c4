"""The child's side: builds one contestant, obeys the parent's lines, ends when its input ends.

Run by `bench.processes`, never by hand. Standard output carries the answers only: everything else that is printed,
by whatever library, goes to standard error.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import traceback
from typing import Any, Final, Protocol

import msgspec

from omnara.log import configure

__all__ = ["Contestant", "main"]


class Contestant(Protocol):
    """Something that can be told to work for a while. Between two requests it must cost next to nothing."""

    async def start(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Get ready; the answer is for the parent."""

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request of the parent."""

    async def stop(self) -> None:
        """Free everything."""


KINDS: Final = {
    "endure": "bench.enduring:EnduringContestant",
    "engine": "bench.engine:EngineContestant",
    "guard": "bench.guard:GuardContestant",
    "idle": "bench.idle_step:IdleContestant",
    "log": "bench.long_log:LongLogContestant",
    "raw": "bench.raw:RawContestant",
    "dbos": "bench.peer_dbos:DbosContestant",
    "model": "bench.model_server:ModelServerContestant",
    "paced": "bench.paced_model:PacedModelContestant",
    "readers": "bench.readers:ReadersContestant",
}


async def _serve(contestant: Contestant, answers: int) -> None:
    reader = asyncio.StreamReader(limit=2**24)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            values: dict[str, Any] = msgspec.json.decode(line)
            what = values.pop("ask")
            try:
                found = await (contestant.start(values) if what == "start" else contestant.ask(what, values))
            except Exception as error:  # noqa: BLE001 - told to the parent, which decides
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"}
            os.write(answers, msgspec.json.encode(found) + b"\n")
    finally:
        await contestant.stop()
        transport.close()


def main() -> None:
    """Serve the parent until it closes the pipe."""
    import uvloop

    answers = os.dup(1)
    os.dup2(2, 1)
    configure("warning", "json")
    module, _, name = KINDS[sys.argv[1]].partition(":")
    contestant: Contestant = getattr(importlib.import_module(module), name)()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(contestant, answers))


if __name__ == "__main__":
    main()
