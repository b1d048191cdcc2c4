"""One spelling for schemas that mean the same, so that two documents can be compared with `==`."""

from __future__ import annotations

import json
from typing import Any

PROSE = {"description", "title", "summary", "example", "examples"}


def normal(schema: Any, document: dict[str, Any]) -> Any:
    """Return `schema` with references followed, prose left out and every free choice of spelling made the same way."""
    if isinstance(schema, list):
        return [normal(item, document) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        target = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return normal(target, document)
    out = {key: _value(key, value, document) for key, value in schema.items() if key not in PROSE}
    return _canonical(out)


def _value(key: str, value: Any, document: dict[str, Any]) -> Any:
    if key == "properties":
        return {name: normal(item, document) for name, item in value.items()}
    if key in {"required", "enum"} and isinstance(value, list):
        return sorted(value, key=str)
    if key == "discriminator":
        return value["propertyName"]
    return normal(value, document)


def _canonical(out: dict[str, Any]) -> dict[str, Any]:
    for part in out.pop("allOf", []):
        out = _merged(out, part)
    options = out.pop("oneOf", None) or out.pop("anyOf", None)
    if options is not None:
        flat = [inner for option in options for inner in (option.get("options", [option]) if option else [option])]
        out["options"] = sorted(flat, key=lambda option: json.dumps(option, sort_keys=True))
        # A discriminator only helps readers: the options say the same.
        out.pop("discriminator", None)
    if isinstance(out.get("type"), list):
        kinds = out.pop("type")
        out["options"] = sorted(({"type": kind} for kind in kinds), key=lambda option: json.dumps(option))
    if "unevaluatedProperties" in out:
        # Once the parts are merged there is no difference.
        out["additionalProperties"] = out.pop("unevaluatedProperties")
    if out.get("required") == []:
        del out["required"]
    if out.get("additionalProperties") in (True, {}):
        del out["additionalProperties"]
    return out


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {**one, **other}
    if "properties" in one or "properties" in other:
        both["properties"] = {**one.get("properties", {}), **other.get("properties", {})}
    if "required" in one or "required" in other:
        both["required"] = sorted({*one.get("required", []), *other.get("required", [])})
    return both
