"""Which models an endpoint offers, asked through its provider's official client.

This is where the official SDKs earn their import: they know the catalogue's pages and the classes of errors, and nobody
waits for a probe. What they may not decide stays here: they read a dozen environment variables, some of which replace
address or credential, so every request leaves through a transport that puts both back, shows each address to the
operator's check, follows no redirect and reads no more than a catalogue's worth.
Source: DESIGN §5; engine.md §7 (SSRF); invariant 7.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib
from collections.abc import Mapping
from typing import Any, Final, Literal

import aiohttp
import msgspec

from omnara.providers import anthropic_messages, openai_chat, openai_responses
from omnara.providers.errors import safe_message
from omnara.providers.headers import BadCredential, credential
from omnara.providers.http import AddressCheck, AddressRefused, Answer, HttpPool, TooLarge
from omnara.providers.protocol import ApiKey, AuthKind

__all__ = [
    "MAX_SLUGS",
    "TIMEOUT_S",
    "Catalogue",
    "OfferedModel",
    "ProbeFailed",
    "ProbeResult",
    "ProbeTarget",
    "probe_models",
]

TIMEOUT_S: Final = 10.0
"""For a whole probe, all pages."""

MAX_SLUGS: Final = 2_000
MAX_BYTES: Final = 8 * 1024 * 1024
"""Of one page. Large catalogues describe some hundred models at two or three kilobytes each."""

_SDKS: Final = {
    anthropic_messages.API_FORMAT: "anthropic",
    openai_chat.API_FORMAT: "openai",
    openai_responses.API_FORMAT: "openai",
}
_KEY_HEADERS: Final = {"anthropic": anthropic_messages.KEY_HEADER, "openai": openai_chat.KEY_HEADER}
_PAGE: Final = 1_000
_MOST_TOKENS: Final = 2**31 - 1
_KEPT: Final = frozenset({"accept", "user-agent", "anthropic-version"})
_RETURNED: Final = frozenset({"content-type", "request-id", "x-request-id"})

Reason = Literal["credential", "address", "connection", "timeout", "status", "answer"]


class ProbeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A provider config, as far as its catalogue needs it."""

    api_format: str
    base_url: str
    auth_kind: AuthKind
    auth_header: str | None = None
    api_key: ApiKey | None = None


class OfferedModel(msgspec.Struct, frozen=True):
    """A model as its provider describes it, as far as it does. `created` in seconds since 1970, sizes in tokens."""

    slug: str
    display_name: str | None = None
    created: float = 0.0
    context_window_tokens: int | None = None
    max_output_tokens: int | None = None


class Catalogue(msgspec.Struct, frozen=True):
    """What the endpoint offers, in its order. Not `complete` when there are more than `MAX_SLUGS`."""

    models: tuple[OfferedModel, ...]
    complete: bool = True

    @property
    def slugs(self) -> tuple[str, ...]:
        """The names alone."""
        return tuple(model.slug for model in self.models)


class ProbeFailed(msgspec.Struct, frozen=True):
    """Why there is no catalogue, as a class and as a sentence without credentials."""

    reason: Reason
    message: str
    status: int | None = None


ProbeResult = Catalogue | ProbeFailed


async def probe_models(
    target: ProbeTarget, *, check_address: AddressCheck | None = None, timeout_s: float = TIMEOUT_S
) -> ProbeResult:
    """Ask the endpoint for its models, once. The first call imports the provider's SDK, in a thread.

    `timeout_s` begins after the import and covers everything. Cancellation closes the connection and propagates.
    """
    sdk_name = _SDKS.get(target.api_format)
    if sdk_name is None:
        return ProbeFailed("answer", f"the wire format {target.api_format!r} has no catalogue")
    try:
        auth = credential(target.auth_kind, target.auth_header or _KEY_HEADERS[sdk_name], target.api_key)
    except BadCredential as error:
        return ProbeFailed("credential", str(error))
    sdk = await asyncio.to_thread(importlib.import_module, sdk_name)
    transport = _Transport(HttpPool(check_address=check_address), target.base_url.rstrip("/") + "/models", auth)
    async with _client(sdk, sdk_name, transport, timeout_s) as client:
        try:
            async with asyncio.timeout(timeout_s):
                return await _list(client, sdk_name)
        except TimeoutError:
            return ProbeFailed("timeout", f"the endpoint did not answer within {timeout_s:g} s")
        except sdk.APIError as error:
            return _failed(sdk, error, transport.failure, target)
        except (ValueError, RecursionError):
            # The SDKs' reader of JSON has limits of its own, for digits and depth, and passes their errors on.
            return ProbeFailed("answer", "the endpoint's answer cannot be read")


def _client(sdk: Any, name: str, transport: _Transport, timeout_s: float) -> Any:
    """Return the official client. Its key is a placeholder: the transport has the real one."""
    make = sdk.AsyncAnthropic if name == "anthropic" else sdk.AsyncOpenAI
    http = sdk.DefaultAsyncHttpxClient(transport=transport, trust_env=False, follow_redirects=False)
    return make(api_key="unused", base_url=transport.url, max_retries=0, timeout=timeout_s, http_client=http)


async def _list(client: Any, name: str) -> Catalogue:
    found: dict[str, OfferedModel] = {}
    pages = client.models.list(limit=_PAGE) if name == "anthropic" else client.models.list()
    async for model in pages:
        if len(found) == MAX_SLUGS:
            return Catalogue(tuple(found.values()), complete=False)
        found.setdefault(model.id, _offered(model))
    return Catalogue(tuple(found.values()))


