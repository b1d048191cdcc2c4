"""What a daemon asks for by HTTP: who it is, to be the machine's runtime, to end or sleep, and to say what failed."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from omnara.api.body import check_depth
from omnara.api.daemon.door import DaemonCall
from omnara.api.daemon.types import (
    BootstrapDaemonResponse,
    DaemonRuntime,
    DaemonRuntimeReconciliation,
    FailureQuery,
    ProcessActionReconciliationDirective,
    ProcessReconciliationClaim,
    ProcessReconciliationDirective,
    RegisterDaemonRuntimeRequest,
    RegisterDaemonRuntimeResponse,
)
from omnara.api.omnara.decode import given
from omnara.api.routing import no_content, reply
from omnara.db.runtimes import RuntimeRow
from omnara.engine.machines import register, runtimes
from omnara.engine.machines.installation import installation_id as find_installation
from omnara.engine.machines.register import NewRuntime
from omnara.engine.machines.runtimes import Failure
from omnara.errors import ValidationFailed
from omnara.ids import IdKind, encode
from omnara.machines.registration import ActionClaim, Platform, ProcessClaim, ProcessDirective

__all__ = ["bootstrap", "end", "failure", "register_runtime", "sleep"]


async def bootstrap(call: DaemonCall) -> web.StreamResponse:
    """Tell a daemon which machine of which installation its token stands for."""
    installation_id = await find_installation(call.context.deps)
    return reply(
        200,
        BootstrapDaemonResponse(
            installation_id=encode(IdKind.INSTANCE, installation_id),
            machine_id=encode(IdKind.MACHINE, call.identity.machine_id),
        ),
    )


async def register_runtime(call: DaemonCall) -> web.StreamResponse:
    """Make the caller its machine's runtime, and say what is to become of each process that it has."""
    body: RegisterDaemonRuntimeRequest = call.body
    if body.daemon_instance_id.int == 0:
        raise ValidationFailed("daemon_instance_id must not be zero")
    capacity = given(body.capacity) or {}
    check_depth(capacity)
    registered = await register.register(
        call.context.deps,
        NewRuntime(
            machine_id=call.identity.machine_id,
            token_id=call.identity.token_id,
            instance_id=body.daemon_instance_id,
            version=body.daemon_version,
            platform=_platform(given(body.observed_platform)),
            capacity=capacity,
            claims=[_claim(claim) for claim in body.processes],
        ),
    )
    answer = RegisterDaemonRuntimeResponse(
        runtime=_runtime(call, registered.runtime),
        reconciliation=DaemonRuntimeReconciliation(processes=[_directive(found) for found in registered.directives]),
    )
    return reply(201, answer)


async def end(call: DaemonCall) -> web.StreamResponse:
    """End the caller's runtime in good order: whatever waits for the machine learns that it is offline."""
    ended = await runtimes.end(call.context.deps, call.identity.machine_id, call.ids["runtimeID"])
    return reply(200, _runtime(call, ended))


async def sleep(call: DaemonCall) -> web.StreamResponse:
    """End the runtime and mark the machine as asleep, unless there is work or nobody could wake it."""
    ended = await runtimes.sleep(call.context.deps, call.identity.machine_id, call.ids["runtimeID"])
    return reply(200, _runtime(call, ended))


async def failure(call: DaemonCall) -> web.StreamResponse:
    """Keep what failed on the machine, for whoever looks at it."""
    query: FailureQuery = call.query
    await runtimes.record_failure(
        call.context.deps,
        call.identity.machine_id,
        Failure(
            stage=query.stage,
            exit_status=given(query.exit_status),
            capture_status=given(query.capture_status),
            daemon_version=given(query.daemon_version),
            target_version=given(query.target_version),
            text=call.text,
        ),
    )
    return no_content()


def _platform(found: dict[str, object] | None) -> Platform | None:
    """Return system and processor as far as they were told as texts; a daemon may tell more than is kept."""
    if not found:
        return None
    os, arch = found.get("os", ""), found.get("arch", "")
    return Platform(os=os if isinstance(os, str) else "", arch=arch if isinstance(arch, str) else "")


def _claim(claim: ProcessReconciliationClaim) -> ProcessClaim:
    return ProcessClaim(
        process_id=claim.process_id,
        supervisor_instance_id=claim.supervisor_instance_id,
        phase=claim.phase,
        supervisor_live=claim.supervisor_live,
        execution_committed=claim.execution_committed,
        action_admission_closed=claim.action_admission_closed,
        resolved_action_seq=claim.resolved_action_seq,
        actions=[
            ActionClaim(
                process_action_id=action.process_action_id,
                seq=action.seq,
                action_kind=action.action_kind,
                position=action.position,
            )
            for action in claim.actions
        ],
    )


def _directive(found: ProcessDirective) -> ProcessReconciliationDirective:
    return ProcessReconciliationDirective(
        process_id=found.process_id,
        supervisor_instance_id=found.supervisor_instance_id,
        disposition=found.disposition,
        actions=[
            ProcessActionReconciliationDirective(
                process_action_id=action.process_action_id,
                seq=action.seq,
                action_kind=action.action_kind,
                disposition=action.disposition,
                payload=action.payload if bytes(action.payload) else UNSET,
            )
            for action in found.actions
        ],
    )


def _runtime(call: DaemonCall, row: RuntimeRow) -> DaemonRuntime:
    state: Any = row.state
    return DaemonRuntime(
        id=encode(IdKind.DAEMON_RUNTIME, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        machine_id=encode(IdKind.MACHINE, row.machine_id),
        daemon_instance_id=row.daemon_instance_id,
        daemon_version=row.daemon_version,
        state=state,
        state_reason_code=row.state_reason_code,
        state_reason_message=row.state_reason_message,
        created_at=row.created_at,
        last_seen_at=row.last_seen_at,
        lease_expires_at=row.lease_expires_at,
        next_heartbeat_after_ms=max(1, round(call.context.deps.settings.machine_heartbeat_s * 1000)),
        ended_at=row.ended_at,
        capacity=msgspec.json.decode(row.capacity),
    )
