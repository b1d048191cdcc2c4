"""OpenAI Responses events in short, for streams that no well-behaved model server would send."""

from __future__ import annotations

from typing import Any

from omnara.providers import ApiKey, ModelTarget

RESPONSES = "openai_responses"


def target(url: str, **more: Any) -> ModelTarget:
    fields: dict[str, Any] = {"slug": "m", "supports_reasoning": True, **more}
    return ModelTarget(
        revision_id="r", provider="p", api_format=RESPONSES, base_url=url, api_key=ApiKey("key-of-x"), **fields
    )


def begin(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.added", "output_index": index, "item": {"type": kind, **fields}}


def end(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": index, "item": {"type": kind, **fields}}


def delta(kind: str, index: int, text: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}.delta", "output_index": index, "delta": text, **fields}


def message(index: int, *texts: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return end(index, "message", role="assistant", content=parts, **fields)


def call(index: int, call_id: Any, name: Any = "look", arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return end(index, "function_call", call_id=call_id, name=name, arguments=arguments, **fields)


def thought(index: int, name: str = "rs_1", **fields: Any) -> dict[str, Any]:
    return end(index, "reasoning", id=name, **{"summary": [], "encrypted_content": "sealed", **fields})


def finished(status: str = "completed", **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{status}", "response": {"status": status, **fields}}
