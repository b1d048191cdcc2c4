"""When a conversation is too large for its model, and what to take away: arithmetic over estimates, no I/O.

What is taken away is summarised by a model call; what stays is a recent part, word for word, and everything that has no
answer yet. A plan promises that the outcome fits, so a compaction that cannot help is refused before it costs anything.
Source: engine.md §6 (budget, plan); field-reports B05.
"""

from __future__ import annotations

from typing import Final

import msgspec

from omnara.domain.context import ContextState
from omnara.domain.context_size import Cut, tokens

MAX_COMPACTIONS: Final = 2
"""Checkpoints in a row without an accepted output or a new message between them. Source: field-reports B05."""

MAX_REDUCTIONS: Final = 2
"""How often the source of a summary that came to nothing is halved before the turn ends."""

TAIL_TOKENS: Final = 20_000
SUMMARY_TOKENS: Final = 16_384
"""Largest recent part that stays, and the summary's preferred limit. Source: engine.md §6."""

MIN_SUMMARY_TOKENS: Final = 256
"""A summary needs at least so much room; with less the model is too small for its instructions."""

WORTH: Final = 0.9
"""A summary must be at most this part of what it stands for. Source: engine.md §6."""

_PROMPT_TOKENS: Final = 700
"""Room for the instructions of a summary call."""


class ModelRoom(msgspec.Struct, frozen=True):
    """What a model offers, and how much of it instructions and tools take with every call. In tokens."""

    window: int
    max_output: int
    fixed: int

    @property
    def budget(self) -> int:
        """What a request may hold: the window without the answer and a margin for the error of the estimate.

        An answer never reserves more than half of the window: a model may allow answers as large as its window.
        """
        return self.window - min(self.max_output, self.window // 2) - margin(self.window)

    def needs(self, context: ContextState) -> int:
        """The estimate for a request with this conversation."""
        return self.fixed + tokens(context.told_bytes)

    def fits(self, context: ContextState) -> bool:
        """Whether a request with this conversation is worth sending."""
        return self.needs(context) <= self.budget


class CompactionPlan(msgspec.Struct, frozen=True):
    """Summarise what `cut` takes away. All sizes in tokens.

    `source`: what goes. `most`: the largest summary that helps. `prompt`: what the summary call may hold, `answer` the
    output limit to ask for.
    """

    cut: Cut
    source: int
    most: int
    prompt: int
    answer: int


def margin(window: int) -> int:
    """Tokens that an estimate may be wrong by. Source: engine.md §6."""
    return min(max(window // 20, 1024 if window >= 4096 else 0), 8192)


def plan_compaction(context: ContextState, room: ModelRoom, reductions: int = 0) -> CompactionPlan | None:
    """Choose what a compaction takes away, or None when none can make the conversation fit.

    The estimate of the conversation as it is counts as too much, whatever the budget says: the provider may have
    refused it. After `reductions` summaries that came to nothing, a smaller source. Source: engine.md §6.
    """
    if context.compactions >= MAX_COMPACTIONS:
        return None
    limit = min(room.budget, room.needs(context))
    total = context.told_bytes
    usable = limit - room.fixed - MIN_SUMMARY_TOKENS
    cuts = [cut for cut in context.cuts() if tokens(total - cut.before) <= usable]
    if not cuts:
        return None
    cut = _preferred(cuts, total, 0 if context.compactions else min(usable // 4, TAIL_TOKENS))
    if reductions:
        cut = _about(context.cuts(), cut, cut.before >> reductions)
    source = tokens(cut.before)
    most = int(source * WORTH)
    if not reductions:  # what follows a smaller source may need another compaction
        most = min(most, usable - tokens(total - cut.before) + MIN_SUMMARY_TOKENS)
    answer = max(min(SUMMARY_TOKENS, room.max_output, room.window // 4), MIN_SUMMARY_TOKENS)
    prompt = min(room.window - answer - margin(room.window) - _PROMPT_TOKENS, limit)
    return CompactionPlan(cut, source, most, max(prompt >> reductions, 0), answer)


def _preferred(cuts: list[Cut], total: int, tail: int) -> Cut:
    """The earliest cut that leaves at most `tail` tokens; a little later if that is where a turn ends."""
    enough = [cut for cut in cuts if tokens(total - cut.before) <= tail]
    if not enough:
        return cuts[-1]
    whole = [cut for cut in enough if cut.between_turns and tokens(total - cut.before) >= tail // 2]
    return whole[0] if whole else enough[0]


def _about(cuts: list[Cut], largest: Cut, size: int) -> Cut:
    """The cut that takes away about `size` bytes, and no more than `largest`."""
    smaller = [cut for cut in cuts if cut.before <= largest.before]
    return min(smaller, key=lambda cut: abs(cut.before - size))
