"""Machines for tests: rows in the database, and a daemon that speaks raw frames and does only what it is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Protocol
from uuid import UUID, uuid4

import aiohttp
import msgspec

from omnara.access import tokens
from omnara.access.tokens import TokenKind
from omnara.ids import IdKind, decode, encode, new_uuid

BASE = "/api/v1/daemon"


class Rows(Protocol):
    """Runs SQL: a pool of the driver's, or anything with its methods."""

    async def fetch(self, query: str, *values: Any) -> list[Any]:
        """Run a query."""
        ...


class TestMachine(msgspec.Struct, frozen=True):
    """A machine that is in the database, with a token for its daemon."""

    __test__ = False

    id: UUID
    org_id: UUID
    project_id: UUID
    token: str

    @property
    def public_id(self) -> str:
        """What clients call it."""
        return encode(IdKind.MACHINE, self.id)


async def make_machine(sql: Rows, org_id: UUID, project_id: UUID, name: str = "laptop") -> TestMachine:
    """Insert somebody's own machine with a token, granted to a project."""
    machine_id, token = new_uuid(), tokens.generate(TokenKind.DAEMON)
    await sql.fetch(
        "insert into machines (id, org_id, source_kind, display_name, activated_at) values ($1, $2, 'byo', $3, now())",
        machine_id, org_id, name,
    )  # fmt: skip
    await sql.fetch(
        "insert into machine_grants (id, org_id, project_id, machine_id, source_kind)"
        " values ($1, $2, $3, $4, 'explicit')",
        new_uuid(), org_id, project_id, machine_id,
    )  # fmt: skip
    await sql.fetch(
        "insert into machine_daemon_tokens (id, org_id, machine_id, token_hash) values ($1, $2, $3, $4)",
        new_uuid(), org_id, machine_id, token.hash,
    )  # fmt: skip
    return TestMachine(machine_id, org_id, project_id, token.text)


async def make_pool_machine(
    sql: Rows,
    org_id: UUID,
    project_id: UUID,
    *,
    provider: str,
    host: str | None = None,
    name: str = "box",
    provisioned: bool = True,
) -> TestMachine:
    """Insert a pool of its own and a machine of it: as if it had been provisioned, or else still to be."""
    pool_id, grant_id, machine_id = new_uuid(), new_uuid(), new_uuid()
    await sql.fetch(
        "insert into machine_pools (id, org_id, name, provider, max_total_machines) values ($1, $2, $3, $4, 10)",
        pool_id, org_id, str(pool_id), provider,
    )  # fmt: skip
    await sql.fetch(
        "insert into machine_pool_grants (id, org_id, project_id, pool_id) values ($1, $2, $3, $4)",
        grant_id, org_id, project_id, pool_id,
    )  # fmt: skip
    await sql.fetch(
        "insert into machines (id, org_id, source_kind, pool_id, pool_grant_id, project_id, display_name, provider,"
        " resource_id, resource_host, generation, lifecycle_state, next_reconcile_after)"
        " values ($1, $2, 'pool', $3, $4, $5, $6, $7, $8, $9, $10, $11, now())",
        machine_id, org_id, pool_id, grant_id, project_id, name, provider,
        str(machine_id) if provisioned else None, host, int(provisioned), "active" if provisioned else "provisioning",
    )  # fmt: skip
    await sql.fetch(
        "insert into machine_grants (id, org_id, project_id, machine_id, pool_grant_id, source_kind)"
        " values ($1, $2, $3, $4, $5, 'pool')",
        new_uuid(), org_id, project_id, machine_id, grant_id,
    )  # fmt: skip
    return TestMachine(machine_id, org_id, project_id, "")


async def bind(sql: Rows, machine: TestMachine, agent_id: UUID, *, kind: str = "explicit") -> UUID:
    """Attach a machine to an agent; the binding's id."""
    binding_id = new_uuid()
    await sql.fetch(
        "insert into agent_machine_bindings (id, org_id, project_id, agent_id, machine_id, machine_ref, binding_kind)"
        " values ($1, $2, $3, $4, $5, $6, $7)",
        binding_id, machine.org_id, machine.project_id, agent_id, machine.id, f"m-{binding_id}", kind,
    )  # fmt: skip
    return binding_id


async def queue_command(
    sql: Rows, machine: TestMachine, agent_id: UUID, binding_id: UUID, command: str, *, wait_ms: int = 10_000
) -> UUID:
    """Queue a command without a call of a tool, and without telling anybody."""
    process_id = new_uuid()
    await sql.fetch(
        "insert into processes (id, agent_id, project_id, machine_id, binding_id, command, wait_ms)"
        " values ($1, $2, $3, $4, $5, $6, $7)",
        process_id, agent_id, machine.project_id, machine.id, binding_id, command, wait_ms,
    )  # fmt: skip
    return process_id


