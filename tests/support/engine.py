"""The engine without HTTP: real workers on a real database, a model that is a Python function, agents made by SQL.

Several workers in one test stand for several replicas: each has its own identity thread, connections and queue, and
knows the others through Postgres alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from omnara.clock import Deadline
from omnara.db.bus import LocalBus
from omnara.db.checks import run_checks
from omnara.db.connection import ConnectSettings, ConnKind
from omnara.db.dedicated import Dedicated
from omnara.db.pool import ApiPool
from omnara.domain.config import BuiltInTool, CustomTool, Definition, ModelChoice, Permission, compiled
from omnara.engine.catalog import ModelCatalog
from omnara.engine.deps import Deps
from omnara.engine.feed import Feed
from omnara.engine.plan import PlanSource
from omnara.ids import IdKind, encode, new_uuid
from omnara.maintenance import OrphanSweep
from omnara.metrics import Metrics
from omnara.providers.gateway import ModelGateway
from omnara.providers.in_process import InProcessAdapter
from omnara.providers.protocol import ModelCall, Outcome
from omnara.settings import Settings
from omnara.tools import registry
from omnara.tools.extract import Extractor
from omnara.tools.protocol import Effect, Tool, ToolCallRequest, ToolContext, ToolResult
from omnara.vault import generate_ring
from omnara.worker import Identity, IdentityTimes, Worker
from tests.support.waiting import until

Script = Callable[[ModelCall], Outcome | Awaitable[Outcome]]
ToolRun = Callable[[ToolCallRequest], Awaitable[ToolResult]]
FORMAT = "openai_chat_completions"

FAST = Settings(
    worker_lease_s=30.0,
    worker_renew_s=0.2,
    worker_probe_s=0.03,
    death_grace_s=0.3,
    death_grace_embedded_s=0.3,
    reconcile_s=0.2,
    claim_sweep_s=0.1,
    model_retry_base_s=0.02,
    model_retry_cap_s=0.1,
    death_limit=5,
)
"""The engine's time constants, shrunk; but for the lease, which has to outlast a computer that stands still."""


