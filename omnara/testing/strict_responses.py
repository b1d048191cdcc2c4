"""What OpenAI Responses refuses of a request that carries its whole history."""

from __future__ import annotations

import re
from typing import Any

from omnara.testing.strict import Context, blank, refuse
from omnara.testing.strict_media import check_responses_file
from omnara.testing.strict_openai import (
    check_function,
    check_headers,
    check_limit,
    check_name,
    check_range,
    check_unknown,
    empty_array,
    missing,
    wrong_type,
)
from omnara.testing.wire import TOKEN_CHARS

__all__ = ["check", "check_headers"]

_KNOWN = frozenset({
    "model", "input", "instructions", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls",
    "temperature", "top_p", "max_output_tokens", "max_tool_calls", "store", "include", "reasoning", "text", "metadata",
    "user", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier", "service_tier",
    "truncation", "previous_response_id", "conversation", "background", "top_logprobs", "prompt", "context_management",
})  # fmt: skip
_PREFIX = {"function_call": "fc", "reasoning": "rs", "message": "msg"}
_BOUND = re.compile(rf"(?:fc|msg)_(.{{{TOKEN_CHARS}}})\d\dr(\d\d)\Z")
_MIN_OUTPUT = 16
_FILES = ("input_image", "input_file")
_MAX_ID = 64


def check(body: Any, context: Context) -> None:
    """Check a decoded body whose model exists. Raises `Refused` at the first broken rule."""
    check_unknown(body, _KNOWN)
    check_range(body, "temperature", 0, 2)
    check_range(body, "top_p", 0, 1)
    if context.spec.reasoning and body.get("temperature") is not None:
        text = "Unsupported parameter: 'temperature' is not supported with this model."
        raise refuse(text, param="temperature", code="unsupported_parameter")
    check_limit(body, "max_output_tokens", _MIN_OUTPUT, context.spec.max_output)
    earlier = body.get("previous_response_id")
    if earlier is not None:
        text = f"Previous response with id '{earlier}' not found."
        raise refuse(text, param="previous_response_id", code="previous_response_not_found")
    _check_tools(body.get("tools"))
    if not isinstance(body.get("instructions", ""), (str, type(None))):
        raise wrong_type("instructions", "a string", body["instructions"])
    given = body.get("input")
    if given is None:
        raise missing("input")
    if isinstance(given, list):
        _check_items(given, body, context)
    elif not isinstance(given, str):
        raise wrong_type("input", "one of a string or array of input items", given)
    elif blank(given):
        raise refuse("Invalid 'input': the text must not be blank.", param="input")
    if context.tokens > context.spec.context_window:
        text = "Your input exceeds the context window of this model. Please adjust your input and try again."
        raise refuse(text, param="input", code="context_length_exceeded")


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list):
        raise wrong_type("tools", "an array of objects", tools)
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") is None:
            raise missing(f"tools[{at}].type")
        if tool["type"] == "function":
            check_function(f"tools[{at}]", tool)


def _check_items(items: list[Any], body: dict[str, Any], context: Context) -> None:
    if not items:
        raise empty_array("input")
    for at, item in enumerate(items):
        _check_item(f"input[{at}]", item, body, context)
    _check_ids(items)
    _check_bonds(items)
    _check_pairs(items)


def _check_item(place: str, item: Any, body: dict[str, Any], context: Context) -> None:
    if not isinstance(item, dict):
        raise wrong_type(place, "an object", item)
    kind = item.get("type", "message")
    if kind == "function_call":
        _check_call(place, item)
    elif kind == "function_call_output":
        _check_call_id(place + ".call_id", item.get("call_id"))
        if not isinstance(item.get("output"), (str, list)):
            raise wrong_type(place + ".output", "one of a string or array of objects", item.get("output"))
        for at, part in enumerate(item["output"] if isinstance(item["output"], list) else ()):
            if isinstance(part, dict) and part.get("type") in _FILES:
                check_responses_file(f"{place}.output[{at}]", part)
    elif kind == "reasoning":
        _check_reasoning(place, item, body, context)
    elif kind == "message":
        _check_message(place, item)
    else:
        text = f"Invalid value: '{kind}'. Supported values are: 'message', 'function_call', 'function_call_output'."
        raise refuse(text, param=place, code="invalid_value")


def _check_call_id(place: str, name: Any) -> None:
    if not isinstance(name, str):
        raise missing(place)
    if not name:
        text = f"Invalid '{place}': empty string. Expected a string with minimum length 1, but got an empty string."
        raise refuse(text, param=place, code="empty_string")
    _check_length(place, name)


