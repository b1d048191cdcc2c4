"""The connections to providers: one streamed POST with its time limits and the end of patience, one small GET.

A request goes out on an aiohttp session of our own: sending the same bytes through an SDK's client costs two to three
times the CPU (0.26 to 0.41 ms against 0.13), and its read timer is kept happy by keep-alives for ever. Redirects are
never followed, and every address is shown to the operator's check before it is dialled.
Source: DESIGN §5; engine.md §5 (timeouts), §7 (SSRF); field-reports B44.
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Protocol

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from omnara.providers.errors import MAX_BODY_BYTES
from omnara.providers.protocol import Limits
from omnara.providers.tap import deliver

AddressCheck = Callable[[str, str, int], str | None]
"""(host as written, IP address, port) -> why it must not be dialled, or None."""

ConnectorFactory = Callable[[], aiohttp.BaseConnector]

_LARGE_BODY: Final = 1024 * 1024
_DRAIN_S: Final = 0.05
"""How long an answer that is already complete may take to end its HTTP body, so that the connection is used again."""


class AddressRefused(Exception):
    """The operator's rules forbid the endpoint's address."""


class TooLarge(Exception):
    """An answer goes beyond what the caller is ready to hold."""


class Expired(Exception):
    """A time limit of the attempt passed. `phase` says which."""

    def __init__(self, phase: Phase, seconds: float) -> None:
        self.phase = phase
        super().__init__(f"{_PHASES[phase]} within {seconds:g} s")


Phase = Literal["first_byte", "idle", "total"]
_PHASES: Final[dict[Phase, str]] = {
    "first_byte": "the provider did not begin to answer",
    "idle": "the provider's stream brought nothing new",
    "total": "the provider did not finish its answer",
}


class Receiver(Protocol):
    """Takes the body of a 200 answer as it arrives."""

    done: bool

    def begin(self, headers: Mapping[str, str]) -> None:
        """The answer begins, with these headers."""
        ...

    def feed(self, chunk: bytes) -> bool:
        """Take bytes; True if they brought something new, as opposed to keep-alives."""
        ...


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Refusal(Exception):
    """The endpoint answered with something other than a 200 stream."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        super().__init__(f"HTTP status {status}")


class _CheckedResolver(AbstractResolver):
    """Resolves as usual and keeps the addresses that may be dialled, so that what is checked is what is dialled."""

    def __init__(self, check: AddressCheck) -> None:
        self._check = check
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
        """Addresses of `host` that pass. Raises OSError, and AddressRefused when there are some and none passes."""
        try:
            found = await self._inner.resolve(host, port, family)
        except UnicodeError as error:
            raise OSError(f"{host[:100]} is no name") from error
        reasons = [self._check(host, item["host"], port) for item in found]
        allowed = [item for item, reason in zip(found, reasons, strict=True) if reason is None]
        if not allowed:
            raise AddressRefused(next((reason for reason in reasons if reason), "no address"))
        return allowed

    async def close(self) -> None:
        """Nothing is held."""
        await self._inner.close()


