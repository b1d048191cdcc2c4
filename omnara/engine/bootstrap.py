"""The first start of an empty database, and what every start makes sure of.

Eight replicas may start at once: one sets up, the others find it done. Nobody waits inside a statement; the lock is
tried again. Source: DESIGN §3 (locks), coordination §1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar
from uuid import UUID

import msgspec

from omnara.access import tokens
from omnara.access.tokens import BearerToken, TokenKind
from omnara.clock import Deadline
from omnara.db import accounts
from omnara.db.accounts import FirstOrg, TokenRow
from omnara.db.connection import Connection
from omnara.db.locks import lock_key
from omnara.db.pool import ApiPool
from omnara.engine.known_models import PROVIDERS, EnvironmentProvider, endpoint, facts_of, speaking
from omnara.engine.model_admin import ProviderSpec, add_models, put_provider
from omnara.errors import ConfigurationError, NotFound, Unavailable
from omnara.ids import new_uuid
from omnara.log import get_logger
from omnara.settings import Settings
from omnara.tools.allow_list import AllowList, parse_allow_list
from omnara.tools.ssrf import UrlRefused, check_endpoint
from omnara.vault import KeyRing, Secret, check_value, verify_check_value

log = get_logger(__name__)
T = TypeVar("T")

ORG_NAME: Final = "Default"
PROJECT_NAME: Final = "Default"
FIRST_TOKEN_NAME: Final = "First start"  # noqa: S105 - a label
CHECK_NAME: Final = "key_ring_check"
SETUP_LIMIT_S: Final = 30.0
SETUP_POLL_S: Final = 0.05


class FirstStart(msgspec.Struct, frozen=True):
    """Where the database stands. `token` is the new personal key, only when this call made it and nobody gave it."""

    created: bool
    org: FirstOrg
    token: BearerToken | None


async def first_start(db: ApiPool, ring: KeyRing, bootstrap_key: str | None) -> FirstStart:
    """Check the key ring, and set an empty database up: organization, project, owner, personal key.

    Own transaction; the first of several callers does it. `bootstrap_key` counts on an empty database only. Raises
    WrongKeyRing, ConfigurationError (a bootstrap key that is none), Unavailable when the set-up lock stays taken.
    """
    given = _given_token(bootstrap_key)

    async def work(connection: Connection) -> FirstStart:
        await _check_ring(connection, ring)
        found = await accounts.first_org(connection)
        if found is not None:
            return FirstStart(False, found, None)
        first = FirstOrg(new_uuid(), new_uuid(), new_uuid())
        await accounts.insert_first_org(connection, first, org_name=ORG_NAME, project_name=PROJECT_NAME)
        token = given or tokens.generate(TokenKind.PERSONAL)
        await _insert_token(connection, first.user_id, FIRST_TOKEN_NAME, token)
        return FirstStart(True, first, None if given is not None else token)

    return await _alone(db, work)


class GivenProvider(msgspec.Struct, frozen=True):
    """A provider of the environment: its key and its endpoint, which has been checked."""

    provider: EnvironmentProvider
    key: Secret
    base_url: str


def environment_endpoints(settings: Settings) -> list[GivenProvider]:
    """Return the providers whose keys are in the environment. Pure; call it early, for what it raises.

    Raises ConfigurationError naming the variable when an endpoint is none that the server would call: plain http or a
    private address that the operator has not named. Source: engine.md §7 (SSRF).
    """
    allow = parse_allow_list(",".join(settings.allowed_private_hosts))
    keys = {provider: getattr(settings, f"{provider.setting}_api_key") for provider in PROVIDERS}
    found = []
    for provider, key in keys.items():
        if key:
            base_url = _checked_endpoint(provider, settings, allow)
            spoken = speaking(provider, base_url, settings.openai_api_format)
            found.append(GivenProvider(spoken, Secret(key), base_url))
    return found


async def environment_providers(db: ApiPool, ring: KeyRing, settings: Settings) -> list[str]:
    """Make or update the providers whose keys are in the environment, with models granted to every project.

    Returns the names of those that are there now. Own transaction; call it at each start, after `first_start`. A key
    that is gone from the environment changes nothing: agents go on. Raises ConfigurationError for an endpoint that
    must not be called.
    """
    wanted = environment_endpoints(settings)
    if not wanted:
        return []

    async def work(connection: Connection) -> list[str]:
        first = await accounts.first_org(connection)
        if first is None:
            raise NotFound("organization")
        made = [await _put_environment(connection, ring, first.org_id, given) for given in wanted]
        return [given.provider.name for given, mine in zip(wanted, made, strict=True) if mine]

    names = await _alone(db, work)
    for given in wanted:
        if given.provider.name not in names:
            log.warning("environment_provider_skipped", provider=given.provider.name, reason="made by other means")
    return names


# --- keys -------------------------------------------------------------------------------------------------


async def create_key(db: ApiPool, name: str) -> tuple[BearerToken, TokenRow]:
    """Make a personal key for the owner of the first organization. The token is shown once: only its hash is kept."""
    token = tokens.generate(TokenKind.PERSONAL)

    async def work(connection: Connection) -> TokenRow:
        return await _insert_token(connection, await _owner(connection), name, token)

    return token, await db.run(work)


async def list_keys(db: ApiPool) -> list[TokenRow]:
    """Return the owner's personal keys that are not revoked, newest first."""
    async with db.acquire() as connection:
        return await accounts.list_tokens(connection, await _owner(connection))


