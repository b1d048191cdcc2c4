"""The OpenAPI document, made from the routes and the types that really read requests and write answers.

There is no second description to keep in step: a parameter, field or status code is in the document because the server
uses it. Source: contract (operation ids, error families); DESIGN §7.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import yaml

from omnara.api.daemon.routes import ROUTES as DAEMON_ROUTES
from omnara.api.flat.routes import ROUTES as FLAT_ROUTES
from omnara.api.omnara.routes import ROUTES as OMNARA_ROUTES
from omnara.api.params import MAX_KEY
from omnara.api.project_cursor import MAX_LENGTH
from omnara.api.routing import Binary, EventStream, Route
from omnara.api.types import Changes, ClientError, Error, ServerError

ROUTES: Final[tuple[Route, ...]] = (*OMNARA_ROUTES, *DAEMON_ROUTES, *FLAT_ROUTES)

_REF: Final = "#/components/schemas/{name}"
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")
_JSON: Final = "application/json"
_ERROR_TEXTS: Final = {
    400: "The request is not valid.",
    401: "There is no usable credential.",
    403: "The caller may not do this.",
    404: "There is no such thing, or the caller may not see it.",
    409: "The request clashes with the present state.",
    410: "What the caller speaks for has ended for good.",
    413: "The body, or a part of it, is too large.",
    415: "The body is not called application/json, or has a Content-Encoding.",
    416: "The part that was asked for lies behind the end.",
    422: "The request is well-formed, and this release cannot do it.",
    500: "The server failed.",
    503: "A needed part is away; try again after Retry-After seconds.",
}
_IDEMPOTENCY_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
    "description": "Repeating a request with the same key has no second effect.",
}
_LAST_EVENT_ID: Final = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "format": "int64", "minimum": 0},
    "description": "The last event that the client has. Outranks after_sequence. A number beyond the log is refused.",
}
_LAST_FRAME_ID: Final = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_LENGTH},
    "description": "The id of the last frame that the client has. Outranks after.",
}


def document(routes: Sequence[Route] = ROUTES) -> dict[str, Any]:
    """Return the whole document as a fresh dict. Takes some ten milliseconds; needs nothing but the code."""
    wanted = _types(routes)
    schemas, components = msgspec.json.schema_components(list(wanted.values()), ref_template=_REF)
    by_type = {name: _tidy(schema) for name, schema in zip(wanted, schemas, strict=True)}
    for kind in wanted.values():
        if isinstance(kind, type) and issubclass(kind, Changes):
            components[kind.__name__]["minProperties"] = 1
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Omnara", "version": "0.1.0", "description": "Durable agents over HTTP."},
        "security": [{"bearerAuth": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearerAuth": {"type": "http", "scheme": "bearer"},
                "machineDaemonAuth": {"type": "http", "scheme": "bearer"},
            },
            "schemas": {name: _tidy(schema) for name, schema in sorted(components.items())},
        },
    }


@functools.cache
def yaml_text() -> bytes:
    """Return the document as YAML. The first call takes a fraction of a second, so make it outside the event loop."""
    text: str = yaml.dump(document(), Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    return text.encode()


def _types(routes: Iterable[Route]) -> dict[str, Any]:
    """Return every type that appears as a body or an answer, by the name under which `_operation` asks for it."""
    found: dict[str, Any] = {str(kind): kind for kind in (Error, ClientError, ServerError)}
    for route in routes:
        kinds = [kind for kind in route.responses.values() if kind is not None and not isinstance(kind, Binary)]
        if route.body is not None:
            kinds.append(route.body)
        for kind in kinds:
            for plain in kind.data if isinstance(kind, EventStream) else (kind,):
                found[str(plain)] = plain
    return found


def _operation(route: Route, by_type: Mapping[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": route.operation_id, "parameters": _parameters(route)}
    if route.description:
        operation["description"] = route.description
    if route.daemon:
        operation["security"] = [{"machineDaemonAuth": []}]
    if route.body is not None:
        content = {_JSON: {"schema": by_type[str(route.body)]}}
        operation["requestBody"] = {"required": route.body_required, "content": content}
    if route.text_limit is not None:
        text = {"text/plain": {"schema": {"type": "string", "maxLength": route.text_limit}}}
        operation["requestBody"] = {"required": False, "content": text}
    responses: dict[str, Any] = {}
    for status, kind in route.responses.items():
        responses[str(status)] = _response("Done.", kind, by_type)
    for status in sorted(route.errors):
        responses[str(status)] = _response(_ERROR_TEXTS[status], Error, by_type)
    for status in sorted(route.unlisted_errors):
        responses[str(status)] = _response(_ERROR_TEXTS[status], ClientError if status < 500 else ServerError, by_type)
    operation["responses"] = responses
    return operation


def _response(text: str, kind: Any, by_type: Mapping[str, Any]) -> dict[str, Any]:
    if kind is None:
        return {"description": text}
    if isinstance(kind, Binary):
        return {"description": text, "content": {"*/*": {"schema": {"type": "string", "format": "binary"}}}}
    if isinstance(kind, EventStream):
        schema = {"oneOf": [by_type[str(plain)] for plain in kind.data]}
        return {"description": text, "content": {"text/event-stream": {"schema": schema}}}
    return {"description": text, "content": {_JSON: {"schema": by_type[str(kind)]}}}


def _parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in _PLACEHOLDER.findall(route.path):
        pattern = f"^{route.path_ids[name].value}_[a-z2-7]{{26}}$"
        schema = {"type": "string", "pattern": pattern}
        found.append({"name": name, "in": "path", "required": True, "schema": schema})
    if route.query is not None:
        _, components = msgspec.json.schema_components([route.query], ref_template=_REF)
        properties = components[route.query.__name__]["properties"]
        required = components[route.query.__name__].get("required", [])
        found += [_query_parameter(name, _tidy(schema), name in required) for name, schema in properties.items()]
    if route.idempotent:
        found.append(_IDEMPOTENCY_KEY)
    for kind in route.responses.values():
        if isinstance(kind, EventStream):
            found.append(_LAST_FRAME_ID if kind.opaque_ids else _LAST_EVENT_ID)
    return found


def _query_parameter(name: str, schema: dict[str, Any], required: bool) -> dict[str, Any]:
    parameter: dict[str, Any] = {"name": name, "in": "query", "required": required, "schema": schema}
    if schema.get("type") == "object":
        parameter |= {"style": "deepObject", "explode": True}
    return parameter


def _tidy(schema: Any) -> Any:
    """Rewrite a generated schema in the plain style that readers and generators of clients expect."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _tidy(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    if "enum" in out and "type" not in out and all(isinstance(item, str) for item in out["enum"]):
        out = {"type": "string", **out}
    if "anyOf" in out and "discriminator" in out:
        out["oneOf"] = out.pop("anyOf")
    options = out.get("anyOf")
    if options is not None and len(options) == 2 and {"type": "null"} in options:
        other = next(option for option in options if option != {"type": "null"})
        if set(other) == {"type"} and isinstance(other["type"], str):
            del out["anyOf"]
            out["type"] = [other["type"], "null"]
    return out
