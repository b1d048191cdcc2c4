"""Control routes: what another process uses to drive the server and to read its log.

`GET /__log` (`?key=`, `?since=NUMBER`, `?bodies=1`), `GET /__counts`, `POST /__script`, `POST` and
`DELETE /__faults`, `POST /__gates`, `GET /__gates/ID`, `POST /__gates/ID/release`, `POST /__reset`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from aiohttp import web

from omnara.testing.catalog import ScriptSpec, build
from omnara.testing.faults import FaultQueue, Planned
from omnara.testing.gates import Gate, Gates, GateSpec
from omnara.testing.request_log import RequestLog
from omnara.testing.script import Script, ScriptError


class Controlled(Protocol):
    """What the routes change."""

    script: Script
    faults: FaultQueue
    gates: Gates
    log: RequestLog

    def reset(self) -> None: ...


class Control:
    """Answers the control routes of one server."""

    def __init__(self, server: Controlled) -> None:
        self._server = server

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer a control request; what cannot be read is a 400 that says why."""
        method, parts = request.method, request.path.removeprefix("/__").split("/")
        try:
            if method == "GET":
                return self._get(request, parts)
            return self._change(method, parts, await request.read())
        except (msgspec.DecodeError, ScriptError, OverflowError, ValueError) as error:
            return web.json_response({"error": str(error)}, status=400)

    def _get(self, request: web.BaseRequest, parts: list[str]) -> web.Response:
        match parts:
            case ["log"]:
                return _json({"entries": self._entries(request)})
            case ["counts"]:
                return _json(self._server.log.counts)
            case ["gates", name]:
                gate = self._server.gates.get(name)
                return _missing() if gate is None else _json(_gate(gate))
            case _:
                return _missing()

    def _change(self, method: str, parts: list[str], body: bytes) -> web.Response:
        server = self._server
        match method, parts:
            case "POST", ["script"]:
                server.script = build(msgspec.json.decode(body, type=ScriptSpec))
            case "POST", ["faults"]:
                for planned in msgspec.json.decode(body, type=list[Planned]):
                    server.faults.add(planned)
            case "DELETE", ["faults"]:
                server.faults.clear()
            case "POST", ["gates"]:
                return _json(_gate(server.gates.add(msgspec.json.decode(body, type=GateSpec))))
            case "POST", ["gates", name, "release"]:
                gate = server.gates.get(name)
                if gate is None:
                    return _missing()
                gate.release()
            case "POST", ["reset"]:
                server.reset()
            case _:
                return _missing()
        return _json({"ok": True})

    def _entries(self, request: web.BaseRequest) -> list[dict[str, Any]]:
        key, since = request.query.get("key"), int(request.query.get("since", "0"))
        bodies = request.query.get("bodies") in ("1", "true")
        chosen = [
            entry for entry in self._server.log.entries if entry.number > since and (key is None or entry.key == key)
        ]
        return [entry.public(bodies=bodies) for entry in chosen]


def _gate(gate: Gate) -> dict[str, Any]:
    return {"id": gate.name, "held": gate.held, "arrivals": gate.arrivals}


def _json(value: Any) -> web.Response:
    return web.json_response(body=msgspec.json.encode(value))


def _missing() -> web.Response:
    return web.json_response({"error": "no such control route"}, status=404)
