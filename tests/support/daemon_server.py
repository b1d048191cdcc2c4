"""A server for one daemon, in a test's hand: says what each route answers, and speaks frames over the real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from aiohttp import WSMsgType, web

from omnara.machines import wire

F = TypeVar("F")

TOKEN = "omnara_daemon_v1_test"
MACHINE = "mch_aaaaaaaaaaaaaaaaaaaaaaaaaa"
INSTALLATION = "inst_aaaaaaaaaaaaaaaaaaaaaaaaaa"


class Channel:
    """One socket of a daemon."""

    def __init__(self, socket: web.WebSocketResponse, runtime_id: str) -> None:
        self.socket = socket
        self.runtime_id = runtime_id
        self.ended = asyncio.Event()

    async def send(self, frame: wire.FromServer) -> None:
        """Send one frame."""
        await self.socket.send_str(wire.encode(frame).decode())

    async def expect(self, kind: type[F], within_s: float = 20.0) -> F:
        """Return the next frame that is no heartbeat; it has to be of this kind."""
        while True:
            async with asyncio.timeout(within_s):
                message = await self.socket.receive()
            assert message.type is WSMsgType.TEXT, message
            frame = wire.decode_from_daemon(message.data)
            if kind is not wire.Heartbeat and isinstance(frame, wire.Heartbeat):
                await self.send(wire.HeartbeatAck(next_heartbeat_after_ms=10_000))
                continue
            assert isinstance(frame, kind), frame
            return frame

    async def expect_report(self, kind: type[F]) -> F:
        """Return the event of the next report, which has to be of this kind, and acknowledge it."""
        report = await self.expect(wire.Report)
        assert isinstance(report.event, kind), report.event
        await self.send(wire.ReportAck(ack_status="committed", report_id=report.report_id))
        return report.event

    async def run(self, process_id: str, command: str, **fields: Any) -> None:
        """Offer a command and grant it."""
        offer = {"io_mode": "pipe", "shell_selector": "default", "wait_ms": 10_000, **fields}
        await self.send(wire.ProcessOffer(process_id=process_id, command=command, **offer))
        assert (await self.expect(wire.ProcessAccept)).process_id == process_id
        await self.send(wire.ProcessAcceptAck(process_id=process_id))


class DaemonServer:
    """`answers` overrides a route (`bootstrap`, `runtimes`, `socket`, `end`, `sleep`) by (status, body, headers)."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: list[str] = []
        self.registrations: list[wire.RegisterRequest] = []
        self.answers: dict[str, tuple[int, Any, dict[str, str]]] = {}
        self.disposition = "retain"
        self.machine_id = MACHINE
        self.frames_before: list[str] = []
        self._channels: asyncio.Queue[Channel] = asyncio.Queue()
        self._open: list[Channel] = []

    def refuse(self, route: str, status: int, code: str = "", **headers: str) -> None:
        """Have a route answer with an error from now on; a `code` makes it the server's own."""
        body = {"error": f"test {status}", "code": code} if code else "<html>a proxy</html>"
        self.answers[route] = (status, body, {name.replace("_", "-"): value for name, value in headers.items()})

    async def channel(self, within_s: float = 20.0) -> Channel:
        """Return the next socket that a daemon opens."""
        async with asyncio.timeout(within_s):
            return await self._channels.get()

    def _answer(self, route: str, usual: Any, status: int = 200) -> web.Response:
        self.calls.append(route)
        status, body, headers = self.answers.get(route, (status, usual, {}))
        if isinstance(body, str):
            return web.Response(status=status, text=body, headers=headers)
        return web.Response(
            status=status, body=json.dumps(body).encode(), content_type="application/json", headers=headers
        )

    async def _bootstrap(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        return self._answer("bootstrap", {"installation_id": INSTALLATION, "machine_id": self.machine_id})

    async def _register(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=wire.RegisterRequest)
        self.registrations.append(asked)
        directives = [
            {
                "process_id": claim.process_id,
                "supervisor_instance_id": claim.supervisor_instance_id,
                "disposition": self.disposition,
                "actions": [],
            }
            for claim in asked.processes
        ]
        runtime = {"id": f"drt_{len(self.registrations)}", "next_heartbeat_after_ms": 10_000}
        return self._answer("runtimes", {"runtime": runtime, "reconciliation": {"processes": directives}}, 201)

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        if "socket" in self.answers:
            return self._answer("socket", {})
        self.calls.append("socket")
        socket = web.WebSocketResponse(max_msg_size=wire.MAX_FRAME_BYTES)
        await socket.prepare(request)
        channel = Channel(socket, request.match_info["runtime"])
        for text in self.frames_before:
            await socket.send_str(text)
        self._open.append(channel)
        self._channels.put_nowait(channel)
        await channel.ended.wait()
        return socket

    async def _runtime(self, request: web.Request) -> web.Response:
        return self._answer(request.match_info["what"], {"id": request.match_info["runtime"]})

    def release(self) -> None:
        """Let go of every socket, so that its handler can end."""
        for channel in self._open:
            channel.ended.set()

    async def start(self) -> web.AppRunner:
        """Listen on a free port."""
        app = web.Application()
        app.router.add_post("/api/v1/daemon/bootstrap", self._bootstrap)
        app.router.add_post("/api/v1/daemon/runtimes", self._register)
        app.router.add_get("/api/v1/daemon/runtimes/{runtime}/socket", self._socket)
        app.router.add_post("/api/v1/daemon/runtimes/{runtime}/{what:end|sleep}", self._runtime)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


@asynccontextmanager
async def daemon_server() -> AsyncIterator[DaemonServer]:
    """A server for the block."""
    server = DaemonServer()
    runner = await server.start()
    try:
        yield server
    finally:
        server.release()
        await runner.cleanup()