def now() -> str:
    """This moment as a daemon writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def process_claim(public: str, **changes: Any) -> dict[str, Any]:
    """What a daemon says, when it registers, of a command that runs."""
    return {
        "process_id": public,
        "supervisor_instance_id": "one",
        "phase": "accepted",
        "supervisor_live": True,
        "execution_committed": True,
        "action_admission_closed": False,
        "resolved_action_seq": 0,
        "actions": [],
        **changes,
    }


class RawDaemon:
    """The client's side of one machine: HTTP and a socket, frames as plain values."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        self.session = session
        self.url = url
        self.token = token
        self.instance = str(uuid4())
        self.runtime = ""
        self.started_at: dict[str, str] = {}
        self.ended_at: dict[str, str] = {}
        self.socket: aiohttp.ClientWebSocketResponse

    @property
    def headers(self) -> dict[str, str]:
        """Who calls."""
        return {"Authorization": f"Bearer {self.token}"}

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Send a request; status and decoded body."""
        if body is not None:
            options["json"] = body
        async with self.session.request(method, f"{self.url}{BASE}{path}", headers=self.headers, **options) as answer:
            text = await answer.text()
            return answer.status, msgspec.json.decode(text) if text else None

    async def register(self, claims: Any = ()) -> Any:
        """Register; the whole answer."""
        body = {
            "daemon_instance_id": self.instance,
            "daemon_version": "1.2.3",
            "observed_platform": {"os": "linux", "arch": "amd64"},
            "processes": list(claims),
        }
        status, answer = await self.call("POST", "/runtimes", body)
        assert status == 201, answer
        self.runtime = answer["runtime"]["id"]
        return answer

    async def connect(self) -> aiohttp.ClientWebSocketResponse:
        """Open the channel."""
        self.socket = await self.session.ws_connect(
            f"{self.url}{BASE}/runtimes/{self.runtime}/socket", headers=self.headers, max_msg_size=2**21
        )
        return self.socket

    async def refused(self, runtime: str | None = None) -> tuple[int, Any]:
        """Try to open a channel that is refused; status and body."""
        path = f"/runtimes/{runtime or self.runtime}/socket"
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        headers = self.headers | upgrade | {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
        async with self.session.get(f"{self.url}{BASE}{path}", headers=headers) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def send(self, kind: str, **payload: Any) -> None:
        """Send a frame."""
        await self.socket.send_str(msgspec.json.encode({"type": kind, "payload": payload}).decode())

    async def beat(self) -> None:
        """Send a heartbeat."""
        await self.send("heartbeat", daemon_instance_id=self.instance)

    async def receive(self, within_s: float = 20.0) -> tuple[str, Any]:
        """Return the next frame; ("closed", code) when the socket ended."""
        message = await self.socket.receive(timeout=within_s)
        if message.type is not aiohttp.WSMsgType.TEXT:
            return "closed", self.socket.close_code
        frame = msgspec.json.decode(message.data)
        return frame["type"], frame["payload"]

    async def expect(self, kind: str, within_s: float = 20.0) -> Any:
        """Return the payload of the next frame of this kind, whatever comes before it."""
        async with asyncio.timeout(within_s):
            while True:
                found, payload = await self.receive(within_s)
                if found == kind:
                    return payload
                assert found != "closed", f"closed with {payload} while {kind} was expected"

    async def closed(self, within_s: float = 20.0) -> int:
        """Return the code with which the socket is closed, whatever comes before that."""
        async with asyncio.timeout(within_s):
            while True:
                found, payload = await self.receive(within_s)
                if found == "closed":
                    return int(payload)

    async def take(self, process_id: UUID | None = None) -> str:
        """Wait for an offer and get its grant; the process's id."""
        while True:
            offer = await self.expect("process_offer")
            if process_id is None or decode(IdKind.PROCESS, offer["process_id"]) == process_id:
                break
        await self.send("process_accept", process_id=offer["process_id"])
        assert (await self.expect("process_accept_ack"))["process_id"] == offer["process_id"]
        return str(offer["process_id"])

    async def started(self, process_id: str, report_id: str = "started") -> Any:
        """Report that a process runs; the acknowledgement."""
        result = {"process_id": process_id, "state": "running", "output": "", "cursor": 0, "next_cursor": 0}
        at = self.started_at.setdefault(process_id, now())
        event = {
            "type": "process_started",
            "process_id": process_id,
            "started_at": at,
            "observed_at": now(),
            "result": result,
        }
        await self.send("report", report_id=report_id, event=event)
        return await self.expect("report_ack")

    async def finished(self, process_id: str, report_id: str = "finished", output: str = "") -> Any:
        """Report that a process ended well; the acknowledgement."""
        at = self.started_at.setdefault(process_id, now())
        result = {
            "state": "exited",
            "exit_code": 0,
            "output": output,
            "cursor": 0,
            "next_cursor": len(output),
            "truncated": False,
            "done": True,
            "error": "",
        }
        event = {
            "type": "process_finished",
            "process_id": process_id,
            "state": "exited",
            "exit_code": 0,
            "started_at": at,
            "ended_at": self.ended_at.setdefault(process_id, now()),
            "result": result,
        }
        await self.send("report", report_id=report_id, event=event)
        return await self.expect("report_ack")


@contextlib.asynccontextmanager
async def raw_daemon(url: str, machine: TestMachine, *, connected: bool = True) -> AsyncIterator[RawDaemon]:
    """A daemon of a machine, registered and with its channel open."""
    async with aiohttp.ClientSession() as session:
        daemon = RawDaemon(session, url, machine.token)
        if connected:
            await daemon.register()
            await daemon.connect()
        yield daemon
