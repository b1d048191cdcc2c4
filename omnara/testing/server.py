"""The scripted model server: three providers in one process, for tests, the demo and benches.

It lives in the package, and not among the tests, because `omnara demo` and `omnara mock-model` run it on a
user's machine.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from omnara.testing.answer import Timing
from omnara.testing.control import Control
from omnara.testing.exchange import Exchange
from omnara.testing.fast import Templates
from omnara.testing.faults import FaultQueue, Match
from omnara.testing.formats import RULES
from omnara.testing.gates import Gate, GatePoint, Gates, GateSpec
from omnara.testing.prompt_cache import PromptCache
from omnara.testing.request_log import RequestLog
from omnara.testing.script import Script, embedded
from omnara.testing.signatures import Signer
from omnara.testing.strict import MAX_BODY_BYTES, ModelSpec, Strictness

_STOP_SECONDS = 1.0


class ModelServer:
    """An HTTP server that speaks Anthropic Messages, OpenAI Chat Completions and OpenAI Responses.

    `script` decides the answers, `timing` is for answers that state none. `strict` is the rule set, `None`
    to accept everything. `fast` keeps no bodies, checks nothing and sends encoded answers from a cache;
    conversations are then told apart by the header only. Use as an async context manager, or `start` and
    `stop`; everything must happen on the loop that started it.
    """

    def __init__(
        self,
        script: Script = embedded,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        strict: Strictness | None = None,
        lenient: bool = False,
        fast: bool = False,
        timing: Timing | None = None,
        log_limit: int = 10_000,
        control: bool = True,
    ) -> None:
        self.script = script
        self.strictness = None if lenient or fast else strict or Strictness()
        self.fast = fast
        self.timing = timing or Timing()
        self.faults = FaultQueue()
        self.gates = Gates()
        self.log = RequestLog(limit=log_limit, bodies=not fast)
        self.signer = Signer()
        self.templates = Templates(self.signer)
        self.cache = PromptCache()
        self.closing = asyncio.Event()
        self._control = Control(self) if control else None
        self._host = host
        self._port = port
        self._runner: web.ServerRunner | None = None

    @property
    def url(self) -> str:
        """The server's base URL without a trailing slash. Raises `RuntimeError` before `start`."""
        if self._runner is None or not self._runner.addresses:
            raise RuntimeError("the model server is not running")
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> Self:
        """Listen. Raises `OSError` when the address is taken; nothing is left open then.

        After `stop` it may be started again, on the same port, with log, faults and script as they were.
        """
        self.closing.clear()
        server = web.Server(
            self._handle, handler_cancellation=True, request_factory=self._request, access_log=None, lingering_time=0.0
        )
        runner = web.ServerRunner(server, shutdown_timeout=_STOP_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, backlog=1024).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        self._port = runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """Stop listening, let go of silent and held requests, and close all connections. May be repeated."""
        self.closing.set()
        self.gates.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def gate(self, at: GatePoint = "request", *, times: int = 1, match: Match | None = None) -> Gate:
        """Set up a gate that holds the next `times` matching requests at a point."""
        return self.gates.add(GateSpec(at=at, times=times, match=match or Match()))

    def reset(self) -> None:
        """Forget log, faults and gates; the script stays."""
        self.log.reset()
        self.faults.clear()
        self.gates.clear()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        rules = RULES.get(request.path)
        if rules is None:
            return await self._other(request)
        if request.method != "POST":
            return web.Response(status=405, text="Method Not Allowed", headers={"allow": "POST"})
        return await Exchange(self, rules, request).run()

    async def _other(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models" and request.method == "GET":
            return web.json_response(body=msgspec.json.encode(self._models(request)))
        if self._control is not None and request.path.startswith("/__"):
            return await self._control.handle(request)
        return web.json_response({"error": {"message": f"No route for {request.path}"}}, status=404)

    def _models(self, request: web.BaseRequest) -> dict[str, Any]:
        known = self.strictness.models if self.strictness is not None else None
        models = known if known is not None else {"scripted": ModelSpec()}
        if "anthropic-version" in request.headers:
            listed = [_anthropic_model(name, spec) for name, spec in models.items()]
            ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
            return {"data": listed, "has_more": False, **ends}
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": 0, "owned_by": "omnara"} for name in models],
        }

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: Any,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        limit = self.strictness.max_body if self.strictness is not None else MAX_BODY_BYTES
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=limit)


def _anthropic_model(name: str, spec: ModelSpec) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": spec.context_window,
        "max_tokens": spec.max_output,
    }
