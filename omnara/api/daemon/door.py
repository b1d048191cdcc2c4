"""The door for machines: a daemon's token is checked here, and its routes get the machine that it stands for.

A daemon that hears 401 or 403 ends every command, deletes what it keeps and is never started again. So these answers
come from a look at the token alone: whatever keeps the server from that look is 503, and nothing here answers 403.
Source: machines.md §1 (the token names the machine), §2 (how the daemon reacts), §14 row 16.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, cast
from uuid import UUID

import msgspec
from aiohttp import web

from omnara.access import tokens
from omnara.access.tokens import BearerToken, TokenKind
from omnara.api import body, params
from omnara.api.context import CONTEXT, ApiContext
from omnara.api.daemon.gate import Visit
from omnara.api.routing import DaemonHandler, Route
from omnara.db.fair_share import in_background
from omnara.engine.machines import identity
from omnara.engine.machines.identity import DaemonIdentity
from omnara.errors import Forbidden, InvalidRequest, RequestTooLarge, Unauthorized, Unavailable, UnsupportedMediaType
from omnara.log import get_logger

__all__ = ["DaemonCall", "daemon_endpoint"]

log = get_logger(__name__)

_RETRY_S: Final = 2.0


class DaemonCall(msgspec.Struct, frozen=True):
    """A request of a machine that passed every check. `text`: the body of a route that takes plain text."""

    request: web.Request
    context: ApiContext
    identity: DaemonIdentity
    visit: Visit
    ids: Mapping[str, UUID]
    query: Any
    body: Any
    text: bytes


def daemon_endpoint(route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the aiohttp handler of a route for daemons. Raises OmnaraError for every refused request."""
    decoder = msgspec.json.Decoder(route.body) if route.body is not None else None
    handler = cast("DaemonHandler", route.handler)

    async def handle(request: web.Request) -> web.StreamResponse:
        body.check_declared_size(request, route.body_limit)
        token = token_of(request)
        with in_background(), request.app[CONTEXT].gate.visit(token.hash) as visit:
            found = await authenticate(request, token)
            try:
                call = await checked(request, found, visit)
                if route.is_socket:
                    return await handler(call)
                async with visit.turn():
                    return await handler(call)
            except Forbidden as error:
                # The token is good: nothing behind this door may tell a daemon to destroy what it runs.
                log.error("a daemon's route refused a machine that is known", exc_info=error)
                raise Unavailable("try again", retry_after_s=_RETRY_S) from error

    async def checked(request: web.Request, found: DaemonIdentity, visit: Visit) -> DaemonCall:
        context = request.app[CONTEXT]
        with context.bodies.share() as held:
            raw = b""
            if request.body_exists:
                timeout_s = context.deps.settings.request_body_timeout_s
                raw = await body.read(request, route.body_limit, held, timeout_s=timeout_s)
            ids = params.path_ids(request.match_info, route.path_ids)
            query = params.query(request.query, route.query)
            text = _text(request, raw, route.text_limit) if route.text_limit is not None else b""
            decoded = None if route.text_limit is not None else _decoded(request, raw, decoder)
        return DaemonCall(request, context, found, visit, ids, query, decoded, text)

    return handle


def token_of(request: web.Request) -> BearerToken:
    """Return what has the shape and the checksum of a daemon's token, without asking anybody. Raises Unauthorized."""
    values = request.headers.getall("Authorization", [])
    text = tokens.bearer_from_header(values[0]) if len(values) == 1 else None
    if text is None:
        raise Unauthorized("send Authorization: Bearer and the machine's token")
    try:
        token = tokens.parse(text)
    except tokens.InvalidToken:
        raise Unauthorized from None
    if token.kind is not TokenKind.DAEMON:
        raise Unauthorized
    return token


async def authenticate(request: web.Request, token: BearerToken) -> DaemonIdentity:
    """Return the machine that calls. Raises Unauthorized for a token that is none or is none any more, Unavailable."""
    context = request.app[CONTEXT]
    try:
        async with context.gate.lookup(token.hash):
            return await identity.authenticate_daemon(context.deps, token.text)
    except (Unauthorized, Unavailable):
        raise
    except Exception as error:  # whatever it was, it says nothing about the token
        log.error("a machine could not be authenticated", exc_info=error)
        raise Unavailable("the token could not be checked", retry_after_s=_RETRY_S) from error


def _text(request: web.Request, raw: bytes, limit: int) -> bytes:
    if raw and request.content_type not in {"text/plain", "application/octet-stream"}:
        raise UnsupportedMediaType("send text/plain")
    if len(raw) > limit:
        raise RequestTooLarge(f"the text may have {limit} bytes")
    return raw


def _decoded(request: web.Request, raw: bytes, decoder: msgspec.json.Decoder[Any] | None) -> Any:
    if decoder is None:
        if raw:
            raise InvalidRequest("this route takes no body")
        return None
    body.check_media_type(request)
    return body.decode(raw, decoder)
