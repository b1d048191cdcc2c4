"""What limits hold for a model call after model, project grant and agent config have each had their say.

Computed when read, never stored: it changes with the model's revision and with the grant. Source: api.md §9, §14.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's wishes; None leaves a matter to the layer below. Sizes in tokens."""

    context_window_tokens: int | None = None
    max_output_tokens: int | None = None
    default_max_output_tokens: int | None = None
    cache_retention: str | None = None
    reasoning_effort: str | None = None


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    """What holds. `default_max_output_tokens` is the cap sent with each request; None sends the largest allowed."""

    context_window_tokens: int
    max_output_tokens: int
    default_max_output_tokens: int | None
    cache_retention: str
    reasoning_effort: str

    @property
    def request_max_output_tokens(self) -> int:
        """The output cap of one request."""
        return self.default_max_output_tokens or self.max_output_tokens


NO_LIMITS: Final = Limits()


def narrow(model: Effective, grant: Limits = NO_LIMITS, config: Limits = NO_LIMITS) -> Effective:
    """Combine the layers: sizes only shrink, preferences are taken from the last layer that has one."""
    window = _least(model.context_window_tokens, grant.context_window_tokens, config.context_window_tokens)
    output = _least(model.max_output_tokens, grant.max_output_tokens, config.max_output_tokens, window - 1)
    default = _last(model.default_max_output_tokens, grant.default_max_output_tokens, config.default_max_output_tokens)
    return Effective(
        context_window_tokens=window,
        max_output_tokens=output,
        default_max_output_tokens=None if default is None else min(default, output),
        cache_retention=config.cache_retention or grant.cache_retention or model.cache_retention,
        reasoning_effort=config.reasoning_effort or grant.reasoning_effort or model.reasoning_effort,
    )


def _least(first: int, *others: int | None) -> int:
    return min(first, *(value for value in others if value is not None), first)


def _last(*layers: int | None) -> int | None:
    given = [value for value in layers if value is not None]
    return given[-1] if given else None
