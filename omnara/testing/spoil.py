"""Answers made awkward on purpose: content that is legal for a provider to send and that breaks clients.

Source: field-reports B04, B13, B43.
"""

from __future__ import annotations

from msgspec.structs import replace

from omnara.testing.answer import Answer, Block, Call, Text
from omnara.testing.faults import Content


def spoil(answer: Answer, content: Content) -> Answer:
    """Return `answer` with its content spoiled in the way of `content`."""
    match content.kind:
        case "empty":
            return replace(answer, blocks=(), stop="end_turn")
        case "empty_text":
            return replace(answer, blocks=(Text(""), *answer.calls))
        case "blank_text":
            return replace(answer, blocks=(Text(" \n "), *answer.calls))
        case "half_arguments":
            return replace(answer, blocks=_half(answer.blocks), stop=content.stop)
        case "split_surrogates":
            return replace(answer, blocks=(Text(chunks=("smile ", "\ud83d", "\ude00", " done")), *answer.calls))
        case "lone_surrogate":
            return replace(answer, blocks=(Text(chunks=("broken ", "\ud83d", " done")), *answer.calls))
        case "nul":
            return replace(answer, blocks=(Text(chunks=("a", "\0", "b and \\u0000")), *answer.calls))


def _half(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Cut the last call's arguments; what would follow it was never generated."""
    last = max((at for at, block in enumerate(blocks) if isinstance(block, Call)), default=None)
    if last is None:
        return blocks
    cut = blocks[last]
    assert isinstance(cut, Call)
    text = cut.encoded()
    # An empty object's half is "{", which is as broken as any other half.
    return (*blocks[:last], Call(cut.name, raw=text[: max(1, len(text) // 2)], id=cut.id))
