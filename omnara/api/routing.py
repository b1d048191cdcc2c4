"""What a route is: one value that says everything about it, from which requests are checked and documented.

The wrapper made here runs the checks in the contract's order, so no handler can forget one: body size, who is calling,
the shape of the request, and only then the handler, whose use case decides what the caller may do.
Source: api.md §3 (order of evaluation), §6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal
from uuid import UUID

import msgspec
from aiohttp import web

from omnara.access.principals import Principal
from omnara.access.roles import CallerRule, Decision, can_call
from omnara.api import body, params
from omnara.api.body import BODY_LIMIT
from omnara.api.context import CONTEXT, ApiContext
from omnara.api.large_bodies import Held
from omnara.db.fair_share import work_for
from omnara.errors import Forbidden, ValidationFailed
from omnara.ids import IdKind

_ENCODER: Final = msgspec.json.Encoder()


class Call(msgspec.Struct, frozen=True):
    """A request that passed every check, with its parts decoded. `query` and `body` are of the route's types."""

    request: web.Request
    context: ApiContext
    principal: Principal
    ids: Mapping[str, UUID]
    query: Any
    body: Any
    key: str | None


class EventStream(msgspec.Struct, frozen=True):
    """Stands in `Route.responses` for an event stream; `data` lists the types of its frames' data.

    `opaque_ids`: the ids of its frames are texts without a meaning to clients, not sequences.
    """

    data: tuple[Any, ...]
    opaque_ids: bool = False


class Binary(msgspec.Struct, frozen=True):
    """Stands in `Route.responses` for bytes of any type."""


Handler = Callable[[Call], Awaitable[web.StreamResponse]]
DaemonHandler = Callable[[Any], Awaitable[web.StreamResponse]]
"""Of a route for daemons, which gets a `daemon.door.DaemonCall`."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. `responses` maps each success status to its type; the common errors are added to all.

    `description` is for readers of the document, where a route needs one: one that the contract has not.
    `path_ids` names the kind of each id in the path. `body_required` matters only with a `body`. `errors` are the
    statuses that the contract lists for the operation, `further_errors` those of its own that fall under its families.
    `daemon`: the caller is a machine (`api.daemon.door`), not a person or a key. `is_socket`: the handler takes the
    connection over, for as long as it likes. `text_limit`: bytes of a body that is
    plain text; instead of `body`.
    """

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    operation_id: str
    handler: Handler | DaemonHandler
    responses: Mapping[int, Any]
    path_ids: Mapping[str, IdKind] = {}
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    body_required: bool = True
    body_limit: int = BODY_LIMIT
    idempotent: bool = False
    caller: CallerRule = CallerRule.ANYONE
    description: str = ""
    daemon: bool = False
    is_socket: bool = False
    text_limit: int | None = None
    errors: frozenset[int] = frozenset({400, 401, 403, 404, 409, 503})
    further_errors: frozenset[int] = frozenset()

    @property
    def unlisted_errors(self) -> frozenset[int]:
        """The statuses beside `errors` that a request may get, for what comes before and around every handler."""
        found = {400, 401, 403, 404, 413, 500, 503} | self.further_errors
        if self.body is not None or self.text_limit is not None:
            found.add(415)
        if any(isinstance(kind, Binary) for kind in self.responses.values()):
            found.add(416)
        return frozenset(found - self.errors)


def endpoint(route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the aiohttp handler of a route. Raises OmnaraError for every refused request."""
    decoder = msgspec.json.Decoder(route.body) if route.body is not None else None
    agent = next((name for name, kind in route.path_ids.items() if kind is IdKind.AGENT), None)

    async def handle(request: web.Request) -> web.StreamResponse:
        body.check_declared_size(request, route.body_limit)
        with request.app[CONTEXT].bodies.share() as held:
            call = await _checked(request, route, decoder, held)
            if can_call(call.principal, route.caller) is Decision.DENIED:
                raise Forbidden
            with work_for(None if agent is None else call.ids[agent]):
                return await route.handler(call)

    return handle


async def _checked(request: web.Request, route: Route, decoder: msgspec.json.Decoder[Any] | None, held: Held) -> Call:
    """Who calls and what for; the bytes of the body are not kept."""
    context = request.app[CONTEXT]
    principal = await context.authenticator.principal(request)
    timeout_s = context.deps.settings.request_body_timeout_s
    raw = await body.read(request, route.body_limit, held, timeout_s=timeout_s) if request.body_exists else b""
    ids = params.path_ids(request.match_info, route.path_ids)
    if _unseen(principal, ids):
        # What it names may have been made since the caller was remembered, perhaps by another process.
        principal = await context.authenticator.principal(request, anew=True)
    query, required = params.query(request.query, route.query), route.body_required
    if len(raw) <= BODY_LIMIT:
        decoded = _decoded(request, raw, decoder, required=required)
    else:  # a body with files takes a tenth of a second
        decoded = await asyncio.to_thread(_decoded, request, raw, decoder, required=required)
    key = params.idempotency_key(request) if route.idempotent else None
    return Call(request, context, principal, ids, query, decoded, key)


def _unseen(principal: Principal, ids: Mapping[str, UUID]) -> bool:
    """Whether a path leads where the caller, as it is remembered, has no role."""
    org_id, project_id = ids.get("orgID"), ids.get("projectID")
    return (org_id is not None and org_id not in principal.org_roles) or (
        project_id is not None and project_id not in principal.project_grants
    )


def _decoded(
    request: web.Request, raw: bytes, decoder: msgspec.json.Decoder[Any] | None, *, required: bool
) -> msgspec.Struct | None:
    if decoder is None:
        if raw:
            raise ValidationFailed("this route takes no body")
        return None
    if not raw:
        if required:
            raise ValidationFailed("a body is required")
        return None
    body.check_media_type(request)
    value: msgspec.Struct = body.decode(raw, decoder)
    return value


def no_content() -> web.Response:
    """Return the answer of an operation that has nothing to say."""
    return web.Response(status=204)


def reply(status: int, value: Any) -> web.Response:
    """Return a JSON response."""
    return web.Response(status=status, body=_ENCODER.encode(value), content_type="application/json")
