"""Fixtures that every test may use: a real Postgres server, and databases of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import structlog
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

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

# How long an example takes says nothing on a computer that stands still at times. What takes too long has its own test.
hypothesis_settings.register_profile(
    "patient", hypothesis_settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("patient")


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
