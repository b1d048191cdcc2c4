"""Transactional calls: a tool that only changes our own state does so in one transaction with what becomes of its call.

The call stays `ready` until then, so nothing about it is ever unknown: after a crash it runs as if for the first time.
The transaction either completes the call, or leaves it `waiting` for something durable that it has queued (a command on
a machine), whose report completes it. The claim is compared under the lock on the hot row, as each save of the claim
holder compares it. Source: engine.md §7 (phases), §3.4 (fence after lock waits).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara import probes
from omnara.db import machine_calls
from omnara.db.agents import HotRow
from omnara.db.calls import CallRow
from omnara.db.connection import Connection
from omnara.db.failures import DatabaseUnavailable
from omnara.db.reads import EventRow
from omnara.domain.claim import Claim
from omnara.domain.config import Definition
from omnara.domain.events import Event, decode_meta, decode_payload
from omnara.engine.appending import Appending
from omnara.engine.authorize import result_blocks
from omnara.engine.deps import Deps
from omnara.engine.tool_step import TOOL_FAULT, RunningCall
from omnara.log import get_logger
from omnara.tools.protocol import ToolResult, failed
from omnara.tools.registry import BUILT_IN, unsupported
from omnara.tools.schema import check_input, malformed

__all__ = ["Ahead", "Done", "Queued", "Settled", "Transaction", "TransactionalTool", "settle"]

log = get_logger(__name__)

RETRY_PAUSES_S: Final = (0.025, 0.05, 0.075)
"""Between tries after a serialization failure, a deadlock or a lost connection. Source: engine.md §7."""


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the agent is locked; nothing that is read here holds once it is."""

    connection: Connection
    deps: Deps
    agent_id: UUID
    input: dict[str, Any]
    definition: Definition


