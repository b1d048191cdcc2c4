"""The output items of OpenAI Responses, whole and as the events that build them up.

Apart from the rest of that format because an item passes through five to eight events, each of which
repeats its ids and indexes.
"""

from __future__ import annotations

from typing import Any

from omnara.testing.answer import Answer, Block, Call, Text, Thinking, pieces
from omnara.testing.frames import Frame, Kind, named
from omnara.testing.wire import Reply


def output_items(answer: Answer, reply: Reply) -> list[dict[str, Any]]:
    """Return the finished items of an answer, one per block."""
    return [_item(block, answer, reply, at) for at, block in enumerate(answer.blocks)]


def item_id(answer: Answer, reply: Reply, at: int) -> str:
    """Return the id of item `at`.

    An item that follows reasoning names it in its own id (`…r00`), so that a replay without the reasoning
    can be refused without remembering anything.
    """
    block = answer.blocks[at]
    prefix = "rs" if isinstance(block, Thinking) else "fc" if isinstance(block, Call) else "msg"
    bound = at > 0 and isinstance(answer.blocks[at - 1], Thinking) and prefix != "rs"
    return f"{prefix}_{reply.token}{at:02d}" + (f"r{at - 1:02d}" if bound else "")


def _item(block: Block, answer: Answer, reply: Reply, at: int) -> dict[str, Any]:
    name = item_id(answer, reply, at)
    status = _status(answer, at)
    if isinstance(block, Text):
        return {
            "id": name,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_part(answer, block.full())],
        }
    if isinstance(block, Call):
        return {
            "id": name,
            "type": "function_call",
            "status": status,
            "name": block.name,
            "call_id": block.id or f"call_{reply.token}{at:02d}",
            "arguments": block.encoded(),
        }
    summary = [{"type": "summary_text", "text": block.text}] if block.text else []
    item: dict[str, Any] = {"id": name, "type": "reasoning", "summary": summary}
    if reply.encrypted_reasoning:
        item["encrypted_content"] = reply.signer.seal(reply.model, name)
    return item


def _status(answer: Answer, at: int) -> str:
    cut = answer.stop_reason in ("max_tokens", "content_filter", "model_context_window_exceeded")
    return "incomplete" if cut and at == len(answer.blocks) - 1 else "completed"


def _part(answer: Answer, text: str) -> dict[str, Any]:
    if answer.stop_reason == "refusal":
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


class Stream:
    """Builds the frames of one answer, counting `sequence_number`."""

    def __init__(self, answer: Answer, reply: Reply) -> None:
        self.frames: list[Frame] = []
        self._answer = answer
        self._reply = reply

    def add(self, kind: Kind, event: dict[str, Any]) -> None:
        """Append an event; its sequence number is its position."""
        event["sequence_number"] = len(self.frames)
        self.frames.append(Frame(named(event["type"], event), kind))

    def items(self) -> list[dict[str, Any]]:
        """Append the events of every item and return the finished items."""
        finished = output_items(self._answer, self._reply)
        for at, (block, item) in enumerate(zip(self._answer.blocks, finished, strict=True)):
            if isinstance(block, Text):
                self._message(at, block, item)
            elif isinstance(block, Call):
                self._call(at, item)
            else:
                self._reasoning(at, block, item)
        return finished

    def _added(self, at: int, item: dict[str, Any]) -> None:
        self.add("open", {"type": "response.output_item.added", "output_index": at, "item": item})

    def _done(self, at: int, item: dict[str, Any]) -> None:
        self.add("close", {"type": "response.output_item.done", "output_index": at, "item": item})

    def _message(self, at: int, block: Text, item: dict[str, Any]) -> None:
        place = {"item_id": item["id"], "output_index": at, "content_index": 0}
        refusal = self._answer.stop_reason == "refusal"
        name, field = ("response.refusal", "refusal") if refusal else ("response.output_text", "text")
        extra: dict[str, Any] = {} if refusal else {"logprobs": []}
        tokens = self._answer.timing.tokens if self._answer.timing else None
        self._added(at, {**item, "status": "in_progress", "content": []})
        empty = {"type": "response.content_part.added", **place, "part": _part(self._answer, "")}
        self.add("open", empty)
        for piece in list(block.chunks) or pieces(block.text, tokens):
            self.add("text", {"type": name + ".delta", **place, "delta": piece, **extra})
        self.add("close", {"type": name + ".done", **place, field: block.full(), **extra})
        self.add("close", {"type": "response.content_part.done", **place, "part": item["content"][0]})
        self._done(at, item)

    def _call(self, at: int, item: dict[str, Any]) -> None:
        place = {"item_id": item["id"], "output_index": at}
        self._added(at, {**item, "status": "in_progress", "arguments": ""})
        for piece in pieces(item["arguments"], None):
            self.add("arguments", {"type": "response.function_call_arguments.delta", **place, "delta": piece})
        whole = {"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]}
        self.add("close", {**whole, "name": item["name"]})
        self._done(at, item)

    def _reasoning(self, at: int, block: Thinking, item: dict[str, Any]) -> None:
        place = {"item_id": item["id"], "output_index": at, "summary_index": 0}
        opened = {key: value for key, value in item.items() if key != "encrypted_content"}
        self._added(at, {**opened, "summary": []})
        if block.text:
            name = "response.reasoning_summary"
            part = {"type": "summary_text", "text": ""}
            self.add("open", {"type": name + "_part.added", **place, "part": part})
            for piece in pieces(block.text, None):
                self.add("thinking", {"type": name + "_text.delta", **place, "delta": piece})
            self.add("close", {"type": name + "_text.done", **place, "text": block.text})
            self.add("close", {"type": name + "_part.done", **place, "part": {**part, "text": block.text}})
        # The sealed content comes with the finished item, as a signature does in the other format.
        self.add("signature", {"type": "response.output_item.done", "output_index": at, "item": item})
