"""The rules of Anthropic Messages about one message: its blocks, and how calls and results must pair.

Source: field-reports B01, B02, B04 name the refusals that clients met.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from omnara.testing.strict import Context, blank, refuse
from omnara.testing.strict_media import check_anthropic_file

_CALL_ID = re.compile(r"[a-zA-Z0-9_-]+\Z")
_CALL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,200}\Z")
_THOUGHTS = ("thinking", "redacted_thinking")
_FILES = ("image", "document")
_USER_BLOCKS = frozenset({"text", "image", "document", "tool_result", "search_result", "container_upload"})


def check_message(at: int, messages: Sequence[Any], model: str, context: Context, used: set[str]) -> None:
    """Check message `at` and its pairing with the one before and after it; add its call ids to `used`.

    Raises `Refused`.
    """
    message = messages[at]
    if not isinstance(message, dict):
        raise refuse(f"messages.{at}: Input should be a valid dictionary")
    if message.get("role") not in ("user", "assistant"):
        raise refuse(f"messages.{at}.role: Input should be 'user' or 'assistant'")
    extra = next((key for key in message if key not in ("role", "content")), None)
    if extra is not None:
        raise refuse(f"messages.{at}.{extra}: Extra inputs are not permitted")
    blocks = _blocks(at, message, last=at == len(messages) - 1)
    for number, block in enumerate(blocks):
        _check_block(f"messages.{at}.content.{number}", block, message["role"], model, context)
    if message["role"] == "assistant":
        _check_calls(at, blocks, messages, used)
    else:
        _check_results(at, blocks, messages)


def _blocks(at: int, message: dict[str, Any], *, last: bool) -> list[Any]:
    if "content" not in message:
        raise refuse(f"messages.{at}.content: Field required")
    content = message["content"]
    if not isinstance(content, (str, list)):
        raise refuse(f"messages.{at}.content: Input should be a valid list")
    if not content:
        if last and message["role"] == "assistant":
            return []
        raise refuse(
            f"messages.{at}: all messages must have non-empty content except for the optional final assistant message"
        )
    if isinstance(content, str):
        _check_text(content)
        return []
    return content


def _check_text(text: Any) -> None:
    if not text:
        raise refuse("messages: text content blocks must be non-empty")
    if blank(text):
        raise refuse("messages: text content blocks must contain non-whitespace text")


def _check_block(place: str, block: Any, role: str, model: str, context: Context) -> None:
    if not isinstance(block, dict):
        raise refuse(f"{place}: Input should be a valid dictionary")
    kind = block.get("type")
    if not isinstance(kind, str):
        raise refuse(f"{place}.type: Field required")
    allowed = kind in _USER_BLOCKS if role == "user" else kind in ("text", "tool_use", *_THOUGHTS)
    if not allowed:
        raise refuse(f"{place}: `{kind}` blocks are not permitted in `{role}` messages")
    if kind == "text":
        if not isinstance(block.get("text"), str):
            raise refuse(f"{place}.text.text: Field required")
        _check_text(block["text"])
    elif kind in _FILES:
        check_anthropic_file(place, block)
    elif kind == "tool_use":
        _check_call(place + ".tool_use", block)
    elif kind == "tool_result":
        _check_result(place + ".tool_result", block)
    elif kind in _THOUGHTS:
        _check_thought(place, block, model, context)


def _check_call(place: str, block: dict[str, Any]) -> None:
    for name, pattern in (("id", _CALL_ID), ("name", _CALL_NAME)):
        value = block.get(name)
        if value is None:
            raise refuse(f"{place}.{name}: Field required")
        if not isinstance(value, str) or not pattern.match(value):
            raise refuse(f"{place}.{name}: String should match pattern '^{pattern.pattern[:-2]}$'")
    if "input" not in block:
        raise refuse(f"{place}.input: Field required")
    if not isinstance(block["input"], dict):
        raise refuse(f"{place}.input: Input should be a valid dictionary")


def _check_result(place: str, block: dict[str, Any]) -> None:
    if not isinstance(block.get("tool_use_id"), str):
        raise refuse(f"{place}.tool_use_id: Field required")
    content = block.get("content")
    if content is not None and not isinstance(content, (str, list)):
        raise refuse(f"{place}.content: Input should be a valid list")
    if block.get("is_error") and not content:
        raise refuse(f"{place}: content cannot be empty if `is_error` is true")
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") not in ("text", "image", "document", "search_result"):
                raise refuse(f"{place}.content.{number}.type: Input should be a valid content block type")
            if part["type"] == "text":
                _check_text(part.get("text"))
            elif block.get("is_error"):
                raise refuse(f"{place}.content: all content must be type `text` if `is_error` is true")
            elif part["type"] in _FILES:
                check_anthropic_file(f"{place}.content.{number}", part)


def _check_thought(place: str, block: dict[str, Any], model: str, context: Context) -> None:
    kind = block["type"]
    fields = ("thinking", "signature") if kind == "thinking" else ("data",)
    for name in fields:
        if not isinstance(block.get(name), str):
            raise refuse(f"{place}.{kind}.{name}: Field required")
    if kind == "thinking":
        good = context.signer.verify(model, block["thinking"], block["signature"])
    else:
        good = context.signer.unseal(model, block["data"])
    if not good:
        raise refuse(f"{place}: Invalid `{'signature' if kind == 'thinking' else 'data'}` in `{kind}` block")


def _check_calls(at: int, blocks: list[Any], messages: Sequence[Any], used: set[str]) -> None:
    if blocks and blocks[-1]["type"] in _THOUGHTS:
        raise refuse(f"messages.{at}: The final block in an assistant message cannot be `thinking`.")
    asked = [block["id"] for block in blocks if block["type"] == "tool_use"]
    for name in asked:
        if name in used:
            raise refuse(f"messages.{at}.content: `tool_use` ids must be unique")
        used.add(name)
    if not asked:
        return
    following = messages[at + 1] if at + 1 < len(messages) else None
    answered = [block.get("tool_use_id") for block in _leading_results(following)]
    missing = [name for name in asked if name not in answered]
    if missing:
        raise refuse(
            f"messages.{at}: `tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block in the "
            "next message."
        )


def _check_results(at: int, blocks: list[Any], messages: Sequence[Any]) -> None:
    asked = {block.get("id") for block in _of(messages[at - 1], "tool_use")} if at else set()
    seen: set[str] = set()
    for number, block in enumerate(blocks):
        if block["type"] != "tool_result":
            continue
        name = block["tool_use_id"]
        if name not in asked:
            raise refuse(
                f"messages.{at}.content.{number}: unexpected `tool_use_id` found in `tool_result` blocks: {name}. "
                "Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
            )
        if name in seen:
            raise refuse(
                f"messages.{at}.content.{number}: each tool_use must have a single result. "
                f"Found multiple `tool_result` blocks with id: {name}"
            )
        seen.add(name)


def _of(message: Any, kind: str) -> list[Any]:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return []
    return [block for block in message["content"] if isinstance(block, dict) and block.get("type") == kind]


def _leading_results(message: Any) -> list[Any]:
    """The results that come before anything else: a result after text does not count as an answer."""
    if not isinstance(message, dict) or message.get("role") != "user" or not isinstance(message.get("content"), list):
        return []
    leading = []
    for block in message["content"]:
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            break
        leading.append(block)
    return leading
