"""What the user has said and the server has not taken yet: sent in order, over restarts of the server, exactly once.

A message carries an Idempotency-Key and an answer to a form is accepted again from the same caller, so both may be
repeated until the server has said yes or no.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from omnara.client import ApiError, Client, ServerUnreachable
from omnara.client.errors import is_retryable_status
from omnara.clock import Backoff

__all__ = ["Message", "Outbox", "Resolution", "is_away"]

LIMIT: Final = 256
"""Lines that wait for a server that is away; more are refused."""
RETRY_S: Final = (0.2, 3.0)


class Message(msgspec.Struct, frozen=True):
    """Words and files for the agent. `key` is its Idempotency-Key, by which its event is recognized."""

    key: str
    text: str
    attachments: tuple[dict[str, Any], ...] = ()
    steering: bool = False
    cancels_forms: bool = False


class Resolution(msgspec.Struct, frozen=True):
    """The answers to a form."""

    interaction: str
    answers: tuple[dict[str, Any], ...]


Item = Message | Resolution


def is_away(error: ApiError | ServerUnreachable) -> bool:
    """Whether the same request may succeed when the server is back."""
    return isinstance(error, ServerUnreachable) or is_retryable_status(error.status)


class Outbox:
    """A bounded queue with one sender, `run`.

    `on_taken` hears what the server took, `on_refused` what it did not take, and why.
    """

    def __init__(
        self,
        client: Client,
        agent: str,
        on_taken: Callable[[Item], None],
        on_refused: Callable[[Item, str], None],
    ) -> None:
        self._client = client
        self._agent = agent
        self._on_taken = on_taken
        self._on_refused = on_refused
        self._queue: asyncio.Queue[Item] = asyncio.Queue(LIMIT)
        self._sending = 0

    @property
    def unsent(self) -> int:
        """How many items the server has not taken yet."""
        return self._queue.qsize() + self._sending

    def put(self, item: Item) -> bool:
        """Queue an item; False when too many wait already."""
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull:
            return False
        return True

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            item = await self._queue.get()
            self._sending = 1
            try:
                await self._deliver(item)
            finally:
                self._sending = 0

    async def _deliver(self, item: Item) -> None:
        backoff = Backoff(*RETRY_S)
        while True:
            try:
                await self._send(item)
            except (ApiError, ServerUnreachable) as error:
                if is_away(error):
                    await backoff.wait()
                    continue
                self._on_refused(item, error.text if isinstance(error, ApiError) else str(error))
            else:
                self._on_taken(item)
            return

    async def _send(self, item: Item) -> None:
        if isinstance(item, Resolution):
            await self._client.resolve(self._agent, item.interaction, item.answers)
            return
        await self._client.send(
            self._agent,
            item.text,
            attachments=item.attachments,
            steering=item.steering,
            cancel_open_interactions=item.cancels_forms,
            key=item.key,
        )
