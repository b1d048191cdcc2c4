"""The end of machines, tokens, grants and pools: what runs there ends in the transaction that takes them away.

One transaction for one machine, in the order of locks: machine, agents, processes. What covers many machines (a pool, a
project, an organization) takes them one after another and itself last, so it may be repeated after any interruption and
no transaction holds the agents of many machines. Machines of pools are handed to the provisioner, which removes them.
Source: machines.md §8, §12, §14 row 24; contract (deleteMachine, deleteMachinePool, deleteProjectMachineGrant).
"""

from __future__ import annotations

import contextlib
from typing import Final
from uuid import UUID

from omnara.access.principals import Principal
from omnara.access.roles import OrgAction, ProjectAction, ProjectScope
from omnara.db import daemon_tokens, machine_grants, machine_pools, machines, processes, provisioning, runtimes
from omnara.db.connection import Connection
from omnara.db.daemon_tokens import DaemonTokenRow
from omnara.engine.appending import Appending, wake_if_runnable
from omnara.engine.deps import Deps
from omnara.engine.machines.access import locked
from omnara.engine.machines.closing import DECOMMISSIONED, close_binding, close_machine, close_token
from omnara.engine.machines.completing import Told
from omnara.engine.machines.pool_admin import locked_pool
from omnara.engine.scope import org_in_scope, project_in_scope
from omnara.errors import Conflict, InvalidRequest, NotFound

GRANT_REVOKED: Final = "machine_grant_revoked"
POOL_DELETED: Final = "machine_pool_deleted"
POOL_GRANT_REVOKED: Final = "machine_pool_grant_revoked"
_REVOKED: Final = "revoked"
_BATCH: Final = 100


async def delete_machine(deps: Deps, p: Principal, org_id: UUID, machine_id: UUID) -> None:
    """End a machine that somebody connected, with its daemon, tokens, grants, bindings and work. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest for a machine of a pool.
    """

    async def work(connection: Connection) -> Told:
        row = await locked(connection, p, org_id, machine_id)
        if row.source_kind != "byo":
            raise InvalidRequest("a machine of a pool ends with its agent or its pool")
        return await _end(connection, machine_id, DECOMMISSIONED, pool=False)

    (await deps.db.run(work)).tell(deps)


async def revoke_token(deps: Deps, p: Principal, org_id: UUID, machine_id: UUID, token_id: UUID) -> DaemonTokenRow:
    """Make a token worthless; what runs on the machine ends if its daemon joined with it. May be repeated.

    Own transaction. Raises NotFound, Forbidden.
    """

    async def work(connection: Connection) -> tuple[Told, DaemonTokenRow]:
        await locked(connection, p, org_id, machine_id)
        told = Told()
        if await daemon_tokens.revoke(connection, machine_id, token_id, _REVOKED):
            told = await close_token(connection, machine_id, token_id)
            told.machines.add(machine_id)
        row = await daemon_tokens.find(connection, machine_id, token_id)
        if row is None:
            raise NotFound("daemon token")
        return told, row

    told, row = await deps.db.run(work)
    told.tell(deps)
    return row


async def delete_grant(deps: Deps, p: Principal, project: ProjectScope, grant_id: UUID) -> None:
    """Take a machine from a project and end what the project's agents have there. Own transaction.

    Bindings stay, so that the agents have the machine again when it is granted again. Raises NotFound, Forbidden,
    Conflict for a grant that came with a pool's machine.
    """
    project_in_scope(p, project, ProjectAction.ACCESS)
    await _drop_grant(deps, project, grant_id)


