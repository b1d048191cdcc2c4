"""Deleting a project with many agents, or an organization: gone at once, emptied afterwards, whoever is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from omnara import probes
from omnara.access.roles import ProjectScope
from omnara.domain.content import TextBlock
from omnara.engine import emptying, launch, lifecycle
from omnara.engine.inputs import create_input
from omnara.engine.orgs import delete_org
from omnara.engine.projects import create_project, delete_project
from omnara.engine.scope import AgentPath
from omnara.errors import NotFound
from omnara.ids import new_uuid
from tests.support.engine_case import Engine, open_engine
from tests.support.machine_floor import Rows
from tests.support.machines import bind, make_machine
from tests.support.postgres import PostgresForTests

AGENTS = 300


@pytest_asyncio.fixture(loop_scope="session")
async def doomed(postgres: PostgresForTests) -> AsyncIterator[Engine]:
    """A project of its own with some hundred agents, two of them with work."""
    async with postgres.fresh() as dsn, open_engine(dsn) as engine:
        path = await engine.agent("waits")
        await engine.agent("waits, too")
        await engine.fetch(
            """with made as (
                 insert into agents (id, org_id, project_id, name, current_config_id)
                 select gen_random_uuid(), org_id, project_id, 'one of many', current_config_id
                 from agents, generate_series(1, $2) where id = $1 returning id, project_id, current_config_id),
               turns as (insert into turns (agent_id, turn_sequence, id, first_sequence)
                         select id, 1, id, 1 from made),
               log as (insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, is_opening,
                                           is_semantic, payload)
                       select m.id, 1, gen_random_uuid(), e.kind, m.id, 1, true, true, e.payload
                       from made m, events e where e.agent_id = $1 and e.sequence = 1)
               insert into agent_sched (agent_id, project_id, config_id, next_sequence, turn_id, turn_sequence)
               select id, project_id, current_config_id, 2, id, 1 from made""",
            path.agent_id,
            AGENTS,
        )
        yield engine
        assert await engine.broken_invariants() == {}


async def left(engine: Engine) -> int:
    """How many agents of the project are not archived."""
    rows = await engine.fetch(
        """select count(*) from agents a join agent_sched s on s.agent_id = a.id
           where a.project_id = $1 and (a.archived_at is null or s.gate <> 'archived')""",
        engine.project.project_id,
    )
    return int(rows[0][0])


async def delete(engine: Engine) -> None:
    await delete_project(engine.deps, engine.p, engine.project.org_id, engine.project.project_id)


async def test_the_project_is_gone_at_once_and_its_agents_soon(doomed: Engine) -> None:
    agents = [row[0] for row in await doomed.fetch("select id from agents order by created_at limit 2")]
    config = await doomed.config()
    await delete(doomed)
    assert await left(doomed) == AGENTS + 2, "no request waits for the agents"
    # The caller is remembered for a moment with its old rights: they count for nothing any more.
    with pytest.raises(NotFound):
        await launch.launch_agent(doomed.deps, doomed.p, doomed.project, config, key="new")
    with pytest.raises(NotFound):
        await create_input(doomed.deps, doomed.p, AgentPath(agents[0]), [TextBlock("still there?")])
    with pytest.raises(NotFound):
        await lifecycle.pause(doomed.deps, doomed.p, AgentPath(agents[0]))
    with pytest.raises(NotFound):
        await delete(doomed)
    members = "select count(*) from project_members where project_id = $1"
    assert (await doomed.fetch(members, doomed.project.project_id))[0][0] == 0
    assert await emptying.empty_projects(doomed.deps)
    assert await left(doomed) == 0
    waiting = await doomed.fetch("select 1 from inputs where agent_id = any($1) and state = 'received'", agents)
    assert waiting == []
    [row] = await doomed.fetch("select emptying from projects where id = $1", doomed.project.project_id)
    assert not row["emptying"]
    assert await emptying.empty_projects(doomed.deps), "nothing is left to do"


async def test_a_launch_is_before_the_deletion_or_refused(doomed: Engine) -> None:
    """Launchers at full speed: what they were told was launched is archived in the end, and nothing else is there."""
    config = await doomed.config()
    launched: list[UUID] = []
    some = asyncio.Event()
    refused = 0

    async def launching() -> None:
        nonlocal refused
        while not refused:
            try:
                made = await launch.launch_agent(doomed.deps, doomed.p, doomed.project, config, message="go")
            except NotFound:
                refused += 1
                return
            launched.append(made.agent.id)
            if len(launched) == 20:
                some.set()

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(launching())
        await some.wait()
        await delete(doomed)
        at_deletion = await left(doomed)
    assert refused
    assert await left(doomed) == at_deletion == AGENTS + 2 + len(launched)
    assert await emptying.empty_projects(doomed.deps)
    assert await left(doomed) == 0


async def test_whoever_comes_next_goes_on(doomed: Engine) -> None:
    """Cut off in the middle, more than once, and with two at a time."""
    await delete(doomed)
    before = await left(doomed)
    for _ in range(3):
        with probes.expect("project_agent_archived") as archived:
            task = asyncio.create_task(emptying.empty_projects(doomed.deps))
            await archived.wait(20, within_s=20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        now = await left(doomed)
        assert 0 < now < before
        before = now
    done = await asyncio.gather(*(emptying.empty_projects(doomed.deps) for _ in range(2)))
    assert True in done
    assert await left(doomed) == 0


def damage(monkeypatch: pytest.MonkeyPatch, agent_id: UUID) -> None:
    """Let one agent be one that cannot be archived, until the patch is undone."""
    real = lifecycle.archive_for_good

    async def archive(deps: Any, each: UUID) -> None:
        if each == agent_id:
            raise LookupError("damaged")
        await real(deps, each)

    monkeypatch.setattr(emptying, "archive_for_good", archive)


async def test_one_agent_that_cannot_be_archived_keeps_no_other(
    doomed: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row] = await doomed.fetch("select id from agents order by created_at offset 100 limit 1")
    damage(monkeypatch, row["id"])
    await delete(doomed)
    assert not await emptying.empty_projects(doomed.deps)
    assert await left(doomed) == 1
    monkeypatch.undo()
    assert await emptying.empty_projects(doomed.deps)
    assert await left(doomed) == 0


# --- organizations ------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def small(postgres: PostgresForTests) -> AsyncIterator[Engine]:
    """An organization of its own with two agents that have work."""
    async with postgres.fresh() as dsn, open_engine(dsn) as engine:
        for message in ("waits", "waits, too"):
            await engine.agent(message)
        yield engine
        assert await engine.broken_invariants() == {}


LEFT = """
select (select count(*) from machines where deleted_at is null)::int as machines,
       (select count(*) from machine_pools where deleted_at is null)::int as pools,
       (select count(*) from machine_daemon_tokens where revoked_at is null)::int as tokens,
       (select count(*) from secret_versions)::int as secrets,
       (select count(*) from configured_models where deleted_at is null)::int as models,
       (select count(*) from projects where emptying)::int as marked"""


async def furnished(engine: Engine) -> UUID:
    """A second project with an agent's machine, and a pool; the second project."""
    scope = (await create_project(engine.deps, engine.p, engine.project.org_id, "Second", None)).row
    machine = await make_machine(Rows(engine), engine.project.org_id, scope.id)
    [row] = await engine.fetch("select id from agents limit 1")
    await bind(Rows(engine), machine, row["id"])
    await engine.fetch(
        "insert into machine_pools (id, org_id, name, provider, max_total_machines) values ($1, $2, 'p', 'docker', 3)",
        new_uuid(), engine.project.org_id,
    )  # fmt: skip
    return scope.id


