"""`omnara daemon` as a process of its own, against a server that is one too: installed, revoked, doubled, stopped."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
import pytest_asyncio

from omnara.client import Client
from omnara.client.machines import ConnectedMachine
from omnara.ids import IdKind, decode
from omnara.settings import child_environment
from omnara.testing import call, say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.machines import TestMachine, bind, queue_command
from tests.support.postgres import PostgresForTests
from tests.support.processes import ROOT
from tests.support.times import SHRUNK
from tests.support.waiting import until

SETTINGS = {
    "OMNARA_MACHINE_HEARTBEAT": "500ms",
    "OMNARA_MACHINE_LEASE": "30s",
    "OMNARA_MACHINE_DRAIN": "200ms",
    "OMNARA_MACHINE_SWEEP": "200ms",
}
HOLD = "echo $$; echo begun >> log; while [ ! -e stop ]; do sleep 0.05; done; echo over >> log"


class Lab:
    """A server with one agent at rest."""

    def __init__(self, cluster: Cluster, client: Client, agent: Handle, url: str) -> None:
        self.cluster = cluster
        self.client = client
        self.agent = agent
        self.url = url
        self.project: Any = None

    async def machine(self) -> tuple[TestMachine, ConnectedMachine]:
        """A machine as people connect one."""
        made = await self.client.machines.connect("laptop")
        machine_id = decode(IdKind.MACHINE, made.machine.id)
        return TestMachine(machine_id, self.project["org_id"], self.project["id"], made.token), made

    async def bound(self) -> tuple[TestMachine, ConnectedMachine, UUID]:
        """A machine that the agent may use, and the binding."""
        machine, made = await self.machine()
        return machine, made, await bind(self.cluster.sql, machine, self.agent.uuid)

    async def row(self, process_id: UUID) -> Any:
        """The row of a process."""
        return await self.cluster.sql.fetchrow("select * from processes where id = $1", process_id)

    async def reaches(self, process_id: UUID, state: str, why: str = "") -> Any:
        """Wait until a process is in a state; its row."""

        async def there() -> bool:
            return bool((await self.row(process_id))["state"] == state)

        await until(there, f"{process_id} is {state} {why}", limit_s=20)
        return await self.row(process_id)

    async def online(self, machine: TestMachine) -> None:
        """Wait until a machine is online."""
        query = "select state = 'online' from machine_connections where machine_id = $1"

        async def there() -> bool:
            return bool(await self.cluster.sql.fetchval(query, machine.id))

        await until(there, "the machine is online", limit_s=20)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(postgres: PostgresForTests, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    directory = tmp_path_factory.mktemp("cluster")
    async with postgres.fresh() as dsn, Cluster(dsn, directory, SHRUNK, **SETTINGS) as cluster:
        [server] = await cluster.start(1, "api,worker,maintenance")
        client = cluster.client(server)
        agent = await cluster.agent(client, say("fine"))
        made = Lab(cluster, client, agent, server.url)
        made.project = await cluster.sql.fetchrow("select id, org_id from projects limit 1")
        yield made
        await cluster.verify()


class Laptop:
    """A user's home on a computer: `omnara` is run there, and everything that it left is ended."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.home = directory / "omnara"
        self.work = directory / "work"
        self.work.mkdir(parents=True)
        self._log = directory / "daemon.log"
        self._environment = child_environment(
            {"OMNARA_HOME": str(self.home), "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(directory), **environment}
        )
        self.daemons: list[subprocess.Popen[bytes]] = []

    def omnara(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "omnara", *words],
            env={**self._environment, **environment},
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def start(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a daemon."""
        with self._log.open("ab") as log:
            made = subprocess.Popen(
                [sys.executable, "-m", "omnara", "daemon", "run", *words],
                env={**self._environment, **environment},
                cwd=self.work,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.daemons.append(made)
        return made

    @property
    def log(self) -> str:
        """What the daemons said."""
        return self._log.read_text()[-3000:]

    def status(self) -> dict[str, Any]:
        """What `omnara daemon status` says."""
        found: dict[str, Any] = json.loads(self.omnara("daemon", "status", "--json").stdout)
        return found

    def end(self) -> None:
        """Kill daemons and what they started."""
        for one in self.daemons:
            one.kill()
            one.wait(30)
        for process in psutil.process_iter(["cwd"]):
            with contextlib.suppress(psutil.Error):
                if (process.info["cwd"] or "").startswith(str(self.work.parent)):
                    process.kill()


async def exited(daemon: subprocess.Popen[bytes], laptop: Laptop) -> int:
    """Wait until a daemon has ended; its code."""
    await until(lambda: daemon.poll() is not None, f"the daemon ends\n{laptop.log}", limit_s=20)
    return int(daemon.returncode)


@pytest.fixture
def laptop(lab: Lab, tmp_path: Path) -> Iterator[Laptop]:
    made = Laptop(tmp_path / "laptop", OMNARA_API_URL=lab.url)
    try:
        yield made
    finally:
        made.end()


def lines(path: Path) -> Sequence[str]:
    return path.read_text().splitlines() if path.exists() else []


async def test_from_install_to_a_result_that_the_model_sees(lab: Lab, laptop: Laptop) -> None:
    machine, made = await lab.machine()
    refused = laptop.omnara("daemon", "install", "--no-start", OMNARA_MACHINE_TOKEN=made.token[:-1] + "!")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False), refused.stderr
    installed = laptop.omnara("daemon", "install", "--no-start", OMNARA_MACHINE_TOKEN=made.token)
    assert installed.returncode == 0, installed.stderr
    assert made.token not in installed.stdout
    kept = json.loads((laptop.home / "daemon.json").read_text())
    assert (laptop.home / "daemon.json").stat().st_mode & 0o777 == 0o600
    assert (kept["schema_version"], kept["api_url"], kept["machine_id"]) == (1, lab.url, made.machine.id)
    assert laptop.omnara("daemon", "status").returncode == 1
    daemon = laptop.start()
    await lab.online(machine)
    assert (laptop.status()["state"], laptop.status()["pid"]) == ("connected", daemon.pid)
    agent = await lab.cluster.agent(
        lab.client,
        say("ready"),
        call("run_command", {"command": "echo from $PWD; exit 3"}),
        say("done"),
        tools=("run_command",),
    )
    await agent.settled()
    await bind(lab.cluster.sql, machine, agent.uuid)
    await lab.client.send(agent.id, "go")
    await until(lambda: len(agent.requests) == 3, "the model saw the result", limit_s=20)
    await agent.settled()
    [event] = [event for event in await agent.events() if event.kind == "tool_result"]
    told = json.dumps(event.content_blocks)
    assert f"from {laptop.work}" in told
    assert '"exit_code": 3' in told
    second = laptop.start()
    assert await exited(second, laptop) == 1, "one daemon for one home"
    daemon.send_signal(signal.SIGTERM)
    assert await exited(daemon, laptop) == 0
    gone = laptop.omnara("daemon", "uninstall", "--purge")
    assert gone.returncode == 0, gone.stderr
    report = "select failure_report ->> 'stage' from machines where id = $1"
    assert await lab.cluster.sql.fetchval(report, machine.id) == "daemon_uninstalled", "the server is told"
    assert laptop.status()["machine_id"] is None
    assert not list(laptop.home.glob("installations/*/machines/*"))


async def test_a_token_that_is_revoked_ends_and_wipes_everything(lab: Lab, laptop: Laptop) -> None:
    machine, made, binding = await lab.bound()
    daemon = laptop.start(OMNARA_MACHINE_TOKEN=made.token)
    await lab.online(machine)
    process_id = await queue_command(lab.cluster.sql, machine, lab.agent.uuid, binding, HOLD, wait_ms=100)
    await lab.reaches(process_id, "running", laptop.log)
    await until(lambda: lines(laptop.work / "log") == ["begun"], "it runs")
    runs = [
        one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(laptop.work) and one.pid != daemon.pid
    ]
    assert runs
    await lab.client.machines.revoke_token(made.machine.id, made.token_record.id)
    assert await exited(daemon, laptop) == 0
    await until(lambda: not any(one.is_running() for one in runs), "what ran is dead")
    assert not list(laptop.home.glob("installations/*/machines/*"))
    row = await lab.row(process_id)
    assert row["state"] == "unknown"
    again = laptop.start(OMNARA_MACHINE_TOKEN=made.token)
    assert await exited(again, laptop) == 0, "a restart finds nothing to do"


async def test_of_two_daemons_with_one_token_the_newer_stays(lab: Lab, laptop: Laptop, tmp_path: Path) -> None:
    machine, made, binding = await lab.bound()
    older = laptop.start(OMNARA_MACHINE_TOKEN=made.token)
    await lab.online(machine)
    process_id = await queue_command(lab.cluster.sql, machine, lab.agent.uuid, binding, HOLD, wait_ms=100)
    await lab.reaches(process_id, "running", laptop.log)
    other = Laptop(tmp_path / "other", OMNARA_API_URL=lab.url)
    try:
        newer = other.start(OMNARA_MACHINE_TOKEN=made.token)
        assert await exited(older, laptop) == 0
        # What the newer one does not have cannot be known any more, and the older one's command goes on all the same.
        await lab.reaches(process_id, "unknown", other.log)
        assert lines(laptop.work / "log") == ["begun"]
        (laptop.work / "stop").touch()
        await until(lambda: lines(laptop.work / "log") == ["begun", "over"], "it was left alone")
        second = await queue_command(lab.cluster.sql, machine, lab.agent.uuid, binding, "pwd")
        await lab.reaches(second, "exited", other.log)
        assert newer.poll() is None
    finally:
        other.end()


async def test_what_is_no_text_arrives_as_far_as_it_is_one(lab: Lab, laptop: Laptop) -> None:
    machine, made, binding = await lab.bound()
    laptop.start(OMNARA_MACHINE_TOKEN=made.token)
    await lab.online(machine)
    for command in (
        "printf 'a\\000b\\377c'",
        "head -c 300000 /dev/zero",
        "head -c 300000 /dev/urandom",
        "printf '\\342\\202'",
    ):
        process_id = await queue_command(lab.cluster.sql, machine, lab.agent.uuid, binding, command)
        assert (await lab.reaches(process_id, "exited", laptop.log))["exit_code"] == 0


async def test_told_to_stop_it_says_so_and_its_command_goes_on(lab: Lab, laptop: Laptop) -> None:
    machine, made, binding = await lab.bound()
    daemon = laptop.start(OMNARA_MACHINE_TOKEN=made.token)
    await lab.online(machine)
    process_id = await queue_command(lab.cluster.sql, machine, lab.agent.uuid, binding, HOLD, wait_ms=100)
    await lab.reaches(process_id, "running", laptop.log)
    daemon.send_signal(signal.SIGTERM)
    assert await exited(daemon, laptop) == 0
    state = "select state from machine_runtimes where machine_id = $1"
    assert await lab.cluster.sql.fetchval(state, machine.id) == "ended", "the server need not wait for the lease"
    (laptop.work / "stop").touch()
    await until(lambda: lines(laptop.work / "log") == ["begun", "over"], "it goes on to its end")
    assert (await lab.row(process_id))["state"] == "running"
    laptop.start(OMNARA_MACHINE_TOKEN=made.token)
    row = await lab.reaches(process_id, "exited", laptop.log)
    assert row["exit_code"] == 0
    assert lines(laptop.work / "log") == ["begun", "over"]


async def test_killed_three_times_while_commands_start_and_end_each_runs_once(lab: Lab, laptop: Laptop) -> None:
    machine, made, binding = await lab.bound()
    daemon = laptop.start(OMNARA_MACHINE_TOKEN=made.token)
    await lab.online(machine)
    ids = []
    for number in range(12):
        command = f"echo x >> ran-{number}; sleep 0.{number % 4}; echo {number}"
        ids.append(await queue_command(lab.cluster.sql, machine, lab.agent.uuid, binding, command, wait_ms=100))
        if number in (3, 7, 11):
            first = laptop.work / f"ran-{number - 3}"
            await until(first.exists, f"some of them were begun\n{laptop.log}", limit_s=20)
            daemon.kill()
            daemon.wait(30)
            daemon = laptop.start(OMNARA_MACHINE_TOKEN=made.token)
    for number, process_id in enumerate(ids):
        row = await lab.reaches(process_id, "exited", laptop.log)
        assert row["exit_code"] == 0
        assert lines(laptop.work / f"ran-{number}") == ["x"]
