"""Provider configs by API: an endpoint with a name, reached with a secret of the organization.

Who manages an organization may send its own secrets where it likes, but never those that the server keeps: what the
environment or an operator's command set up stays with its endpoint. Source: api.md §3, §8, §14; contract.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import OrgAction
from omnara.db import model_configs, owned_secrets
from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.model_configs import NewProviderConfig, ProviderConfigRow
from omnara.engine.deps import Deps
from omnara.engine.model_discovery import Discovered, ask, sealed_key
from omnara.engine.naming import checked_name
from omnara.engine.provider_settings import Endpoint, Wishes, changed_endpoint, new_endpoint
from omnara.engine.scope import org_in_scope
from omnara.errors import Conflict, InvalidRequest, NotFound
from omnara.ids import new_uuid
from omnara.tools.allow_list import AllowList, parse_allow_list

MAX_PROVIDERS: Final = 10_000
"""Per organization. Source: api.md §8 (resource caps)."""


class CreatedProvider(msgspec.Struct, frozen=True):
    """A provider config with what it offers; not `created` when one with these settings was there."""

    created: bool
    row: ProviderConfigRow
    offered: Discovered


async def create_provider(
    deps: Deps, p: Principal, org_id: UUID, name: str, preset: str | None, wishes: Wishes, secret_id: UUID
) -> CreatedProvider:
    """Store a provider config, then ask it for its models. Own transaction, over before the provider is asked.

    Raises NotFound, Forbidden, InvalidRequest, Conflict for a name with other settings or at the cap.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    shown = checked_name(name)
    endpoint = new_endpoint(preset, wishes, _allow(deps))

    async def work(connection: Connection) -> tuple[bool, ProviderConfigRow]:
        await _keep_secret(connection, org_id, secret_id)
        if await model_configs.count_providers(connection, org_id) >= MAX_PROVIDERS:
            raise Conflict(f"an organization may have {MAX_PROVIDERS} provider configs")
        new = NewProviderConfig(
            id=new_uuid(),
            org_id=org_id,
            name=shown,
            preset=preset,
            secret_id=secret_id,
            **msgspec.structs.asdict(endpoint),
        )
        created = await model_configs.add_provider(connection, new)
        row = await model_configs.provider_by_name(connection, org_id, shown)
        if row is None or (not created and (_endpoint(row), row.secret_id) != (endpoint, secret_id)):
            raise Conflict("a provider config of this name has other settings")
        return created, row

    created, row = await deps.db.run(work)
    async with deps.db.acquire() as connection:
        sealed = await sealed_key(connection, row)
    return CreatedProvider(created, row, await ask(deps, row, sealed))


async def get_provider(deps: Deps, p: Principal, org_id: UUID, provider_id: UUID) -> ProviderConfigRow:
    """Return a provider config. Raises NotFound, Forbidden."""
    org_in_scope(p, org_id, OrgAction.MANAGE)
    async with deps.db.acquire() as connection:
        return await found_provider(connection, org_id, provider_id)


async def list_providers(
    deps: Deps, p: Principal, org_id: UUID, order: ListOrder
) -> list[tuple[str, ProviderConfigRow]]:
    """Return provider configs with sort values; one more than the page when there are more."""
    org_in_scope(p, org_id, OrgAction.MANAGE)
    async with deps.db.acquire() as connection:
        return await model_configs.list_providers(connection, org_id, order)


async def update_provider(
    deps: Deps, p: Principal, org_id: UUID, provider_id: UUID, wishes: Wishes, secret_id: UUID | None
) -> ProviderConfigRow:
    """Change where requests go or with which key. Own transaction; running agents follow within a second.

    Raises NotFound, Forbidden, InvalidRequest, Conflict for a provider that the environment keeps.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)

    async def work(connection: Connection) -> ProviderConfigRow:
        row = await _locked(connection, org_id, provider_id)
        endpoint = changed_endpoint(_endpoint(row), wishes, _allow(deps))
        if secret_id is not None:
            await _keep_secret(connection, org_id, secret_id)
        elif row.own_secret and endpoint.base_url != row.base_url:
            raise InvalidRequest(
                "another base_url needs a credential_secret_id: the server's own key stays where it is"
            )
        changed = msgspec.structs.replace(
            row,
            secret_id=row.secret_id if secret_id is None else secret_id,
            base_url=endpoint.base_url,
            request_path=endpoint.request_path,
            auth_kind=endpoint.auth_kind,
            auth_header=endpoint.auth_header,
            request_timeout_ms=endpoint.request_timeout_ms,
        )
        if changed != row:
            await model_configs.change_provider(connection, changed)
        return await found_provider(connection, org_id, provider_id)

    return await deps.db.run(work)


async def delete_provider(deps: Deps, p: Principal, org_id: UUID, provider_id: UUID) -> None:
    """Delete a provider config. Own transaction.

    Raises NotFound, Forbidden, Conflict while it has models or when the environment keeps it.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)

    async def work(connection: Connection) -> None:
        row = await _locked(connection, org_id, provider_id)
        if await model_configs.has_models(connection, row.id):
            raise Conflict("the provider config has configured models")
        await model_configs.delete_provider(connection, row.id)

    await deps.db.run(work)


async def found_provider(connection: Connection, org_id: UUID, provider_id: UUID) -> ProviderConfigRow:
    """Return a provider config of an organization. Raises NotFound."""
    row = await model_configs.find_provider(connection, org_id, provider_id)
    if row is None:
        raise NotFound("model provider config")
    return row


async def _locked(connection: Connection, org_id: UUID, provider_id: UUID) -> ProviderConfigRow:
    await model_configs.lock_provider(connection, org_id, provider_id)
    row = await found_provider(connection, org_id, provider_id)
    if row.origin == "environment":
        raise Conflict("the environment of the server keeps this provider config")
    return row


async def _keep_secret(connection: Connection, org_id: UUID, secret_id: UUID) -> None:
    if not await owned_secrets.keep_for_use(connection, org_id, secret_id):
        raise InvalidRequest("credential_secret_id is not a generic secret of the organization")


def _endpoint(row: ProviderConfigRow) -> Endpoint:
    return Endpoint(
        api_format=row.api_format,
        api_variant=row.api_variant,
        base_url=row.base_url,
        request_path=row.request_path,
        auth_kind="api_key_header" if row.auth_kind == "api_key_header" else "bearer_token",
        auth_header=row.auth_header,
        request_timeout_ms=row.request_timeout_ms,
    )


def _allow(deps: Deps) -> AllowList:
    return parse_allow_list(",".join(deps.settings.allowed_private_hosts))
