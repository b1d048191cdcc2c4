"""Routes of files: what is known of one, and its bytes.

The bytes came from anybody and are shown by browsers, so they are never offered for display: attachment, exact type, no
guessing. They never change, so they are cached for good by whoever was allowed to fetch them.
Source: api.md §13.
"""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web
from msgspec import UNSET

from omnara.api.middleware import REQUEST_ID, REQUEST_ID_HEADER, error_response
from omnara.api.omnara.decode import AGENT, AGENT_PATH, agent_path
from omnara.api.omnara.types.artifacts import Artifact
from omnara.api.ranges import Span, names_tag, span_of
from omnara.api.routing import Binary, Call, Route, reply
from omnara.db.artifacts import ArtifactRow
from omnara.engine.artifacts_read import get_artifact, read_content
from omnara.errors import RangeNotSatisfiable, Unavailable
from omnara.ids import IdKind, encode
from omnara.log import get_logger

log = get_logger(__name__)

PIECE_BYTES: Final = 512 * 1024
"""How much of a file is held for one reader."""

_NAME: Final = re.compile(r"[^A-Za-z0-9._\- ()]+")
_IDS: Final = {**AGENT, "artifactID": IdKind.ARTIFACT}
_PATH: Final = f"{AGENT_PATH}/artifacts/{{artifactID}}"
_ERRORS: Final = frozenset({400, 401, 403, 404, 409, 503})


async def get_metadata(call: Call) -> web.StreamResponse:
    """What is known of a file."""
    found = await get_artifact(call.context.deps, call.principal, agent_path(call), call.ids["artifactID"])
    agent, row = found.agent, found.row
    artifact = Artifact(
        id=encode(IdKind.ARTIFACT, row.id),
        org_id=encode(IdKind.ORG, agent.org_id),
        project_id=encode(IdKind.PROJECT, agent.project_id),
        agent_id=encode(IdKind.AGENT, row.agent_id),
        content_type=row.media_type,
        filename=UNSET if row.filename is None else row.filename,
        digest=_digest(row),
        size_bytes=row.size,
        created_at=row.created_at,
    )
    return reply(200, artifact)


async def get_content(call: Call) -> web.StreamResponse:
    """The bytes of a file, or one span of them."""
    request, deps = call.request, call.context.deps
    row = (await get_artifact(deps, call.principal, agent_path(call), call.ids["artifactID"])).row
    headers = _headers(row)
    if names_tag(request.headers.get("If-None-Match"), headers["ETag"]):
        return web.Response(status=304, headers={name: headers[name] for name in ("ETag", "Cache-Control")})
    span, status = Span(0, row.size), 200
    if request.headers.get("If-Range", headers["ETag"]).strip() == headers["ETag"]:
        asked = span_of(request.headers.get("Range"), row.size)
        if asked is not None and asked.start == asked.stop:
            refused = error_response(RangeNotSatisfiable(f"the file has {row.size} bytes"))
            refused.headers["Content-Range"] = f"bytes */{row.size}"
            return refused
        if asked is not None:
            span, status = asked, 206
            headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{row.size}"
    return await _send(call, row, span, web.StreamResponse(status=status, headers=headers))


async def _send(call: Call, row: ArtifactRow, span: Span, response: web.StreamResponse) -> web.StreamResponse:
    """Stream the span piece by piece. No connection of the database is held while the client takes its time."""
    deps, request = call.context.deps, call.request
    at = min(span.stop, (span.start // PIECE_BYTES + 1) * PIECE_BYTES)
    piece = await read_content(deps, row, span.start, at)  # what fails here is still answered with an error
    response.content_length = span.stop - span.start
    response.headers[REQUEST_ID_HEADER] = REQUEST_ID.get()
    await response.prepare(request)
    await response.write(piece)
    while at < span.stop:
        start, at = at, min(span.stop, at + PIECE_BYTES)
        try:
            piece = await read_content(deps, row, start, at)
        except Unavailable as error:
            # The length is announced already: only a cut connection tells the client that this is not all.
            log.warning("file_cut_off", error=str(error))
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write(piece)
    await response.write_eof()
    return response


def _digest(row: ArtifactRow) -> str:
    return f"sha256:{row.digest.hex()}"


def _headers(row: ArtifactRow) -> dict[str, str]:
    name = _NAME.sub("", row.filename or "").strip() or encode(IdKind.ARTIFACT, row.id)
    return {
        "Content-Type": row.media_type,
        "Content-Disposition": f'attachment; filename="{name}"',
        "X-Content-Type-Options": "nosniff",
        "ETag": f'"{_digest(row)}"',
        "Cache-Control": "private, max-age=31536000, immutable",
        "Accept-Ranges": "bytes",
    }


ROUTES: Final = (
    Route(
        method="GET",
        path=_PATH,
        operation_id="getArtifact",
        handler=get_metadata,
        path_ids=_IDS,
        responses={200: Artifact},
        errors=_ERRORS,
    ),
    Route(
        method="GET",
        path=f"{_PATH}/content",
        operation_id="getArtifactContent",
        handler=get_content,
        path_ids=_IDS,
        responses={200: Binary(), 206: Binary(), 304: None},
        errors=_ERRORS,
    ),
)
