"""What both OpenAI formats refuse in the same words: credentials, numbers, function definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnara.testing.strict import FUNCTION_NAME, FUNCTION_NAME_CHARS, Refused, is_count, is_number, refuse
from omnara.testing.wire import Problem

_KIND = {str: "a string", int: "an integer", float: "a decimal", list: "an array", dict: "an object", bool: "a boolean"}


def kind_of(value: Any) -> str:
    """Return OpenAI's words for the JSON type of a value."""
    return "null" if value is None else _KIND[type(value)]


def wrong_type(place: str, expected: str, value: Any) -> Refused:
    """Return the refusal of a value of the wrong type."""
    return refuse(
        f"Invalid type for '{place}': expected {expected}, but got {kind_of(value)} instead.",
        param=place,
        code="invalid_type",
    )


def missing(place: str) -> Refused:
    """Return the refusal of an absent parameter."""
    return refuse(f"Missing required parameter: '{place}'.", param=place, code="missing_required_parameter")


def empty_array(place: str) -> Refused:
    """Return the refusal of a list without elements."""
    return refuse(
        f"Invalid '{place}': empty array. Expected an array with minimum length 1, but got an empty array instead.",
        param=place,
        code="empty_array",
    )


def check_headers(headers: Mapping[str, str], keys: frozenset[str] | None) -> Refused | None:
    """Check the bearer key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        message = (
            "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer "
            "auth (i.e. Authorization: Bearer YOUR_KEY)."
        )
        return Refused(Problem(message=message, status=401))
    if keys is not None and key.strip() not in keys:
        message = f"Incorrect API key provided: {key.strip()[:2]}{'*' * 8}."
        return Refused(Problem(message=message, status=401, code="invalid_api_key"))
    return None


def check_unknown(body: Any, known: frozenset[str]) -> None:
    """Refuse a body that is no object, and parameters that do not exist. Raises `Refused`."""
    if not isinstance(body, dict):
        raise refuse("We could not parse the JSON body of your request. The body must be a JSON object.")
    unknown = next((key for key in body if key not in known), None)
    if unknown is not None:
        raise refuse(f"Unknown parameter: '{unknown}'.", param=unknown, code="unknown_parameter")


def check_range(body: dict[str, Any], name: str, low: float, high: float) -> None:
    """Check an optional decimal. Raises `Refused`."""
    value = body.get(name)
    if value is None:
        return
    if not is_number(value):
        raise wrong_type(name, "a decimal", value)
    for wrong, side, sign, bound in (
        (value > high, "above maximum", "<=", high),
        (value < low, "below minimum", ">=", low),
    ):
        if wrong:
            code = "decimal_" + side.replace(" ", "_") + "_value"
            text = (
                f"Invalid '{name}': decimal {side} value. Expected a value {sign} {bound:g}, but got {value} instead."
            )
            raise refuse(text, param=name, code=code)


def check_limit(body: dict[str, Any], name: str, low: int, high: int) -> None:
    """Check an optional count of tokens. Raises `Refused`."""
    value = body.get(name)
    if value is None:
        return
    if not is_count(value):
        raise wrong_type(name, "an integer", value)
    if value < low:
        text = f"Invalid '{name}': integer below minimum value. Expected a value >= {low}, but got {value} instead."
        raise refuse(text, param=name, code="integer_below_min_value")
    if value > high:
        text = f"{name} is too large: {value}. This model supports at most {high} completion tokens."
        raise refuse(text, param=name, code="invalid_value")


def check_name(place: str, name: Any) -> None:
    """Check the name of a function. Raises `Refused`."""
    if name is None:
        raise missing(place)
    if not isinstance(name, str):
        raise wrong_type(place, "a string", name)
    if not name:
        text = f"Invalid '{place}': empty string. Expected a string with minimum length 1, but got an empty string."
        raise refuse(text, param=place, code="empty_string")
    if len(name) > FUNCTION_NAME_CHARS:
        text = (
            f"Invalid '{place}': string too long. Expected a string with maximum length {FUNCTION_NAME_CHARS}, "
            f"but got a string with length {len(name)} instead."
        )
        raise refuse(text, param=place, code="string_above_max_length")
    if not FUNCTION_NAME.match(name):
        text = (
            f"Invalid '{place}': string does not match pattern. Expected a string that matches the pattern "
            "'^[a-zA-Z0-9_-]+$'."
        )
        raise refuse(text, param=place, code="invalid_value")


def check_function(place: str, function: Any) -> None:
    """Check the definition of a function at `place`. Raises `Refused`."""
    if not isinstance(function, dict):
        raise wrong_type(place, "an object", function)
    check_name(place + ".name", function.get("name"))
    schema = function.get("parameters")
    if schema is None:
        return
    found = schema.get("type") if isinstance(schema, dict) else None
    if found != "object":
        text = (
            f"Invalid schema for function '{function['name']}': schema must be a JSON Schema of 'type: \"object\"', "
            f"got 'type: \"{found}\"'."
        )
        raise refuse(text, param=place + ".parameters", code="invalid_function_parameters")
