"""The only process dies and is started again, its embedded database left running, dead, or dead with a stale file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from omnara.db.embedded import EmbeddedPostgres
from omnara.testing import say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.processes import ServerProcess
from tests.support.times import Times

EVERYTHING = "api,worker,maintenance"


async def test_the_next_step_follows_at_once(
    own_directory: Path,
    pg_bin: Path | None,
    tmp_path_factory: pytest.TempPathFactory,
    times: Times,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No lease to wait for, and no long grace: the step begins when the process is up."""
    directory = own_directory
    # A lease, or the grace after somebody else's start of Postgres, would be waited for in vain.
    settings = {"OMNARA_DATA_DIR": str(directory), "OMNARA_WORKER_LEASE": "60s", "OMNARA_DEATH_GRACE": "60s"}
    if pg_bin is not None:
        settings["OMNARA_POSTGRES_BIN"] = str(pg_bin)
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        async with Cluster("", tmp_path_factory.mktemp("only"), times, **settings) as cluster:
            (only,) = await cluster.start(roles=EVERYTHING)
            dsn = await EmbeddedPostgres.running_dsn(directory)
            assert dsn is not None
            await cluster.connect(dsn)
            answer = say("answer {{attempt}}")
            agent = await cluster.agent(cluster.client(only), answer, gate="mid_text", gate_times=-1)
            await agent.gate.reached(30)
            only, alone_s = await again(cluster, agent, only)
            only.kill()
            end_postgres(directory)
            only, both_s = await start_after(cluster, agent, only)
            only.kill()
            end_postgres(directory)
            pid_file = directory / "pgdata" / "postmaster.pid"
            _, *rest = pid_file.read_text().splitlines()
            pid_file.write_text("\n".join([str(foreign.pid), *rest]))
            only, stale_s = await start_after(cluster, agent, only)
            agent.gate.release()
            await agent.settled()
            assert await agent.texts() == ["answer 4"]
            assert await agent.step_states() == [("model", "interrupted")] * 3 + [("model", "succeeded")]
            assert max(alone_s, both_s, stale_s) < 15
            await cluster.verify()
            assert await only.stop() == 0
            assert await EmbeddedPostgres.running_dsn(directory) is None, "an orderly stop stops the database too"
    finally:
        foreign.kill()
        foreign.wait()
    with capsys.disabled():
        print(f"\n  next step after ready: {alone_s:.3f} s; its database dead too: {both_s:.3f} s, {stale_s:.3f} s")


async def again(cluster: Cluster, agent: Handle, only: ServerProcess) -> tuple[ServerProcess, float]:
    """Kill the process alone and start it again."""
    only.kill_main()
    return await start_after(cluster, agent, only)


async def start_after(cluster: Cluster, agent: Handle, dead: ServerProcess) -> tuple[ServerProcess, float]:
    """Start the process that follows; it, and the seconds from its being ready to the agent's next step.

    Each step is one request of the agent's single model call.
    """
    asked = len(agent.requests)
    following = cluster.make(EVERYTHING, ports=dead.ports)
    await following.start()
    await agent.asked(asked + 1)
    (line,) = following.log_lines("ready")
    begun = (await agent.steps())[-1]["started_at"]
    assert len(await agent.steps()) == asked + 1
    return following, float((begun - datetime.fromisoformat(line["timestamp"])).total_seconds())


def end_postgres(directory: Path) -> None:
    """`kill -9` of the database server of this directory, if one runs; its pid file stays."""
    try:
        pid = int((directory / "pgdata" / "postmaster.pid").read_text().splitlines()[0])
        server = psutil.Process(pid)
        if "postgres" not in server.name():
            return
    except (FileNotFoundError, psutil.NoSuchProcess):
        return
    children = server.children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([server, *children], timeout=15)
