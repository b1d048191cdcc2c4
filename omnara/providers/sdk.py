"""Request headers, as far as the official SDKs know them better: API version and user agent, beside the credential.

The SDKs follow their provider's rules, so they are asked instead of imitated; their clients are made with retries off
and never send anything (see `http` for why). Importing them takes over a second, so it happens on first use and in a
thread. They also read a dozen environment variables, some of which replace credentials: only headers that are known
and expected leave here, so that nothing of the operator's environment reaches a tenant's endpoint.
Source: DESIGN §5; invariant 7.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections import OrderedDict
from typing import Any, Final, Literal

from omnara.providers.protocol import ModelTarget

Sdk = Literal["anthropic", "openai"]

_KEPT: Final = frozenset({"user-agent", "anthropic-version"})
_FIXED: Final = {"content-type": "application/json", "accept": "text/event-stream", "accept-encoding": "identity"}
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_RESERVED: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", *_FIXED})
_CACHED: Final = 512
_NOWHERE: Final = "https://unused.invalid"
"""The clients need an address, or take one from the environment; they never send."""


class BadCredential(ValueError):
    """The provider config has no usable credential. The message does not contain it."""


class SdkHeaders:
    """Headers per credential, made once."""

    def __init__(self, sdk: Sdk) -> None:
        self._sdk = sdk
        self._module: Any = None
        self._http: Any = None
        self._cache: OrderedDict[tuple[object, ...], dict[str, str]] = OrderedDict()

    async def warm(self) -> None:
        """Import the SDK, in a thread. Cancelling it leaves the import running to its end."""
        if self._http is None:
            await asyncio.to_thread(self._load)

    async def get(self, target: ModelTarget) -> dict[str, str]:
        """Headers for a request to `target`; do not change them. Raises BadCredential."""
        key = (target.auth_kind, target.auth_header, target.api_key)
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        await self.warm()
        made = self._make(target)
        self._cache[key] = made
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        return made

    async def close(self) -> None:
        """Drop the SDK's own, never used HTTP client and all credentials."""
        self._cache.clear()
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def _load(self) -> None:
        self._module = importlib.import_module(self._sdk)
        if self._http is None:  # it reads certificates from disk, which has no place on the event loop either
            self._http = self._module.DefaultAioHttpClient(follow_redirects=False, trust_env=False)

    def _make(self, target: ModelTarget) -> dict[str, str]:
        secret = target.api_key.reveal() if target.api_key is not None else ""
        if not secret or not secret.isascii() or any(ord(char) < 33 for char in secret):
            raise BadCredential("the provider's API key is missing or has characters that a header cannot carry")
        client = self._client(target, secret)
        headers = {name.lower(): value for name, value in client.default_headers.items() if isinstance(value, str)}
        kept = {name: value for name, value in headers.items() if name in _KEPT}
        return {**kept, **_FIXED, **self._auth(target, secret)}

    def _auth(self, target: ModelTarget, secret: str) -> dict[str, str]:
        """Not the SDK's own: a variable of the environment can put another credential in its place."""
        if target.auth_kind == "bearer_token":
            return {"authorization": f"Bearer {secret}"}
        name = (target.auth_header or ("x-api-key" if self._sdk == "anthropic" else "api-key")).lower()
        if not _TOKEN.fullmatch(name) or name in _RESERVED:
            raise BadCredential("the provider's API key header has a name that cannot be used")
        return {name: secret}

    def _client(self, target: ModelTarget, secret: str) -> Any:
        shared = {"base_url": _NOWHERE, "max_retries": 0, "http_client": self._http}
        if self._sdk == "openai":
            return self._module.AsyncOpenAI(api_key=secret, **shared)
        if target.auth_kind == "bearer_token":
            return self._module.AsyncAnthropic(auth_token=secret, **shared)
        return self._module.AsyncAnthropic(api_key=secret, **shared)
