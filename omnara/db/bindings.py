"""Machines as agents have them: bindings, where configs get them from, and new machines of pools.

Environments are JSON text whose secrets are UUIDs. Source: machines.md §8, §12.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("bindings")


class BoundMachine(msgspec.Struct, frozen=True):
    """A machine that is attached to an agent. `offline_s`: since when it was not heard of; None: online or asleep.

    `served_s`: for how long there was somebody to hear it. `bound_at`: when the agent got it.
    `seen`: some daemon registered for it. `granted`: the agent's project may use it.
    """

    binding_id: UUID
    machine_id: UUID
    machine_ref: str
    binding_kind: str
    source_key: str
    description: str
    cwd: str
    env_overlay: str
    secret_env_overlay: str
    display_name: str
    machine_description: str
    provider: str
    machine_cwd: str
    env: str
    secret_env: str
    observed_platform: str | None
    cpu: int | None
    memory_mb: int | None
    lifecycle_state: str
    reason_code: str
    reason_message: str
    failure_report: str | None
    pool_id: UUID | None
    created_at: datetime
    asleep: bool
    offline_s: float | None
    served_s: float
    bound_at: datetime
    seen: bool
    granted: bool


class BindingRow(msgspec.Struct, frozen=True):
    """A binding as it is shown."""

    id: UUID
    project_id: UUID
    agent_id: UUID
    machine_id: UUID
    machine_ref: str
    binding_kind: str
    state: str
    description: str
    cwd: str
    env_overlay: str
    secret_env_overlay: str
    created_at: datetime
    updated_at: datetime


class NewBinding(msgspec.Struct, frozen=True, kw_only=True):
    """A machine to attach."""

    id: UUID
    org_id: UUID
    project_id: UUID
    agent_id: UUID
    machine_id: UUID
    machine_ref: str
    binding_kind: str
    source_key: str
    description: str
    cwd: str
    env_overlay: str
    secret_env_overlay: str


class SourceMachine(msgspec.Struct, frozen=True):
    """A machine that a config may mean."""

    id: UUID
    source_kind: str
    granted: bool


class SourcePool(msgspec.Struct, frozen=True):
    """A pool that a config may mean. `provider_config` and `options` (of its machines) are JSON text."""

    id: UUID
    granted: bool
    provider: str
    provider_config: str
    options: str


class PoolName(msgspec.Struct, frozen=True):
    """A pool as a model is told of it."""

    id: UUID
    name: str
    description: str


class LockedPool(msgspec.Struct, frozen=True):
    """A locked pool, the project's grant, and what counts against their limits. Sizes in cores and MiB."""

    id: UUID
    grant_id: UUID
    name: str
    provider: str
    cpu: int | None
    memory_mb: int | None
    env: str
    secret_env: str
    options: str
    cwd: str
    max_machines: int
    max_cpu: int | None
    max_memory_mb: int | None
    min_machine_cpu: int | None
    min_machine_memory_mb: int | None
    max_machine_cpu: int | None
    max_machine_memory_mb: int | None
    idle_minutes: int | None
    grant_cpu: int | None
    grant_memory_mb: int | None
    grant_env: str
    grant_secret_env: str
    grant_options: str
    grant_cwd: str
    grant_max_machines: int | None
    grant_max_cpu: int | None
    grant_max_memory_mb: int | None
    grant_min_machine_cpu: int | None
    grant_min_machine_memory_mb: int | None
    grant_max_machine_cpu: int | None
    grant_max_machine_memory_mb: int | None
    grant_idle_minutes: int | None
    used_machines: int
    used_cpu: int
    used_memory_mb: int
    project_machines: int
    project_cpu: int
    project_memory_mb: int
    agent_machines: int


class NewPoolMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine to be provisioned, everything resolved."""

    id: UUID
    org_id: UUID
    pool_id: UUID
    grant_id: UUID
    project_id: UUID
    display_name: str
    description: str
    provider: str
    cwd: str
    env: str
    secret_env: str
    cpu: int | None
    memory_mb: int | None
    options: str
    idle_minutes: int | None
    machine_grant_id: UUID


async def bound_machines(connection: Connection, agent_id: UUID) -> list[BoundMachine]:
    """Return the machines attached to an agent, oldest binding first."""
    return [BoundMachine(*row) for row in await connection.fetch(_SQL["bound_machines"], agent_id)]


async def list_bindings(connection: Connection, agent_id: UUID) -> list[BindingRow]:
    """Return the attached bindings of an agent in the order in which they were made."""
    return [BindingRow(*row) for row in await connection.fetch(_SQL["list_bindings"], agent_id)]


async def insert_binding(connection: Connection, new: NewBinding) -> bool:
    """Attach a machine to a locked agent; False when the agent has used the machine_ref before."""
    return await connection.fetchval(_SQL["insert_binding"], *msgspec.structs.astuple(new)) is not None


async def free_ref(connection: Connection, agent_id: UUID, machine_ref: str, other: str) -> None:
    """Give the released binding that has a machine_ref another one. The agent is locked."""
    await connection.execute(_SQL["free_ref"], agent_id, machine_ref, other)


async def change_binding(
    connection: Connection,
    binding_id: UUID,
    *,
    machine_ref: str,
    description: str,
    cwd: str,
    env_overlay: str,
    secret_env_overlay: str,
) -> None:
    """Write what another config says about an attached machine. The agent is locked."""
    await connection.execute(
        _SQL["change_binding"], binding_id, machine_ref, description, cwd, env_overlay, secret_env_overlay
    )


async def release_bindings(connection: Connection, binding_ids: Collection[UUID]) -> None:
    """Detach machines of a locked agent."""
    await connection.execute(_SQL["release_bindings"], list(binding_ids))


async def source_machines(
    connection: Connection, org_id: UUID, project_id: UUID, machine_id: UUID | None, name: str
) -> list[SourceMachine]:
    """Return up to two machines that a config means by id or by name."""
    rows = await connection.fetch(_SQL["source_machines"], org_id, project_id, machine_id, name)
    return [SourceMachine(*row) for row in rows]


async def source_pool(
    connection: Connection, org_id: UUID, project_id: UUID, pool_id: UUID | None, name: str
) -> SourcePool | None:
    """Return the pool that a config means by id or by name."""
    row = await connection.fetchrow(_SQL["source_pools"], org_id, project_id, pool_id, name)
    return None if row is None else SourcePool(*row)


async def pool_names(connection: Connection, project_id: UUID, pool_ids: Sequence[UUID]) -> list[PoolName]:
    """Return which of these pools the project may still use, by name."""
    return [PoolName(*row) for row in await connection.fetch(_SQL["pool_names"], project_id, list(pool_ids))]


async def lock_pools(connection: Connection, pool_ids: Collection[UUID]) -> None:
    """Lock pools against other admissions until the transaction ends. Before any agent is locked."""
    await connection.fetch(_SQL["lock_pools"], list(pool_ids))


async def locked_pool(connection: Connection, pool_id: UUID, project_id: UUID, agent_id: UUID) -> LockedPool | None:
    """Return a locked pool with what it is used for; None when it is gone or not granted."""
    row = await connection.fetchrow(_SQL["locked_pool"], pool_id, project_id, agent_id)
    return None if row is None else LockedPool(*row)


async def insert_pool_machine(connection: Connection, new: NewPoolMachine) -> None:
    """Insert a machine in `provisioning`, granted to its project. The pool is locked."""
    await connection.execute(_SQL["insert_pool_machine"], *msgspec.structs.astuple(new))


async def lock_machines(connection: Connection, machine_ids: Collection[UUID], *, at_once: bool = False) -> None:
    """Lock machines until the transaction ends, before any agent. After one `at_once`: never waits, raises instead."""
    await connection.fetch(_SQL["lock_machines_at_once" if at_once else "lock_machines"], list(machine_ids))


async def share_machines(connection: Connection, machine_ids: Collection[UUID]) -> None:
    """Keep machines from being deleted or withdrawn until the transaction ends. Before any agent is locked."""
    await connection.fetch(_SQL["share_machines"], list(machine_ids))


async def keep_machine(connection: Connection, machine_id: UUID) -> bool:
    """Keep a machine that is shared already from being deleted; False when it is gone. Without waiting, as above."""
    return await connection.fetchval(_SQL["keep_machine"], machine_id) is not None


async def delete_machines(connection: Connection, machine_ids: Collection[UUID], reason: str) -> list[UUID]:
    """Set locked pool machines to `deleting`; return those that were not yet."""
    rows = await connection.fetch(_SQL["delete_machines"], list(machine_ids), reason)
    return [row[0] for row in rows]


async def own_pool(connection: Connection, org_id: UUID, name: str) -> tuple[UUID, str] | None:
    """Return id and provider of the pool that this cluster keeps for an organization."""
    row = await connection.fetchrow(_SQL["own_pool"], org_id, name)
    return None if row is None else (row[0], row[1])


async def insert_own_pool(
    connection: Connection, pool_id: UUID, org_id: UUID, *, name: str, description: str, provider: str, most: int
) -> None:
    """Make that pool, if no pool has its name."""
    await connection.execute(_SQL["insert_own_pool"], pool_id, org_id, name, description, provider, most)


async def grant_own_pool(connection: Connection, grant_id: UUID, org_id: UUID, project_id: UUID, pool_id: UUID) -> None:
    """Let a project use that pool; again without effect."""
    await connection.execute(_SQL["grant_own_pool"], grant_id, org_id, project_id, pool_id)
