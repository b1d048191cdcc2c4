"""Which of the models that a provider offers an agent could use: asked live, read with care, never a failure.

A provider that does not answer is told as data, because a config may be stored before its endpoint is up.
Source: api.md §14 (newest first; no embedding, audio, image and legacy models); contract (ModelCatalog).
"""

from __future__ import annotations

import re
from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import OrgAction
from omnara.db import model_configs, secrets
from omnara.db.connection import Connection
from omnara.db.model_configs import ProviderConfigRow
from omnara.db.secrets import SealedRow
from omnara.domain.text import clean_text
from omnara.engine.catalog import open_secret
from omnara.engine.deps import Deps
from omnara.engine.scope import org_in_scope
from omnara.errors import NotFound
from omnara.providers.probe import Catalogue, OfferedModel, ProbeTarget
from omnara.providers.protocol import ApiKey
from omnara.vault import SecretUnreadable

MAX_TEXT_CHARS: Final = 256
"""Of a slug or a name of somebody else's."""

_NOT_FOR_AGENTS: Final = re.compile(
    r"embed|whisper|tts|audio|realtime|transcri|speech|dall-e|image|imagen|moderation|sora|video|rerank|"
    r"davinci|babbage|(?:^|/)ada|curie|gpt-3|gpt-4-0|gpt-4-1106|claude-(?:1|2|instant)|(?:^|[-/])ocr",
    re.IGNORECASE,
)


class Discovered(msgspec.Struct, frozen=True):
    """What a provider offers, or (`error`) why that is not known."""

    models: tuple[OfferedModel, ...]
    error: str | None = None


async def discover(deps: Deps, p: Principal, org_id: UUID, provider_id: UUID) -> Discovered:
    """Ask a stored provider for its models; takes up to ten seconds and holds no connection meanwhile.

    Raises NotFound, Forbidden.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    async with deps.db.acquire() as connection:
        provider = await model_configs.find_provider(connection, org_id, provider_id)
        if provider is None:
            raise NotFound("model provider config")
        sealed = await sealed_key(connection, provider)
    return await ask(deps, provider, sealed)


async def sealed_key(connection: Connection, provider: ProviderConfigRow) -> SealedRow | None:
    """Return a provider's key, sealed; None when it has none."""
    return None if provider.secret_id is None else await secrets.current_version(connection, provider.secret_id)


async def ask(deps: Deps, provider: ProviderConfigRow, sealed: SealedRow | None) -> Discovered:
    """Ask a provider for its models. Call it while holding no connection; cancellation ends the request."""
    try:
        key = None if sealed is None else ApiKey(open_secret(deps.ring, sealed))
    except SecretUnreadable:
        return Discovered((), "the provider's key cannot be read with this key ring")
    target = ProbeTarget(
        api_format=provider.api_format,
        base_url=provider.base_url,
        auth_kind="api_key_header" if provider.auth_kind == "api_key_header" else "bearer_token",
        auth_header=provider.auth_header,
        api_key=key,
    )
    found = await deps.gateway.probe(target)
    if isinstance(found, Catalogue):
        return Discovered(usable(found.models))
    return Discovered((), clean_text(found.message))


def usable(offered: tuple[OfferedModel, ...]) -> tuple[OfferedModel, ...]:
    """Return the models that an agent could use, newest first; those of unknown age stay in the provider's order."""
    kept = [model for model in offered if _fits(model.slug)]
    return tuple(_shown(model) for model in sorted(kept, key=lambda model: -model.created))


def _fits(slug: str) -> bool:
    return 0 < len(slug) <= MAX_TEXT_CHARS and slug.isprintable() and _NOT_FOR_AGENTS.search(slug) is None


def _shown(model: OfferedModel) -> OfferedModel:
    name = None if model.display_name is None else clean_text(model.display_name)[:MAX_TEXT_CHARS]
    return msgspec.structs.replace(model, display_name=name)
