"""The ring of an embedded database: made once, and never again for a database that knows one."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnara.app.first_start import set_up
from omnara.app.keyring import RING_FILE, ring_of
from omnara.db.connection import ConnectSettings
from omnara.errors import ConfigurationError
from omnara.settings import load
from omnara.vault import WrongKeyRing, generate_ring
from tests.support.postgres import PostgresForTests


async def test_a_lost_ring_is_asked_for_and_not_replaced(postgres: PostgresForTests, tmp_path: Path) -> None:
    settings = load({"OMNARA_DATA_DIR": str(tmp_path)})
    path = tmp_path / RING_FILE
    async with postgres.fresh() as dsn:
        database = ConnectSettings(dsn=dsn, embedded=True)
        ring = await ring_of(settings, database)
        await set_up(database, ring, settings)
        kept = path.rename(tmp_path / "backup")
        with pytest.raises(ConfigurationError, match=rf"{path} is missing.*restore"):
            await ring_of(settings, database)
        assert not path.exists()
        kept.rename(path)
        assert (await ring_of(settings, database)).serialise() == ring.serialise()


async def test_a_ring_of_another_database_is_named_by_where_it_came_from(
    postgres: PostgresForTests, tmp_path: Path
) -> None:
    settings = load({"OMNARA_DATA_DIR": str(tmp_path)})
    given = load(
        {
            "OMNARA_DATA_DIR": str(tmp_path),
            "OMNARA_SECRET_ENCRYPTION_KEYS": generate_ring("k1").serialise(),
            "OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY": "k1",
        }
    )
    async with postgres.fresh() as dsn:
        database = ConnectSettings(dsn=dsn, embedded=True)
        await set_up(database, await ring_of(settings, database), settings)
        with pytest.raises(WrongKeyRing, match="OMNARA_SECRET_ENCRYPTION_KEYS"):
            await set_up(database, await ring_of(given, database), given)
        (tmp_path / RING_FILE).write_text(generate_ring("k1").serialise())
        with pytest.raises(WrongKeyRing, match=str(tmp_path / RING_FILE)):
            await set_up(database, await ring_of(settings, database), settings)
