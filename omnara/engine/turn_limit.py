"""The end of a turn that does not come to one by itself, such as that of a model that asks for the same tool for ever.

How often the model has answered in a turn is in the log (`EventMeta.answers`), so no restart, claim or compaction
forgets it. Every message opens a turn and starts afresh. Source: DESIGN §5 (bounds).
"""

from __future__ import annotations

from typing import Final

from omnara.domain.context import ContextState
from omnara.providers.protocol import Failed

__all__ = ["TURN_LIMIT_REACHED", "turn_limit"]

TURN_LIMIT_REACHED: Final = "turn_limit_reached"


def turn_limit(context: ContextState, calls: int) -> Failed | None:
    """The named end of the turn if the model has answered `calls` times in it, which is the limit; else None."""
    if context.answers < calls:
        return None
    return Failed(
        kind="invalid_request",
        message=f"{TURN_LIMIT_REACHED}: the model has answered {context.answers} times in this turn, the limit",
        provider_code=TURN_LIMIT_REACHED,
    )