class Transaction(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool works with, inside the transaction: the agent is locked, the call ready, the input checked.

    `asked_at`: when the model asked for the call. `appending` may be given results of other calls. `ahead` is what the
    tool's `lock` returned.
    """

    connection: Connection
    deps: Deps
    appending: Appending
    call_id: UUID
    asked_at: datetime
    input: dict[str, Any]
    definition: Definition
    ahead: Any = None

    @property
    def agent_id(self) -> UUID:
        """The agent that calls."""
        return self.appending.hot.agent_id

    @property
    def project_id(self) -> UUID:
        """Its project."""
        return self.appending.hot.project_id


class Queued(msgspec.Struct, frozen=True):
    """Something durable will complete the call. `machines` are told of their work after the commit; those that are
    `there`, through their channels alone."""

    machines: tuple[UUID, ...] = ()
    there: bool = False


class Done(msgspec.Struct, frozen=True):
    """The call is over, and these machines are to be told after the commit."""

    result: ToolResult
    machines: tuple[UUID, ...] = ()


Outcome = ToolResult | Queued | Done


class TransactionalTool(msgspec.Struct, frozen=True):
    """One tool. Expected failures are results; what it raises is a fault of ours, and rolls everything back.

    `run` makes the effect, and may be called again in a new transaction. `lock` locks what comes before the agent in
    the order of locks (pools and machines), and returns what `run` wants to know of it.
    """

    run: Callable[[Transaction], Awaitable[Outcome]]
    lock: Callable[[Ahead], Awaitable[Any]] | None = None


class Settled(msgspec.Struct, frozen=True):
    """What became of a call, and of the hot row with it. `events` are those that the transaction added."""

    state: str
    events: tuple[Event, ...]
    next_sequence: int
    batch_sequence: int | None
    open_calls: int


async def settle(
    deps: Deps, tools: Mapping[str, TransactionalTool], claim: Claim, worker_id: UUID, call: RunningCall
) -> Settled | None:
    """Run a ready transactional call to its completion or to waiting; None when the claim is no longer the caller's.

    Own transaction, up to four times; a commit of unknown outcome is found out by the next try, which meets the call as
    it is by then. Everybody is told after the commit. Call it while holding no connection. Raises Unavailable.
    """
    config = await deps.models.config(claim.config_id)
    attempt = _Attempt(deps, tools.get(call.name), claim, worker_id, call, config.definition)
    for pause_s in (*RETRY_PAUSES_S, None):
        try:
            return await attempt.run()
        except DatabaseUnavailable as error:
            if pause_s is None:
                raise
            log.info("transactional_call_retried", tool=call.name, error=str(error))
        await asyncio.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


class _Attempt:
    """One call with all that its transactions need."""

    def __init__(
        self,
        deps: Deps,
        tool: TransactionalTool | None,
        claim: Claim,
        worker_id: UUID,
        call: RunningCall,
        definition: Definition,
    ) -> None:
        self._deps = deps
        self._tool = tool
        self._claim = claim
        self._worker_id = worker_id
        self._call = call
        self._definition = definition

    async def run(self) -> Settled | None:
        """Run the tool; if that fails by a fault of ours, end the call with that."""
        try:
            return await self._transaction(None)
        except DatabaseUnavailable:
            raise
        except Exception:  # a fault of one tool fails its call, never the agent
            log.exception("tool_fault", tool=self._call.name)
        return await self._transaction(failed(f"The tool {self._call.name} failed by an internal fault.", TOOL_FAULT))

    async def _transaction(self, known: ToolResult | None) -> Settled | None:
        """Make the effect and settle the call, or settle it with the result that is `known`."""
        agent_id = self._claim.agent_id
        async with self._deps.db.transaction() as connection:
            ahead = await self._lock(connection) if known is None else None
            locked = await machine_calls.lock_claimed(connection, self._claim, self._worker_id, self._call.id)
            if locked is None:
                return None
            hot, call = locked
            if call.state != "ready":  # a try whose outcome was unknown had happened
                return _settled(call.state, (), hot)
            appending = Appending(connection, hot)
            outcome = known if known is not None else await self._outcome(connection, appending, call, ahead)
            rows = await self._write(connection, appending, call, outcome)
            probes.hit("tool_tx", agent_id=agent_id, tool=self._call.name)
        probes.hit("tool_tx_committed", agent_id=agent_id, tool=self._call.name)
        return self._tell(appending, rows, outcome)

    async def _lock(self, connection: Connection) -> Any:
        if self._tool is None or self._tool.lock is None:
            return None
        return await self._tool.lock(
            Ahead(
                connection=connection,
                deps=self._deps,
                agent_id=self._claim.agent_id,
                input=self._call.input,
                definition=self._definition,
            )
        )

    async def _outcome(self, connection: Connection, appending: Appending, call: CallRow, ahead: Any) -> Outcome:
        tool = BUILT_IN.get(self._call.name)
        if self._tool is None or tool is None:
            return unsupported(self._call.name)
        problems = check_input(tool.input_schema, self._call.input)
        if problems:
            return malformed(problems)
        return await self._tool.run(
            Transaction(
                connection=connection,
                deps=self._deps,
                appending=appending,
                call_id=call.id,
                asked_at=call.created_at,
                input=self._call.input,
                definition=self._definition,
                ahead=ahead,
            )
        )

    async def _write(
        self, connection: Connection, appending: Appending, call: CallRow, outcome: Outcome
    ) -> list[EventRow]:
        """Both ways carry the claim in the statement itself, as every write of a claim's holder does."""
        if isinstance(outcome, Queued):
            if not await machine_calls.park_call(connection, self._claim, self._worker_id, call.id):
                raise RuntimeError("a call left its state under the lock of its agent")
        else:
            result = outcome.result if isinstance(outcome, Done) else outcome
            appending.add_result(call, result.outcome, result_blocks(result))
        return await appending.write_under_claim(self._claim, self._worker_id) if appending.grew else []

    def _tell(self, appending: Appending, rows: list[EventRow], outcome: Outcome) -> Settled:
        hot = appending.hot
        events = tuple(_event(row) for row in rows)
        if events:
            self._deps.feed.events(hot.agent_id, events)
            self._deps.hints.events((hot.agent_id,))
        for call in appending.completed:
            self._deps.feed.tool_call(hot.agent_id, call.id, call.state)
        state = "completed"
        if isinstance(outcome, Queued):
            state = "waiting"
            self._deps.feed.tool_call(hot.agent_id, self._call.id, state)
        if isinstance(outcome, Queued) and outcome.there:
            self._deps.hints.commands(outcome.machines)
        elif not isinstance(outcome, ToolResult) and outcome.machines:
            self._deps.hints.machines(outcome.machines)
        return _settled(state, events, hot)


def _settled(state: str, events: tuple[Event, ...], hot: HotRow) -> Settled:
    return Settled(state, events, hot.next_sequence, hot.batch_sequence, hot.open_calls)


def _event(row: EventRow) -> Event:
    return Event(
        sequence=row.sequence,
        id=row.id,
        kind="tool_result",
        turn_id=row.turn_id,
        turn_sequence=row.turn_sequence,
        is_opening=row.is_opening,
        payload=decode_payload(row.kind, row.sequence, row.payload),
        meta=decode_meta(row.sequence, None),
        replay=None,
        created_at=row.created_at,
    )
