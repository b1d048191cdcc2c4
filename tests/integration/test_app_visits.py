"""Commands beside servers that start, and the other way round: who comes second waits and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from omnara.app import database as database_module
from omnara.app import first_start
from omnara.app.database import bring_up_to_date, open_database, visit_database
from omnara.app.first_start import set_up, visit_set_up
from omnara.app.keyring import ring_of
from omnara.db.embedded.datadir import DirectoryLock
from omnara.engine.bootstrap import create_key
from omnara.errors import ConfigurationError, Unavailable
from omnara.settings import Settings, load
from tests.integration.test_db_embedded import BIN
from tests.support.own_directory import own_directory
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until


@pytest.fixture
def root() -> Iterator[Path]:
    """Where the embedded database is."""
    with own_directory() as path:
        yield path


def settings_of(root: Path) -> Settings:
    return load({"OMNARA_DATA_DIR": str(root)} | ({"OMNARA_POSTGRES_BIN": BIN} if BIN else {}))


async def serve(settings: Settings, over: asyncio.Event) -> None:
    """The part of a server's life that its database sees."""
    async with open_database(settings) as database:
        await bring_up_to_date(database)
        await set_up(database, await ring_of(settings, database), settings)
        await over.wait()


async def test_commands_and_starting_servers_wait_for_each_other(root: Path) -> None:
    settings, over = settings_of(root), asyncio.Event()
    lock = root / "omnara.lock"

    def told(logs: Sequence[Mapping[str, Any]], what: str) -> bool:
        return any(line["event"] == f"waiting for {what}" for line in logs)

    with capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            group.create_task(serve(settings, over))
            await until(lock.exists, "the server has begun")
            async with asyncio.timeout(30), visit_set_up(settings) as (_, pool):
                _, key = await create_key(pool, "early")
                assert key.name == "early"
                assert "visiting" not in lock.read_text(), "the server's own database was used"
            over.set()
    assert told(logs, "the server that is starting the embedded database")

    with capture_logs() as logs:
        async with asyncio.TaskGroup() as group, asyncio.timeout(30):
            async with visit_database(settings):
                assert "visiting" in lock.read_text(), "the command has started it for itself"
                serving = group.create_task(serve(settings, over))
                await until(lambda: told(logs, "a command that uses the embedded database"), "the server waits")
            await serving
    assert "visiting" not in lock.read_text()


async def test_a_command_gives_up_on_a_server_that_never_answers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "WAIT_FOR_DATABASE_S", 0.0)
    settings = settings_of(root)
    root.mkdir()
    lock = DirectoryLock(root)
    lock.take()
    with pytest.raises(Unavailable, match="does not answer"):
        async with visit_database(settings):
            pass
    with pytest.raises(ConfigurationError, match="in use by another omnara process"):
        async with open_database(settings):
            pass
    lock.give_up()
    # A start that went no further has left nothing to work on, and a command makes nothing.
    with pytest.raises(ConfigurationError, match="start `omnara serve` once"):
        async with visit_database(settings):
            pass
    assert not (root / "pgdata").exists()


async def test_a_database_that_nobody_sets_up_is_told(
    postgres: PostgresForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_start, "SET_UP_WAITS_S", 0.0)
    async with postgres.empty() as dsn:
        with pytest.raises(ConfigurationError, match="nobody has set the database up"):
            async with visit_set_up(load({"OMNARA_DATABASE_URL": dsn})):
                pass
