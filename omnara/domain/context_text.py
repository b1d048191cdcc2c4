"""The fixed words that a conversation is built with: notices, outcome markers, placeholders.

They are apart from the fold because changing one changes the bytes of every running agent's next request, and with them
what the provider has cached: treat them as data.
Source: engine.md §6 (outcome marker, errors and config changes as messages, checkpoint element).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, assert_never
from xml.sax.saxutils import escape

import msgspec

from omnara.domain.content import (
    EMPTY_RESULT_TEXT,
    INTERRUPTED_TEXT,
    OVERFLOW_KEY,
    InputBlock,
    MediaPart,
    MediaRefBlock,
    Part,
    ResultBlock,
    StructuredDataBlock,
    TextBlock,
)
from omnara.domain.events import Outcome
from omnara.domain.text import is_blank

CANCEL_NOTICE: Final = "[Notice: the user stopped the work here.]"
CONFIG_NOTICE: Final = (
    "[Notice: this agent's configuration changed here. Instructions and tools may differ from before.]"
)
LOST_NOTICE: Final = "[Notice: a part of this conversation is not available. Go on from what is known.]"
CUT_NOTICE: Final = (
    "[Notice: the answer above was cut off by its length limit. If it is still wanted, go on exactly where it stopped, "
    "without repeating anything. A tool call that was not complete did not run.]"
)

_MARKERS: Final[dict[Outcome, str]] = {
    "failed": "[The tool call failed.]",
    "denied": "[The tool call was denied; the tool did not run.]",
    "canceled": "[The tool call was canceled.]",
}


def error_notice(text: str) -> str:
    """Tell that a model call ended for good. `text` is the recorded reason, possibly blank."""
    reason = text.strip() or "no reason was recorded"
    return f"[Notice: the previous model call failed and its turn ended: {reason}]"


def input_parts(blocks: Sequence[InputBlock]) -> list[Part]:
    """What a message says, in order, without blank texts."""
    parts: list[Part] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            if not is_blank(block.text):
                parts.append(block.text)
        elif isinstance(block, MediaRefBlock):
            parts.append(MediaPart(block.artifact_id))
        else:
            assert_never(block)
    return parts


def result_media(blocks: Sequence[ResultBlock]) -> tuple[MediaPart, ...]:
    """The files of a result, which follow its text."""
    return tuple(
        MediaPart(block.artifact_id, previewed=OVERFLOW_KEY in (block.metadata or {}))
        for block in blocks
        if isinstance(block, MediaRefBlock)
    )


def media_text(artifact_id: str) -> str:
    """Stand for a stored file that is not shown."""
    return f"[Attachment {artifact_id}: its content is not shown.]"


def result_text(outcome: Outcome, blocks: Sequence[ResultBlock], shown_chars: int | None = None) -> str:
    """Everything a model is told about the end of a call, never blank: outcome marker, then the content.

    `shown_chars` bounds each text; the log keeps all of it. The same blocks always give the same text.
    """
    parts = [_MARKERS[outcome]] if outcome in _MARKERS else []
    for block in blocks:
        if isinstance(block, TextBlock):
            if not is_blank(block.text):
                parts.append(_shown(block.text, shown_chars))
        elif isinstance(block, StructuredDataBlock):
            parts.append(msgspec.json.encode(block.value).decode())
        elif isinstance(block, MediaRefBlock):
            if OVERFLOW_KEY not in (block.metadata or {}):  # the preview beside it says where it is
                parts.append(f"[Attachment {block.artifact_id}]")
        else:
            assert_never(block)
    return "\n".join(parts) or EMPTY_RESULT_TEXT


def _shown(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}\n\n[The first {limit} of {len(text)} characters are shown.]"


def interrupted_text() -> str:
    """What stands for an answer that the log does not have. Source: DESIGN §2, invariant 4."""
    return result_text("failed", [TextBlock(INTERRUPTED_TEXT)])


def checkpoint_text(summary: str) -> str:
    """The summary that replaces everything before it, escaped so that it cannot close its own element."""
    return f"<context_checkpoint>\n{escape(summary)}\n</context_checkpoint>"
