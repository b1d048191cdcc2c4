"""The key ring is rotated while its secrets are in use. Source: field-reports B23."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import msgspec
import pytest

from omnara.db import secrets
from omnara.db.connection import ConnectSettings
from omnara.db.pool import ApiPool
from omnara.db.secrets import SealedRow
from omnara.engine.bootstrap import environment_providers, first_start
from omnara.engine.catalog import open_secret
from omnara.engine.reseal import BATCH, Resealed, reseal_secrets
from omnara.errors import ConfigurationError
from omnara.settings import Settings
from omnara.testing import ModelServer, fixed
from omnara.vault import KeyRing, SecretUnreadable, WrongKeyRing, generate_ring, seal, secret_aad
from tests.e2e.served import served
from tests.e2e.test_cli import omnara
from tests.support.postgres import PostgresForTests

OLD, NEW = generate_ring("old"), generate_ring("new")
BOTH_OLD = KeyRing({**OLD.keys, **NEW.keys}, "old")
BOTH_NEW = KeyRing({**OLD.keys, **NEW.keys}, "new")
SETTINGS = Settings(anthropic_api_key="sk-ant-one", openai_api_key="sk-oai-one")


@contextlib.asynccontextmanager
async def pool_on(dsn: str) -> AsyncIterator[ApiPool]:
    pool = ApiPool(ConnectSettings(dsn=dsn), size=2)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def stored(pool: ApiPool) -> list[SealedRow]:
    """Every version of every secret."""
    async with pool.acquire() as connection:
        return await secrets.sealed_by_others(connection, "", (UUID(int=0), 0), 1000)


async def many(pool: ApiPool, ring: KeyRing, count: int) -> None:
    """Further versions of the first secret, without a value that anything uses."""
    first = (await stored(pool))[0]
    async with pool.transaction() as connection:
        for version in range(2, count + 2):
            value = msgspec.json.encode({"value": f"version {version}"})
            sealed = seal(ring, value, secret_aad(first.id, version))
            row = msgspec.structs.replace(
                first,
                version=version,
                key_id=sealed.key_id,
                wrapped_key=sealed.wrapped_key,
                nonce=sealed.nonce,
                ciphertext=sealed.ciphertext,
            )
            await secrets.insert_version(connection, row, ["value"])


async def test_every_version_moves_and_the_old_key_can_go(database: str) -> None:
    async with pool_on(database) as pool:
        await first_start(pool, OLD, None)
        await environment_providers(pool, OLD, SETTINGS)
        await many(pool, OLD, BATCH + 5)
        before = {(row.id, row.version): row for row in await stored(pool)}
        await first_start(pool, BOTH_OLD, None)
        await first_start(pool, BOTH_NEW, None)
        assert {open_secret(BOTH_NEW, row) for row in before.values()} >= {"sk-ant-one", "sk-oai-one"}
        with pytest.raises(WrongKeyRing):
            await first_start(pool, NEW, None)
        assert await reseal_secrets(pool, BOTH_NEW) == Resealed(len(before), (), ("old",))
        assert await reseal_secrets(pool, BOTH_NEW) == Resealed(0, (), ("old",))
        after = await stored(pool)
        assert {row.key_id for row in after} == {"new"}
        for row in after:
            old = before[row.id, row.version]
            assert (row.ciphertext, row.nonce) == (old.ciphertext, old.nonce)
            assert open_secret(NEW, row) == open_secret(OLD, old)
            with pytest.raises(SecretUnreadable):
                open_secret(OLD, row)
        await first_start(pool, NEW, None)
        with pytest.raises(WrongKeyRing):
            await first_start(pool, OLD, None)


async def test_what_cannot_be_read_stays_and_keeps_its_key(database: str) -> None:
    async with pool_on(database) as pool:
        await first_start(pool, OLD, None)
        await environment_providers(pool, OLD, SETTINGS)
        async with pool.acquire() as connection:
            await connection.execute(
                "update secret_versions set wrapped_key = '\\x00' where secret_id ="
                " (select id from secrets where name = 'OPENAI_API_KEY')"
            )
        for _ in range(2):
            done = await reseal_secrets(pool, BOTH_NEW)
            assert (done.unreadable, done.retired) == (("OPENAI_API_KEY",), ())
        assert sorted((row.name, row.key_id) for row in await stored(pool)) == [
            ("ANTHROPIC_API_KEY", "new"),
            ("OPENAI_API_KEY", "old"),
        ]
        with pytest.raises(WrongKeyRing):
            await first_start(pool, NEW, None)
        with pytest.raises(WrongKeyRing):
            await reseal_secrets(pool, NEW)


async def test_there_is_nothing_to_do_before_the_first_start(database: str) -> None:
    async with pool_on(database) as pool:
        with pytest.raises(ConfigurationError, match="set this database up"):
            await reseal_secrets(pool, NEW)


async def test_the_command_rotates_beside_a_running_server(postgres: PostgresForTests, tmp_path: Path) -> None:
    async with ModelServer(fixed("fine")) as model, postgres.fresh() as dsn:
        async with served(dsn, tmp_path, model) as server:
            ring = f"{server.environment['OMNARA_SECRET_ENCRYPTION_KEYS']},{NEW.serialise()}"
            environment = server.environment | {
                "OMNARA_SECRET_ENCRYPTION_KEYS": ring,
                "OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY": "new",
            }
            done = await omnara("secrets", "reseal", "--json", environment=environment)
            assert (done.code, done.json()) == (0, {"moved": 1, "unreadable": [], "retired": ["k1"]})
        only_new = environment | {"OMNARA_SECRET_ENCRYPTION_KEYS": NEW.serialise()}
        async with served(dsn, tmp_path, model, only_new) as server:
            assert server.environment["OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY"] == "new"
