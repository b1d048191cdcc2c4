"""A middleware for test servers that notes every answer which the contract does not allow.

Status, content type, body (additional properties included) and the payload of each stream frame are compared with the
distilled contract; routes of our own with our own document. Nothing is changed on the way: violations are collected,
and the fixture that owns the server fails the test at the end.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
from aiohttp import web
from aiohttp.typedefs import Handler

from omnara.api import openapi

CONTRACT = Path(__file__).with_name("contract.json")
EVENT_STREAM = "text/event-stream"
OPERATIONAL = {"/healthz", "/api/openapi.yaml", "/install/omnarad.sh", "/install/wheels/{sha256}/{filename}"}
"""Routes that answer to nobody's schema."""
FRAME_EVENTS = {"agent_input", "model_output", "tool_result", "context_checkpoint"}


@functools.cache
def contract() -> dict[str, Any]:
    """The distilled contract."""
    loaded: dict[str, Any] = json.loads(CONTRACT.read_text(encoding="utf-8"))
    return loaded


JOINT_ID = re.compile(r"id: [A-Za-z0-9_-]{20,}(\n|$)")
SEQUENCE = re.compile(r'"sequence":(\d+),')


class Checker:
    """Compares answers with the contract. One per test server."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.checked = 0
        self.frames = 0
        self._own = openapi.document()
        self._validators: dict[str, jsonschema_rs.Validator] = {}

    def install(self, app: web.Application) -> None:
        """Watch every answer of `app`; call before it is run."""
        app.middlewares.insert(0, self._middleware())
        app.on_response_prepare.append(self._watch_stream)

    def _middleware(self) -> Any:
        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            self.check(request, response)
            return response

        return check

    def check(self, request: web.Request, response: web.StreamResponse) -> None:
        """Note what is wrong with a finished answer."""
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else ""
        preflight = request.method == "OPTIONS" and response.status == 204
        if path in OPERATIONAL or preflight:
            return
        self.checked += 1
        where = f"{request.method} {path or request.path} -> {response.status}"
        for problem in self._problems(request.method.lower(), path, response):
            self.violations.append(f"{where}: {problem}")

    def _problems(self, method: str, path: str, response: web.StreamResponse) -> Iterator[str]:
        document, operation = self._operation(path, method)
        if operation is None:
            yield from self._unknown_route(response)
            return
        named = self._own["paths"].get(path, {}).get(method)
        if named is not None and str(response.status) not in named["responses"]:
            yield "our own document does not name the status"
        declared = declared_response(document, operation, response.status)
        if declared is None and response.status in {206, 304}:
            # What only a conditional request gets is in our own document; the contract knows no such requests.
            operation = self._own["paths"].get(path, {}).get(method, operation)
            declared = declared_response(self._own, operation, response.status)
        if declared is None:
            yield "status is not declared"
            return
        content = declared.get("content", {})
        if not content:
            if getattr(response, "body", None):
                yield "a body where none is declared"
            return
        if "*/*" in content:
            return
        if response.content_type not in content:
            yield f"content type {response.content_type} is not declared"
        elif response.content_type != EVENT_STREAM:
            assert isinstance(response, web.Response)
            yield from self._mismatch(document, content[response.content_type]["schema"], response.body)

    def _unknown_route(self, response: web.StreamResponse) -> Iterator[str]:
        """A path that nobody declares must be a 404 (or an HTTP-level refusal) with the common body."""
        if response.status < 400 or not isinstance(response, web.Response):
            yield "an undeclared route answers"
            return
        yield from self._mismatch(contract(), {"$ref": "#/components/schemas/Error"}, response.body)

    def _operation(self, path: str, method: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
        for document in (contract(), self._own):
            operation = document["paths"].get(path, {}).get(method)
            if operation is not None:
                return document, operation
        return contract(), None

    def _mismatch(self, document: dict[str, Any], schema: dict[str, Any], body: Any) -> Iterator[str]:
        try:
            value = json.loads(bytes(body))
        except (TypeError, ValueError):
            yield "the body is not JSON"
            return
        validator = self._validator(document, schema)
        for error in validator.iter_errors(value):
            yield f"{'/'.join(map(str, error.instance_path))}: {error.message[:300]}"

    def _validator(self, document: dict[str, Any], schema: dict[str, Any]) -> jsonschema_rs.Validator:
        key = f"{id(document)}:{json.dumps(schema, sort_keys=True)}"
        if key not in self._validators:
            whole = {"components": {"schemas": document["components"]["schemas"]}, "allOf": [schema]}
            self._validators[key] = jsonschema_rs.Draft202012Validator(whole, validate_formats=True)
        return self._validators[key]

    # --- streams ------------------------------------------------------------------------------------------

    async def _watch_stream(self, request: web.Request, response: web.StreamResponse) -> None:
        if response.content_type != EVENT_STREAM:
            return
        send = response.write
        pending = bytearray()
        resource = request.match_info.route.resource
        joint = resource is not None and resource.canonical.endswith("/projects/{projectID}/events/stream")

        async def write(data: Any) -> None:
            pending.extend(data)
            while (end := pending.find(b"\n\n")) >= 0:
                self.check_frame(bytes(pending[:end]), joint=joint)
                del pending[: end + 2]
            await send(data)

        response.write = write  # type: ignore[method-assign]

    def check_frame(self, frame: bytes, *, joint: bool = False) -> None:
        """Note what is wrong with one frame. `joint`: a project's stream; its ids are opaque and may come alone."""
        self.frames += 1
        text = frame.decode()
        if joint and (place := JOINT_ID.match(text)) is not None:
            rest = text[place.end() :]
            if not rest:
                return
            sequence = SEQUENCE.search(rest)
            text = f"id: {sequence[1] if sequence else '?'}\n{rest}"
        for problem in self._frame_problems(text):
            self.violations.append(f"frame: {problem}")

    def _frame_problems(self, frame: str) -> Iterator[str]:
        if frame in {": ok", ": heartbeat"}:
            return
        fields = [line.split(": ", 1) for line in frame.split("\n")]
        names = [field[0] for field in fields]
        if any(len(field) != 2 for field in fields) or names not in (["id", "event", "data"], ["event", "data"]):
            yield f"lines {names}"
            return
        event, data = fields[-2][1], fields[-1][1]
        schema = {"AgentEvent": event in FRAME_EVENTS}
        schema |= {"ToolCallUpdate": event == "tool_call_update", "ModelOutputDelta": event == "model_output_delta"}
        schema |= {"Error": event == "error"}
        found = [name for name, fits in schema.items() if fits]
        if len(found) != 1:
            yield f"event name {event!r}"
            return
        if (names[0] == "id") is not (event in FRAME_EVENTS):
            yield f"{event} has{'' if names[0] == 'id' else ' no'} id"
        yield from self._mismatch(contract(), {"$ref": f"#/components/schemas/{found[0]}"}, data.encode())
        if event in FRAME_EVENTS and f'"event_kind":"{event}"' not in data:
            yield f"{event} carries another kind"
        if event in FRAME_EVENTS and f'"sequence":{fields[0][1]},' not in data:
            yield "id is not the sequence"


def declared_response(document: dict[str, Any], operation: dict[str, Any], status: int) -> dict[str, Any] | None:
    """Return the declaration that covers a status, by number or by family; None when there is none."""
    responses = operation["responses"]
    found = responses.get(str(status), responses.get(f"{status // 100}XX"))
    if found is not None and "$ref" in found:
        found = document["components"]["responses"][found["$ref"].rpartition("/")[2]]
    declared: dict[str, Any] | None = found
    return declared
