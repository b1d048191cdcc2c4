"""Commands and actions are kept for ever, so no statement may look through all that ever were."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from omnara.db.sqlfiles import Queries, query_groups
from tests.support.engine_case import Engine
from tests.support.machine_floor import Floor

GROWING = ("processes", "process_actions")
OF_WHAT_IS_OPEN = frozenset({"processes_queued", "processes_live", "processes_agent_live", "process_actions_open"})
"""Indexes that hold only what is not over: few, however many there were."""

COMMANDS = 20_000


def about_commands() -> list[tuple[str, str]]:
    """Every statement that names one of the tables."""
    named = re.compile(rf"\b({'|'.join(GROWING)})\b")
    groups = [(group, Queries(group)) for group in query_groups()]
    return [
        (f"{group}.{name}", queries[name])
        for group, queries in groups
        for name in queries
        if named.search(queries[name])
    ]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan and all its parts."""
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


def walks(plan: dict[str, Any]) -> list[str]:
    """The parts of a plan that look through a whole table, or through an index of all that is in it."""
    found = []
    for node in nodes(plan):
        kind, index = node["Node Type"], node.get("Index Name", "")
        if kind == "Seq Scan" and node["Relation Name"] in GROWING:
            found.append(f"{kind} on {node['Relation Name']}")
        if index.startswith(GROWING) and index not in OF_WHAT_IS_OPEN and "Index Cond" not in node:
            found.append(f"{kind} of {index}")
    return found


@pytest.mark.parametrize("analyzed", [False, True], ids=["without statistics", "with statistics"])
async def test_no_statement_looks_through_all_commands(engine: Engine, *, analyzed: bool) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()
    async with engine.deps.db.acquire() as connection:
        await connection.execute("set plan_cache_mode = force_generic_plan")
        await connection.execute(
            f"""insert into processes (id, agent_id, project_id, machine_id, binding_id, command, state, exit_code,
                                       closed_at, created_at)
                select gen_random_uuid(), md5((n % 500)::text)::uuid, project_id, machine_id, binding_id, 'true',
                       'exited', 0, now(), now() - n * interval '1 second'
                from processes, generate_series(1, {COMMANDS}) n where id = $1""",
            job.id,
        )
        await connection.execute(
            """insert into process_actions (id, agent_id, process_id, machine_id, tool_call_id, seq, kind, payload,
                                            state, closed_at)
               select gen_random_uuid(), agent_id, id, machine_id, gen_random_uuid(), n, 'write', '{}',
                      'applied', now()
               from processes, generate_series(1, 2) n where state = 'exited'"""
        )
        if analyzed:
            await connection.execute("vacuum analyze processes")
            await connection.execute("vacuum analyze process_actions")
        found = {}
        for name, statement in about_commands():
            count = max((int(number) for number in re.findall(r"\$(\d+)", statement)), default=0)
            given = f"({', '.join(['null'] * count)})" if count else ""
            await connection.execute(f"prepare looked_at as {statement}")
            text = await connection.fetchval(f"explain (format json) execute looked_at{given}")
            await connection.execute("deallocate looked_at")
            if through := walks(msgspec.json.decode(text)[0]["Plan"]):
                found[name] = through
        await connection.execute("reset plan_cache_mode")
    assert not found
