"""Who is calling: from the Authorization header to a principal, with a short memory.

A burst of requests with one key costs one query a second. A revoked key therefore works for at most that second, and
open streams are closed by the stream hub within about the same time. Source: api.md §2, §3.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from omnara.access import tokens
from omnara.access.principals import Principal
from omnara.access.tokens import TokenKind
from omnara.clock import monotonic
from omnara.errors import Unauthorized

TTL_S: Final = 1.0
MAX_REMEMBERED: Final = 10_000
_LOCKS: Final = 64

Load = Callable[[str], Awaitable[Principal]]
"""Returns the principal behind an Authorization header; raises Unauthorized. `engine.authenticate` is one."""


class Authenticator:
    """Turns requests into principals. For one event loop."""

    def __init__(self, load: Load, *, ttl_s: float = TTL_S) -> None:
        self._load = load
        self._ttl_s = ttl_s
        self._known: OrderedDict[str, tuple[float, Principal]] = OrderedDict()
        self._locks = [asyncio.Lock() for _ in range(_LOCKS)]

    async def principal(self, request: web.Request, *, anew: bool = False) -> Principal:
        """Return the caller. Raises Unauthorized (also without touching the database), Unavailable.

        `anew` asks the database even when the caller is remembered: for paths that lead where it had no role.
        """
        values = request.headers.getall("Authorization", [])
        text = tokens.bearer_from_header(values[0]) if len(values) == 1 else None
        if text is None:
            raise Unauthorized("send Authorization: Bearer and a key")
        try:
            token = tokens.parse(text)
        except tokens.InvalidToken:
            raise Unauthorized from None
        if token.kind is TokenKind.DAEMON:
            raise Unauthorized
        if anew:
            self._known.pop(token.hash, None)
        return await self._remembered(token.hash, values[0])

    def forget(self) -> None:
        """Forget all principals, so that the next request of each asks the database."""
        self._known.clear()

    async def _remembered(self, key: str, header: str) -> Principal:
        found = self._fresh(key)
        if found is not None:
            return found
        # Five hundred streams that open at once with one key wait here for one query instead of making as many.
        async with self._locks[int(key[:8], 16) % _LOCKS]:
            found = self._fresh(key)
            if found is not None:
                return found
            self._known.pop(key, None)
            principal = await self._load(header)
            self._known[key] = (monotonic() + self._ttl_s, principal)
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
            return principal

    def _fresh(self, key: str) -> Principal | None:
        entry = self._known.get(key)
        return entry[1] if entry is not None and entry[0] > monotonic() else None
