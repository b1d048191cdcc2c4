"""A server whose pool has machines in a cloud, and agents with one machine each."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.app import parts
from omnara.ids import IdKind, decode, new_uuid
from omnara.machines.providers.places import PLACES
from omnara.settings import Address
from omnara.testing import ModelServer, call, embed
from omnara.testing.ports import free_ports
from tests.contract.server import CONFIG, ApiServer, api_server, invariants_hold
from tests.support.cloud import DAEMON, Cloud
from tests.support.docker_fleet import QUICK, TIMES
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until

TOOLS = {"run_command": {"permission": "always_allow"}}


class Sky:
    """A server with a cloud, and its pool."""

    def __init__(self, server: ApiServer, cloud: Cloud) -> None:
        self.server = server
        self.cloud = cloud
        self.pool = ""

    async def no_more_is_made(self) -> None:
        """End the server's maker of machines."""
        for part in self.server.parts.services:
            if part.name == "provisioner":
                await part.stop()

    async def make_pool(self, **fields: Any) -> Any:
        """Ask for a pool of the cloud; the answer."""
        body = {"name": "sky", "provider": "cloud", "max_total_machines": 9, "provider_config": {"region": "north"}}
        return await self.server.call("POST", f"/api/v1/orgs/{self.server.org}/machine-pools", body | fields)

    async def use_pool(self, **fields: Any) -> None:
        """Make the pool that agents get their machines from."""
        made = await self.make_pool(**fields)
        assert made.status == 201, made.text
        self.pool = made.json["id"]
        path = f"{self.server.scope}/machine-pool-grants"
        granted = await self.server.call("POST", path, {"machine_pool_id": self.pool})
        assert granted.status == 201, granted.text

    async def remove_pool(self) -> None:
        """Delete the pool, and so its machines."""
        gone = await self.server.call("DELETE", f"/api/v1/orgs/{self.server.org}/machine-pools/{self.pool}")
        assert gone.status in (200, 204), gone.text

    async def delete_org(self) -> None:
        """Delete the organization, with all that is in it."""
        gone = await self.server.call("DELETE", f"/api/v1/orgs/{self.server.org}")
        assert gone.status == 204, gone.text

    async def secret(self, value: str) -> str:
        """Make a secret of the organization; its id."""
        body = {"owner": {"kind": "org"}, "name": str(new_uuid()), "material": {"kind": "generic", "value": value}}
        made = await self.server.call("POST", f"/api/v1/orgs/{self.server.org}/secrets", body)
        assert made.status == 201, made.text
        return str(made.json["id"])

    async def rotate(self, secret: str, value: str) -> None:
        """Give a secret another value."""
        body = {"material": {"kind": "generic", "value": value}}
        path = f"/api/v1/orgs/{self.server.org}/secrets/{secret}/versions"
        answer = await self.server.call("POST", path, body)
        assert answer.status == 200, answer.text

    async def agent(self, message: str | None = None) -> str:
        """An agent with a machine of the pool."""
        if not self.pool:
            refused = await self.make_pool(provider_config={"zone": 1})
            assert (refused.status, refused.code) == (400, "invalid_request"), "its own check is asked"
            await self.use_pool()
        source = msgspec.yaml.decode(CONFIG) | {
            "machine_sources": [{"pool": "sky", "initial_num_machines": 1, "max_machines": 1}],
            "tools": TOOLS,
        }
        return await self.server.agent(message, source=msgspec.json.encode(source).decode())

    async def machine(self, **wanted: Any) -> Any:
        """Wait until the newest machine has these columns; its row, with its state of connection."""
        query = (
            "select m.*, c.state as connection from machines m join machine_connections c on c.machine_id = m.id"
            " order by m.created_at desc limit 1"
        )
        found: Any = None

        async def there() -> bool:
            nonlocal found
            rows = await self.server.rows(query)
            found = rows[0] if rows else None
            return found is not None and all(found[name] == value for name, value in wanted.items())

        await until(there, f"the machine is {wanted}", limit_s=30)
        return found

    async def online(self, generation: int = 1) -> Any:
        """Wait until the newest machine is online."""
        return await self.machine(connection="online", generation=generation)

    async def tokens(self, machine_id: UUID) -> list[tuple[bool, str]]:
        """Whether each of a machine's tokens works, the newest last, and why not."""
        rows = await self.server.rows(
            "select revoked_at is null, revoke_reason from machine_daemon_tokens where machine_id = $1"
            " order by created_at, id",
            machine_id,
        )
        return [tuple(row) for row in rows]

    async def ran(self, agent: str, command: str) -> str:
        """Have an agent run a command; what came of it."""
        await self.begin(agent, command)
        return await self.result(agent)

    async def begin(self, agent: str, command: str) -> None:
        """Have an agent begin to run a command."""
        await self.server.say(agent, embed(call("run_command", {"command": command, "wait_ms": 9000})))

    async def result(self, agent: str) -> str:
        """Wait for the end of an agent's turn; what its last tool said."""
        await self.server.settled(agent)
        rows = await self.server.rows(
            "select payload::text from events where agent_id = $1 and kind = 'tool_result'"
            " order by sequence desc limit 1",
            decode(IdKind.AGENT, agent.rsplit("/", 1)[1]),
        )
        return str(rows[0][0])

    async def ask(self, token: str, method: str, path: str, **options: Any) -> int:
        """What the door for daemons answers to a token."""
        answer = await self.server.call(method, f"/api/v1/daemon{path}", key=token, **options)
        self.answer = answer.text
        return answer.status


@contextlib.asynccontextmanager
async def sky_over(
    postgres: PostgresForTests,
    model: ModelServer,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str = "http://127.0.0.1",
    command: str = DAEMON,
    key: str = "",
    **times: Any,
) -> AsyncIterator[Sky]:
    """Run a server with a cloud, its times shrunk.

    `url`: how the server is reached, without the port. `key`: what the cloud asks for.
    """
    monkeypatch.setattr(parts, "Times", lambda: msgspec.structs.replace(TIMES, **({"daemon_s": 0.5} | times)))
    cloud, port = Cloud(directory / "cloud", command, key), free_ports()[0]
    given: dict[str, Any] = QUICK | {
        "listen": Address("127.0.0.1", port),
        "machine_lease_s": 1.5,
        "machine_heartbeat_s": 0.4,
    }
    given["public_url"] = f"{url}:{port}" if url else None
    async with (
        postgres.fresh() as dsn,
        api_server(dsn, model, places={**PLACES, "cloud": cloud.place}, **given) as server,
    ):
        lab = Sky(server, cloud)
        try:
            yield lab
            await invariants_hold(server)
        finally:
            await lab.no_more_is_made()
            for name in list(cloud.boxes):
                cloud.destroy(name)
