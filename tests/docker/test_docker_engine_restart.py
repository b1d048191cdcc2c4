"""The engine stops with all its containers, and comes back: machines too, with their files, and nothing runs twice."""

from __future__ import annotations

import time

from omnara.machines.providers.docker import DockerProvider
from tests.contract.server import invariants_hold
from tests.support.docker_engine import BUSYBOX_IMAGE
from tests.support.docker_fleet import fleet
from tests.support.docker_own import own_engine


async def test_machines_come_back_with_their_engine(database: str) -> None:
    async with own_engine() as engine:
        provider = DockerProvider(engine.endpoint)
        try:
            async with fleet(database, provider) as replica:
                held = await replica.machine(BUSYBOX_IMAGE)
                await held.run("echo kept >file")
                running = await held.queue("echo ran >>log; sleep 600")
                await held.until_process(running, "running")
                engine.stop()
                waiting = await held.queue("echo ran >>waited; cat file log waited")
                assert (await held.process(waiting))["state"] == "queued"
                await engine.start()
                began = time.monotonic()
                await held.until_process(waiting, "exited", 30)
                row = await held.until_process(running, "unknown", 30)
                assert row["reason_code"] == "local_process_missing_after_daemon_reconnect"
                machine = await held.until_state("active")
                assert machine["generation"] == 2
                await held.run('[ "$(cat log)" = ran ] && [ "$(cat waited)" = ran ] && [ "$(cat file)" = kept ]')
                assert time.monotonic() - began < 50
                await invariants_hold(replica.server)
        finally:
            await provider.close()