async def revoke_key(db: ApiPool, token_id: str) -> TokenRow:
    """Revoke one of the owner's personal keys by its visible id. Raises NotFound."""

    async def work(connection: Connection) -> TokenRow:
        revoked = await accounts.revoke_token(connection, await _owner(connection), token_id)
        if revoked is None:
            raise NotFound("key")
        return revoked

    return await db.run(work)


async def is_set_up(db: ApiPool) -> bool:
    """Whether a first start came to its end here; there may be no tables yet. Raises Unavailable."""
    async with db.acquire() as connection:
        return await accounts.has_tables(connection) and await accounts.first_org(connection) is not None


async def default_org(db: ApiPool) -> FirstOrg:
    """Return the organization that commands work on. Raises NotFound before the first start."""
    async with db.acquire() as connection:
        found = await accounts.first_org(connection)
    if found is None:
        raise NotFound("organization: start the server once")
    return found


# --- parts ------------------------------------------------------------------------------------------------


class _Busy(Exception):
    """Another process is setting up at this moment."""


async def _alone(db: ApiPool, work: Callable[[Connection], Awaitable[T]]) -> T:
    """Run `work` in a transaction that holds the set-up lock, trying for up to 30 s. Raises Unavailable."""
    key = lock_key("setup", "bootstrap")

    async def locked(connection: Connection) -> T:
        if not await accounts.try_setup_lock(connection, key):
            raise _Busy
        return await work(connection)

    deadline = Deadline(SETUP_LIMIT_S)
    while True:
        try:
            return await db.run(locked)
        except _Busy:
            if deadline.passed:
                raise Unavailable("another process is setting the database up") from None
        await asyncio.sleep(SETUP_POLL_S)


async def _check_ring(connection: Connection, ring: KeyRing) -> None:
    stored = await accounts.installation_value(connection, CHECK_NAME)
    wanted = check_value(ring) if stored is None else verify_check_value(stored, ring)
    if wanted != stored:
        await accounts.set_installation_value(connection, CHECK_NAME, wanted)


def _given_token(text: str | None) -> BearerToken | None:
    if text is None:
        return None
    try:
        token = tokens.parse(text)
    except tokens.InvalidToken:
        token = None
    if token is None or token.kind is not TokenKind.PERSONAL:
        raise ConfigurationError(
            "OMNARA_BOOTSTRAP_API_KEY must be a personal key of the form omnara_pat_v1_… with a right checksum"
        )
    return token


async def _insert_token(connection: Connection, user_id: UUID, name: str, token: BearerToken) -> TokenRow:
    return await accounts.insert_token(
        connection, new_uuid(), user_id, name=name, token_id=tokens.new_token_id(), token_hash=token.hash
    )


async def _owner(connection: Connection) -> UUID:
    found = await accounts.first_org(connection)
    if found is None:
        raise NotFound("organization: start the server once")
    return found.user_id


def _checked_endpoint(provider: EnvironmentProvider, settings: Settings, allow: AllowList) -> str:
    url = endpoint(provider, getattr(settings, f"{provider.setting}_base_url"))
    try:
        check_endpoint(url, allow)
    except (UrlRefused, OSError) as error:
        raise ConfigurationError(
            f"{provider.setting.upper()}_BASE_URL: {error}; plain http and private addresses are for hosts that "
            "OMNARA_ALLOWED_PRIVATE_HOSTS names, for example 127.0.0.1:8090"
        ) from error
    return url


async def _put_environment(connection: Connection, ring: KeyRing, org_id: UUID, given: GivenProvider) -> bool:
    provider = given.provider
    spec = ProviderSpec(
        name=provider.name,
        preset=provider.name,
        api_format=provider.api_format,
        base_url=given.base_url,
        request_path=provider.request_path,
        auth_kind=provider.auth_kind,
        secret_name=provider.secret_name,
        origin="environment",
    )
    provider_id = await put_provider(connection, ring, org_id, spec, given.key)
    if provider_id is None:
        return False
    models = [(slug, facts_of(slug)) for slug in provider.slugs]
    await add_models(connection, org_id, provider_id, models, keep=True)
    return True
