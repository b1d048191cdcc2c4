"""Reading the arguments of a tool call: model output that other parts of the server must be able to trust.

Broken arguments are an answer of the model like any other: the call gets a failed result that says what is wrong, and
is never run with a guess. So nothing here raises.
Source: field-reports B13, B15, B43.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

import msgspec

from omnara.providers.nesting import nested_deeper

MAX_DEPTH: Final = 128
"""Deepest nesting of arguments: far below what the database and every JSON library can take."""

MAX_CHARS: Final = 4 * 1024 * 1024
"""Longest arguments of one call: several times what the longest answer of any model can hold."""

_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def read_arguments(text: str) -> tuple[dict[str, Any], str | None]:
    """Decode the JSON text of a call's arguments. Returns (arguments, None), or ({}, what is wrong with them).

    No text at all means no arguments. They may hold NUL and lone surrogates: a call must not run with something else in
    their place, so whoever decides about it has to see them, and whoever stores them cleans them.
    """
    if not text.strip():
        return {}, None
    if len(text) > MAX_CHARS:
        return {}, f"the arguments are longer than {MAX_CHARS} characters"
    if nested_deeper(text, MAX_DEPTH):
        return {}, f"the arguments are nested more than {MAX_DEPTH} levels deep"
    try:
        value = _decode(text)
    except (ValueError, RecursionError) as error:
        return {}, f"the arguments are not valid JSON: {_reason(error)}"
    if not isinstance(value, dict):
        return {}, "the arguments are not a JSON object"
    return value, None


def _decode(text: str) -> Any:
    if _SURROGATE.search(text) is None:
        return msgspec.json.decode(text)
    return json.loads(text, parse_float=_finite, parse_constant=_refuse_constant)


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("number out of range")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
