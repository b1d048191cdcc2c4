"""The chunks of an OpenAI Chat Completions stream, as OpenAI and the many servers that imitate it send them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from omnara.providers.json_events import EventDecoder
from omnara.providers.usage import Stated


class Function(msgspec.Struct):
    """A piece of a call. Some imitators give the arguments whole and decoded."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class CallDelta(msgspec.Struct):
    """A piece of the call `index`; imitators leave the index out, or repeat it for different ids."""

    index: int | None = None
    id: str | None = None
    function: Function | None = None
    extra_content: Any = None


class Delta(msgspec.Struct):
    """What a chunk adds. Among the imitators reasoning has two names, and content may be a list of parts."""

    content: str | list[Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class Choice(msgspec.Struct):
    """One answer; only the first is asked for."""

    index: int | None = 0
    delta: Delta | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    """Breakdown of the input tokens."""

    cached_tokens: Stated = None
    cache_write_tokens: Stated = None


class CompletionDetails(msgspec.Struct):
    """Breakdown of the output tokens."""

    reasoning_tokens: Stated = None


class Usage(msgspec.Struct):
    """Token counts, usually in the last chunk only."""

    prompt_tokens: Stated = None
    completion_tokens: Stated = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Chunk(msgspec.Struct):
    """One event. `error` appears in place of choices when the answer fails after its 200."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


DONE: Final = b"[DONE]"

decoder: Final[EventDecoder[Chunk]] = EventDecoder(Chunk)
