"""How commands call a running server: with the key and address of the settings, no longer than a person waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from omnara.cli.output import run
from omnara.client import Client
from omnara.errors import ConfigurationError
from omnara.settings import load

T = TypeVar("T")

__all__ = ["with_client"]


def with_client(work: Callable[[Client], Awaitable[T]]) -> T:
    """Run `work` with a client of the server at OMNARA_URL. Raises ConfigurationError without a key."""
    settings = load()
    if settings.api_key is None:
        raise ConfigurationError("OMNARA_API_KEY is not set; put a key of the server there (see `omnara keys --help`)")
    key = settings.api_key

    async def main() -> T:
        async with Client(settings.url, key, retry_for_s=2) as client:
            return await work(client)

    return run(main())
