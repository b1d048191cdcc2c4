"""What OpenAI Chat Completions refuses, and the servers that speak the same format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omnara.testing.strict import Context, Refused, blank, refuse
from omnara.testing.strict_media import check_chat_file
from omnara.testing.strict_openai import (
    check_function,
    check_headers,
    check_limit,
    check_name,
    check_range,
    check_unknown,
    empty_array,
    kind_of,
    missing,
    wrong_type,
)

__all__ = ["check", "check_headers"]

_KNOWN = frozenset({
    "model", "messages", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "temperature",
    "top_p", "max_tokens", "max_completion_tokens", "stop", "n", "seed", "user", "metadata", "store", "logprobs",
    "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "response_format", "reasoning_effort",
    "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier",
    "verbosity", "modalities", "audio", "prediction", "web_search_options", "functions", "function_call",
})  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")


def check(body: Any, context: Context) -> None:
    """Check a decoded body whose model exists. Raises `Refused` at the first broken rule."""
    check_unknown(body, _KNOWN)
    check_range(body, "temperature", 0, 2)
    check_range(body, "top_p", 0, 1)
    for name in ("max_tokens", "max_completion_tokens"):
        check_limit(body, name, 1, context.spec.max_output)
    _check_reasoning_model(body, context)
    if body.get("stream_options") is not None and not body.get("stream"):
        text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise refuse(text, param="stream_options")
    _check_tools(body.get("tools"))
    _check_messages(body.get("messages"), context)
    window = context.spec.context_window
    if context.tokens > window:
        raise refuse(
            f"This model's maximum context length is {window} tokens. However, your messages resulted in "
            f"{context.tokens} tokens. Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )


def _check_reasoning_model(body: Mapping[str, Any], context: Context) -> None:
    if not context.spec.reasoning:
        return
    if body.get("max_tokens") is not None:
        text = (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        )
        raise refuse(text, param="max_tokens", code="unsupported_parameter")
    if body.get("temperature") not in (None, 1):
        text = (
            f"Unsupported value: 'temperature' does not support {body['temperature']} with this model. "
            "Only the default (1) value is supported."
        )
        raise refuse(text, param="temperature", code="unsupported_value")


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list):
        raise wrong_type("tools", "an array of objects", tools)
    if not tools:
        raise empty_array("tools")
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise wrong_type(f"tools[{at}]", "an object", tool)
        if tool.get("type") is None:
            raise missing(f"tools[{at}].type")
        if tool["type"] == "function":
            if "function" not in tool:
                raise missing(f"tools[{at}].function")
            check_function(f"tools[{at}].function", tool["function"])


def _check_messages(messages: Any, context: Context) -> None:
    if messages is None:
        raise missing("messages")
    if not isinstance(messages, list):
        raise wrong_type("messages", "an array of objects", messages)
    if not messages:
        raise empty_array("messages")
    open_calls: dict[str, None] = {}
    asked_at = 0
    for at, message in enumerate(messages):
        _check_shape(at, message, context)
        if message["role"] == "tool":
            _take_result(at, message, open_calls, messages)
            continue
        if open_calls:
            break
        if message["role"] == "assistant":
            asked_at = at
            open_calls = {call["id"]: None for call in message.get("tool_calls") or ()}
    if open_calls:
        raise refuse(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            f"'tool_call_id'. The following tool_call_ids did not have response messages: {', '.join(open_calls)}",
            param=f"messages.[{asked_at + 1}].role",
        )


def _take_result(at: int, message: dict[str, Any], open_calls: dict[str, None], messages: Sequence[Any]) -> None:
    name = message.get("tool_call_id")
    if not isinstance(name, str):
        raise missing(f"messages[{at}].tool_call_id")
    if name in open_calls:
        del open_calls[name]
        return
    before = messages[at - 1] if at else {}
    if before.get("role") == "tool" or before.get("tool_calls"):
        text = f"Invalid parameter: 'tool_call_id' of '{name}' not found in 'tool_calls' of previous message."
        raise refuse(text, param=f"messages.[{at}].tool_call_id")
    text = "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
    raise refuse(text, param=f"messages.[{at}].role")


def _check_shape(at: int, message: Any, context: Context) -> None:
    place = f"messages[{at}]"
    if not isinstance(message, dict):
        raise wrong_type(place, "an object", message)
    role = message.get("role")
    if role not in _ROLES:
        raise refuse(
            f"Invalid value: '{role}'. Supported values are: 'system', 'assistant', 'user', 'tool', and 'developer'.",
            param=f"{place}.role",
            code="invalid_value",
        )
    calls = message.get("tool_calls")
    if role == "assistant" and calls is not None:
        _check_calls(place + ".tool_calls", calls, context)
    _check_content(place + ".content", message, context)


def _check_content(place: str, message: dict[str, Any], context: Context) -> None:
    content = message.get("content")
    if content is None:
        spoken = message["role"] == "assistant" and (message.get("tool_calls") or message.get("refusal"))
        if spoken:
            return
        raise refuse(f"Invalid value for 'content': expected a string, got {kind_of(content)}.", param=place)
    if not isinstance(content, (str, list)):
        raise wrong_type(place, "one of a string or array of objects", content)
    if content == []:
        raise empty_array(place)
    if isinstance(content, list):
        for at, part in enumerate(content):
            _check_part(f"{place}[{at}]", part, message["role"], context)
    elif context.strictness.portable and _says_nothing(content, message):
        raise refuse(f"Invalid '{place}': the content must contain non-whitespace text.", param=place)


def _says_nothing(content: str, message: dict[str, Any]) -> bool:
    if message["role"] == "tool" or not blank(content):
        return False
    # A call without words may carry an empty string, and many clients send that.
    return bool(content) or not message.get("tool_calls")


def _check_part(place: str, part: Any, role: str, context: Context) -> None:
    if not isinstance(part, dict):
        raise wrong_type(place, "an object", part)
    if part.get("type") is None:
        raise missing(place + ".type")
    if part["type"] == "text":
        if not isinstance(part.get("text"), str):
            raise wrong_type(place + ".text", "a string", part.get("text"))
        if context.strictness.portable and blank(part["text"]):
            raise refuse(f"Invalid '{place}.text': the text must not be blank.", param=place + ".text")
    elif role == "user":
        check_chat_file(place, part)


def _check_calls(place: str, calls: Any, context: Context) -> None:
    if not isinstance(calls, list):
        raise wrong_type(place, "an array of objects", calls)
    if not calls:
        raise empty_array(place)
    seen: set[str] = set()
    for at, call in enumerate(calls):
        here = f"{place}[{at}]"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise missing(here + ".function")
        if not isinstance(call.get("id"), str) or not call["id"]:
            raise missing(here + ".id")
        if call["id"] in seen:
            raise _duplicate(here, call["id"])
        seen.add(call["id"])
        check_name(here + ".function.name", call["function"].get("name"))
        _check_arguments(here + ".function.arguments", call["function"].get("arguments"), context)


def _duplicate(place: str, name: str) -> Refused:
    return refuse(f"Duplicate value for 'tool_call_id' of '{name}'.", param=place + ".id")


def _check_arguments(place: str, arguments: Any, context: Context) -> None:
    if not isinstance(arguments, str):
        raise wrong_type(place, "a string", arguments)
    if context.strictness.portable:
        try:
            msgspec.json.decode(arguments)
        except msgspec.DecodeError as error:
            raise refuse(f"Invalid '{place}': the arguments are not valid JSON: {error}", param=place) from error
