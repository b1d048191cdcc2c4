"""Several real server processes on one database, with everything outside of them that a test counts from.

The scripted model and the web page run in the test, so that what was asked for, and how often, is known without
believing the servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from omnara.access.tokens import TokenKind, generate
from omnara.client import Client
from omnara.db.checks import run_checks
from omnara.db.connection import ConnectSettings, ConnKind, connect
from omnara.testing import (
    Answer,
    Conversation,
    Fault,
    GatePoint,
    Match,
    ModelServer,
    Strictness,
    Text,
    embed,
    embedded,
    say,
)
from omnara.vault import generate_ring
from tests.support.agent_handle import Handle
from tests.support.counting_page import CountingPage
from tests.support.processes import ServerProcess, left_behind
from tests.support.times import Times
from tests.support.waiting import until

MODEL = "anthropic/scripted"
KEY_CHARS = 200


def chaos_script(conversation: Conversation) -> Answer:
    """The plan in the user's message; `{{attempt}}` in a text tells which request of that turn it answers."""
    answer = embedded(conversation)
    number = str(conversation.attempt)
    blocks = tuple(
        Text(block.text.replace("{{attempt}}", number)) if isinstance(block, Text) and not block.chunks else block
        for block in answer.blocks
    )
    return msgspec.structs.replace(answer, blocks=blocks)


