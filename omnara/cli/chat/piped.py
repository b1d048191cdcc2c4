"""A chat without a terminal: standard input is one message, the answer's text is the output, the exit code tells.

Nothing else goes to standard output, so that the answer can be the input of the next program.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Final

import click

from omnara.cli.chat.activity import HELD
from omnara.cli.chat.draft import answer_text
from omnara.cli.chat.outbox import is_away
from omnara.client import ApiError, Client, Event, ServerUnreachable
from omnara.visible import visible

__all__ = ["TurnFailed", "ask"]

LOOK_S: Final = 2.0
"""How often a silent agent is looked at: a form, a pause or a crash shows in no event."""


class TurnFailed(click.ClickException):
    """The turn did not end with an answer; exit code 1."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message, lines=True))


class _Turn:
    """The turn that our message opened, followed in the log. Source: api.md §15.

    Messages are answered in order, so the first output without calls after ours is its answer; also when somebody
    steers in between, which the log shows as another turn.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._begun = False
        self._texts: list[str] = []
        self.over = False

    def take(self, event: Event) -> None:
        """Take the next event. Raises TurnFailed when the turn ended without an answer."""
        if not self._begun:
            self._begun = event.input_idempotency_key == self._key
            return
        if event.kind == "agent_input" and event.input_kind == "control":
            raise TurnFailed("the turn was stopped")
        if event.kind == "model_output":
            self._output(event)

    def _output(self, event: Event) -> None:
        if event.stop_reason == "error":
            errors = [str(block.get("text")) for block in event.content_blocks if block.get("type") == "error"]
            raise TurnFailed("; ".join(errors) or "the model call failed")
        if event.stop_reason in ("refusal", "content_filter"):
            raise TurnFailed(f"no answer ({event.stop_reason}) {answer_text(event)}".strip())
        if event.tool_calls:
            self._texts.clear()
            return
        self._texts.append(answer_text(event))
        # What was cut at the length limit goes on in the next output, in mid-sentence.
        self.over = event.stop_reason != "max_tokens"

    @property
    def answer(self) -> str:
        """The text of the answer."""
        return "".join(self._texts)


async def ask(client: Client, agent: str, text: str) -> str:
    """Send `text`, wait until its turn is over and return the answer. Raises TurnFailed and ClientError.

    Cancellation leaves the agent to itself.
    """
    latest = await client.latest_events(agent, limit=1)
    turn = _Turn(key := uuid.uuid4().hex)
    await client.send(agent, text, key=key)
    follow = asyncio.create_task(_follow(client, agent, turn, after=latest[-1].sequence if latest else 0))
    watch = asyncio.create_task(_watch(client, agent))
    try:
        done, _ = await asyncio.wait((follow, watch), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        follow.cancel()
        watch.cancel()
        await asyncio.gather(follow, watch, return_exceptions=True)
    return turn.answer


async def _follow(client: Client, agent: str, turn: _Turn, *, after: int) -> None:
    async with client.stream(agent, after=after) as items:
        async for item in items:
            if isinstance(item, Event):
                turn.take(item)
                if turn.over:
                    return


async def _watch(client: Client, agent: str) -> None:
    """Raise TurnFailed when the agent waits for a person, or is held."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            await _look(client, agent)
        except (ApiError, ServerUnreachable) as error:
            if not is_away(error):
                raise


async def _look(client: Client, agent: str) -> None:
    status = await client.status(agent)
    if status.status in HELD:
        raise TurnFailed(HELD[status.status])
    if status.status == "waiting" and (forms := await client.interactions(agent)):
        title = str(forms[0].request.get("title", "a question"))
        raise TurnFailed(f"the agent asks and waits: {title} Answer it with: omnara chat {agent}")
