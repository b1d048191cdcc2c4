"""Running the server as a command: what `omnara mock-model` does once its options are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omnara.testing.answer import Timing
from omnara.testing.faults import COMMON_TROUBLE
from omnara.testing.script import Script, embedded, fixed
from omnara.testing.server import ModelServer
from omnara.testing.strict import Strictness


async def run_mock_model(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    delay_ms: float = 0,
    tokens: int | None = None,
    token_delay_ms: float = 0,
    script: Script | None = None,
    errors_every: int = 0,
    strict: bool = True,
    fast: bool = False,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until cancelled; `ready` is called with the base URL once requests are accepted.

    `delay_ms` passes before each answer, `token_delay_ms` between the `tokens` deltas of a text. Without a
    `script`, answers have `tokens` words if that is given and else follow the plan in the user's message or
    echo it. Each `errors_every`-th request meets trouble that is worth a retry (429, 529, a cut stream, an
    error inside the stream, in rotation); 0: none. `strict` refuses what the real providers refuse, under
    any model name and key; `fast` is for benches and implies not strict. Raises `OSError` when the address
    is taken. Cancellation stops the server and closes its connections.
    """
    timing = Timing(delay_ms=delay_ms, tokens=tokens, token_ms=token_delay_ms)
    chosen = script or (embedded if tokens is None else fixed(words(tokens)))
    server = ModelServer(
        chosen,
        host=host,
        port=port,
        strict=Strictness(models=None),
        lenient=not strict,
        fast=fast,
        timing=timing,
    )
    server.faults.every(errors_every, *COMMON_TROUBLE)
    async with server:
        ready(server.url)
        await asyncio.Event().wait()


def words(count: int) -> str:
    """Return a text of `count` words of equal length, so that as many deltas hold one word each."""
    return "".join(f"w{number % 1000:03d} " for number in range(count))
