"""A real server process on a given database, for tests that go through the front door."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from omnara.access.tokens import TokenKind, generate
from omnara.cli.demo.server import ServerProcess
from omnara.testing.server import ModelServer
from omnara.vault import generate_ring


class Served(msgspec.Struct, frozen=True):
    """A running server, the key that it accepts, and the settings that it was started with."""

    process: ServerProcess
    key: str
    environment: dict[str, str]

    @property
    def url(self) -> str:
        """The API's base URL."""
        return self.process.url


def environment_for(dsn: str, data_dir: Path, model: ModelServer | None) -> dict[str, str]:
    """Settings for a server on `dsn`, with the scripted model as provider `anthropic`."""
    ring = generate_ring("k1")
    values = {
        "OMNARA_DATABASE_URL": dsn,
        "OMNARA_DATA_DIR": str(data_dir),
        "OMNARA_SECRET_ENCRYPTION_KEYS": ring.serialise(),
        "OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY": "k1",
        "OMNARA_BOOTSTRAP_API_KEY": generate(TokenKind.PERSONAL).text,
        "OMNARA_DEATH_GRACE": "0",
        "OMNARA_WORKER_DRAIN_TIMEOUT": "5",
        # What would be made on the engine stays there when the database is gone.
        "OMNARA_DOCKER_HOST": "off",
    }
    if model is not None:
        values["ANTHROPIC_API_KEY"] = "scripted"
        values["ANTHROPIC_BASE_URL"] = model.url
        values["OMNARA_ALLOWED_PRIVATE_HOSTS"] = model.url.removeprefix("http://")
    return values


@contextlib.asynccontextmanager
async def served(
    dsn: str, directory: Path, model: ModelServer | None = None, extra: Mapping[str, str] | None = None
) -> AsyncIterator[Served]:
    """Run a server for the block; it must stop with exit code 0, else the test fails with its log."""
    environment = environment_for(dsn, directory, model) | dict(extra or {})
    process = ServerProcess(environment, directory / "server.log")
    try:
        await process.start()
        yield Served(process, environment["OMNARA_BOOTSTRAP_API_KEY"], environment)
        code = await process.stop()
        assert code == 0, process.log_tail()
    finally:
        process.kill()
