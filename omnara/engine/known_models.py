"""The providers that an API key in the environment sets up, and the models that they start with.

One place for facts that age: model names come and go, and any other name of these providers can be used as
`provider/slug` all the same. The sizes are cautious; `omnara models add` states better ones.
"""

from __future__ import annotations

from typing import Final

import msgspec

from omnara.db.catalog import ModelFacts


class EnvironmentProvider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider that one setting is enough for. Sizes of its unlisted models are those of `facts_of`."""

    name: str
    setting: str
    secret_name: str
    api_format: str
    base_url: str
    version_path: str
    request_path: str
    auth_kind: str
    slugs: tuple[str, ...]


ANTHROPIC: Final = EnvironmentProvider(
    name="anthropic",
    setting="anthropic",
    secret_name="ANTHROPIC_API_KEY",  # noqa: S106 - the name of a variable
    api_format="anthropic_messages",
    base_url="https://api.anthropic.com/v1",
    version_path="/v1",
    request_path="/messages",
    auth_kind="api_key_header",
    slugs=(
        "claude-fable-5-2",
        "claude-mythos-5-2",
        "claude-opus-5-5",
        "claude-sonnet-5-5",
        "claude-haiku-5-5",
        "claude-opus-5",
        "claude-sonnet-5",
        "claude-opus-4-8",
        "claude-sonnet-4-6",
        "claude-haiku-4-5",
    ),
)

OPENAI: Final = EnvironmentProvider(
    name="openai",
    setting="openai",
    secret_name="OPENAI_API_KEY",  # noqa: S106 - the name of a variable
    api_format="openai_responses",
    base_url="https://api.openai.com/v1",
    version_path="",
    request_path="/responses",
    auth_kind="bearer_token",
    slugs=(
        "gpt-6.2-astra",
        "gpt-6.2-sol",
        "gpt-6.1-terra",
        "gpt-6-luna",
        "gpt-5.6-sol",
        "gpt-5.6-terra",
        "gpt-5.6-luna",
        "gpt-5.5",
        "gpt-5.4",
        "gpt-5.4-mini",
        "gpt-5.4-nano",
        "gpt-5",
        "gpt-5-mini",
        "gpt-4.1",
        "gpt-4.1-mini",
    ),
)

PROVIDERS: Final = (ANTHROPIC, OPENAI)

_CONTEXT_TOKENS: Final = 200_000
_OUTPUT_TOKENS: Final = 32_000
_DEFAULT_OUTPUT_TOKENS: Final = 8_192
_EFFORTS: Final = ("low", "medium", "high")
_WITHOUT_REASONING: Final = ("gpt-4", "gpt-3", "chatgpt-4")


def facts_of(slug: str) -> ModelFacts:
    """Return cautious facts about a model that nobody has described."""
    reasons = not slug.startswith(_WITHOUT_REASONING)
    return ModelFacts(
        provider_model_slug=slug,
        context_window_tokens=_CONTEXT_TOKENS,
        max_output_tokens=_OUTPUT_TOKENS,
        default_max_output_tokens=_DEFAULT_OUTPUT_TOKENS,
        supports_reasoning=reasons,
        supported_reasoning_efforts=_EFFORTS if reasons else (),
    )


def speaking(provider: EnvironmentProvider, base_url: str, wanted: str) -> EnvironmentProvider:
    """Return the provider with the wire format for its endpoint. `wanted`: `auto`, `responses`, `chat-completions`.

    `auto` takes an endpoint that is not the provider's own for one that imitates it: those know Chat Completions.
    """
    if provider is not OPENAI or wanted == "responses" or (wanted == "auto" and base_url == provider.base_url):
        return provider
    return msgspec.structs.replace(provider, api_format="openai_chat_completions", request_path="/chat/completions")


def endpoint(provider: EnvironmentProvider, given: str | None) -> str:
    """Return the base URL: the provider's own, or a given one, with the version that its SDK would add."""
    if given is None:
        return provider.base_url
    base = given.rstrip("/")
    return base if base.endswith(provider.version_path) else base + provider.version_path
