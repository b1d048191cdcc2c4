"""The person and the program on the client's side: answer the agent's calls and its question, whatever dies meanwhile.

Every call is executed once and its answer kept, so that an answer whose fate is unknown is sent again, not computed
again; the server takes the first one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec

from omnara.cli.demo.folder import Folder
from omnara.client import ApiError, Client, Delta, Event, Interaction, ServerUnreachable, turn_is_over
from omnara.client.errors import is_retryable_status
from omnara.clock import Backoff

__all__ = ["Hands"]

Ask = Callable[[str, list[str]], Awaitable[int]]
"""Puts a question with options to the user and returns the index of the chosen option."""

_CUSTOM: Final = frozenset({"list_files", "get_file"})


class Hands:
    """Follows one agent to the end of its turn. `events` are the durable events in order, as they were streamed."""

    def __init__(self, client: Client, agent: str, folder: Folder, *, ask: Ask, show: Callable[[Event], None]) -> None:
        self._client = client
        self._agent = agent
        self._folder = folder
        self._ask = ask
        self._show = show
        self.events: list[Event] = []
        self.executed: Counter[str] = Counter()
        self.refused_answers = 0
        self.reconnects = 0
        self.deltas = 0
        self.done = False
        self._changed = asyncio.Event()

    @property
    def outputs(self) -> int:
        """Model outputs seen so far."""
        return sum(event.kind == "model_output" for event in self.events)

    async def until(self, reached: Callable[[Hands], bool]) -> None:
        """Wait until `reached(self)`; looked at whenever something arrives."""
        while not reached(self):
            self._changed.clear()
            await self._changed.wait()

    async def follow(self) -> Event:
        """Answer what comes until the turn is over, and return its last event. Errors of an answer end it."""
        async with asyncio.TaskGroup() as group:
            return await self._read(group)

    async def _read(self, group: asyncio.TaskGroup) -> Event:
        async with self._client.stream(self._agent, deltas=True) as stream:
            async for item in stream:
                self.reconnects = stream.reconnects
                # Waiters run only after this handler has gone on to its next wait, so they see what it has done.
                self._changed.set()
                if not isinstance(item, Event):
                    self.deltas += isinstance(item, Delta)
                    continue
                self.events.append(item)
                self._show(item)
                for call in item.tool_calls:
                    work = self._work(call)
                    if work is not None:
                        group.create_task(work)
                if item.kind == "model_output" and turn_is_over(self.events):
                    self.done = True
                    return item
        raise AssertionError("a stream has no end of its own")

    def _work(self, call: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        if call["name"] in _CUSTOM:
            return self._run(call)
        return self._answer_question(call) if call["name"] == "ask_question" else None

    async def _run(self, call: dict[str, Any]) -> None:
        call_id = str(call["tool_call_id"])
        self.executed[call_id] += 1
        text, failed = self._folder.answer(str(call["name"]), call["input"])
        await self._insist(lambda: self._client.answer_call(self._agent, call_id, text, failed=failed))

    async def _answer_question(self, call: dict[str, Any]) -> None:
        interaction = await self._insist(self._open_question)
        if interaction is None:
            return
        answers = []
        for question in interaction.request["questions"]:
            options = [str(option["label"]) for option in question["options"] if not option.get("allows_text")]
            answers.append({"option_indices": [await self._ask(str(question["prompt"]), options)]})
        await self._insist(lambda: self._client.resolve(self._agent, interaction.id, answers))

    async def _open_question(self) -> Interaction | None:
        """Return the open question; None when somebody else has answered it meanwhile."""
        found = [one for one in await self._client.interactions(self._agent) if one.kind == "question"]
        return found[0] if found else None

    async def _insist(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Send until the server has taken it. A conflict means that an earlier sending arrived after all."""
        backoff = Backoff(0.05, 1.0)
        while True:
            try:
                return await send()
            except ServerUnreachable:
                await backoff.wait()
            except ApiError as error:
                if error.status == 409:
                    self.refused_answers += 1
                    return None
                if not is_retryable_status(error.status):
                    raise
                await backoff.wait()


def report_in(event: Event) -> dict[str, Any] | None:
    """Return the JSON object in an agent's last words, or None when there is none."""
    text = event.text
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        return None
    try:
        found = msgspec.json.decode(text[start : end + 1])
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) else None
