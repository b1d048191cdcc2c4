"""Many busy agents, for as long as a test wants, and the proof afterwards that no step was lost or repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from omnara.client import Client, Event
from omnara.domain.content import INTERRUPTED_TEXT
from omnara.testing import Answer, Conversation, Timing, call, say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster, chaos_script

LAST_WORDS = "all read"


class Load:
    """Agents that fetch page after page, each page once, until `end`. `delay_ms` is the model's time for an answer."""

    def __init__(self, cluster: Cluster, name: str, *, delay_ms: float = 250) -> None:
        self._cluster = cluster
        self._name = name
        self._timing = Timing(delay_ms=delay_ms)
        self._ended = False
        self._followers: list[asyncio.Task[list[Event]]] = []
        self.agents: list[Handle] = []

    async def begin(self, clients: Sequence[Client], agents: int) -> None:
        """Launch the agents, through these clients in turn."""
        self._cluster.model.script = self._script
        for number in range(agents):
            client = clients[number % len(clients)]
            self.agents.append(await self._cluster.agent(client, text=f"{self._name} {number}"))

    def _script(self, conversation: Conversation) -> Answer:
        text = conversation.first_user_text
        if not text.startswith(f"{self._name} "):
            return chaos_script(conversation)
        if self._ended:
            return say(LAST_WORDS)
        page = f"{self._name}-{text.split()[1]}-{conversation.turn}"
        return msgspec.structs.replace(call("web_fetch", self._cluster.fetch(page)), timing=self._timing)

    async def goes_on(self, *, within_s: float = 30.0) -> None:
        """Wait until every agent has made another model call."""
        await asyncio.gather(*(agent.asked(len(agent.requests) + 1, within_s=within_s) for agent in self.agents))

    def follow(self, agents: int) -> None:
        """Read the streams of so many agents from now on; `check` compares what came with the log."""
        self._followers = [asyncio.create_task(_follow(agent)) for agent in self.agents[:agents]]

    async def end(self) -> None:
        """Let every agent finish, and wait for it."""
        self._ended = True
        await asyncio.gather(*(agent.settled() for agent in self.agents))
        self._cluster.model.script = chaos_script

    async def check(self, *, undisturbed: bool = False) -> int:
        """Compare log, steps, model requests and page visits; returns how many steps were interrupted or released.

        `undisturbed`: no process died or lost patience, so nothing at all may have been repeated or interrupted.
        """
        broken = 0
        for agent, seen in zip(self.agents, await asyncio.gather(*self._followers), strict=False):
            assert [event.id for event in seen] == [event.id for event in await agent.events()]
        for number, agent in enumerate(self.agents):
            events = await agent.events()
            assert [event.sequence for event in events] == list(range(1, len(events) + 1))
            assert events[-1].text == LAST_WORDS
            outputs = sum(event.kind == "model_output" for event in events)
            states = await agent.step_states()
            lost = [kind for kind, state in states if state in ("interrupted", "released")]
            assert {state for _, state in states} <= {"succeeded", "interrupted", "released"}
            broken += len(lost)
            # Only the calls that were under way when something broke were made again.
            assert 0 <= len(agent.requests) - outputs <= lost.count("model"), (len(agent.requests), states)
            turns = [int(entry.turn) for entry in agent.requests]
            assert turns == sorted(turns), "no finished turn was asked for again"
            results = [event for event in events if event.kind == "tool_result"]
            assert len(results) == outputs - 1
            for turn, result in enumerate(results):
                hits = self._cluster.page.hits[f"{self._name}-{number}-{turn}"]
                assert hits == 1 or (hits == 0 and result.text == INTERRUPTED_TEXT), (hits, result)
        assert not (undisturbed and broken), await self._what_was_repeated()
        return broken

    async def _what_was_repeated(self) -> str:
        """The steps that did not succeed, by agent, and what the processes warned of: for a failure."""
        lines = ["steps were repeated"]
        for agent in self.agents:
            for step in await agent.steps():
                if step["state"] != "succeeded":
                    times = f"{step['started_at']:%H:%M:%S.%f} to {step['finished_at']:%H:%M:%S.%f}"
                    lines.append(f"{agent.key[:16]} step {step['number']} ({step['kind']}) {step['state']}, {times}")
        for replica in self._cluster.replicas:
            lines.append(f"--- {replica.name}, worker {replica.worker_id}")
            lines += replica.warnings()
        return "\n".join(lines)


async def _follow(agent: Handle) -> list[Event]:
    """Read an agent's stream to its last words, through whatever happens to the servers."""
    seen = []
    async with asyncio.timeout(300), agent.client.stream(agent.id) as events:
        async for event in events:
            if isinstance(event, Event):
                seen.append(event)
                if event.text == LAST_WORDS:
                    break
    return seen
