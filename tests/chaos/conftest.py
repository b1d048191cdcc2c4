"""One cluster for all tests that can share it. Each test starts the processes that it breaks and ends them itself.

Every test exists twice: with shrunk time constants, and marked `slow` with the defaults (`make chaos`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from omnara.client import Client
from omnara.db.embedded import EmbeddedPostgres
from tests.support.cluster import Cluster
from tests.support.own_directory import own_directory
from tests.support.postgres import PostgresForTests
from tests.support.times import DEFAULT, SHRUNK, Times

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell fixtures that the test has failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every chaos test its time constants."""
    if "times" in metafunc.fixturenames:
        slow = pytest.param(DEFAULT, id="default", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
        metafunc.parametrize("times", [pytest.param(SHRUNK, id="shrunk"), slow], scope="session", indirect=True)


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> Times:
    """The time constants of the servers."""
    chosen: Times = request.param
    return chosen


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared(
    postgres: PostgresForTests, tmp_path_factory: pytest.TempPathFactory, times: Times
) -> AsyncIterator[Cluster]:
    """A cluster with one API process, which stays."""
    async with postgres.fresh() as dsn, Cluster(dsn, tmp_path_factory.mktemp("cluster"), times) as cluster:
        (cluster.front,) = await cluster.start(roles="api")
        yield cluster


@pytest.fixture(name="own_directory")
def _own_directory() -> Iterator[Path]:
    with own_directory() as path:
        yield path


@pytest.fixture(scope="session")
def pg_bin() -> Path | None:
    """Where the Postgres programs are, when the tests are to use other ones than the wheel's."""
    given = os.environ.get("OMNARA_TEST_PG_BIN")
    return Path(given) if given else None


@pytest_asyncio.fixture(loop_scope="session")
async def own_postgres(own_directory: Path, pg_bin: Path | None) -> AsyncIterator[EmbeddedPostgres]:
    """A server that the test may restart; its socket stays where it is. Commits are kept unless the machine dies."""
    settings = {"synchronous_commit": "on"}
    server = EmbeddedPostgres(own_directory, bin_dir=pg_bin, durable=False, extra_settings=settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(shared: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """The shared cluster; what a test leaves running is ended without mercy, and every invariant is checked."""
    shared.model.reset()
    shared.page.reset()
    shared.agents.clear()
    try:
        yield shared
        if request.node.stash.get(FAILED, False):
            print(await shared.describe())
        await shared.verify()
    finally:
        shared.model.reset()
        await shared.discard(keep=(shared.front,))


@pytest.fixture
def client(cluster: Cluster) -> Client:
    """A client of the API process that stays."""
    return cluster.client(cluster.front)
