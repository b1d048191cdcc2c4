"""`recovery`: kill -9 of a replica until the next step of each of its agents, and a restart of the only process.

Nothing inside the servers is asked: the kill is timed here, and the next step by the time that Postgres gave its row.
A kill counts with its slowest agent. Source: DESIGN §3 ("Who is alive"), §9.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import asyncpg

from bench.cluster import open_cluster
from bench.options import Options
from bench.processes import Child, ChildFailed, start_child, work_directory
from bench.report import Run
from bench.seed import is_idle
from bench.servers import Server, server_environment
from bench.verify import look
from bench.workload import ARGUMENTS
from omnara.access.tokens import TokenKind, generate
from omnara.client import Client
from omnara.clock import poll_until
from omnara.vault import generate_ring

__all__ = ["run"]

AGENTS: Final = 8
MODEL_DELAY_MS: Final = 400.0
"""Long enough for a kill to fall into a model call, short enough for agents to be between steps now and then."""
START_GRACE_S: Final = 11.0
"""Nobody is declared dead within 10 s of a Postgres start. Source: DESIGN §3."""
LIMIT_S: Final = 60.0
TOOL: Final = {
    "name": "lookup",
    "description": "Looks up one record.",
    "input_schema": {"type": "object", "properties": {name: {} for name in ARGUMENTS}},
    "permission": "deny",
}
"""A denied call has its result in the same save, so agents go on by themselves, for ever, without anybody answering."""


async def run(options: Options) -> Run:
    """Kill and restart. Raises ChildFailed, NotDurable."""
    async with contextlib.AsyncExitStack() as stack:
        directory = await stack.enter_async_context(work_directory())
        cluster = await stack.enter_async_context(open_cluster(options.database_url))
        database = await stack.enter_async_context(cluster.database("recovery"))
        model = await stack.enter_async_context(
            start_child("model", directory, fast=False, delay_ms=MODEL_DELAY_MS, tool=TOOL["name"])
        )
        key, ring = generate(TokenKind.PERSONAL).text, generate_ring()
        environment = server_environment(database, ring, key, str(model.hello["url"]))
        pair = _Pair(database.dsn, environment, directory)
        stack.push_async_callback(pair.close)
        await pair.open(key)
        kills = [await pair.kill_one() for _ in range(options.kills)]
        await pair.leave_one()
        restarts = [await pair.restart() for _ in range(options.restarts)]
        codes = await pair.end(model)
        counted = await look(database.dsn)
    slowest = [kill["slowest_s"] for kill in kills]
    wrong = [*counted.broken, *(f"a server stopped with code {code}" for code in codes if code)]
    return Run(
        sizes={"agents": AGENTS, "kills": options.kills, "restarts": options.restarts, "model_ms": MODEL_DELAY_MS},
        figures={
            "recovery_s_p50": round(statistics.median(slowest), 4),
            "recovery_s_max": round(max(slowest), 4),
            "first_agent_s_p50": round(statistics.median(kill["first_s"] for kill in kills), 4),
            "restart_s": round(statistics.median(one["after_up_s"] for one in restarts), 4),
            "restart_s_max": round(max(one["after_up_s"] for one in restarts), 4),
            "restart_total_s": round(statistics.median(one["total_s"] for one in restarts), 4),
        },
        details={"kills": kills, "restarts": restarts, "steps": counted.succeeded, "others": counted.others},
        postgres=cluster.facts,
        wrong=wrong,
    )


class _Pair:
    """Two replicas, of which the one that holds the agents is killed; the other one takes over and is next."""

    def __init__(self, dsn: str, environment: dict[str, str], directory: Path) -> None:
        self._dsn = dsn
        self._servers = [Server(name, environment, directory) for name in ("a", "b")]
        self._workers: dict[str, UUID] = {}
        self._conn: Any = None
        self._clock_s = 0.0

    async def open(self, key: str) -> None:
        """Start both, launch the agents through the API, wait until all of them have run a step."""
        for server in self._servers:
            await self._start(server)
        async with Client(self._servers[0].url, key) as client:
            for number in range(AGENTS):
                await client.launch(
                    model="openai/scripted", system_prompt="Go on.", tools=[TOOL], message=f"Go. {number}"
                )

        async def all_run() -> bool:
            return bool(
                await self._conn.fetchval("select count(*) = $1 from agent_sched where step_number > 1", AGENTS)
            )

        await _until(all_run, "every agent runs")
        self._clock_s = await self._clock_difference()
        age = await self._conn.fetchval("select extract(epoch from clock_timestamp() - pg_postmaster_start_time())")
        await asyncio.sleep(max(0.0, START_GRACE_S - float(age)))

    async def kill_one(self) -> dict[str, Any]:
        """Kill whoever holds most agents; return how long their next steps took, and start the victim again."""
        await self._settle()
        await asyncio.sleep(random.uniform(0.0, MODEL_DELAY_MS / 1000))
        victim = await self._busiest()
        worker = self._workers[victim.name]
        agents = await self._held(worker)
        killed_at = await victim.kill() + self._clock_s
        started = await self._next_steps(agents, killed_at, worker)
        took = sorted(at - killed_at for at in started)
        await self._start(victim)
        return {"agents": len(agents), "first_s": round(took[0], 4), "slowest_s": round(took[-1], 4)}

    async def leave_one(self) -> None:
        """Stop the replica that holds the fewest agents, and let the other one take them all."""
        busiest = await self._busiest()
        idle = next(server for server in self._servers if server is not busiest)
        await idle.stop()
        self._servers = [busiest, idle]

        async def all_held() -> bool:
            return len(await self._held(self._workers[busiest.name])) == AGENTS

        await _until(all_held, "one replica holds every agent")

    async def restart(self) -> dict[str, Any]:
        """Kill the only replica and start it at once; return the time to the next steps, from being up and in all."""
        await self._settle()
        await asyncio.sleep(random.uniform(0.0, MODEL_DELAY_MS / 1000))
        server = self._servers[0]
        worker = self._workers[server.name]
        agents = await self._held(worker)
        killed_at = await server.kill() + self._clock_s
        up_at = await self._start(server) + self._clock_s
        last = max(await self._next_steps(agents, killed_at, worker))
        return {
            "agents": len(agents),
            "up_s": round(up_at - killed_at, 4),
            "after_up_s": round(max(0.0, last - up_at), 4),
            "total_s": round(last - killed_at, 4),
        }

    async def _settle(self) -> None:
        """Wait until every agent has saved a step since the last kill: deaths in a row are another matter."""

        async def settled() -> bool:
            return not await self._conn.fetchval("select exists (select from agent_sched where deaths > 0)")

        await _until(settled, "every agent has saved a step since the last kill")

    async def end(self, model: Child) -> list[int]:
        """Let the model say that all is done, wait until every agent is idle, stop the servers in order."""
        await model.ask("end")
        await _until(lambda: is_idle(self._conn), "all agents are idle")
        return [await server.stop() for server in self._servers[:1]]

    async def close(self) -> None:
        """Kill what still runs."""
        for server in self._servers:
            await server.kill()
        if self._conn is not None:
            await self._conn.close()

    async def _start(self, server: Server) -> float:
        """Start a replica; learn which worker it is: the one live row that was not there before."""
        up_at = await server.start()
        if self._conn is None:
            self._conn = await asyncpg.connect(self._dsn)
        known = set(self._workers.values())
        async with asyncio.timeout(LIMIT_S):
            while True:
                rows = await self._conn.fetch("select id from workers order by started_at desc limit 5")
                new = [row[0] for row in rows if row[0] not in known]
                if new:
                    self._workers[server.name] = new[0]
                    return up_at
                await asyncio.sleep(0.02)

    async def _busiest(self) -> Server:
        held = {server.name: len(await self._held(self._workers[server.name])) for server in self._servers}
        found = max(self._servers, key=lambda server: held[server.name])
        if not held[found.name]:
            raise ChildFailed(f"no replica holds an agent\n{found.log_tail()}")
        return found

    async def _held(self, worker: UUID) -> list[UUID]:
        rows = await self._conn.fetch("select agent_id from agent_sched where worker_id = $1", worker)
        return [row[0] for row in rows]

    async def _next_steps(self, agents: list[UUID], killed_at: float, victim: UUID) -> list[float]:
        """Wait until every agent has begun a step under another worker; return the Unix times of these."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                rows = await self._conn.fetch(
                    "select extract(epoch from min(started_at))::float8 from steps where agent_id = any($1) "
                    "and started_at >= to_timestamp($2) and worker_id <> $3 group by agent_id",
                    agents,
                    killed_at,
                    victim,
                )
                if len(rows) == len(agents):
                    return [row[0] for row in rows]
                await asyncio.sleep(0.01)

    async def _clock_difference(self) -> float:
        """Return how far the clock of Postgres is ahead of ours, in seconds; the quickest of ten looks is used."""
        found = []
        for _ in range(10):
            before = time.time()
            there = float(await self._conn.fetchval("select extract(epoch from clock_timestamp())"))
            after = time.time()
            found.append((after - before, there - (before + after) / 2))
        return min(found)[1]


async def _until(reached: Callable[[], Awaitable[bool]], what: str) -> None:
    if not await poll_until(reached, within_s=LIMIT_S, every_s=0.02):
        raise ChildFailed(f"after {LIMIT_S:g} s it is still not so that {what}")