class LocalHints:
    """Hints among the workers of one test, as LISTEN/NOTIFY would carry them; `muted` loses all of them."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.buses: list[LocalBus] = []
        self.muted = False

    def ready(self, agent_ids: Iterable[UUID]) -> None:
        """Wake every worker."""
        if not self.muted:
            for worker in self.workers:
                worker.poke()

    def events(self, agent_ids: Iterable[UUID]) -> None:
        """Nobody streams here."""

    def machines(self, machine_ids: Iterable[UUID]) -> None:
        """Tell every bus that these machines have work."""
        from omnara.db.hintwire import Hint, Kind

        if not self.muted:
            for bus in self.buses:
                bus.publish(Hint(Kind.MACHINES, tuple(str(machine_id) for machine_id in machine_ids)))

    def commands(self, machine_ids: Iterable[UUID]) -> None:
        """Tell every bus that these machines, which are there, have work."""
        from omnara.db.hintwire import Hint, Kind

        if not self.muted:
            for bus in self.buses:
                bus.publish(Hint(Kind.COMMANDS, tuple(str(machine_id) for machine_id in machine_ids)))

    def cancel(self, agent_ids: Iterable[UUID]) -> None:
        """Tell every worker that work was taken away."""
        from omnara.db.hintwire import Hint, Kind

        if not self.muted:
            for bus in self.buses:
                bus.publish(Hint(Kind.CANCEL, tuple(str(agent_id) for agent_id in agent_ids)))


@dataclass
class Replica:
    """One worker with everything that is its own."""

    worker: Worker
    identity: Identity
    sweep: OrphanSweep
    connection: Dedicated
    deps: Deps
    stopped: bool = False

    async def drain(self, seconds: float = 20.0) -> None:
        """Stop as a deploy does."""
        await self.worker.drain(Deadline(seconds))
        await self.stop()

    async def stop(self) -> None:
        """Stop at once, in order."""
        if self.stopped:
            return
        self.stopped = True
        await self.sweep.stop()
        await self.worker.stop()
        await self.identity.stop()
        await self.connection.close()
        await self.deps.db.close()


@dataclass
class Engine:
    """A database with one project and one model, and any number of replicas."""

    dsn: str
    sql: asyncpg.Connection
    org_id: UUID
    project_id: UUID
    model_id: UUID
    script: Script
    hints: LocalHints = field(default_factory=LocalHints)
    replicas: list[Replica] = field(default_factory=list)
    settings: Settings = FAST

    async def start(self, count: int = 1, **overrides: Any) -> list[Replica]:
        """Start replicas and return them."""
        settings = msgspec.structs.replace(self.settings, **overrides)
        started = [await self._start_one(settings) for _ in range(count)]
        self.replicas += started
        return started

    async def _start_one(self, settings: Settings) -> Replica:
        database = ConnectSettings(dsn=self.dsn)
        pool = ApiPool(database)
        await pool.start()
        gateway = ModelGateway()
        gateway.register(FORMAT, InProcessAdapter(lambda call: self.script(call)))
        ring = generate_ring()
        models = ModelCatalog(pool, ring, settings)
        deps = Deps(pool, ring, Feed(), self.hints, registry.BUILT_IN, gateway, models, settings, Metrics.create())
        times = IdentityTimes(
            lease_s=settings.worker_lease_s,
            renew_s=settings.worker_renew_s,
            probe_s=settings.worker_probe_s,
            grace_s=settings.death_grace_s,
        )
        identity = Identity(database, times, ["worker"])
        bus = LocalBus()
        connection = Dedicated(database, ConnKind.CLAIMER)
        worker = Worker(
            deps, database, identity, bus, connection, PlanSource(models), ToolContext(extractor=Extractor())
        )
        sweep = OrphanSweep(deps)
        identity.listen(worker)
        identity.listen(sweep)
        await identity.start()
        await worker.start()
        await sweep.start()
        self.hints.workers.append(worker)
        self.hints.buses.append(bus)
        return Replica(worker, identity, sweep, connection, deps)

    async def add_agents(
        self, count: int = 1, *, tools: dict[str, str] | None = None, ready: bool = True
    ) -> list[UUID]:
        """Insert agents as a launch leaves them: event 1 is the config; `tools` are names with permission modes."""
        config_id = await self._add_config(tools or {})
        agents = [new_uuid() for _ in range(count)]
        await self.sql.executemany(
            "insert into agents (id, org_id, project_id, name, current_config_id) values ($1, $2, $3, 'a', $4)",
            [(agent, self.org_id, self.project_id, config_id) for agent in agents],
        )
        turns = {agent: new_uuid() for agent in agents}
        await self.sql.executemany(
            """insert into agent_sched (agent_id, project_id, config_id, next_sequence, turn_id, turn_sequence)
               values ($1, $2, $3, 2, $4, 1)""",
            [(agent, self.project_id, config_id, turns[agent]) for agent in agents],
        )
        await self.sql.executemany(
            "insert into turns (agent_id, turn_sequence, id, first_sequence) values ($1, 1, $2, 1)",
            [(agent, turns[agent]) for agent in agents],
        )
        payload = msgspec.json.encode(
            {
                "agent_input_id": "ain_x",
                "input_kind": "config_change",
                "content_blocks": [],
                "agent_config_id": encode(IdKind.AGENT_CONFIG, config_id),
            }
        ).decode()
        await self.sql.executemany(
            """insert into events
                 (agent_id, sequence, id, kind, turn_id, turn_sequence, is_opening, is_semantic, payload)
               values ($1, 1, $2, 'agent_input', $3, 1, true, true, $4)""",
            [(agent, new_uuid(), turns[agent], payload) for agent in agents],
        )
        return agents

    async def _add_config(self, tools: dict[str, str]) -> UUID:
        definition = Definition(
            "v1",
            "Do what you are told.",
            ModelChoice(encode(IdKind.CONFIGURED_MODEL, self.model_id)),
            {name: _tool(name, mode) for name, mode in tools.items()},
        )
        done = compiled(definition)
        config_id = new_uuid()
        await self.sql.execute(
            """insert into agent_configs (id, org_id, project_id, source, source_format, source_hash, definition,
                                          definition_hash, instruction_hash, configured_model_id)
               values ($1, $2, $3, 'x', 'yaml', $4, $5, $6, $7, $8)""",
            config_id,
            self.org_id,
            self.project_id,
            str(config_id),
            done.text,
            done.definition_hash,
            done.instruction_hash,
            self.model_id,
        )
        return config_id

    async def say(self, agent_id: UUID, text: str = "go", *, mode: str = "queued", wake: bool = True) -> UUID:
        """A message, written as the API writes it: hot row first, generation moved, agent ready."""
        input_id = new_uuid()
        async with self.sql.transaction():
            rank = await self.sql.fetchval(
                """update agent_sched set inputs_gen = inputs_gen + 1, next_rank = next_rank + 1024,
                          ready_at = least(ready_at, statement_timestamp())
                   where agent_id = $1 returning next_rank - 1024""",
                agent_id,
            )
            await self.sql.execute(
                """insert into inputs (agent_id, id, kind, delivery_mode, state, rank, content)
                   values ($1, $2, 'content', $3, 'received', $4, $5)""",
                agent_id,
                input_id,
                mode,
                rank,
                msgspec.json.encode([{"type": "text", "text": text}]).decode(),
            )
        if wake:
            self.hints.ready([agent_id])
        return input_id

    async def hot(self, agent_id: UUID) -> asyncpg.Record:
        """The hot row."""
        return await self.sql.fetchrow("select * from agent_sched where agent_id = $1", agent_id)

    async def events(self, agent_id: UUID) -> list[tuple[int, str, dict[str, Any]]]:
        """The log as (sequence, kind, payload)."""
        rows = await self.sql.fetch(
            "select sequence, kind, payload from events where agent_id = $1 order by sequence", agent_id
        )
        return [(row[0], row[1], msgspec.json.decode(row[2])) for row in rows]

    async def until_idle(self, *agents: UUID, limit_s: float = 20.0) -> None:
        """Wait until none of these agents has anything to do or is claimed."""

        async def idle() -> bool:
            left = await self.sql.fetchval(
                """select count(*) from agent_sched
                   where agent_id = any($1::uuid[])
                     and (worker_id is not null or (ready_at is not null and gate = 'open'))""",
                list(agents),
            )
            return bool(left == 0)

        await until(idle, "agents are idle", limit_s=limit_s)

    async def check(self) -> None:
        """Every invariant that a query can see holds."""
        broken = [(result.name, result.broken) for result in await run_checks(self.sql) if result.broken]
        assert broken == []


def _tool(name: str, mode: str) -> BuiltInTool | CustomTool:
    permission = Permission(mode, {})  # type: ignore[arg-type]
    if name in registry.BUILT_IN:
        return BuiltInTool(permission)
    return CustomTool(f"The tool {name}.", {"type": "object"}, permission)


@contextlib.contextmanager
def built_in(name: str, run: ToolRun) -> Any:
    """Offer one more built-in tool with an outside effect for the length of a test."""

    async def execute(call: ToolCallRequest, _context: ToolContext) -> ToolResult:
        return await run(call)

    tool = Tool(name=name, description=name, input_schema={"type": "object"}, type="built_in", effect=Effect.OUTSIDE)
    with registry.offered(tool, execute):
        yield


@contextlib.asynccontextmanager
async def engine_on(dsn: str, script: Script) -> AsyncIterator[Engine]:
    """An engine without replicas yet. On leaving, everything stops and the invariants are checked."""
    sql = await asyncpg.connect(dsn)
    ids = [new_uuid() for _ in range(5)]
    org_id, project_id, provider_id, model_id, revision_id = ids
    await sql.execute("insert into orgs (id, name) values ($1, 'o')", org_id)
    await sql.execute("insert into projects (id, org_id, name) values ($1, $2, 'p')", project_id, org_id)
    await sql.execute(
        """insert into model_provider_configs (id, org_id, name, api_format, base_url, request_path, auth_kind)
           values ($1, $2, 'test', $3, 'http://127.0.0.1:1', '/', 'bearer_token')""",
        provider_id,
        org_id,
        FORMAT,
    )
    await sql.execute(
        """insert into configured_models (id, org_id, provider_config_id, name, current_revision_id)
           values ($1, $2, $3, 'model', $4)""",
        model_id,
        org_id,
        provider_id,
        revision_id,
    )
    await sql.execute(
        """insert into configured_model_revisions (id, configured_model_id, revision, provider_model_slug,
                                                   context_window_tokens, max_output_tokens)
           values ($1, $2, 1, 'model', 100000, 4096)""",
        revision_id,
        model_id,
    )
    await sql.execute(
        "insert into project_model_grants (id, project_id, configured_model_id) values ($1, $2, $3)",
        new_uuid(),
        project_id,
        model_id,
    )
    engine = Engine(dsn, sql, org_id, project_id, model_id, script)
    try:
        yield engine
        for replica in engine.replicas:
            await replica.stop()
        await engine.check()
    finally:
        for replica in engine.replicas:
            await replica.stop()
        await sql.close()
