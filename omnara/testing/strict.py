"""What real providers refuse, common to all formats: credentials, sizes, models, readable JSON.

A client tested only against a forgiving server learns of its malformed requests from its users. The rules
of each format are in the modules beside this one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from omnara.testing.signatures import Signer
from omnara.testing.wire import Problem

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Anthropic's limit for one Messages request; larger ones get 413."""

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}\Z")
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]+\Z")
FUNCTION_NAME_CHARS = 64


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the server has: its window in tokens, its longest answer, whether it only reasons.

    `cache_minimum` is the shortest prefix in tokens that is cached.
    """

    context_window: int = 200_000
    max_output: int = 64_000
    reasoning: bool = False
    cache_minimum: int = 1024


DEFAULT_MODELS: Mapping[str, ModelSpec] = {
    "scripted": ModelSpec(),
    "scripted-2": ModelSpec(),
    "scripted-reasoning": ModelSpec(reasoning=True),
    "scripted-small": ModelSpec(context_window=2_000, max_output=1_000, cache_minimum=50),
}


class Strictness(msgspec.Struct, frozen=True, kw_only=True):
    """What is checked.

    `keys`: accepted API keys, `None` for any key that is not empty. `models`: what exists, `None` for any
    name. `portable`: also refuse what OpenAI itself tolerates in Chat Completions and other servers of that
    format do not (blank texts, arguments that are not JSON).
    """

    keys: frozenset[str] | None = None
    models: Mapping[str, ModelSpec] | None = msgspec.field(default_factory=lambda: DEFAULT_MODELS)
    max_body: int = MAX_BODY_BYTES
    portable: bool = True

    def model(self, name: str) -> ModelSpec | None:
        """Return the model of that name, or `None` when there is none."""
        return ModelSpec() if self.models is None else self.models.get(name)


class Refused(Exception):
    """A rule is broken; carries what the provider would say."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class Context(msgspec.Struct, frozen=True):
    """What the rules of a format may look at beside the body."""

    strictness: Strictness
    spec: ModelSpec
    signer: Signer
    tokens: int


Check = Callable[[Any, Context], None]


def refuse(message: str, **more: Any) -> Refused:
    """Return a refusal with status 400 and type `invalid_request_error`, unless `more` says otherwise."""
    return Refused(Problem(message=message, **more))


def is_number(value: Any) -> bool:
    """Return whether a decoded JSON value is a number; `true` is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Return whether a decoded JSON value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def blank(text: str) -> bool:
    """Return whether a text has nothing but white space."""
    return not text.strip()


def cache_marks(value: Any) -> int:
    """Count the `cache_control` marks anywhere below `value`, tool arguments and schemas excepted."""
    if isinstance(value, list):
        return sum(cache_marks(item) for item in value)
    if not isinstance(value, dict):
        return 0
    own = 1 if value.get("cache_control") else 0
    return own + sum(cache_marks(item) for key, item in value.items() if key not in ("input", "input_schema"))