def _check_length(place: str, name: str) -> None:
    if len(name) > _MAX_ID:
        text = (
            f"Invalid '{place}': string too long. Expected a string with maximum length {_MAX_ID}, but got a string "
            f"with length {len(name)} instead."
        )
        raise refuse(text, param=place, code="string_above_max_length")


def _check_call(place: str, item: dict[str, Any]) -> None:
    _check_call_id(place + ".call_id", item.get("call_id"))
    check_name(place + ".name", item.get("name"))
    if not isinstance(item.get("arguments"), str):
        raise wrong_type(place + ".arguments", "a string", item.get("arguments"))


def _check_message(place: str, item: dict[str, Any]) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        text = f"Invalid value: '{role}'. Supported values are: 'assistant', 'system', 'developer', and 'user'."
        raise refuse(text, param=place + ".role", code="invalid_value")
    content = item.get("content")
    if isinstance(content, str):
        if blank(content):
            raise refuse(f"Invalid '{place}.content': the text must not be blank.", param=place + ".content")
        return
    if not isinstance(content, list):
        raise wrong_type(place + ".content", "one of a string or array of objects", content)
    if not content:
        raise empty_array(place + ".content")
    allowed = ("output_text", "refusal") if role == "assistant" else ("input_text", "input_image", "input_file")
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        here = f"{place}.content[{at}]"
        if kind not in allowed:
            names = " and ".join(f"'{name}'" for name in allowed)
            raise refuse(f"Invalid value: '{kind}'. Supported values are: {names}.", param=here, code="invalid_value")
        if kind in ("output_text", "input_text") and _blank_text(part.get("text")):
            raise refuse(f"Invalid '{here}.text': the text must not be blank.", param=here + ".text")
        if kind in _FILES:
            check_responses_file(here, part)


def _blank_text(text: Any) -> bool:
    return not isinstance(text, str) or blank(text)


def _check_reasoning(place: str, item: dict[str, Any], body: dict[str, Any], context: Context) -> None:
    name = item.get("id")
    if not isinstance(name, str):
        raise missing(place + ".id")
    if not isinstance(item.get("summary"), list):
        raise missing(place + ".summary")
    sealed = item.get("encrypted_content")
    if sealed is None:
        text = (
            f"Item with id '{name}' not found. Items are not persisted when `store` is set to false. "
            "Try again with `store` set to true, or remove this item from your input."
        )
        raise refuse(text, status=404, param="input")
    if not isinstance(sealed, str) or not context.signer.unseal(body["model"], sealed, name):
        text = f"The encrypted content for item {name} could not be verified."
        raise refuse(text, code="invalid_encrypted_content")


def _check_ids(items: list[Any]) -> None:
    seen: set[str] = set()
    for at, item in enumerate(items):
        name, kind = item.get("id"), item.get("type", "message")
        if name is None:
            continue
        prefix = _PREFIX.get(kind)
        if prefix and not str(name).startswith(prefix):
            text = f"Invalid 'input[{at}].id': '{name}'. Expected an ID that begins with '{prefix}'."
            raise refuse(text, param=f"input[{at}].id", code="invalid_value")
        _check_length(f"input[{at}].id", str(name))
        if name in seen:
            text = f"Duplicate item found with id {name}. Remove duplicate items from your input and try again."
            raise refuse(text, param="input")
        seen.add(name)


def _check_bonds(items: list[Any]) -> None:
    """Reasoning and the item that it led to travel together."""
    for at, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            after = items[at + 1] if at + 1 < len(items) else {}
            led = after.get("type") == "function_call" or after.get("role") == "assistant"
            if not led and after.get("type") != "reasoning":
                text = f"Item '{item['id']}' of type 'reasoning' was provided without its required following item."
                raise refuse(text, param="input")
        bound = _BOUND.match(str(item.get("id", "")))
        if bound:
            wanted = f"rs_{bound[1]}{bound[2]}"
            if not at or items[at - 1].get("id") != wanted:
                text = (
                    f"Item '{item['id']}' of type '{kind}' was provided without its required 'reasoning' item: "
                    f"'{wanted}'."
                )
                raise refuse(text, param="input")


def _check_pairs(items: list[Any]) -> None:
    open_calls: dict[str, None] = {}
    known: set[str] = set()
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            if item["call_id"] in known:
                raise refuse(f"Duplicate function call with call_id {item['call_id']}.", param="input")
            known.add(item["call_id"])
            open_calls[item["call_id"]] = None
        elif kind == "function_call_output":
            if item["call_id"] not in known:
                text = f"No tool call found for function call output with call_id {item['call_id']}."
                raise refuse(text, param="input")
            if item["call_id"] not in open_calls:
                raise refuse(f"Duplicate output for function call {item['call_id']}.", param="input")
            del open_calls[item["call_id"]]
    for name in open_calls:
        raise refuse(f"No tool output found for function call {name}.", param="input")
