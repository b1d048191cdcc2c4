"""The server's side of a runtime's line, in a test's hand: send a frame, expect the next one, let a connection end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from omnara.machines import wire
from omnara.machines.link import LinkClosed, memory_link
from omnara.machines.runtime import Ended, Runtime

F = TypeVar("F")


class ByFrame:
    """One connection. `expect` fails on any other frame than the expected one, so nothing goes by unseen."""

    def __init__(self, runtime: Runtime, first_beat_ms: int) -> None:
        mine, its = memory_link()
        self.link = mine
        self.serving = asyncio.ensure_future(runtime.serve(its, first_beat_ms))

    async def send(self, frame: wire.FromServer) -> None:
        """Send one frame to the runtime."""
        await self.link.send(frame)

    async def expect(self, kind: type[F], within_s: float = 20.0) -> F:
        """Return the next frame, which has to be of this kind."""
        async with asyncio.timeout(within_s):
            frame = await self.link.receive()
        assert isinstance(frame, kind), frame
        return frame

    async def expect_report(self, kind: type[F]) -> tuple[str, F]:
        """Return id and event of the next frame, which has to be a report of this kind."""
        report = await self.expect(wire.Report)
        assert isinstance(report.event, kind), report.event
        return report.report_id, report.event

    async def acknowledge(self, report_id: str, status: Any = "committed") -> None:
        """Answer a report."""
        await self.send(wire.ReportAck(ack_status=status, report_id=report_id))

    async def silent(self, for_s: float = 0.05) -> None:
        """Fail if anything is sent within a short time."""
        try:
            async with asyncio.timeout(for_s):
                frame = await self.link.receive()
        except TimeoutError:
            return
        raise AssertionError(f"unexpected {frame}")

    async def run(self, process_id: str, **fields: Any) -> None:
        """Offer a process and grant it."""
        await self.send(offer(process_id, **fields))
        assert (await self.expect(wire.ProcessAccept)).process_id == process_id
        await self.send(wire.ProcessAcceptAck(process_id=process_id))

    async def act(
        self, process_id: str, action_id: str, kind: Any, seq: int, payload: Any = None, *, cursor: int = 0
    ) -> None:
        """Offer an action and grant it."""
        raw = msgspec.Raw(msgspec.json.encode({} if payload is None else payload))
        await self.send(
            wire.ActionOffer(process_id=process_id, process_action_id=action_id, action_kind=kind, seq=seq, payload=raw)
        )
        assert (await self.expect(wire.ActionAccept)).process_action_id == action_id
        await self.send(
            wire.ActionAcceptAck(
                process_id=process_id,
                process_action_id=action_id,
                process_state="running",
                default_output_cursor=cursor,
            )
        )

    async def cut(self) -> None:
        """Cut the line and wait until the runtime has noticed."""
        await self.link.close(1006)
        try:
            async with asyncio.timeout(20):
                await self.serving
        except LinkClosed:
            return
        raise AssertionError("the runtime did not notice the cut")

    async def ended(self) -> Ended:
        """Wait until the runtime says that it was ended."""
        async with asyncio.timeout(20):
            return await self.serving

    async def stop(self) -> None:
        """End the connection whatever its state."""
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)


@asynccontextmanager
async def connected(runtime: Runtime, first_beat_ms: int = 60_000) -> AsyncIterator[ByFrame]:
    """A runtime's connection until the end of the block."""
    server = ByFrame(runtime, first_beat_ms)
    try:
        yield server
    finally:
        await server.stop()


def offer(process_id: str, **fields: Any) -> wire.ProcessOffer:
    """An offer of a shell command."""
    return wire.ProcessOffer(
        **{
            "process_id": process_id,
            "io_mode": "pipe",
            "command": "true",
            "shell_selector": "default",
            "wait_ms": 5_000,
            **fields,
        }
    )


def directive(
    claim: wire.ProcessClaim, disposition: Any, actions: list[wire.ActionDirective] | None = None
) -> wire.ProcessDirective:
    """The server's answer to a claim."""
    return wire.ProcessDirective(
        process_id=claim.process_id,
        supervisor_instance_id=claim.supervisor_instance_id,
        disposition=disposition,
        actions=actions or [],
    )
