"""`commands`: what it takes to run a command on a machine, and what machines cost that do nothing.

`*_ms` is a call's time from ready to result, by the database's clock: the command is `true`, the machine is online, the
server has nothing else to do. The same for three homes: a directory of the server's computer, a daemon, a container.
Idle machines are paid for in processor time of the server. Source: DESIGN §9.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec

from bench.cluster import open_cluster
from bench.machine_cleanup import docker_problem, local_problem, swept
from bench.machine_site import Daemon, Site, agent_id
from bench.options import Options
from bench.percentile import percentile
from bench.processes import start_child, work_directory
from bench.report import Run
from bench.verify import look

__all__ = ["run"]

AGENTS: Final = 50
IDLE: Final = {"local": 20, "daemon": 5, "docker": 5}
"""Machines that are idle together; those of Docker are made one after the other, and timed."""
WARM_UP: Final = 20
QUIET: Final = 2.0
"""How many times `--seconds` a quiet time is."""
SETTLE_S: Final = 3.0


class Measured(msgspec.Struct):
    """What was found out about one kind of machine."""

    figures: dict[str, float | int | None] = msgspec.field(default_factory=dict)
    stages: dict[str, Any] = msgspec.field(default_factory=dict)


async def run(options: Options) -> Run:
    """Measure what can be had here. Raises ChildFailed, NotDurable."""
    problems = {"local": await local_problem(), "docker": await docker_problem()}
    skipped = {kind: problem for kind, problem in problems.items() if problem is not None}
    kinds = [kind for kind in IDLE if kind not in skipped]
    async with contextlib.AsyncExitStack() as stack:
        directory = await stack.enter_async_context(work_directory())
        cluster = await stack.enter_async_context(open_cluster(options.database_url))
        database = await stack.enter_async_context(cluster.database("commands"))
        await stack.enter_async_context(swept(database.dsn, directory / "data", docker="docker" in kinds))
        model = await stack.enter_async_context(start_child("model", directory, script="commands"))
        site = await stack.enter_async_context(Site(database, directory, model, docker="docker" in kinds))
        alone_s, _ = await _quiet(site, options)
        found = {kind: await _Kind(site, options, kind).measure(alone_s) for kind in kinds}
        wrong = await _wrong(site, database.dsn)
    figures: dict[str, float | int | None] = {f"{kind}_ms_p50": None for kind in IDLE}
    for measured in found.values():
        figures |= measured.figures
    return Run(
        sizes={
            "rounds": options.rounds, "agents": AGENTS, "seconds": options.seconds, "quiet_s": options.seconds * QUIET,
            "idle": IDLE,
        },
        figures=figures,
        postgres=cluster.facts,
        details={"stages_ms": {kind: measured.stages for kind, measured in found.items()}},
        skipped=skipped,
        wrong=wrong,
    )  # fmt: skip


async def _quiet(site: Site, options: Options, pids: Sequence[int] = ()) -> tuple[float, float]:
    await asyncio.sleep(SETTLE_S)
    return await site.quiet(options.seconds * QUIET, pids)


class _Kind:
    """One kind of machine on a site."""

    def __init__(self, site: Site, options: Options, kind: str) -> None:
        self._site = site
        self._options = options
        self._kind = kind
        self._count = IDLE[kind]

    async def measure(self, alone_s: float) -> Measured:
        """Make machines, leave them alone, run commands on one, then on many; remove them."""
        found = Measured()
        async with self._machines(found) as (agents, source, daemons):
            pids = [daemon.process.pid for daemon in daemons]
            server_s, others_s = await _quiet(self._site, self._options, pids)
            hours = self._options.seconds * QUIET / 3600 * self._count
            found.figures[f"{self._kind}_idle_cpu_s_per_hour"] = round((server_s - alone_s) / hours, 3)
            if pids:
                found.figures["daemon_process_idle_cpu_s_per_hour"] = round(others_s / hours, 3)
            await self._one_by_one(agents[0], found)
            if self._kind != "docker":
                await self._many(source, found)
        return found

    @contextlib.asynccontextmanager
    async def _machines(self, found: Measured) -> AsyncIterator[tuple[list[str], dict[str, Any], list[Daemon]]]:
        daemons: list[Daemon] = []
        if self._kind == "daemon":
            daemons = [await self._site.daemon(f"daemon-{number}") for number in range(self._count)]
            source: dict[str, Any] = {"machine": daemons[0].name}
            agents = [await self._site.agent(source)]
        else:
            source = await self._site.pool(self._kind)
            agents = []
            for number in range(self._count):
                agents.append(await self._site.agent(source))
                await self._site.until_online(number + 1)
            created = [float(row[0]) for row in await self._site.conn.fetch(_CREATED)]
            found.figures[f"{self._kind}_create_s_p50"] = percentile(created, 50)
        await self._site.until_online(self._count)
        yield agents, source, daemons
        await self._site.archive(agents)
        await self._site.remove(daemons)

    async def _one_by_one(self, agent: str, found: Measured) -> None:
        async with self._site.turns(agent) as turn:
            for _ in range(WARM_UP + self._options.rounds):
                await turn()
        rows = (await self._site.conn.fetch(_CALLS, agent_id(agent)))[WARM_UP:]
        for name in ("call", "queue", "grant", "run", "save"):
            values = [float(row[name]) for row in rows]
            found.stages[name] = {f"p{rank}": percentile(values, rank) for rank in (10, 50, 90, 99)}
        for rank in (50, 99):
            found.figures[f"{self._kind}_ms_p{rank}"] = found.stages["call"][f"p{rank}"]

    async def _many(self, source: dict[str, Any], found: Measured) -> None:
        agents = await self._site.agents(AGENTS, source, model="endless")
        await self._site.until_online(self._count + (AGENTS if "pool" in source else 0))
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(self._site.client.send(agent, "Go on."))
        await asyncio.sleep(SETTLE_S)
        before = await self._site.conn.fetchrow(_RUN)
        await asyncio.sleep(self._options.seconds)
        after = await self._site.conn.fetchrow(_RUN)
        name = "commands_per_s" if self._kind == "local" else f"{self._kind}_commands_per_s"
        found.figures[name] = round((after[0] - before[0]) / float(after[1] - before[1]), 1)
        for agent in agents:
            await self._site.client.delete(agent)


async def _wrong(site: Site, dsn: str) -> list[str]:
    """What must not be: calls that did not succeed while nobody ended their agent, a broken invariant, a bad stop."""
    failed = await site.conn.fetchval(_FAILED)
    code = await site.server.stop()
    wrong = list((await look(dsn)).broken)
    if failed:
        wrong.append(f"{failed} commands did not succeed")
    if code:
        wrong.append(f"the server stopped with code {code}")
    return wrong


_CALLS: Final = """
select extract(epoch from t.completed_at - t.created_at) * 1000 as call,
       extract(epoch from p.created_at - t.created_at) * 1000 as queue,
       extract(epoch from p.granted_at - p.created_at) * 1000 as grant,
       extract(epoch from p.closed_at - p.granted_at) * 1000 as run,
       extract(epoch from t.completed_at - p.closed_at) * 1000 as save
from tool_calls t join processes p on p.agent_id = t.agent_id and p.tool_call_id = t.id
where t.agent_id = $1 order by t.created_at
"""
_CREATED: Final = """
select extract(epoch from greatest(m.activated_at, r.connected_at) - m.created_at)
from machines m join machine_runtimes r on r.id = m.current_runtime_id where m.lifecycle_state = 'active'
"""
_RUN: Final = """
select count(*) filter (where outcome = 'succeeded'), extract(epoch from clock_timestamp()) from tool_calls
"""
_FAILED: Final = "select count(*) from tool_calls where outcome = 'failed'"
