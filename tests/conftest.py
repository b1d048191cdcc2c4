"""Fixtures that every test may use: a real Postgres server, and databases of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import structlog

from omnara.db.connection import ConnectSettings
from tests.support.postgres import PostgresForTests, postgres_for_tests

# Without this a logged exception shows every local of every frame, which takes seconds for each.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def postgres() -> AsyncIterator[PostgresForTests]:
    """The server, shared by all test processes of this machine."""
    async with postgres_for_tests() as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def database(postgres: PostgresForTests) -> AsyncIterator[str]:
    """The URL of a fresh database with the whole schema."""
    async with postgres.fresh() as dsn:
        yield dsn


@pytest_asyncio.fixture(loop_scope="session")
async def empty_database(postgres: PostgresForTests) -> AsyncIterator[str]:
    """The URL of a database without tables."""
    async with postgres.empty() as dsn:
        yield dsn


@pytest.fixture
def connect_settings(database: str) -> ConnectSettings:
    """Settings that lead to a fresh database with the whole schema."""
    return ConnectSettings(dsn=database)
