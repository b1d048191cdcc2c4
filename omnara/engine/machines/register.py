"""Registration: a daemon process becomes its machine's runtime, and all that it has is compared with what is stored.

One transaction. The older runtime, or the older channel of the same one, is fenced off before anything is read, so no
grant can slip in between. Source: machines.md §2 (register transaction), §5, §14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from omnara.db import process_ends as ends
from omnara.db import processes as db
from omnara.db import runtimes
from omnara.db.connection import Connection
from omnara.db.fleet import MachineClaim
from omnara.db.runtimes import LockedMachine, NewRuntimeRow, RuntimeRow
from omnara.domain.text import clean
from omnara.engine.deps import Deps
from omnara.engine.machines import reconcile
from omnara.engine.machines.completing import Told, results_of, settle
from omnara.engine.machines.daemon_tokens import SUPERSEDED
from omnara.engine.machines.runtimes import ASLEEP, LEASE_EXPIRED, REPLACED, platform_text
from omnara.errors import Gone, Unauthorized, Unavailable
from omnara.ids import new_uuid
from omnara.log import get_logger
from omnara.machines.registration import Platform, ProcessClaim, ProcessDirective

log = get_logger(__name__)


class NewRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """A daemon process that introduces itself, with its token, or a replica that drives the machine, with its claim."""

    machine_id: UUID
    token_id: UUID | None
    instance_id: UUID
    version: str
    platform: Platform | None
    capacity: Mapping[str, Any]
    claims: Sequence[ProcessClaim]
    driver: MachineClaim | None = None


class Registered(msgspec.Struct, frozen=True):
    """The runtime, and exactly one directive for each claim."""

    runtime: RuntimeRow
    directives: list[ProcessDirective]


async def register(deps: Deps, new: NewRuntime) -> Registered:
    """Make a daemon process the runtime of its machine and reconcile its claims. Own transaction, announced after it.

    The same process gets the same runtime again. Raises Gone when it was replaced or has ended, or when somebody else
    drives the machine by now, Unauthorized when its token was revoked a moment ago, and Unavailable while the machine
    is not (or no longer) active.
    """

    async def work(connection: Connection) -> tuple[Registered, Told, reconcile.Plan]:
        machine = await _locked(connection, new)
        runtime_id = await _take_over(connection, deps, machine, new)
        plan, told = await _reconcile(connection, new)
        await runtimes.registered(connection, machine.id, runtime_id, platform_text(new.platform))
        if machine.source_kind == "pool" and new.token_id is not None:
            await runtimes.revoke_other_tokens(connection, machine.id, new.token_id, SUPERSEDED)
        found = await runtimes.find(connection, runtime_id)
        assert found is not None, "it was written in this transaction"
        return Registered(found[0], plan.directives), told, plan

    registered, told, plan = await deps.db.run(work)
    told.tell(deps)
    if plan.contradictions:
        log.error("claims_contradict", machine_id=str(new.machine_id), processes=plan.contradictions)
    if plan.processes or plan.actions:
        log.warning(
            "reconciled",
            machine_id=str(new.machine_id),
            processes=[(str(ending.id), ending.state, ending.reason_code) for ending in plan.processes],
            actions=[(str(ending.id), ending.state, ending.reason_code) for ending in plan.actions],
        )
    return registered


async def _locked(connection: Connection, new: NewRuntime) -> LockedMachine:
    machine = await runtimes.lock_machine(connection, new.machine_id)
    if machine is None or machine.lifecycle_state != "active":
        raise Unavailable("the machine is not active")
    if new.token_id is not None and not await runtimes.token_is_good(connection, new.token_id, new.machine_id):
        raise Unauthorized
    if new.token_id is not None and machine.claim_token is not None:
        raise Gone("the server itself runs what is to run on this machine")
    if new.driver is not None and (machine.claim_token, machine.generation) != (
        new.driver.claim_token,
        new.driver.generation,
    ):
        # What it saw of the machine is from before the one that drives it now; taken as true it would end what runs.
        raise Gone("somebody else drives the machine")
    return machine


async def _take_over(connection: Connection, deps: Deps, machine: LockedMachine, new: NewRuntime) -> UUID:
    """Make the caller's runtime the active one and return it; whoever was it before can change nothing any more."""
    lease_s, capacity = deps.settings.machine_lease_s, msgspec.json.encode(clean(dict(new.capacity))).decode()
    known = await runtimes.runtime_of_instance(connection, machine.id, new.instance_id)
    if known is None:
        await runtimes.end_active(connection, machine.id, REPLACED)
        row = NewRuntimeRow(
            new_uuid(), machine.org_id, machine.id, new.token_id, new.instance_id, new.version, capacity, lease_s
        )
        await runtimes.insert(connection, row)
        return row.id
    revivable = known.state == "active" or known.state_reason_code in (LEASE_EXPIRED, ASLEEP)
    if known.id != machine.current_runtime_id or known.daemon_version != new.version or not revivable:
        raise Gone("the runtime was replaced or has ended")
    await runtimes.revive(connection, known.id, new.token_id, capacity, lease_s)
    return known.id


async def _reconcile(connection: Connection, new: NewRuntime) -> tuple[reconcile.Plan, Told]:
    claimed = [found for found in map(reconcile.claimed_id, new.claims) if found is not None]
    hot_rows = await db.lock_agents(connection, await db.agents_on(connection, new.machine_id, claimed))
    told = Told()
    if not hot_rows:
        return reconcile.plan(new.claims, (), ()), told
    held = await db.lock_held(connection, new.machine_id, claimed, hot_rows)
    await db.requeue_reads(connection, new.machine_id, hot_rows)
    actions = await db.lock_actions(connection, reconcile.resolved_of(new.claims, held))
    plan = reconcile.plan(new.claims, held, actions)
    processes = await ends.end_processes(connection, plan.processes) if plan.processes else []
    closed = await ends.end_actions(connection, plan.actions) if plan.actions else []
    closed += await ends.end_actions_of(connection, [process.id for process in held])
    await settle(connection, hot_rows, results_of(processes, closed), told)
    return plan, told
