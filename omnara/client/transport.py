"""One request to the server: authorization, retries, errors.

A POST is repeated only when it carries an Idempotency-Key, for only then does the server know a repetition. Reads and
deletions are repeated as they are.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from omnara.client.errors import ApiError, ServerUnreachable, is_retryable_status
from omnara.clock import Backoff, Deadline

__all__ = ["Transport", "api_error"]

T = TypeVar("T")

_MAX_RETRY_AFTER_S: Final = 30.0
_LARGE_BODY: Final = 512 * 1024
CONNECT_TIMEOUT_S: Final = 5.0


class _Page(msgspec.Struct):
    data: list[Any]
    next_cursor: str | None = None


class Transport:
    """Sends requests to one server with one key. Close it with `close`; a session that was handed in stays open."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        session: aiohttp.ClientSession | None,
        timeout_s: float,
        retry_for_s: float,
    ) -> None:
        self._base = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._session = session
        self._owned = session is None
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._retry_for_s = retry_for_s

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP session, made at first use (it needs a running event loop)."""
        if self._session is None:
            # Streams hold a connection each, and the default of 100 would then block ordinary requests.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def close(self) -> None:
        """Close the session if it is ours."""
        if self._owned and self._session is not None:
            await self._session.close()

    def url(self, path: str) -> str:
        """Return the absolute URL of a path; an absolute URL is returned as it is."""
        return path if path.startswith(("http://", "https://")) else self._base + path

    @property
    def headers(self) -> dict[str, str]:
        """The headers that every request carries."""
        return dict(self._headers)

    async def request(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> T:
        """Send a request and decode its answer as `answer`; `key` is the Idempotency-Key.

        Repeats what may be repeated, for the retry time of this client. Raises ApiError for an error answer,
        ServerUnreachable when there was none. After the latter the outcome of a POST is unknown.
        """
        headers = self.headers
        if body is not None:
            headers["Content-Type"] = "application/json"
        if key is not None:
            headers["Idempotency-Key"] = key
        data = None if body is None else msgspec.json.encode(body)
        repeatable = method != "POST" or key is not None
        backoff = Backoff(0.2, 5.0)
        deadline = Deadline(self._retry_for_s)
        while True:
            try:
                content = await self._once(method, self.url(path), headers, data, params)
                return msgspec.json.decode(content or b"{}", type=answer)
            except (ApiError, ServerUnreachable) as error:
                retry = repeatable and (isinstance(error, ServerUnreachable) or is_retryable_status(error.status))
                wait_s = backoff.next_s()
                if isinstance(error, ApiError) and error.retry_after_s is not None:
                    wait_s = max(wait_s, error.retry_after_s)
                if not retry or wait_s > deadline.remaining_s:
                    raise
                await asyncio.sleep(wait_s)

    async def pages(self, path: str, kind: Any, **filters: str) -> list[Any]:
        """Return every item of a list, page after page, each converted to `kind`. Raises as `request` does."""
        items: list[Any] = []
        params = {"limit": "100", **filters}
        while True:
            page = await self.request("GET", path, _Page, params=params)
            items.extend(msgspec.convert(page.data, list[kind]))
            if page.next_cursor is None:
                return items
            params["cursor"] = page.next_cursor

    async def _once(
        self, method: str, url: str, headers: Mapping[str, str], data: bytes | None, params: Mapping[str, str] | None
    ) -> bytes:
        # The library sends bytes in one piece and warns of it; from a file it sends them piece by piece.
        sent = io.BytesIO(data) if data is not None and len(data) >= _LARGE_BODY else data
        try:
            async with self.session.request(
                method, url, headers=headers, data=sent, params=params, timeout=self._timeout, allow_redirects=False
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise ServerUnreachable(f"{method} {url}: {str(error) or type(error).__name__}") from error
        if response.status >= 300:
            raise api_error(response.status, content, response.headers)
        return content


class _ErrorBody(msgspec.Struct):
    error: str = ""
    code: str = ""


def api_error(status: int, content: bytes, headers: Mapping[str, str]) -> ApiError:
    """Return the error that an answer stands for, also when a proxy answered with something else than our JSON."""
    try:
        body = msgspec.json.decode(content, type=_ErrorBody)
    except msgspec.DecodeError:
        body = _ErrorBody()
    return ApiError(
        status, body.code or "unknown", body.error or "the answer has no message", retry_after_s=_retry_after_s(headers)
    )


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:
        return None
    return min(seconds, _MAX_RETRY_AFTER_S) if seconds >= 0 else None