class Cluster:
    """A database, a model, a web page, and the processes that a test starts. Use as a context manager.

    With an empty `dsn` the server makes its embedded database in `directory`; `connect` follows then.
    """

    def __init__(self, dsn: str, directory: Path, times: Times, **settings: str) -> None:
        self.dsn = self._given_dsn = dsn
        self.directory = directory
        self.times = times
        self.key = generate(TokenKind.PERSONAL).text
        self.model = ModelServer(chaos_script, strict=Strictness(models=None))
        self.page = CountingPage()
        self.sql: asyncpg.Pool
        self.replicas: list[ServerProcess] = []
        self.agents: list[Handle] = []
        self.front: ServerProcess
        self._kept: tuple[ServerProcess, ...] = ()
        self._more: dict[str, Mapping[str, str]] = {}
        self._settings = settings
        self._ring = generate_ring()
        self._numbers = itertools.count(1)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Cluster:
        await self._stack.enter_async_context(self.model)
        await self._stack.enter_async_context(self.page)
        if self.dsn:
            await self.connect(self.dsn)
        self._stack.push_async_callback(self._end)
        return self

    async def connect(self, dsn: str) -> None:
        """Look into this database from now on."""
        self.dsn = dsn
        self.sql = await self._stack.enter_async_context(asyncpg.create_pool(dsn, min_size=0, max_size=8))

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.aclose()

    async def _end(self) -> None:
        self._kept = ()
        await self.discard()

    async def discard(self, *, keep: Sequence[ServerProcess] = ()) -> None:
        """Kill all processes but these and the kept one. Fails when one of them has left another behind."""
        ended = [replica for replica in self.replicas if replica not in (*keep, *self._kept)]
        self.replicas = [replica for replica in self.replicas if replica not in ended]
        for replica in ended:
            replica.kill()
            replica.probes.close()
        if ended:
            await until(lambda: not left_behind(ended), "no process is left behind", limit_s=20)

    # --- processes --------------------------------------------------------------------------------------

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """The settings of a process of this cluster; `more` are variables without their prefix."""
        values = {
            "OMNARA_DATABASE_URL": self._given_dsn,
            "OMNARA_DATA_DIR": str(self.directory),
            "OMNARA_SECRET_ENCRYPTION_KEYS": self._ring.serialise(),
            "OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY": self._ring.active,
            "OMNARA_BOOTSTRAP_API_KEY": self.key,
            "OMNARA_ALLOWED_PRIVATE_HOSTS": "127.0.0.1",
            "ANTHROPIC_API_KEY": "scripted",
            "ANTHROPIC_BASE_URL": self.model.url,
        }
        return values | self.times.env | self._settings | {f"OMNARA_{name}": value for name, value in more.items()}

    def make(
        self,
        roles: str = "worker,maintenance",
        *,
        ports: tuple[int, int] | None = None,
        settings: Mapping[str, str] | None = None,
        around: Mapping[str, str] | None = None,
    ) -> ServerProcess:
        """Prepare a process without starting it. `settings`: variables without their prefix; `around`: any others."""
        name = f"{next(self._numbers)}-{roles.split(',')[0]}"
        environment = self.environment({"ROLES": roles, **(settings or {})}) | dict(around or {})
        self._more[name] = {**(settings or {}), **(around or {})}
        replica = ServerProcess(name, self.directory, environment, ports=ports)
        self.replicas.append(replica)
        return replica

    async def start(
        self,
        count: int = 1,
        roles: str = "worker,maintenance",
        settings: Mapping[str, str] | None = None,
        around: Mapping[str, str] | None = None,
    ) -> list[ServerProcess]:
        """Start processes at once and wait until all are ready. A kept worker that nobody took is ended first."""
        kept, self._kept = self._kept, ()
        for worker in kept:
            worker.kill()
        made = [self.make(roles, settings=settings, around=around) for _ in range(count)]
        for replica in made:
            replica.launch()
        await asyncio.gather(*(replica.ready() for replica in made))
        return made

    def keep(self, worker: ServerProcess) -> None:
        """Leave this worker running for the next test: the only one, and one that has proved itself."""
        assert [one for one in self.replicas if one.alive and one is not self.front] == [worker]
        self._kept = (worker,)

    async def only_worker(self, settings: Mapping[str, str] | None = None) -> ServerProcess:
        """The worker that an earlier test has left, if it has these settings, or a new one: it takes all work."""
        for kept in self._kept:
            if self._more[kept.name] == (settings or {}):
                self._kept = ()
                return kept
        return (await self.start(settings=settings))[0]

    async def end(self, *replicas: ServerProcess) -> None:
        """Stop processes in order, at the same time; each must end with 0."""
        codes = await asyncio.gather(*(replica.stop() for replica in replicas))
        assert codes == [0] * len(replicas), [replica.log_tail() for replica in replicas]

    async def runner_of(self, agent: Handle, *, within_s: float = 20.0) -> ServerProcess:
        """The process that holds the agent's claim, once some does."""
        found: list[ServerProcess] = []

        async def there() -> bool:
            worker = (await agent.hot())["worker_id"]
            found[:] = [one for one in self.replicas if one.alive and worker is not None and one.is_worker(worker)]
            return bool(found)

        await until(there, "somebody runs the agent", limit_s=within_s)
        return found[0]

    # --- agents -----------------------------------------------------------------------------------------

    def client(self, replica: ServerProcess, *, retry_for_s: float = 60.0) -> Client:
        """A client of one process, which ends with the cluster."""
        made = Client(replica.url, self.key, retry_for_s=retry_for_s)
        self._stack.push_async_callback(made.close)
        return made

    async def agent(
        self,
        client: Client,
        *answers: Answer,
        loop: bool = False,
        tools: Sequence[str | Mapping[str, Any]] = ("web_fetch",),
        text: str = "agent",
        prompt: str = "You are under test.",
        gate: GatePoint | None = None,
        gate_times: int = 1,
        fault: Fault | None = None,
        fault_times: int = 1,
    ) -> Handle:
        """Launch an agent whose model gives these answers. Gate and fault are for its first requests."""
        # The model server knows a conversation by the head of its first message, which must not depend on what follows.
        head = f"{text} {next(self._numbers)} ".ljust(KEY_CHARS, ".")
        message = embed(*(answers or (say("fine"),)), loop=loop, text=head)
        match = Match(key=head)
        held = None if gate is None else self.model.gate(gate, times=gate_times, match=match)
        if fault is not None:
            self.model.faults.push(fault, times=fault_times, match=match)
        launched = await client.launch(model=MODEL, system_prompt=prompt, tools=tools, message=message)
        made = Handle(self, client, launched.id, head, held)
        self.agents.append(made)
        return made

    def fetch(self, name: str) -> dict[str, str]:
        """The arguments of a `web_fetch` of a counted page."""
        return {"url": f"{self.page.url}/{name}"}

    @contextlib.asynccontextmanager
    async def no_new_turns(self) -> AsyncIterator[None]:
        """Hold up every begin that opens a turn; claims, and saves of what runs, go on."""
        connection = await asyncpg.connect(self.dsn)
        try:
            async with connection.transaction():
                await connection.execute("lock table turns in share mode")
                yield
        finally:
            await connection.close()

    async def waits_for_a_lock(self) -> bool:
        """Whether a statement of the engine waits for a lock in the database."""
        query = """select exists (select from pg_stat_activity where wait_event_type = 'Lock'
                                  and application_name like 'omnara:%' and datname = current_database())"""
        return bool(await self.sql.fetchval(query))

    async def now(self) -> Any:
        """The database's clock."""
        return await self.sql.fetchval("select clock_timestamp()")

    async def worker_state(self, worker_id: UUID) -> str:
        """The state of a worker's row."""
        return str(await self.sql.fetchval("select state from workers where id = $1", worker_id))

    async def describe(self) -> str:
        """What is to be known of this test's agents that are not at rest, and the ends of the logs; for failures."""
        lines = []
        for agent in self.agents:
            status = await self.sql.fetchval("select status from agents_overview where agent_id = $1", agent.uuid)
            if status != "idle":
                asked = [(entry.turn, entry.outcome) for entry in agent.requests]
                states = await agent.step_states()
                lines.append(f"{agent.key[:12]} {status} {dict(await agent.hot())}\n  {states[-8:]}\n  {asked[-8:]}")
        rows = await self.sql.fetch("select id, state from workers order by started_at desc limit 12")
        lines += [f"worker {row['id']} {row['state']}" for row in rows]
        lines += [f"--- {one.name} {'alive' if one.alive else 'dead'}\n{one.log_tail(5)}" for one in self.replicas]
        return "\n".join(lines)

    # --- what must hold at any time ---------------------------------------------------------------------

    async def verify(self) -> None:
        """Check every invariant that can be seen from outside, and forget gates, faults and the model's log."""
        self.model.gates.clear()
        self.model.faults.clear()
        connection = await connect(ConnectSettings(dsn=self.dsn), ConnKind.ADMIN)
        try:
            broken = [check for check in await run_checks(connection) if check.broken]
        finally:
            connection.terminate()
        assert not broken, broken
        bad = [entry for entry in self.model.log.entries if entry.outcome in ("refused", "script_error")]
        assert not bad, [(entry.status, entry.detail) for entry in bad]
        tracebacks = {replica.name: replica.tracebacks() for replica in self.replicas if replica.tracebacks()}
        assert not tracebacks, tracebacks
