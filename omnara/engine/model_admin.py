"""Writing the model catalogue: providers with a sealed key, models, grants. Used at start and by `omnara models`.

Source: DESIGN §5; api.md §14 (defaults of sizes).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from uuid import UUID

import msgspec

from omnara.db import catalog, secrets
from omnara.db.catalog import ListedModel, ModelFacts, NewProvider, ProviderRow
from omnara.db.connection import Connection
from omnara.db.pool import ApiPool
from omnara.db.secrets import SealedRow
from omnara.engine.catalog import SECRET_FIELD, open_secret
from omnara.errors import ConfigurationError, Conflict, InvalidRequest, NotFound
from omnara.ids import new_uuid
from omnara.providers.probe import ProbeTarget
from omnara.providers.protocol import ApiKey
from omnara.vault import KeyRing, Secret, SecretUnreadable, seal, secret_aad

KEYLESS: Final = Secret("none")
"""Sent to endpoints that ask for no key."""


class ProviderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A provider as it should be. `origin`: who keeps it up to date (api or environment)."""

    name: str
    api_format: str
    base_url: str
    request_path: str
    auth_kind: str
    origin: str = "api"
    preset: str | None = None
    secret_name: str | None = None

    @property
    def key_name(self) -> str:
        """The name of the secret that holds the key; no two providers share one."""
        return self.secret_name or f"{self.name} key"


async def put_provider(
    connection: Connection, ring: KeyRing, org_id: UUID, spec: ProviderSpec, key: Secret | None
) -> UUID | None:
    """Make a provider or bring it up to date, sealing its key anew only when that changed; return its id.

    None when somebody made a provider of that name by other means: it is theirs. Call inside a transaction.
    """
    found = await catalog.find_provider(connection, org_id, spec.name)
    if found is None:
        secret_id = None if key is None else await _put_secret(connection, ring, org_id, spec.key_name, key)
        provider_id = new_uuid()
        new = NewProvider(
            id=provider_id,
            org_id=org_id,
            name=spec.name,
            preset=spec.preset,
            api_format=spec.api_format,
            base_url=spec.base_url,
            request_path=spec.request_path,
            auth_kind=spec.auth_kind,
            secret_id=secret_id,
            origin=spec.origin,
        )
        await catalog.insert_provider(connection, new)
        return provider_id
    if found.origin != spec.origin:
        return None
    await _update(connection, ring, found, spec, key)
    return found.id


async def add_models(
    connection: Connection, org_id: UUID, provider_id: UUID, models: Iterable[tuple[str, ModelFacts]], *, keep: bool
) -> None:
    """Make models of a provider and grant them to every project.

    `keep` leaves existing ones as they are: a grant that somebody took away does not come back.
    """
    projects = list(await catalog.org_projects(connection, org_id))
    for name, facts in models:
        ids = (new_uuid(), new_uuid())
        model_id, new = await catalog.put_model(connection, org_id, provider_id, name, facts, ids, keep_existing=keep)
        if keep and not new:
            continue
        for project_id in projects:
            await catalog.grant(connection, new_uuid(), project_id, model_id)


async def add_model(
    db: ApiPool, ring: KeyRing, org_id: UUID, provider: ProviderSpec, key: Secret | None, name: str, facts: ModelFacts
) -> None:
    """Add a model, and its provider if it is new, and grant it to every project. Own transaction.

    An existing provider keeps its key when none is given. One that has none, since its endpoint asks for none, gets a
    word in its place: every request carries a credential. Raises Conflict when the environment keeps that provider, and
    InvalidRequest for sizes that cannot be.
    """
    if facts.max_output_tokens >= facts.context_window_tokens:
        raise InvalidRequest("max_output_tokens must be smaller than context_window_tokens")

    async def work(connection: Connection) -> None:
        found = await catalog.find_provider(connection, org_id, provider.name)
        keyless = found is None or found.secret_id is None
        given = KEYLESS if key is None and keyless else key
        provider_id = await put_provider(connection, ring, org_id, provider, given)
        if provider_id is None:
            raise Conflict(f"the provider {provider.name} belongs to somebody else")
        await add_models(connection, org_id, provider_id, [(name, facts)], keep=False)

    await db.run(work)


