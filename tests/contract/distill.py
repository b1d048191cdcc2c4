"""Makes `contract.json` from the published OpenAPI file: paths, methods, parameters, schemas and status codes.

The tests need the data of the contract and none of its prose, so every description, summary, title, tag and example is
left out. Run it when the published file changes:

    python -m tests.contract.distill PATH/TO/openapi.yaml
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).with_name("contract.json")
METHODS = ("get", "put", "post", "patch", "delete")
PROSE = frozenset({"description", "summary", "title", "tags", "example", "examples", "externalDocs"})
NAMED_MAPS = frozenset({"properties", "schemas", "responses", "parameters", "mapping", "patternProperties", "$defs"})
"""Below these keys names are free: a property may well be called `description`."""


def distill(document: dict[str, Any]) -> dict[str, Any]:
    """Return the contract's data. Operation ids, references and component names are kept."""
    components = document["components"]
    return {
        "components": {
            "parameters": _strip_named(components["parameters"]),
            "responses": _strip_named(components["responses"]),
            "schemas": _strip_named(components["schemas"]),
        },
        "paths": {path: _path(item) for path, item in sorted(document["paths"].items())},
    }


def _path(item: dict[str, Any]) -> dict[str, Any]:
    shared = item.get("parameters", [])
    return {method: _operation(item[method], shared) for method in METHODS if method in item}


def _operation(operation: dict[str, Any], shared: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "operationId": operation["operationId"],
        "parameters": [_strip(parameter) for parameter in [*shared, *operation.get("parameters", [])]],
        "responses": _strip_named(operation["responses"]),
    }
    if "requestBody" in operation:
        out["requestBody"] = _strip(operation["requestBody"])
    return out


def _strip(value: Any) -> Any:
    if isinstance(value, list):
        return [_strip(item) for item in value]
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    for key, item in value.items():
        if key in PROSE or key.startswith("x-"):
            continue
        named = key in NAMED_MAPS and isinstance(item, dict)
        out[key] = _strip_named(item) if named else _strip(item)
    return out


def _strip_named(value: dict[str, Any]) -> dict[str, Any]:
    return {name: _strip(item) for name, item in value.items()}


def main() -> None:
    """Read the file named on the command line and write `contract.json` beside this module."""
    document = yaml.load(Path(sys.argv[1]).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    TARGET.write_text(json.dumps(distill(document), indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
