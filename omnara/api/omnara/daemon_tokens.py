"""Routes of the tokens with which machines' daemons join."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from omnara.api.cursors import Binding
from omnara.api.omnara.decode import PageQuery, given
from omnara.api.omnara.machine_shapes import token_record
from omnara.api.omnara.machines import MACHINE, MACHINE_PATH
from omnara.api.omnara.tools import next_cursor, time_key
from omnara.api.omnara.types.machines import (
    CreateMachineDaemonTokenRequest,
    CreateMachineDaemonTokenResponse,
    ListMachineDaemonTokensResponse,
    MachineDaemonToken,
)
from omnara.api.routing import Call, Route, reply
from omnara.engine.machines import closing_down, daemon_tokens
from omnara.ids import IdKind

TOKENS_PATH = f"{MACHINE_PATH}/daemon-tokens"


async def create_token(call: Call) -> web.StreamResponse:
    """A new token, whose text is shown this once."""
    body: CreateMachineDaemonTokenRequest = call.body or CreateMachineDaemonTokenRequest()
    token, row = await daemon_tokens.create_token(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        call.ids["machineID"],
        given(body.name) or "",
        given(body.metadata) or {},
    )
    return reply(201, CreateMachineDaemonTokenResponse(token=token.text, token_record=token_record(row)))


async def list_tokens(call: Call) -> web.StreamResponse:
    """A page of a machine's tokens, newest first."""
    query: PageQuery = call.query
    org_id, machine_id = call.ids["orgID"], call.ids["machineID"]
    binding = Binding("daemon_tokens", (str(machine_id),))
    page = await daemon_tokens.list_tokens(
        call.context.deps, call.principal, org_id, machine_id, after=time_key(binding, query), limit=query.limit
    )
    cursor = next_cursor(binding, page.rows, more=page.more)
    data = [token_record(row) for row in page.rows]
    return reply(200, ListMachineDaemonTokensResponse(data=data, next_cursor=cursor))


async def revoke_token(call: Call) -> web.StreamResponse:
    """The end of a token, and of what runs on the machine if its daemon joined with it."""
    row = await closing_down.revoke_token(
        call.context.deps, call.principal, call.ids["orgID"], call.ids["machineID"], call.ids["tokenID"]
    )
    return reply(200, token_record(row))


ROUTES: Final = (
    Route(
        method="POST",
        path=TOKENS_PATH,
        operation_id="createBYOMachineDaemonToken",
        handler=create_token,
        path_ids=MACHINE,
        body=CreateMachineDaemonTokenRequest,
        body_required=False,
        responses={201: CreateMachineDaemonTokenResponse},
    ),
    Route(
        method="GET",
        path=TOKENS_PATH,
        operation_id="listBYOMachineDaemonTokens",
        handler=list_tokens,
        path_ids=MACHINE,
        query=PageQuery,
        responses={200: ListMachineDaemonTokensResponse},
    ),
    Route(
        method="POST",
        path=f"{TOKENS_PATH}/{{tokenID}}/revoke",
        operation_id="revokeMachineDaemonToken",
        handler=revoke_token,
        path_ids={**MACHINE, "tokenID": IdKind.DAEMON_TOKEN},
        responses={200: MachineDaemonToken},
    ),
)
