"""The daemon's calls to its server, and what each answer means for it.

An answer decides over everything that runs here, so each status is taken for exactly what it says: only a 401 or 403
with the server's own code in it means that this machine is no longer its. A proxy's page never does.
Source: machines.md §2 (how the daemon reacts).
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from omnara.machines import wire
from omnara.machines.daemon.socket_link import SocketLink
from omnara.machines.link import Link

__all__ = ["AuthorityLost", "NotAsleep", "Refused", "ServerAway", "ServerClient", "Superseded"]

T = TypeVar("T")

HTTP_TIMEOUT_S: Final = 30.0
PING_S: Final = 20.0
"""How often the socket is pinged; a pong is awaited for half of it. Source: machines.md §3."""


CLOSE_S: Final = 0.5
"""How long the server's half of a close is waited for; whatever comes next, a new socket or the end, is not held up."""


class AuthorityLost(Exception):
    """The server does not accept this machine's token: it was revoked, or the machine deleted."""


class Superseded(Exception):
    """The machine has a newer runtime, or this one is not registered any more."""


class Refused(Exception):
    """The server finds the request itself wrong; the same one will never do."""


class ServerAway(Exception):
    """No usable answer. The same request may do later, after `retry_after_s` at least."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class NotAsleep(Exception):
    """The server does not let this machine sleep; `forever` when it could never be woken."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.forever = code == "not_wake_capable"


class _ErrorBody(msgspec.Struct):
    error: str = ""
    code: str = ""


class ServerClient:
    """Calls to one server with one token. Use it in `async with`. Redirects are never followed: they could take the
    token elsewhere."""

    def __init__(self, api_url: str, token: str) -> None:
        self._base = f"{api_url}/api/v1/daemon"
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ServerClient:
        watch = aiohttp.TraceConfig()
        watch.on_request_redirect.append(_no_redirect)
        headers = {"Authorization": f"Bearer {self._token}"}
        timeout = aiohttp.ClientTimeout(total=HTTP_TIMEOUT_S)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, trace_configs=[watch])
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def bootstrap(self) -> wire.BootstrapResponse:
        """Ask which machine the token stands for. Raises AuthorityLost, Refused, ServerAway."""
        return _decoded(await self._post("/bootstrap", None), wire.BootstrapResponse)

    async def register(self, request: wire.RegisterRequest) -> wire.RegisterResponse:
        """Register this runtime with its claims. Raises AuthorityLost, Superseded, Refused, ServerAway."""
        return _decoded(await self._post("/runtimes", msgspec.json.encode(request)), wire.RegisterResponse)

    async def end(self, runtime_id: str) -> None:
        """Say that this runtime is over. Raises as `register`."""
        await self._post(f"/runtimes/{runtime_id}/end", None)

    async def sleep(self, runtime_id: str) -> None:
        """Say that this machine may be suspended. Raises NotAsleep, and as `register`."""
        await self._post(f"/runtimes/{runtime_id}/sleep", None)

    async def uninstalled(self) -> None:
        """Say that nothing is left here, so that nobody waits for what ran. Raises as `register`."""
        await self._post("/failures?stage=daemon_uninstalled", b"", "text/plain")

    async def connect(self, runtime_id: str) -> Link[wire.FromDaemon, wire.FromServer]:
        """Open the runtime's socket. Raises Superseded (register again), ServerAway.

        A refusal of the token counts when the next registration is refused as well: here its words are not heard.
        """
        assert self._session is not None
        url = f"{self._base}/runtimes/{runtime_id}/socket"
        try:
            socket = await self._session.ws_connect(
                url,
                heartbeat=PING_S,
                max_msg_size=wire.MAX_FRAME_BYTES,
                compress=0,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            )
        except aiohttp.WSServerHandshakeError as error:
            raise _meaning(error.status, _ErrorBody(), _retry_after(error.headers)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerAway(_plain(error)) from error
        return SocketLink(socket)

    async def _post(self, path: str, body: bytes | None, content_type: str = "application/json") -> bytes:
        assert self._session is not None
        headers = {} if body is None else {"Content-Type": content_type}
        if body is not None and len(body) > wire.MAX_BODY_BYTES:
            raise ServerAway("this machine has more to claim than a registration may hold")
        try:
            call = self._session.post(self._base + path, data=body, headers=headers, allow_redirects=False)
            async with call as answer:
                text = await _bounded(answer)
                if answer.status in (200, 201, 204):
                    return text
                raise _meaning(answer.status, _error_body(text), _retry_after(answer.headers))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerAway(_plain(error)) from error


async def _no_redirect(*_: Any) -> None:
    raise ServerAway("the server answers with a redirect; its address here must be the one that it redirects to")


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    chunks, size = [], 0
    async for chunk in answer.content.iter_chunked(65_536):
        size += len(chunk)
        if size > wire.MAX_BODY_BYTES:
            raise ServerAway("the server's answer has no end")
        chunks.append(chunk)
    return b"".join(chunks)


def _meaning(status: int, body: _ErrorBody, retry_after_s: float) -> Exception:
    text = f"{status} {body.error[:500]}".strip()
    if status in (401, 403) and body.code:
        return AuthorityLost(text)
    if status == 410:
        return Superseded(text)
    if status == 400:
        return Refused(text)
    if status == 409 and body.code in ("pending_work", "not_wake_capable"):
        return NotAsleep(body.code)
    return ServerAway(text, retry_after_s)


def _error_body(text: bytes) -> _ErrorBody:
    try:
        return msgspec.json.decode(text, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _ErrorBody()  # a proxy's page


def _retry_after(headers: Any) -> float:
    text = str(headers.get("Retry-After", "")) if headers is not None else ""
    # A date would have to be compared with a clock; the backoff does without.
    return min(float(text), 3600.0) if text.isdecimal() and len(text) < 6 else 0.0


def _decoded(text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ServerAway("the server's answer is not that of an omnara server") from error


def _plain(error: BaseException) -> str:
    return str(error) or type(error).__name__