async def test_an_organization_is_gone_at_once_and_everything_in_it_soon(small: Engine) -> None:
    org_id = small.project.org_id
    second = await furnished(small)
    config = await small.config()
    before = dict((await small.fetch(LEFT))[0])
    assert before["secrets"] > 0
    await delete_org(small.deps, small.p, org_id)
    assert await left(small) == 2, "no request waits for the agents"
    assert dict((await small.fetch(LEFT))[0]) == before | {"marked": 2}
    for refused in (
        delete_org(small.deps, small.p, org_id),
        create_project(small.deps, small.p, org_id, "Third", None),
        launch.launch_agent(small.deps, small.p, small.project, config),
        launch.launch_agent(small.deps, small.p, ProjectScope(org_id, second), config),
    ):
        with pytest.raises(NotFound):
            await refused
    assert await emptying.empty_projects(small.deps)
    assert await left(small) == 0
    assert set(dict((await small.fetch(LEFT))[0]).values()) == {0}
    assert await emptying.empty_projects(small.deps), "nothing is left to do"


async def test_whoever_comes_next_goes_on_with_an_organization(small: Engine) -> None:
    """Cut off when only its secrets are left, with two at a time; its first project was deleted and emptied before."""
    await furnished(small)
    await delete(small)
    assert await emptying.empty_projects(small.deps)
    await delete_org(small.deps, small.p, small.project.org_id)
    for _ in range(2):
        with probes.expect("org_released") as reached:
            tasks = [asyncio.create_task(emptying.empty_projects(small.deps)) for _ in range(2)]
            await reached.wait(within_s=20)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(emptying.empty_projects(small.deps) for _ in range(3)))
    assert await emptying.empty_projects(small.deps)
    assert set(dict((await small.fetch(LEFT))[0]).values()) == {0}


async def test_an_agent_that_cannot_be_archived_keeps_the_organizations_secrets(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row] = await small.fetch("select id from agents order by created_at offset 1 limit 1")
    damage(monkeypatch, row["id"])
    await delete_org(small.deps, small.p, small.project.org_id)
    assert not await emptying.empty_projects(small.deps)
    assert (await small.fetch(LEFT))[0]["secrets"] > 0
    monkeypatch.undo()
    assert await emptying.empty_projects(small.deps)
    assert set(dict((await small.fetch(LEFT))[0]).values()) == {0}
