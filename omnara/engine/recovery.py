"""Taking claims away: from dead workers, from steps that must be given up, from agents with a damaged log.

Whatever was running gets its one result here ("interrupted, outcome unknown"), in the same transaction that takes the
claim, so nothing with an outside effect can run again and no later save of the old holder can win.
Source: DESIGN §3 "Crashes that repeat", §4 (void ranges); engine.md §3.5; coordination §3.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from uuid import UUID

import msgspec

from omnara.db import recovery as db
from omnara.db.connection import Connection
from omnara.db.failures import DatabaseUnavailable
from omnara.db.recovery import LockedClaim, TakenAgent
from omnara.domain.claim import Claim, HeldClaim
from omnara.domain.content import INTERRUPTED_TEXT, ErrorBlock, TextBlock
from omnara.domain.events import EventMeta, ModelOutputPayload, ToolResultPayload, encode_payload
from omnara.engine.deps import Deps
from omnara.engine.machines.closing import INTERRUPTED, end_transfers
from omnara.ids import IdKind, encode, new_uuid
from omnara.log import get_logger

log = get_logger(__name__)

FIRST = UUID(int=0)
RELEASE_BATCH = 100
"""Agents released by one transaction. Source: engine.md §3.5."""


class Released(msgspec.Struct, frozen=True):
    """Agents whose claims were taken away, and those of them that are now `crashed`."""

    agents: tuple[UUID, ...]
    crashed: tuple[UUID, ...]
    machines: tuple[UUID, ...] = ()
    """They carried files for calls that were interrupted, and are to stop."""


async def release_orphans(deps: Deps, death_limit: int) -> Released:
    """Release up to 100 claims of workers that are not live; call again while it returns a full batch.

    Own transaction; one for each agent when that of all fails, so that one bad row never keeps the others. A death with
    a step under way counts for its agent; `death_limit` deaths in a row close its gate. A worker that signed off, or
    that lived on when its lease ran out, did not die of its agents. Raises DatabaseUnavailable.
    """
    orphans = _Orphans(death_limit)
    try:
        released = await deps.db.run(lambda connection: orphans.release(connection, RELEASE_BATCH))
    except DatabaseUnavailable:
        raise
    except Exception as error:  # noqa: BLE001 - the data of one of them is at fault
        log.warning("orphans_released_singly", error=type(error).__name__)
        released = await _release_singly(deps, orphans)
    _announce(deps, released)
    if released.crashed:
        log.error("agents_crashed", agents=[str(agent) for agent in released.crashed], deaths=death_limit)
    return released


async def _release_singly(deps: Deps, orphans: _Orphans) -> Released:
    agents: list[UUID] = []
    crashed: list[UUID] = []
    machines: list[UUID] = []
    orphans.last = FIRST
    while orphans.last is not None:
        try:
            released = await deps.db.run(lambda connection: orphans.release(connection, 1))
        except DatabaseUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - the others come first; this one is tried again at the next sweep
            log.error("orphan_not_released", agent_id=str(orphans.last), error=repr(error))
            continue
        agents += released.agents
        crashed += released.crashed
        machines += released.machines
    return Released(tuple(agents), tuple(crashed), tuple(machines))


class _Orphans:
    """Releases orphaned claims in order of agent. `last` is the last one looked at; None when there are no more."""

    def __init__(self, death_limit: int) -> None:
        self._death_limit = death_limit
        self.last: UUID | None = FIRST

    async def release(self, connection: Connection, limit: int) -> Released:
        claims = await db.lock_orphans(connection, limit, self.last or FIRST)
        self.last = claims[-1].agent_id if claims else None
        if not claims:
            return Released((), ())
        started = await db.started_steps(connection, claims)
        agents = [
            _taken(claim, claim.deaths + (_died(claim) and claim.agent_id in started), self._death_limit)
            for claim in claims
        ]
        return await _take(connection, claims, agents, "interrupted")


async def release_claim(deps: Deps, claim: Claim | HeldClaim, worker_id: UUID) -> bool:
    """Give up one claim whose step cannot be saved: running calls end as interrupted, the step is `released`.

    Counts neither as a death nor as a failed attempt. False when the claim had already moved on. Own transaction.
    """

    async def work(connection: Connection) -> Released:
        locked = await db.lock_claim(connection, claim.agent_id, worker_id, claim.claim_token, claim.epoch)
        if locked is None:
            return Released((), ())
        return await _take(connection, [locked], [_taken(locked, locked.deaths, 2**15)], "released")

    released = await deps.db.run(work)
    _announce(deps, released)
    return bool(released.agents)


async def quarantine(deps: Deps, claim: Claim, worker_id: UUID, void: Sequence[tuple[int, int]], reason: str) -> bool:
    """Mark an agent `crashed` because a row of its own is damaged, and void half-open ranges of sequences.

    False when the claim had moved on. Own transaction. The rows stay where they are; an ordinary error output tells the
    reader; an operator decides how to go on.
    """
    text = f"The agent was stopped: {reason}. Resume it with force or restart."
    payload = ModelOutputPayload(encode(IdKind.MODEL_CALL, new_uuid()), "error", [ErrorBlock(text)])

    async def work(connection: Connection) -> int | None:
        return await db.quarantine_agent(
            connection,
            (claim.agent_id, worker_id, claim.claim_token, claim.epoch),
            void=void,
            event_id=new_uuid(),
            turn_id=claim.turn_id or new_uuid(),
            payload=encode_payload(payload),
            meta=encode_payload(EventMeta(claim.next_sequence - 1)),
            error=msgspec.json.encode({"kind": "damaged_history", "message": reason}).decode(),
        )

    sequence = await deps.db.run(work)
    if sequence is None:
        return False
    log.error("agent_quarantined", agent_id=str(claim.agent_id), void=list(void), reason=reason)
    _announce(deps, Released((claim.agent_id,), (claim.agent_id,)))
    return True


def _died(claim: LockedClaim) -> bool:
    return claim.worker_state not in ("stopped", "lapsed")


def _taken(claim: LockedClaim, deaths: int, death_limit: int) -> TakenAgent:
    return TakenAgent(claim.agent_id, claim.epoch, deaths, "crashed" if deaths >= death_limit else "open", ())


async def _take(
    connection: Connection, claims: Sequence[LockedClaim], agents: Sequence[TakenAgent], step_state: str
) -> Released:
    calls: dict[UUID, list[UUID]] = defaultdict(list)
    running = await db.running_calls(connection, claims)
    for agent_id, call_id in running:
        calls[agent_id].append(call_id)
    with_results = [
        msgspec.structs.replace(
            agent, results=tuple((new_uuid(), call_id, _interrupted(call_id)) for call_id in calls[agent.agent_id])
        )
        for agent in agents
    ]
    taken = await db.take_away(connection, with_results, step_state)
    machines = await end_transfers(connection, running, INTERRUPTED, INTERRUPTED) if running else ()
    crashed = tuple(agent_id for agent_id, (_, gate) in taken.items() if gate == "crashed")
    return Released(tuple(taken), crashed, tuple(machines))


def _interrupted(call_id: UUID) -> str:
    payload = ToolResultPayload(encode(IdKind.TOOL_CALL, call_id), "failed", [TextBlock(INTERRUPTED_TEXT)])
    return encode_payload(payload)


def _announce(deps: Deps, released: Released) -> None:
    if not released.agents:
        return
    for agent_id in released.agents:
        deps.feed.wake(agent_id)
    deps.hints.events(released.agents)
    deps.hints.ready(released.agents)
    if released.machines:
        deps.hints.machines(released.machines)
