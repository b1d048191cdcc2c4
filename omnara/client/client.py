"""The client of an Omnara server: agents in a few calls, and their events as an async iterator.

It holds no state about agents: every method takes an agent's id, so any process can go on where another stopped.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from omnara.client.errors import ApiError
from omnara.client.machines import Machines
from omnara.client.stream import BACKOFF_S, ConnectionChange, EventStream
from omnara.client.transport import Transport
from omnara.client.types import Agent, AgentStatus, Event, Input, Interaction, Launched, Links, ToolCall

__all__ = ["Client"]


class _Agents(msgspec.Struct):
    data: list[Agent]
    next_cursor: str | None = None


class _Events(msgspec.Struct):
    data: list[Event]
    has_more: bool
    next_after_sequence: int


class _Newest(msgspec.Struct):
    data: list[Event]


class _InputEnvelope(msgspec.Struct):
    agent_input: Input


class _Named(msgspec.Struct):
    id: str


class _Me(msgspec.Struct):
    orgs: list[_Named]


class Client:
    """Talks to the server at `base_url` with `api_key`. Close it, or use it in `async with`.

    `retry_for_s`: how long requests that may be repeated are repeated while the server is away. All methods raise
    ApiError for an error answer and ServerUnreachable when there is none in time.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        session: aiohttp.ClientSession | None = None,
        timeout_s: float = 30.0,
        retry_for_s: float = 60.0,
    ) -> None:
        self._http = Transport(base_url, api_key, session=session, timeout_s=timeout_s, retry_for_s=retry_for_s)
        self._links: dict[str, Links] = {}
        self._project: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Streams that are still read end with an error."""
        await self._http.close()

    # --- the flat routes ----------------------------------------------------------------------------------

    async def launch(
        self,
        *,
        model: str,
        system_prompt: str,
        tools: Sequence[str | Mapping[str, Any]] = (),
        machine_sources: Sequence[Mapping[str, Any]] = (),
        message: str | None = None,
        name: str | None = None,
        temperature: float | None = None,
        key: str | None = None,
    ) -> Launched:
        """Start an agent and return at once. `tools`: names of built-in tools, or objects with name, description,
        input_schema and permission. `machine_sources`: as in a config, {"machine": "laptop"} or {"pool": "cloud"}.
        `key` is the Idempotency-Key (default: a new one), so a retry cannot launch twice.
        """
        optional = {"message": message, "name": name, "temperature": temperature}
        body: dict[str, Any] = {"model": model, "system_prompt": system_prompt, "tools": list(tools)}
        body |= {field: value for field, value in optional.items() if value is not None}
        if machine_sources:
            body["machine_sources"] = list(machine_sources)
        launched = await self._http.request("POST", "/agents", Launched, body=body, key=key or _new_key())
        self._links[launched.id] = launched.links
        return launched

    async def status(self, agent: str) -> AgentStatus:
        """Return what the agent is doing and what it said last."""
        return await self._http.request("GET", f"/agents/{agent}", AgentStatus)

    async def agents(self, *, status: str | None = None) -> list[Agent]:
        """Return the agents of the key's default project, newest first: those in `status`, or all but archived ones."""
        return [agent async for agent in self.each_agent(status=status)]

    async def each_agent(self, *, status: str | None = None) -> AsyncIterator[Agent]:
        """Yield what `agents` returns, a page at a time: the next one is asked for when this one is used up."""
        params = {"limit": "100"} if status is None else {"limit": "100", "status": status}
        while True:
            page = await self._http.request("GET", "/agents", _Agents, params=params)
            for agent in page.data:
                self._links[agent.id] = agent.links
                yield agent
            if page.next_cursor is None:
                return
            params["cursor"] = page.next_cursor

    async def pause(self, agent: str) -> AgentStatus:
        """Let the running step finish, then hold. Messages are still accepted."""
        return await self._http.request("POST", f"/agents/{agent}/pause", AgentStatus)

    async def resume(self, agent: str, *, force: bool = False, restart: bool = False) -> AgentStatus:
        """Go on from the last saved step. A crashed agent needs `force`, or `restart` from the last message."""
        body = {name: True for name, wanted in (("force", force), ("restart", restart)) if wanted}
        return await self._http.request("POST", f"/agents/{agent}/resume", AgentStatus, body=body)

    async def delete(self, agent: str) -> None:
        """Stop the agent and archive it; its log stays readable."""
        await self._http.request("DELETE", f"/agents/{agent}", dict[str, Any])

    # --- one agent in the scoped API ----------------------------------------------------------------------

    async def send(
        self,
        agent: str,
        text: str,
        *,
        attachments: Sequence[Mapping[str, Any]] = (),
        steering: bool = False,
        cancel_open_interactions: bool = False,
        key: str | None = None,
    ) -> Input:
        """Send a message: queued for its own turn, or `steering` the running one. Safe to repeat (see `launch`).

        `attachments` are further content blocks, such as `file_block` makes, put before the text. The event of the
        message carries `key` as `input_idempotency_key`.
        """
        words = [{"type": "text", "text": text}] if text or not attachments else []
        body: dict[str, Any] = {"content_blocks": [*attachments, *words]}
        if steering:
            body["delivery_mode"] = "steering"
        if cancel_open_interactions:
            body["cancel_open_interactions"] = True
        path = (await self.links(agent)).inputs
        return (await self._http.request("POST", path, _InputEnvelope, body=body, key=key or _new_key())).agent_input

    async def events(self, agent: str, *, after: int = 0) -> AsyncIterator[Event]:
        """Yield the events after sequence `after` that are in the log now, oldest first, page by page."""
        path = (await self.links(agent)).events
        while True:
            params = {"after_sequence": str(after), "limit": "500"}
            page = await self._http.request("GET", path, _Events, params=params)
            for event in page.data:
                yield event
            after = page.next_after_sequence
            if not page.has_more:
                return

    async def latest_events(self, agent: str, *, limit: int = 100) -> list[Event]:
        """Return the newest `limit` (at most 500) events of the log, oldest first."""
        params = {"before_sequence": "0", "limit": str(limit)}
        return (await self._http.request("GET", (await self.links(agent)).events, _Newest, params=params)).data

    def stream(
        self,
        agent: str,
        *,
        after: int = 0,
        deltas: bool = False,
        on_connection: ConnectionChange | None = None,
        max_wait_s: float = BACKOFF_S[1],
    ) -> EventStream:
        """Return the stream of events after `after`, which ends only when the agent is archived; with `deltas` also
        what is said before it is saved.

        `on_connection` hears of lost and regained connections; `max_wait_s` is the longest wait before another try.
        """

        async def find_path() -> str:
            return (await self.links(agent)).stream

        async def is_archived() -> bool:
            return (await self.status(agent)).status == "archived"

        return EventStream(
            self._http,
            find_path,
            is_archived,
            after=after,
            deltas=deltas,
            backoff_s=(min(BACKOFF_S[0], max_wait_s), max_wait_s),
            on_connection=on_connection,
        )

    async def tool_calls(self, agent: str, *, state: str | None = None) -> list[ToolCall]:
        """Return all tool calls of the agent, oldest first; only those in `state` if given."""
        calls = await self._http.pages((await self.links(agent)).tool_calls, ToolCall)
        return [call for call in calls if state is None or call.state == state]

    async def answer_call(self, agent: str, call: str, text: str, *, failed: bool = False) -> None:
        """Answer a custom tool call. The first answer counts: a later one is ApiError 409 `conflict`. Not repeated."""
        blocks = [{"type": "text", "text": text}] if text else []
        body = {"outcome": "failed" if failed else "succeeded", "content_blocks": blocks}
        path = f"{(await self.links(agent)).tool_calls}/{call}/result"
        await self._http.request("POST", path, dict[str, Any], body=body)

    async def interactions(self, agent: str, *, state: str | None = "open") -> list[Interaction]:
        """Return the questions and permission requests, oldest first; `state=None` for all."""
        found = await self._http.pages((await self.links(agent)).interactions, Interaction)
        return [one for one in found if state is None or one.state == state]

    async def resolve(self, agent: str, interaction: str, answers: Sequence[Mapping[str, Any]]) -> Interaction:
        """Answer an interaction, one answer per question. The same answers by the same caller again are accepted."""
        path = f"{(await self.links(agent)).interactions}/{interaction}/resolve"
        return await self._http.request("POST", path, Interaction, body={"answers": list(answers)})

    async def cancel(self, agent: str) -> bool:
        """Stop the current turn. Returns whether there was anything to stop; queued messages start next."""
        path = (await self.links(agent)).events.removesuffix("/events") + "/cancel"
        answer = await self._http.request("POST", path, dict[str, Any], body={})
        return bool(answer.get("affected"))

    # --- the project --------------------------------------------------------------------------------------

    async def project_path(self) -> str:
        """Return `/api/v1/orgs/…/projects/…` of the oldest project that this key can see. ApiError 404 if none."""
        if self._project is None:
            for org in (await self._http.request("GET", "/api/v1/me", _Me)).orgs:
                projects = await self._http.pages(f"/api/v1/orgs/{org.id}/projects", _Named)
                if projects:
                    self._project = f"/api/v1/orgs/{org.id}/projects/{projects[-1].id}"
                    break
            else:
                raise ApiError(404, "not_found", "this key can see no project")
        return self._project

    @property
    def machines(self) -> Machines:
        """The machines of the project's organization."""
        return Machines(self._http, self.project_path)

    async def links(self, agent: str) -> Links:
        """Return the agent's paths in the scoped API; asked of the server once per agent."""
        found = self._links.get(agent)
        if found is None:
            found = (await self.status(agent)).links or _links(f"{await self.project_path()}/agents/{agent}")
            self._links[agent] = found
        return found


def _links(base: str) -> Links:
    return Links(
        f"{base}/inputs", f"{base}/events", f"{base}/events/stream", f"{base}/tool-calls", f"{base}/interactions"
    )


def _new_key() -> str:
    return uuid.uuid4().hex