async def delete_pool(deps: Deps, p: Principal, org_id: UUID, pool_id: UUID) -> None:
    """End all machines of a pool, then hide it and take it from every project. Several transactions; may be repeated.

    Raises NotFound, Forbidden, Conflict for a pool that the cluster keeps.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    await _drop_pool(deps, org_id, pool_id, by_tenant=True)


async def delete_pool_grant(deps: Deps, p: Principal, project: ProjectScope, grant_id: UUID) -> None:
    """End the machines that a project got from a pool, then take the pool from it.

    Several transactions; may be repeated. Raises NotFound, Forbidden.
    """
    project_in_scope(p, project, ProjectAction.ACCESS)
    await _drop_pool_grant(deps, project, grant_id)


async def release_project(deps: Deps, project: ProjectScope) -> None:
    """Take all machines and pools from a project that is deleted. Several transactions; may be repeated."""
    for listed, drop in (
        (machine_grants.of_project, _drop_grant),
        (machine_pools.grants_of_project, _drop_pool_grant),
    ):
        while True:
            async with deps.db.acquire() as connection:
                found = await listed(connection, project.project_id, _BATCH)
            for grant_id in found:
                with contextlib.suppress(NotFound):  # somebody else was faster
                    await drop(deps, project, grant_id)
            if not found:
                break


async def release_org(deps: Deps, org_id: UUID) -> None:
    """End all pools and machines of an organization that is deleted. Several transactions; may be repeated."""
    while True:
        async with deps.db.acquire() as connection:
            pools = await machine_pools.of_org(connection, org_id, _BATCH)
        for pool_id in pools:
            with contextlib.suppress(NotFound):  # somebody else was faster
                await _drop_pool(deps, org_id, pool_id, by_tenant=False)
        if not pools:
            break
    while True:
        async with deps.db.acquire() as connection:
            found = await machines.connected(connection, org_id, _BATCH)
        for machine_id in found:
            await _end_alone(deps, org_id, machine_id, DECOMMISSIONED, pool=False)
        if not found:
            break


async def end_pool_machine(connection: Connection, machine_id: UUID, reason: str, message: str = "") -> Told:
    """End a locked machine of a pool and hand it to the provisioner; nothing when that was done already.

    In the caller's transaction, which has locked no agent; the caller tells after its commit.
    """
    words = f"There is no machine: {message.rstrip('.')}." if message else ""
    told = await _end(connection, machine_id, reason, pool=True, message=words)
    if told.machines and message:
        await provisioning.set_reason_message(connection, machine_id, message)
    return told


# --- parts ------------------------------------------------------------------------------------------------


async def _drop_grant(deps: Deps, project: ProjectScope, grant_id: UUID) -> None:
    async def work(connection: Connection) -> Told:
        row = await machine_grants.find(connection, project.project_id, grant_id=grant_id)
        if row is None:
            raise NotFound("machine grant")
        if row.source_kind != "explicit":
            raise Conflict("the grant came with a machine of a pool; delete the grant of the pool")
        await machines.lock(connection, project.org_id, row.machine_id)
        if not await machine_grants.drop(connection, grant_id):
            raise NotFound("machine grant")
        return await _close_bindings(connection, project.project_id, row.machine_id)

    (await deps.db.run(work)).tell(deps)


async def _close_bindings(connection: Connection, project_id: UUID, machine_id: UUID) -> Told:
    """End what the agents of a project have on a locked machine."""
    bindings = await machines.bindings(connection, machine_id, project_id)
    hot_rows = await processes.lock_agents(connection, [agent_id for _, agent_id in bindings])
    told = Told(machines={machine_id})
    for binding_id, agent_id in bindings:
        appending = Appending(connection, hot_rows[agent_id])
        before = appending.hot.next_sequence
        told.machines |= await close_binding(connection, appending, binding_id, GRANT_REVOKED)
        if appending.hot.next_sequence > before:
            await appending.write(wake_if_runnable(appending.hot))
            told.agents.add(agent_id)
            told.calls += appending.completed
    return told


async def _drop_pool(deps: Deps, org_id: UUID, pool_id: UUID, *, by_tenant: bool) -> None:
    async def finish(connection: Connection) -> bool:
        await _pool_to_delete(connection, org_id, pool_id, by_tenant=by_tenant)
        if await machines.of_pool(connection, pool_id):
            return False
        await machine_pools.mark_deleted(connection, pool_id)
        return True

    async with deps.db.transaction() as connection:
        await _pool_to_delete(connection, org_id, pool_id, by_tenant=by_tenant)
    done = False
    while not done:
        await _end_machines(deps, org_id, pool_id, None, POOL_DELETED)
        done = await deps.db.run(finish)


async def _pool_to_delete(connection: Connection, org_id: UUID, pool_id: UUID, *, by_tenant: bool) -> None:
    row = await locked_pool(connection, org_id, pool_id)
    if by_tenant and row.management_kind == "cluster":
        raise Conflict("the cluster keeps this machine pool")


async def _drop_pool_grant(deps: Deps, project: ProjectScope, grant_id: UUID) -> None:
    async with deps.db.acquire() as connection:
        grant = await machine_pools.find_grant(connection, project.project_id, grant_id=grant_id)
    if grant is None:
        raise NotFound("machine pool grant")
    pool_id, done = grant.pool_id, False

    async def finish(connection: Connection) -> bool:
        await machine_pools.lock(connection, project.org_id, pool_id)
        if await machines.of_pool(connection, pool_id, grant_id):
            return False
        if await machine_pools.drop_grant(connection, project.project_id, grant_id) is None:
            raise NotFound("machine pool grant")
        return True

    while not done:
        await _end_machines(deps, project.org_id, pool_id, grant_id, POOL_GRANT_REVOKED)
        done = await deps.db.run(finish)


async def _end_machines(deps: Deps, org_id: UUID, pool_id: UUID, grant_id: UUID | None, reason: str) -> None:
    async with deps.db.acquire() as connection:
        found = await machines.of_pool(connection, pool_id, grant_id)
    for machine_id in found:
        await _end_alone(deps, org_id, machine_id, reason, pool=True)


async def _end_alone(deps: Deps, org_id: UUID, machine_id: UUID, reason: str, *, pool: bool) -> None:
    """End a machine unless it was ended meanwhile. Own transaction."""

    async def work(connection: Connection) -> Told:
        if not await machines.lock(connection, org_id, machine_id):
            return Told()
        return await _end(connection, machine_id, reason, pool=pool)

    (await deps.db.run(work)).tell(deps)


async def _end(connection: Connection, machine_id: UUID, reason: str, *, pool: bool, message: str = "") -> Told:
    """End a locked machine and all that depends on it. Locks the agents that have it, in order of id."""
    if pool and not await machines.mark_deleting(connection, machine_id, reason):
        return Told()
    bound = {agent_id for _, agent_id in await machines.bindings(connection, machine_id)}
    await processes.lock_agents(connection, bound | set(await processes.agents_on(connection, machine_id)))
    told = await close_machine(connection, machine_id, message=message)
    await runtimes.revoke_other_tokens(connection, machine_id, None, DECOMMISSIONED)
    await machines.drop_grants(connection, machine_id)
    await machines.release_bindings(connection, machine_id)
    if not pool:
        await machines.mark_deleted(connection, machine_id, reason)
    return told