async def list_models(db: ApiPool, org_id: UUID) -> list[ListedModel]:
    """Return an organization's models by provider and name."""
    async with db.acquire() as connection:
        return await catalog.list_models(connection, org_id)


async def probe_target(db: ApiPool, ring: KeyRing, org_id: UUID, provider: str) -> ProbeTarget:
    """Return where and with which key a provider's catalogue is asked. Own connection, given back before the probe.

    Raises NotFound for a provider that there is none of, ConfigurationError when its key does not open, Unavailable.
    """
    async with db.acquire() as connection:
        found = await catalog.find_provider(connection, org_id, provider)
        if found is None:
            raise NotFound(f"provider {provider}; `omnara models list` shows those that there are")
        sealed = None if found.secret_id is None else await secrets.current_version(connection, found.secret_id)
    try:
        key = None if sealed is None else ApiKey(open_secret(ring, sealed))
    except SecretUnreadable as error:
        raise ConfigurationError(
            f"the key of {provider} cannot be read with this key ring; see `omnara doctor`"
        ) from error
    return ProbeTarget(
        api_format=found.api_format,
        base_url=found.base_url,
        auth_kind="api_key_header" if found.auth_kind == "api_key_header" else "bearer_token",
        auth_header=found.auth_header,
        api_key=key,
    )


async def _update(
    connection: Connection, ring: KeyRing, found: ProviderRow, spec: ProviderSpec, key: Secret | None
) -> None:
    secret_id = found.secret_id
    if key is not None:
        if secret_id is None:
            secret_id = await _put_secret(connection, ring, found.org_id, spec.key_name, key)
        else:
            await _renew_secret(connection, ring, secret_id, key)
    wanted = msgspec.structs.replace(
        found,
        base_url=spec.base_url,
        request_path=spec.request_path,
        api_format=spec.api_format,
        auth_kind=spec.auth_kind,
        secret_id=secret_id,
    )
    if wanted != found:
        await catalog.update_provider(connection, wanted)


async def _put_secret(connection: Connection, ring: KeyRing, org_id: UUID, name: str, key: Secret) -> UUID:
    """Make a provider's secret, or renew the one that an earlier provider of this name left behind."""
    found = await secrets.find_system_secret(connection, org_id, name)
    if found is not None:
        await _renew_secret(connection, ring, found, key)
        return found
    secret_id = new_uuid()
    await secrets.insert_secret(
        connection, secret_id, org_id, owner_kind="system", name=name, description="Key of a model provider"
    )
    await _seal(connection, ring, secret_id, name, 1, key)
    return secret_id


async def _renew_secret(connection: Connection, ring: KeyRing, secret_id: UUID, key: Secret) -> None:
    """Write a new version unless the current one already holds this key under the ring's active key."""
    current = await secrets.current_version(connection, secret_id)
    if current is None:
        raise InvalidRequest("the provider's secret was deleted")
    try:
        same = current.key_id == ring.active and Secret(open_secret(ring, current)) == key
    except SecretUnreadable:
        same = False
    if not same:
        await _seal(connection, ring, secret_id, current.name, current.version + 1, key)


async def _seal(connection: Connection, ring: KeyRing, secret_id: UUID, name: str, version: int, key: Secret) -> None:
    payload = msgspec.json.encode({SECRET_FIELD: key.reveal()})
    sealed = seal(ring, payload, secret_aad(secret_id, version))
    row = SealedRow(secret_id, name, version, sealed.key_id, sealed.wrapped_key, sealed.nonce, sealed.ciphertext)
    await secrets.insert_version(connection, row, [SECRET_FIELD])