class HttpPool:
    """The connections to all providers of this process. The session opens with the first request."""

    def __init__(
        self,
        *,
        check_address: AddressCheck | None = None,
        connector_factory: ConnectorFactory | None = None,
        trust_env: bool = False,
    ) -> None:
        """`trust_env`: use the proxy settings of the environment; a proxy resolves names itself, past the check."""
        self._check = check_address
        self._factory = connector_factory or self._connector
        self._trust_env = trust_env
        self._session: aiohttp.ClientSession | None = None

    async def stream(
        self, url: str, headers: Mapping[str, str], body: bytes, limits: Limits, receiver: Receiver
    ) -> None:
        """POST `body` and feed the answer to `receiver` until it is done or the body ends.

        Cancellation closes the connection at once.

        Raises Refusal, Expired, AddressRefused, aiohttp.ClientError, and whatever the receiver raises.
        """
        target = self._checked(url)
        clock = _Clock(limits)
        large = len(body) >= _LARGE_BODY
        request = self._open().post(
            target,
            data=io.BytesIO(body) if large else body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, connect=limits.connect),
            allow_redirects=False,
        )
        async with clock, request as response:
            clock.progress("idle", limits.idle)
            await _refuse_unless_stream(response)
            receiver.begin(response.headers)

            def take(chunk: bytes) -> bool:
                if receiver.feed(chunk):
                    clock.progress("idle", limits.idle)
                return receiver.done

            await deliver(response, take)
            if receiver.done:
                await _drain(response.content)
            return
        raise Expired(clock.phase, clock.seconds)

    async def get(self, url: str, headers: Mapping[str, str], *, max_bytes: int) -> Answer:
        """GET a document that is small enough to hold. No time limit: the caller has one.

        Raises TooLarge, AddressRefused, aiohttp.ClientError.
        """
        request = self._open().get(
            self._checked(url), headers=headers, timeout=aiohttp.ClientTimeout(total=None), allow_redirects=False
        )
        async with request as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise TooLarge(f"the endpoint's answer is larger than {max_bytes} bytes")
            return Answer(response.status, response.headers, bytes(body))

    async def close(self) -> None:
        """Close all connections. Running requests fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=self._factory(), cookie_jar=aiohttp.DummyCookieJar(), trust_env=self._trust_env
            )
        return self._session

    def _connector(self) -> aiohttp.BaseConnector:
        resolver = None if self._check is None else _CheckedResolver(self._check)
        return aiohttp.TCPConnector(limit=0, resolver=resolver)

    def _checked(self, url: str) -> URL:
        try:
            target = URL(url)
            host = target.host  # Decoded only now: a name may be one that is none.
        except ValueError as error:
            raise aiohttp.InvalidURL(url, str(error)) from error
        if target.scheme not in ("http", "https") or host is None or target.user is not None:
            raise aiohttp.InvalidURL(target, "not an http(s) URL without credentials")
        if self._check is not None and _is_address(host):
            # A literal address never reaches the resolver.
            reason = self._check(host, host, target.port or 0)
            if reason is not None:
                raise AddressRefused(reason)
        return target


class _Clock:
    """The limits of one attempt as one timer. Progress only notes the time: re-arming a timer per event would cost
    more than parsing the event.
    """

    def __init__(self, limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self.phase: Phase = "first_byte"
        self.seconds = limits.connect + limits.first_byte
        self._since = self._loop.time()
        self._total = self._since + limits.total
        self._scope = asyncio.timeout_at(None)
        self._handle: asyncio.TimerHandle | None = None

    def progress(self, phase: Phase, seconds: float) -> None:
        """Something new arrived: count anew."""
        self._since = self._loop.time()
        self.seconds = seconds
        if phase != self.phase:
            self.phase = phase
            self._arm()

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._arm()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._handle is not None:
            self._handle.cancel()
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            return True  # ours, since it left the scope as a timeout: `stream` raises Expired
        return False

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(min(self._since + self.seconds, self._total), self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if now >= self._total:
            self.phase, self.seconds = "total", self._limits.total
        elif now < self._since + self.seconds:
            self._arm()
            return
        self._scope.reschedule(now)


async def _refuse_unless_stream(response: aiohttp.ClientResponse) -> None:
    """Raise Refusal for anything but a success that can be a stream; its body is read as far as errors are."""
    if response.status == 200 and response.content_type not in ("application/json", "text/html"):
        return
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= MAX_BODY_BYTES:
            break
    raise Refusal(response.status, response.headers, bytes(body[:MAX_BODY_BYTES]))


async def _drain(content: aiohttp.StreamReader) -> None:
    if content.at_eof():
        return
    try:
        async with asyncio.timeout(_DRAIN_S):
            while not content.at_eof():
                await content.readany()
    except (TimeoutError, aiohttp.ClientError):
        return  # the answer is whole; the connection is closed instead of used again


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
