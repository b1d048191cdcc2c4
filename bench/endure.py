"""`steps --minutes N`: the engine at full speed for minutes. Does anything grow that should not, or anything slow down?

Agents come and go as in life: so many run at a time, each ends after some hundred steps, and another one takes its
place. Else every conversation would grow for the whole run, and memory with it. The log itself grows, as it must; what
is judged is the rate, the hot table with its indexes, the memory of the process, and how long vacuum was held up.
Source: DESIGN §3 (a waiter pins `backend_xmin`, and the hot table bloats), §9 (hot table after 10 minutes).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

import asyncpg
import msgspec

from bench.cluster import open_cluster
from bench.flatness import Minute, judge_flat
from bench.options import Options
from bench.processes import Child, ChildFailed, start_child, work_directory
from bench.report import Run
from bench.seed import Seeded, seed, seed_inputs
from bench.usage import rss_bytes
from bench.verify import look, wrong_with
from omnara.vault import generate_ring

__all__ = ["run"]

EVENTS_PER_AGENT: Final = 500
AGENTS_PER_MINUTE: Final = 1_500
"""Seeded beforehand, so that the hot table has its rows from the start: enough for 12,500 steps a second."""
CACHE_BYTES: Final = 2**25
"""Full within the first minute, and from then on part of a memory that should not grow."""
REFILL_S: Final = 0.2
LOOK_S: Final = 1.0
SHOWN: Final = ("agent_sched", "events", "steps", "tool_calls", "inputs", "turns")


async def run(options: Options) -> Run:
    """Run for `minutes`, look every minute (at least three times), judge. Raises ChildFailed, NotDurable."""
    assert options.minutes is not None
    looks = max(3, round(options.minutes))
    ring = generate_ring()
    async with contextlib.AsyncExitStack() as stack:
        directory = await stack.enter_async_context(work_directory())
        cluster = await stack.enter_async_context(open_cluster(options.database_url))
        database = await stack.enter_async_context(cluster.database("endure"))
        stock = options.agents + int(AGENTS_PER_MINUTE * max(1.0, options.minutes))
        seeded = await seed(database.dsn, stock, ring, opened=False)
        conn = await asyncpg.connect(database.dsn)
        stack.push_async_callback(conn.close)
        child = await stack.enter_async_context(
            start_child(
                "endure",
                directory,
                dsn=database.dsn,
                embedded=database.embedded,
                ring=ring.serialise(),
                events=EVENTS_PER_AGENT,
                settings={"context_cache_bytes": CACHE_BYTES},
            )
        )
        watched = _Watched(conn, child, seeded, options.agents)
        minutes = await watched.run(looks, options.minutes * 60 / looks)
        finished = await child.ask("finish")
        counted = await look(database.dsn)
    verdict = judge_flat(minutes)
    return Run(
        sizes={"agents": options.agents, "minutes": options.minutes, "events_per_agent": EVENTS_PER_AGENT},
        figures={
            "steps_per_s": round(sum(one.steps for one in minutes) / sum(one.seconds for one in minutes), 1),
            **verdict.figures,
        },
        details={
            "minutes": msgspec.to_builtins(minutes),
            "rule": verdict.rule,
            "not_flat": verdict.reasons,
            "agents_used": watched.used,
        },
        postgres=cluster.facts,
        wrong=wrong_with("engine", counted, int(finished["saved"])),
    )


class _Most(msgspec.Struct):
    """The longest time and the most transactions that a snapshot was held for; the most memory of the process."""

    held_s: float = 0.0
    held_xids: int = 0
    rss_bytes: int = 0


class _Watched:
    """The run as seen from outside of the engine: who is next, and what Postgres and the kernel say of it."""

    def __init__(self, conn: Any, child: Child, seeded: Seeded, agents: int) -> None:
        self._conn = conn
        self._child = child
        self._stock = seeded.agents
        self._agents = agents
        self.used = 0

    async def run(self, looks: int, every_s: float) -> list[Minute]:
        """Keep so many agents running; return what was seen in each interval."""
        await self._refill()
        await self._child.ask("open")
        steps, begun = await self._steps(), time.monotonic()
        found: list[Minute] = []
        for number in range(looks):
            most = await self._wait_until(begun + every_s)
            now, at = await self._steps(), time.monotonic()
            minute = Minute(
                number=number + 1,
                steps=now - steps,
                seconds=round(at - begun, 3),
                rss_bytes=most.rss_bytes,
                oldest_xmin_s=round(most.held_s, 3),
                oldest_xmin_xids=most.held_xids,
                tables=await self._tables(),
            )
            found.append(minute)
            steps, begun = now, at
        return found

    async def _wait_until(self, deadline: float) -> _Most:
        """Refill until then; return the most of what was seen meanwhile."""
        most, next_look = _Most(), time.monotonic()
        while (left_s := deadline - time.monotonic()) > 0:
            await self._refill()
            if time.monotonic() >= next_look:
                row = await self._conn.fetchrow(_OLDEST)
                most.held_s = max(most.held_s, row["seconds"])
                most.held_xids = max(most.held_xids, row["xids"])
                most.rss_bytes = max(most.rss_bytes, rss_bytes(self._child.pid))
                next_look += LOOK_S
            await asyncio.sleep(min(REFILL_S, max(0.0, left_s)))
        return most

    async def _refill(self) -> None:
        """Let as many new agents begin as have ended. Raises ChildFailed when there are no more."""
        missing = self._agents - int(await self._conn.fetchval(_BUSY))
        if missing <= 0:
            return
        chosen = self._stock[self.used : self.used + missing]
        if len(chosen) < missing:
            raise ChildFailed(
                f"all {len(self._stock)} agents are used up: the engine is faster than this bench thought"
            )
        self.used += missing
        await seed_inputs(self._conn, chosen, "Go through the list.")
        await self._child.ask("poke")

    async def _steps(self) -> int:
        return int((await self._child.ask("saved"))["saved"])

    async def _tables(self) -> dict[str, dict[str, int]]:
        rows = await self._conn.fetch(_TABLES, list(SHOWN))
        return {row["name"]: {key: int(row[key]) for key in ("table", "indexes", "dead_rows", "dead")} for row in rows}


_BUSY: Final = """
select (select count(*) from agent_sched where worker_id is not null)
     + (select count(*) from agent_sched where worker_id is null and gate = 'open' and ready_at is not null)
"""

_OLDEST: Final = """
select coalesce(max(extract(epoch from clock_timestamp() - coalesce(xact_start, query_start))), 0)::float8 as seconds,
       coalesce(max(age(backend_xmin)), 0)::int as xids
from pg_stat_activity where backend_xmin is not null and pid <> pg_backend_pid() and backend_type = 'client backend'
"""

_TABLES: Final = """
select c.relname as name, pg_table_size(c.oid) as table, pg_indexes_size(c.oid) as indexes, s.n_dead_tup as dead_rows,
       (pg_relation_size(c.oid) * s.n_dead_tup / greatest(s.n_live_tup + s.n_dead_tup, 1))::int8 as dead
from pg_class c join pg_stat_user_tables s on s.relid = c.oid where c.relname = any($1::text[]) order by 1
"""
