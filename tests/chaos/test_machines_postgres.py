"""Postgres is away while a daemon asks who it is, or comes back without its last commits: the machine keeps its work.

What a machine has done and the database has forgotten is taken out of service once, and never run again.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from omnara.db.embedded import EmbeddedPostgres
from omnara.testing import Answer, embed, say
from tests.support.cluster import Cluster
from tests.support.machine_chaos import HELD, PATIENT, Floor, machine_times, results, run
from tests.support.times import Times
from tests.support.waiting import until


async def test_an_outage_is_no_reason_to_destroy_anything(
    own_postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, times: Times
) -> None:
    """The daemon is killed and starts anew without a database, and asks until there is one: its command goes on.

    A daemon that hears 401 wipes its machine, so this is the failure that must never look like one.
    """
    constants = machine_times(times)
    settings = {f"OMNARA_{name}": value for name, value in (constants.env | PATIENT).items()}
    async with Cluster(own_postgres.dsn, tmp_path_factory.mktemp("cluster"), times, **settings) as cluster:
        (cluster.front,) = await cluster.start(1, "api,worker,maintenance")
        floor = Floor(cluster, constants, tmp_path)
        machine = await floor.machine()
        async with floor.daemon(machine, "laptop") as daemon:
            agent = await floor.agent([machine], Answer(blocks=(run(HELD),)), say("done"))
            await floor.client.send(agent.id, "go")
            await until(lambda: daemon.lines("log") == ["begun"], f"it runs\n{daemon.tail()}", limit_s=30)
            await own_postgres.stop()
            daemon.kill()
            daemon.start()
            await until(lambda: "503" in daemon.tail(), f"the daemon is refused for now\n{daemon.tail()}", limit_s=60)
            (daemon.work / "stop").touch()
            await until(lambda: daemon.lines("log") == ["begun", "over"], "the command goes on", limit_s=30)
            asked = daemon.log.read_text().count("503")
            await until(lambda: daemon.log.read_text().count("503") > asked, "it asks again", limit_s=60)
            assert daemon.process is not None
            assert daemon.process.poll() is None, "it goes on asking"
            assert list(daemon.home.glob("installations/*/machines/*")), "and keeps what it has"
            await own_postgres.start()
            await floor.online(machine, daemon)
            await agent.settled(within_s=constants.back_s)
            [(outcome, value)] = await results(agent)
            assert (outcome, value["output"]) == ("succeeded", "the end\n")
            assert daemon.lines("log") == ["begun", "over"]
        await cluster.verify()


async def test_a_database_that_has_forgotten_a_command_does_not_run_it_again(
    own_postgres: EmbeddedPostgres,
    own_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    times: Times,
) -> None:
    """Restored to a moment at which the command was not handed over yet, while the machine has its end on disk."""
    constants = machine_times(times)
    settings = {f"OMNARA_{name}": value for name, value in (constants.env | PATIENT).items()}
    async with Cluster(own_postgres.dsn, tmp_path_factory.mktemp("cluster"), times, **settings) as cluster:
        (cluster.front,) = await cluster.start(1, "api,worker,maintenance")
        floor = Floor(cluster, constants, tmp_path)
        machine = await floor.machine()
        async with floor.daemon(machine, "laptop") as daemon:
            agent = await floor.agent([machine], Answer(blocks=(run("echo ran >> log; echo it"),)), say("done"))
            daemon.kill()
            await floor.client.send(agent.id, "go")
            await floor.until_states(agent, "queued")
            await restarted(own_postgres, cluster, own_directory, own_directory.with_name("before"))
            daemon.start()
            await floor.until_states(agent, "exited", limit_s=constants.back_s)
            daemon.kill()
            await restarted(own_postgres, cluster, own_directory.with_name("before"), own_directory)
            assert [row["state"] for row in await floor.processes(agent)] == ["queued"]
            daemon.start()
            await floor.until_states(agent, "unknown", limit_s=constants.back_s)
            agent.client = floor.client
            await agent.settled(within_s=constants.back_s)
            [(outcome, value)] = await results(agent)
            assert (outcome, value["error_code"]) == ("failed", "reconciliation_conflict")
            await floor.client.send(agent.id, embed(Answer(blocks=(run("cat log"),)), say("fine"), text="and now?"))

            async def told() -> bool:
                return (await agent.texts())[-1] == "fine"

            await until(told, "the machine works on", limit_s=constants.back_s)
            assert (await results(agent))[-1][1]["output"] == "ran\n"
        await cluster.verify()


async def restarted(server: EmbeddedPostgres, cluster: Cluster, source: Path, target: Path) -> None:
    """Kill the servers of a cluster, copy the database's files from one place to the other, and start everything."""
    cluster.front.kill_main()
    await server.stop()
    if target.exists():
        await asyncio.to_thread(subprocess.run, ["rm", "-r", str(target)], check=True)
    await asyncio.to_thread(subprocess.run, ["cp", "-a", str(source), str(target)], check=True)
    await server.start()
    front = cluster.make("api,worker,maintenance", ports=cluster.front.ports)
    front.launch()
    await front.ready()
    cluster.front = front
