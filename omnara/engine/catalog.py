"""From a configured model to a target that can be called, key included, with a memory of one second.

A busy process resolves the same few models thousands of times a second; one second is how late it may learn of a new
revision, grant or key. Opened keys live in memory only. Source: DESIGN §5.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.clock import monotonic
from omnara.db import catalog as db
from omnara.db import secrets, snapshot
from omnara.db.catalog import ModelRow
from omnara.db.pool import ApiPool
from omnara.db.secrets import SealedRow
from omnara.domain.config import Definition, decode_definition
from omnara.engine.configs import effective_limits
from omnara.errors import NotFound
from omnara.ids import IdKind, encode
from omnara.providers.protocol import ApiKey, CacheRetention, Limits, ModelTarget
from omnara.settings import Settings
from omnara.vault import KeyRing, Sealed, open_sealed, secret_aad

TTL_S: Final = 1.0
MAX_MODELS: Final = 1_000
MAX_CONFIGS: Final = 10_000

SECRET_FIELD: Final = "value"  # noqa: S105 - the name of a field
"""The payload key of a generic secret."""


_RETENTIONS: Final[dict[str, CacheRetention]] = {"none": "none", "short": "short", "long": "long"}


class ResolvedModel(msgspec.Struct, frozen=True):
    """A model as a project uses it. `secret_names` are the secrets that a call with it needs, for the journal."""

    row: ModelRow
    api_key: ApiKey | None
    secret_names: tuple[str, ...]


class ResolvedConfig(msgspec.Struct, frozen=True):
    """An immutable compiled config."""

    id: UUID
    project_id: UUID
    definition: Definition
    configured_model_id: UUID


class ModelCatalog:
    """Resolves models and configs for steps. For one event loop; acquires API connections of its own.

    Concurrent look-ups of one model share a single query (and its failure). Overflow: least recently used go first.
    """

    def __init__(
        self, pool: ApiPool, ring: KeyRing, settings: Settings, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._pool = pool
        self._ring = ring
        self._settings = settings
        self._clock = clock
        self._models: OrderedDict[tuple[UUID, UUID], tuple[float, ResolvedModel]] = OrderedDict()
        self._configs: OrderedDict[UUID, ResolvedConfig] = OrderedDict()
        self._locks: dict[tuple[UUID, UUID], asyncio.Lock] = {}

    async def resolve(self, configured_model_id: UUID, project_id: UUID) -> ResolvedModel:
        """Return a model with its key. At most one second old.

        Raises NotFound, SecretUnreadable, Unavailable. Call it while holding no connection.
        """
        key = (configured_model_id, project_id)
        fresh = self._fresh(key)
        if fresh is not None:
            return fresh
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                fresh = self._fresh(key)
                if fresh is not None:
                    return fresh
                resolved = await self._load(configured_model_id, project_id)
                before = self._models.get(key)
                if before is not None and before[1] == resolved:
                    # The same object again: who derived something from it may compare identities.
                    resolved = before[1]
                self._models[key] = (self._clock() + TTL_S, resolved)
                self._models.move_to_end(key)
                while len(self._models) > MAX_MODELS:
                    self._models.popitem(last=False)
                return resolved
        finally:
            if not lock.locked():
                self._locks.pop(key, None)

    async def config(self, config_id: UUID) -> ResolvedConfig:
        """Return a compiled config; it never changes, so it is read once. Raises NotFound, Unavailable.

        Raises msgspec.MsgspecError when the stored definition is damaged. Call it while holding no connection.
        """
        found = self._configs.get(config_id)
        if found is not None:
            self._configs.move_to_end(config_id)
            return found
        async with self._pool.acquire() as connection:
            row = await snapshot.read_config(connection, config_id)
        if row is None:
            raise NotFound("agent config")
        project_id, text, model_id = row
        found = ResolvedConfig(config_id, project_id, decode_definition(text), model_id)
        self._configs[config_id] = found
        while len(self._configs) > MAX_CONFIGS:
            self._configs.popitem(last=False)
        return found

    def target(self, resolved: ResolvedModel, definition: Definition) -> ModelTarget:
        """Return what an attempt needs: the model, narrowed by grant and config, and the time limits."""
        row = resolved.row
        limits = effective_limits(row, definition)
        settings = self._settings
        return ModelTarget(
            revision_id=encode(IdKind.MODEL_REVISION, row.revision_id),
            provider=row.provider_config,
            api_format=row.api_format,
            slug=row.provider_model_slug,
            base_url=row.base_url,
            request_path=row.request_path,
            api_variant=row.api_variant,
            auth_kind="api_key_header" if row.auth_kind == "api_key_header" else "bearer_token",
            auth_header=row.auth_header,
            api_key=resolved.api_key,
            context_window_tokens=limits.context_window_tokens,
            max_output_tokens=limits.request_max_output_tokens,
            supports_tools=row.supports_tools,
            supports_reasoning=row.supports_reasoning,
            input_modalities=tuple(row.input_modalities),
            reasoning_effort=limits.reasoning_effort,
            cache_retention=_RETENTIONS[limits.cache_retention],
            temperature=definition.temperature,
            options=msgspec.json.decode(row.api_variant_options, type=dict[str, Any]),
            limits=Limits(
                connect=settings.model_connect_timeout_s,
                first_byte=settings.model_first_byte_timeout_s,
                idle=settings.model_idle_timeout_s,
                total=min(settings.model_total_timeout_s, row.request_timeout_ms / 1000),
            ),
        )

    def forget(self) -> None:
        """Forget all models, so that the next look-up of each asks the database."""
        self._models.clear()

    def _fresh(self, key: tuple[UUID, UUID]) -> ResolvedModel | None:
        entry = self._models.get(key)
        return entry[1] if entry is not None and entry[0] > self._clock() else None

    async def _load(self, configured_model_id: UUID, project_id: UUID) -> ResolvedModel:
        async with self._pool.acquire() as connection:
            row = await db.granted_model(connection, configured_model_id, project_id)
            if row is None or row.grant_id is None:
                # A grant is live policy: without it the next call of a running agent is refused.
                raise NotFound("configured model")
            sealed = None if row.secret_id is None else await secrets.current_version(connection, row.secret_id)
        if sealed is None:
            return ResolvedModel(row, None, ())
        return ResolvedModel(row, ApiKey(open_secret(self._ring, sealed)), (sealed.name,))


def open_secret(ring: KeyRing, row: SealedRow) -> str:
    """Return the value of a generic secret. Raises SecretUnreadable."""
    sealed = Sealed(row.key_id, row.wrapped_key, row.nonce, row.ciphertext)
    payload = msgspec.json.decode(open_sealed(ring, sealed, secret_aad(row.id, row.version)), type=dict[str, str])
    return payload[SECRET_FIELD]
