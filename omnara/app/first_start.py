"""What every start makes sure of: the right key ring, somebody who may call, and the providers of the environment."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Final

from omnara.access.tokens import BearerToken
from omnara.app.database import visit_database
from omnara.app.keyring import ring_source, write_private
from omnara.clock import poll_until
from omnara.db.connection import ConnectSettings
from omnara.db.pool import ApiPool
from omnara.engine.bootstrap import environment_providers, first_start, is_set_up
from omnara.errors import ConfigurationError
from omnara.log import get_logger
from omnara.settings import Settings
from omnara.vault import KeyRing, WrongKeyRing

__all__ = ["INITIAL_KEY_FILE", "api_pool", "set_up", "visit_set_up"]

log = get_logger(__name__)

INITIAL_KEY_FILE: Final = "initial-api-key"
SET_UP_WAITS_S: Final = 10.0
"""How long a command waits for the first start of a server to come to its end, which takes two or three seconds."""


@contextlib.asynccontextmanager
async def api_pool(database: ConnectSettings) -> AsyncIterator[ApiPool]:
    """A pool for the block, for starts and commands."""
    pool = ApiPool(database)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def visit_set_up(settings: Settings) -> AsyncIterator[tuple[ConnectSettings, ApiPool]]:
    """Use the database of servers for one command, once the first of them has set it up.

    Raises as `visit_database`, and ConfigurationError when nobody has set it up and nobody does.
    """
    async with visit_database(settings) as database, api_pool(database) as pool:
        if not await is_set_up(pool):
            log.warning("waiting for a server to set the database up")
            if not await poll_until(lambda: is_set_up(pool), within_s=SET_UP_WAITS_S):
                raise ConfigurationError("nobody has set the database up: start `omnara serve` once")
        yield database, pool


async def set_up(database: ConnectSettings, ring: KeyRing, settings: Settings) -> None:
    """Set an empty database up, hand the first key over, and make the providers whose keys are in the environment.

    The key is shown once on a terminal; without one it is written to `<data dir>/initial-api-key` (0600) and the log
    names the path. Raises WrongKeyRing, ConfigurationError, Unavailable.
    """
    async with api_pool(database) as pool:
        try:
            found = await first_start(pool, ring, settings.bootstrap_api_key)
        except WrongKeyRing as error:
            raise WrongKeyRing(f"{ring_source(settings)}: {error.detail}") from error
        if found.created:
            log.info("set up an empty database: organization, project, owner, personal key")
        if found.token is not None:
            _hand_over(found.token, settings)
        providers = await environment_providers(pool, ring, settings)
    if providers:
        log.info("model providers from the environment", providers=providers)


def _hand_over(token: BearerToken, settings: Settings) -> None:
    if sys.stdout.isatty():
        sys.stdout.write(f"\nYour API key, shown only this once:\n\n    {token.text}\n\n")
        sys.stdout.flush()
        return
    path = settings.data_dir / INITIAL_KEY_FILE
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One that is there belongs to an earlier database; this one's key would otherwise be lost.
        path.unlink(missing_ok=True)
        write_private(path, token.text + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"the first API key cannot be written to {path} ({error.strerror}); make another with `omnara keys create`"
        ) from error
    log.warning("wrote the first API key to a file", path=str(path))
