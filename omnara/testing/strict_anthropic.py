"""What Anthropic Messages refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnara.testing.strict import TOOL_NAME, Context, Refused, cache_marks, is_count, is_number, refuse
from omnara.testing.strict_anthropic_blocks import check_message
from omnara.testing.wire import Problem

MAX_CACHE_MARKS = 4
MIN_THINKING_BUDGET = 1024

_KNOWN = frozenset({
    "model", "messages", "max_tokens", "system", "tools", "tool_choice", "temperature", "top_p", "top_k",
    "stop_sequences", "stream", "metadata", "thinking", "service_tier", "container", "context_management",
    "output_config", "cache_control", "inference_geo", "speed", "mcp_servers", "betas", "output_format",
})  # fmt: skip


def check_headers(headers: Mapping[str, str], keys: frozenset[str] | None) -> Refused | None:
    """Check credentials and version header; the key may come as `x-api-key` or as a bearer token."""
    key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
    if not key:
        return _unauthorized("x-api-key header is required")
    if keys is not None and key not in keys:
        return _unauthorized("invalid x-api-key")
    if not headers.get("anthropic-version"):
        return refuse("anthropic-version: header is required")
    return None


def check(body: Any, context: Context) -> None:
    """Check a decoded body whose model exists. Raises `Refused` at the first broken rule."""
    if not isinstance(body, dict):
        raise refuse("Input should be a valid dictionary")
    unknown = next((key for key in body if key not in _KNOWN), None)
    if unknown is not None:
        raise refuse(f"{unknown}: Extra inputs are not permitted")
    _check_numbers(body, context)
    _check_thinking(body)
    _check_tools(body.get("tools"))
    _check_system(body.get("system"))
    _check_messages(body, context)
    marks = sum(cache_marks(body.get(part)) for part in ("tools", "system", "messages"))
    if marks + bool(body.get("cache_control")) > MAX_CACHE_MARKS:
        raise refuse(f"A maximum of 4 blocks with cache_control may be provided. Found {marks}.")
    if context.tokens > context.spec.context_window:
        raise refuse(f"prompt is too long: {context.tokens} tokens > {context.spec.context_window} maximum")


def _unauthorized(message: str) -> Refused:
    return Refused(Problem(message=message, status=401, error_type="authentication_error"))


def _check_numbers(body: dict[str, Any], context: Context) -> None:
    limit = body.get("max_tokens")
    if limit is None:
        raise refuse("max_tokens: Field required")
    if not is_count(limit):
        raise refuse("max_tokens: Input should be a valid integer")
    if limit < 1:
        raise refuse("max_tokens: Input should be greater than or equal to 1")
    if limit > context.spec.max_output:
        most = context.spec.max_output
        raise refuse(
            f"max_tokens: {limit} > {most}, which is the maximum allowed number of output tokens for {body['model']}"
        )
    for name in ("temperature", "top_p"):
        value = body.get(name)
        if value is not None and (not is_number(value) or not 0 <= value <= 1):
            raise refuse(f"{name}: range: 0..1")
    if not isinstance(body.get("stream", False), bool):
        raise refuse("stream: Input should be a valid boolean")


def _check_thinking(body: dict[str, Any]) -> None:
    thinking = body.get("thinking") or {}
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if body.get("thinking") is not None and kind not in ("enabled", "disabled", "adaptive"):
        raise refuse("thinking.type: Input should be 'adaptive', 'disabled' or 'enabled'")
    if kind == "enabled":
        budget = thinking.get("budget_tokens")
        if budget is None or not is_count(budget):
            raise refuse("thinking.enabled.budget_tokens: Field required")
        if budget < MIN_THINKING_BUDGET:
            raise refuse("thinking.enabled.budget_tokens: Input should be greater than or equal to 1024")
        if budget >= body["max_tokens"]:
            raise refuse("`max_tokens` must be greater than `thinking.budget_tokens`.")
    if kind in ("enabled", "adaptive"):
        if body.get("temperature") not in (None, 1):
            raise refuse("`temperature` may only be set to 1 when thinking is enabled.")
        if (body.get("tool_choice") or {}).get("type") in ("any", "tool"):
            raise refuse("Thinking may not be enabled when tool_choice forces tool use.")


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list):
        raise refuse("tools: Input should be a valid list")
    names: set[str] = set()
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise refuse(f"tools.{at}: Input should be a valid dictionary")
        name = tool.get("name")
        if name is None:
            raise refuse(f"tools.{at}.custom.name: Field required")
        if not isinstance(name, str) or not TOOL_NAME.match(name):
            raise refuse(f"tools.{at}.custom.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'")
        if name in names:
            raise refuse("tools: Tool names must be unique.")
        names.add(name)
        if tool.get("type", "custom") == "custom":
            _check_schema(tool, f"tools.{at}.custom.input_schema")


def _check_schema(tool: dict[str, Any], place: str) -> None:
    schema = tool.get("input_schema")
    if schema is None:
        raise refuse(f"{place}: Field required")
    if not isinstance(schema, dict):
        raise refuse(f"{place}: Input should be a valid dictionary")
    if "type" not in schema:
        raise refuse(f"{place}.type: Field required")
    if schema["type"] != "object":
        raise refuse(f"{place}.type: Input should be 'object'")


def _check_system(system: Any) -> None:
    if system is None or isinstance(system, str):
        return
    if not isinstance(system, list) or not all(isinstance(block, dict) for block in system):
        raise refuse("system: Input should be a valid list")
    for at, block in enumerate(system):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise refuse(f"system.{at}.text: Field required")
        if not block["text"]:
            raise refuse("system: text content blocks must be non-empty")
        if not block["text"].strip():
            raise refuse("system: text content blocks must contain non-whitespace text")


def _check_messages(body: dict[str, Any], context: Context) -> None:
    messages = body.get("messages")
    if messages is None:
        raise refuse("messages: Field required")
    if not isinstance(messages, list):
        raise refuse("messages: Input should be a valid list")
    if not messages:
        raise refuse("messages: at least one message is required")
    used: set[str] = set()
    for at, message in enumerate(messages):
        check_message(at, messages, body["model"], context, used)
        if at == 0 and message["role"] != "user":
            raise refuse('messages: first message must use the "user" role')
    _check_prefill(messages[-1])
    if (body.get("thinking") or {}).get("type") == "enabled":
        _check_thinking_leads(messages)


def _check_prefill(last: dict[str, Any]) -> None:
    if last["role"] != "assistant":
        return
    content = last["content"]
    text = content if isinstance(content, str) else content[-1].get("text", "") if content else ""
    if text != text.rstrip():
        raise refuse("messages: final assistant content cannot end with trailing whitespace")


def _check_thinking_leads(messages: list[dict[str, Any]]) -> None:
    """With manual thinking, the answer that is being continued after tool results must start with its thinking."""
    last = messages[-1]
    if last["role"] != "user" or isinstance(last["content"], str):
        return
    if not any(block["type"] == "tool_result" for block in last["content"]):
        return
    found = messages[-2]["content"][0]["type"]
    if found not in ("thinking", "redacted_thinking"):
        raise refuse(
            f"messages.{len(messages) - 2}.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
            f"`{found}`. When `thinking` is enabled, a final `assistant` message must start with a thinking block "
            "(preceeding the lastmost set of `tool_use` and `tool_result` blocks)."
        )
