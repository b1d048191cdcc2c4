"""Machines of an organization: those that people connect, and those that agents got from pools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from omnara.client.transport import Transport

__all__ = ["ConnectedMachine", "DaemonToken", "Machine", "MachinePool", "Machines", "NewDaemonToken"]


class Machine(msgspec.Struct, frozen=True):
    """One machine. `connection_state`: online, asleep or offline."""

    id: str
    display_name: str
    source_kind: str
    provider: str
    lifecycle_state: str
    connection_state: str
    created_at: datetime
    connection_state_reason: str = ""


class DaemonToken(msgspec.Struct, frozen=True):
    """A daemon's token without its text."""

    id: str
    name: str
    created_at: datetime
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None


class NewDaemonToken(msgspec.Struct, frozen=True):
    """A new token. `token` is its text, which nobody can ask for again."""

    token: str
    token_record: DaemonToken


class ConnectedMachine(msgspec.Struct, frozen=True):
    """A new machine that a daemon can join with `token`, which nobody can ask for again."""

    machine: Machine
    token: str
    token_record: DaemonToken
    project_grants: list[dict[str, Any]] = []


class MachinePool(msgspec.Struct, frozen=True):
    """A pool, from which agents get machines of their own."""

    id: str
    name: str
    provider: str
    max_total_machines: int
    created_at: datetime
    provider_config: dict[str, Any] = {}


class Machines:
    """The machines that a key sees. Raises ApiError and ServerUnreachable as the client does."""

    def __init__(self, http: Transport, project_path: Callable[[], Awaitable[str]]) -> None:
        self._http = http
        self._project_path = project_path

    async def all(self, *, source_kind: str | None = None) -> list[Machine]:
        """Return the machines, newest first: all, or those of one source (byo, pool)."""
        filters = {} if source_kind is None else {"source_kind": source_kind}
        found: list[Machine] = await self._http.pages(await self._path(), Machine, **filters)
        return found

    async def connect(self, name: str, *, projects: Sequence[str] | None = None) -> ConnectedMachine:
        """Make a machine for a daemon to join, which these projects may use (ids; default: the key's project).

        Not repeated after a lost answer: then look at `all`, since the token of what was made is gone.
        """
        if projects is None:
            projects = [(await self._project_path()).rpartition("/")[2]]
        body = {"display_name": name, "project_ids": list(projects)}
        return await self._http.request("POST", f"{await self._path()}/connect", ConnectedMachine, body=body)

    async def get(self, machine: str) -> Machine:
        """Return one machine."""
        return await self._http.request("GET", await self._path(machine), Machine)

    async def delete(self, machine: str) -> None:
        """End a connected machine, with its daemon and all that runs on it."""
        await self._http.request("DELETE", await self._path(machine), dict[str, Any])

    async def tokens(self, machine: str) -> list[DaemonToken]:
        """Return the tokens of a machine's daemon, newest first, revoked ones too."""
        found: list[DaemonToken] = await self._http.pages(f"{await self._path(machine)}/daemon-tokens", DaemonToken)
        return found

    async def create_token(self, machine: str, *, name: str = "") -> NewDaemonToken:
        """Make another token with which a daemon can join as this machine."""
        path = f"{await self._path(machine)}/daemon-tokens"
        return await self._http.request("POST", path, NewDaemonToken, body={"name": name})

    async def revoke_token(self, machine: str, token: str) -> DaemonToken:
        """Make a token worthless. A daemon that joined with it ends all its commands and deletes its files."""
        path = f"{await self._path(machine)}/daemon-tokens/{token}/revoke"
        return await self._http.request("POST", path, DaemonToken)

    async def pools(self) -> list[MachinePool]:
        """Return the pools of the organization, newest first."""
        found: list[MachinePool] = await self._http.pages(await self._path(kind="machine-pools"), MachinePool)
        return found

    async def create_pool(
        self, name: str, *, provider: str, config: Mapping[str, Any] | None = None, max_machines: int = 10
    ) -> MachinePool:
        """Make a pool that the key's project may use. The same again changes nothing; other settings are a conflict.

        `config` is the provider's, such as an image. Needs the right to manage the organization's machines.
        """
        body = {
            "name": name,
            "provider": provider,
            "provider_config": dict(config or {}),
            "max_total_machines": max_machines,
        }
        pool = await self._http.request("POST", await self._path(kind="machine-pools"), MachinePool, body=body)
        path = f"{await self._project_path()}/machine-pool-grants"
        await self._http.request("POST", path, dict[str, Any], body={"machine_pool_id": pool.id}, key=pool.id)
        return pool

    async def delete_pool(self, pool: str) -> None:
        """End a pool, and all its machines with what runs on them."""
        await self._http.request("DELETE", await self._path(pool, kind="machine-pools"), dict[str, Any])

    async def _path(self, machine: str = "", *, kind: str = "machines") -> str:
        org = (await self._project_path()).partition("/projects/")[0]
        return f"{org}/{kind}/{machine}".removesuffix("/")
