"""What Anthropic must get back unchanged: signed reasoning, in order, with the blocks around it.

Source: field-reports B02.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from omnara.domain.text import clean_text, is_blank
from omnara.providers.names import sent_name
from omnara.providers.output import OutputBuilder


class WireBlock(msgspec.Struct):
    """A block of the stream, as far as repeating it needs more than its text. `index` is the output's, -1 if none."""

    type: str
    index: int = -1
    signed: list[str] = msgspec.field(default_factory=list)
    data: str = ""
    given: Any = None

    @property
    def signature(self) -> str:
        """The whole signature; it comes in pieces."""
        return "".join(self.signed)


def signed_content(blocks: Sequence[WireBlock], output: OutputBuilder) -> tuple[bytes, ...]:
    """JSON of the blocks as a message may repeat them, or nothing when no reasoning among them can be verified.

    One unsigned thought spoils all: the provider checks that none is missing.
    """
    thoughts = [block for block in blocks if block.type in ("thinking", "redacted_thinking")]
    if not thoughts or not all(block.signature or block.data for block in thoughts):
        return ()
    ids = iter(output.provider_ids)
    try:
        values = [value for block in blocks if (value := _value(block, output, ids)) is not None]
        while values and values[-1]["type"] in ("thinking", "redacted_thinking"):
            values.pop()  # a message may not end with reasoning, nor does it once its blank last text is left out
        return tuple(msgspec.json.encode(value) for value in values)
    except UnicodeEncodeError:
        return ()  # half a character was signed: it cannot go back as it came


def _value(block: WireBlock, output: OutputBuilder, ids: Iterator[str]) -> dict[str, Any] | None:
    if block.type == "thinking":
        return {"type": "thinking", "thinking": output.raw(block.index), "signature": block.signature}
    if block.type == "redacted_thinking":
        return {"type": "redacted_thinking", "data": block.data}
    if block.type == "text":
        text = clean_text(output.raw(block.index))
        return None if is_blank(text) else {"type": "text", "text": text}
    if block.type == "tool_use":
        arguments, _ = output.arguments(block.index)
        name = sent_name(output.call_name(block.index))
        return {"type": "tool_use", "id": next(ids), "name": name, "input": arguments}
    return None
