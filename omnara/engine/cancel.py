"""Stopping what an agent is doing, and nothing else: the current turn, its calls and forms, and waiting steering.

The control event comes first, then a canceled result for each open call, so the log stays well-formed for every
provider. Taking the claim away in the same transaction is what makes late results of the running step worthless.
Source: engine.md §8, trap 9; api.md §10; field-reports B01, B40.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import agents, calls, inputs, interactions
from omnara.db.agents import AgentRef
from omnara.db.calls import CallRow
from omnara.db.connection import Connection
from omnara.db.inputs import ResolvedInput
from omnara.db.reads import EventRow
from omnara.domain.content import StructuredDataBlock
from omnara.domain.events import AgentInputPayload
from omnara.engine.actors import ExternalActor, actor_for, check_actor
from omnara.engine.appending import Appending
from omnara.engine.deps import Deps, announce
from omnara.engine.machines.closing import cancel_calls
from omnara.engine.scope import AgentPath, locate
from omnara.ids import IdKind, encode, new_uuid
from omnara.tools.registry import MACHINE_TOOLS

REASON: Final = "canceled"
"""The structured reason of the canceled results of a stopped turn."""


class Canceled(msgspec.Struct, frozen=True):
    """What a cancel did. An idle agent: no event, not `affected`. `taken`: a worker was running it.

    `machines` have something to end.
    """

    event: EventRow | None
    affected: bool
    taken: bool
    actor_id: UUID | None
    machines: frozenset[UUID] = frozenset()


async def cancel_agent(deps: Deps, p: Principal, path: AgentPath, *, actor: ExternalActor | None = None) -> Canceled:
    """Cancel the current turn. Own transaction; in effect when it returns: no later save of that turn can win.

    Queued messages stay and start next. Raises NotFound, Forbidden, InvalidRequest (actor of a user).
    """

    async def work(connection: Connection) -> tuple[UUID, Canceled]:
        agent = await locate(connection, p, path, ProjectAction.OPERATE)
        check_actor(p, actor)
        appending = await Appending.lock(connection, agent.id)
        if not turn_is_open(appending):
            return agent.id, Canceled(None, False, False, None)
        return agent.id, await _cancel(connection, p, agent, appending, actor)

    agent_id, canceled = await deps.db.run(work)
    if canceled.affected:
        announce(deps, agent_id, events=True, ready=True, taken=canceled.taken)
    if canceled.machines:
        deps.hints.machines(canceled.machines)
    return canceled


def turn_is_open(appending: Appending) -> bool:
    """Whether the current turn has anything left to stop: a model call due or running, or an open call."""
    return appending.hot.turn_open or appending.hot.open_calls > 0


async def _cancel(
    connection: Connection, p: Principal, agent: AgentRef, appending: Appending, actor: ExternalActor | None
) -> Canceled:
    actor_id = await actor_for(connection, p, ProjectScope(agent.org_id, agent.project_id), actor)
    taken = appending.hot.worker_id is not None
    machines = await stop_turn(connection, appending, actor_id)
    await inputs.cancel_waiting(connection, agent.id, ["steering"])
    more = await inputs.has_waiting(connection, agent.id)
    events = await appending.write("wake" if more else "sleep", release=taken)
    return Canceled(events[0], True, taken, actor_id, frozenset(machines))


async def stop_turn(connection: Connection, appending: Appending, actor_id: UUID | None) -> set[UUID]:
    """Add the control event and the canceled results, close the running step, and leave the hot row at rest.

    What the canceled calls asked of machines is taken back; returns the machines to hint at after the commit. The
    caller decides about waiting inputs and writes `appending`, with `release` when a worker holds the claim.
    """
    hot = appending.hot
    input_id = new_uuid()
    payload = AgentInputPayload(
        agent_input_id=encode(IdKind.AGENT_INPUT, input_id),
        input_kind="control",
        content_blocks=[],
        actor_id=None if actor_id is None else encode(IdKind.ACTOR, actor_id),
        control_type="cancel_current",
    )
    event = appending.add_input(payload)
    new = ResolvedInput(
        id=input_id, kind="control", event_sequence=event.sequence, actor_id=actor_id, control_type="cancel_current"
    )
    await inputs.insert_resolved(connection, hot.agent_id, new)
    await interactions.cancel(connection, hot.agent_id, calls=None, input_id=input_id, reason=REASON)
    machines: set[UUID] = set()
    if hot.batch_sequence is not None:
        stopped = await calls.open_calls(connection, hot.agent_id, hot.batch_sequence)
        for call in stopped:
            appending.add_result(call, "canceled", [StructuredDataBlock({"reason": REASON})])
        machines = await cancel_calls(connection, hot.agent_id, at_machines(stopped))
    await agents.cancel_started_step(connection, hot.agent_id, hot.step_number)
    hot.turn_open = False
    hot.batch_sequence = None
    hot.open_calls = 0
    hot.attempt = 0
    hot.retry_at = None
    return machines


def at_machines(open_calls: Iterable[CallRow]) -> list[UUID]:
    """Those of these calls that may have something on a machine: a question has nothing there, and needs no look.

    Those that run carry files.
    """
    return [call.id for call in open_calls if call.state in ("waiting", "running") and call.name in MACHINE_TOOLS]