def _offered(model: Any) -> OfferedModel:
    """Read what providers say of a model under the names that they use; anything odd is as good as unsaid."""
    top = getattr(model, "top_provider", None)
    output = getattr(model, "max_tokens", None) or (top.get("max_completion_tokens") if isinstance(top, dict) else None)
    name = getattr(model, "display_name", None) or getattr(model, "name", None)
    return OfferedModel(
        slug=model.id,
        display_name=name if isinstance(name, str) else None,
        created=_created(model),
        context_window_tokens=_tokens(
            getattr(model, "context_length", None) or getattr(model, "max_input_tokens", None), least=2
        ),
        max_output_tokens=_tokens(output, least=1),
    )


def _created(model: Any) -> float:
    created, moment = getattr(model, "created", None), getattr(model, "created_at", None)
    try:
        if isinstance(created, int | float):
            return float(created)
        return moment.timestamp() if isinstance(moment, datetime.datetime) else 0.0
    except (ValueError, OverflowError, OSError):  # a number of four hundred digits, or the year 1
        return 0.0


def _tokens(value: Any, *, least: int) -> int | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST_TOKENS
    return value if fits else None


class _NoCatalogue(Exception):
    """The endpoint answered with a success that lists no models."""


class _Entry(msgspec.Struct):
    id: str


class _Page(msgspec.Struct):
    data: list[_Entry]


class _Transport:
    """What the client's HTTP library sends through: our connections, address and credential in place of its own.

    The SDKs changed that library once; which one it is now, its requests say. `failure` is what kept a request from its
    answer: the SDKs wrap or pass on what a transport raises, each in its own way.
    """

    def __init__(self, pool: HttpPool, url: str, auth: Mapping[str, str]) -> None:
        self.url = url
        self.failure: Exception | None = None
        self._pool = pool
        self._auth = auth

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request for the catalogue; only its page is the client's to choose."""
        library = importlib.import_module(type(request).__module__.partition(".")[0])
        try:
            answer = await self._ask(request)
        except (AddressRefused, TooLarge, _NoCatalogue, aiohttp.ClientError, OSError) as error:
            self.failure = error
            raise library.ConnectError(str(error), request=request) from error
        headers = {name: value for name, value in answer.headers.items() if name.lower() in _RETURNED}
        return library.Response(answer.status, headers=headers, content=answer.body, request=request)

    async def _ask(self, request: Any) -> Answer:
        kept = {name.lower(): value for name, value in request.headers.items() if name.lower() in _KEPT}
        query = request.url.query.decode("ascii")
        answer = await self._pool.get(
            self.url + ("?" + query if query else ""),
            {**kept, "accept-encoding": "identity", **self._auth},
            max_bytes=MAX_BYTES,
        )
        return _checked(answer) if answer.status == 200 else answer

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.close()


def _checked(answer: Answer) -> Answer:
    """Return a success, called JSON as it is. Raises _NoCatalogue for what the SDKs would stumble over later."""
    try:
        msgspec.json.decode(answer.body, type=_Page)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _NoCatalogue("the endpoint's answer is not a list of models") from error
    return answer._replace(headers={"content-type": "application/json"})


def _failed(sdk: Any, error: Any, cause: Exception | None, target: ProbeTarget) -> ProbeFailed:
    """Say what an error of the SDK means, by its class; for what never became an answer, by its `cause`."""
    if isinstance(error, sdk.APIStatusError):
        return _refused(sdk, error, target)
    if isinstance(cause, AddressRefused):
        return ProbeFailed("address", f"the endpoint's address is not allowed: {cause}")
    if isinstance(cause, aiohttp.InvalidURL):
        return ProbeFailed("address", "the endpoint's URL is not usable")
    if isinstance(cause, _NoCatalogue | TooLarge):
        return ProbeFailed("answer", str(cause))
    if isinstance(error, sdk.APIConnectionError):
        return ProbeFailed(
            "connection", safe_message(f"could not connect to the endpoint: {cause or error}", target.api_key)
        )
    return ProbeFailed("answer", safe_message(f"the endpoint's answer cannot be used: {error}", target.api_key))


def _refused(sdk: Any, error: Any, target: ProbeTarget) -> ProbeFailed:
    status: int = error.status_code
    if isinstance(error, sdk.AuthenticationError):
        return ProbeFailed("credential", f"the provider does not accept the key ({status})", status)
    if isinstance(error, sdk.PermissionDeniedError):
        return ProbeFailed("credential", f"the key may not list models ({status})", status)
    if isinstance(error, sdk.NotFoundError):
        return ProbeFailed("status", f"the endpoint has no list of models ({status} for GET …/models)", status)
    if 300 <= status < 400:
        return ProbeFailed("status", f"the endpoint answered with a redirect ({status}), which is not followed", status)
    if isinstance(error, sdk.RateLimitError):
        return ProbeFailed("status", f"the provider asks to slow down ({status}); try again later", status)
    if isinstance(error, sdk.InternalServerError):
        return ProbeFailed("status", f"the provider has a problem of its own ({status}); try again later", status)
    return ProbeFailed(
        "status", safe_message(f"the endpoint refused ({status}): {_words(error)}", target.api_key), status
    )


def _words(error: Any) -> str:
    """What the endpoint says of its refusal. One SDK writes the whole body, as Python would, into its message."""
    body = error.body.get("error", error.body) if isinstance(error.body, dict) else error.body
    said = [body] if not isinstance(body, dict) else [body.get("message"), body.get("type"), error.body.get("message")]
    return next((text for text in said if isinstance(text, str) and text), "it does not say why")
