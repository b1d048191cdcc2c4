"""Group saves: every save of the process goes through one queue, and each of two connections takes whatever waits.

Nothing is ever delayed for company: a lone save goes alone. An exception from a save means that the outcome is
*unknown*, never that it is lost; the saver finds out by reading, and saves again only if the database says
that nothing happened.
Source: DESIGN §3 "Group saves", coordination §5 (rules 6 and 8) and §10.
"""

from __future__ import annotations

import asyncio
from collections import deque
from uuid import UUID

import msgspec
from prometheus_client import Histogram

from omnara.db.advance import MAX_GROUP, MAX_GROUP_BYTES, advance
from omnara.db.connection import ConnectSettings, ConnKind
from omnara.db.dedicated import Dedicated
from omnara.db.failures import is_data_error, is_definite_sql_error, is_unavailability
from omnara.db.sched import read_claim
from omnara.domain.advance import Advance, Advanced, AdvanceOutcome, ClaimLost
from omnara.domain.claim import ClaimState
from omnara.log import get_logger

log = get_logger(__name__)

SAVER_CONNECTIONS = 2
"""Source: coordination §10."""
SKIPPED_RETRY_S = 0.005
"""A save whose hot row was locked goes back on the queue after this. Source: coordination §10."""
FAILED_RETRY_MAX_S = 1.0
"""Longest pause between two tries of a save that Postgres answers with an error, such as a full disk."""
SAVE_TIMEOUT_S = 10.0


class DataRefused(Exception):
    """Postgres refused the content of one save for good, for example text that it cannot store. Nothing was written."""


class SaverFull(Exception):
    """The queue has reached its bound of bytes while Postgres is away; the caller must abandon its step."""


class _Pending:
    __slots__ = ("done", "failures", "item", "size")

    def __init__(self, item: Advance, done: asyncio.Future[AdvanceOutcome]) -> None:
        self.item = item
        self.done = done
        self.size = item.size
        self.failures = 0

    @property
    def pause_s(self) -> float:
        """Wait before the next try: a locked row is free in a moment, a disk that is full is not."""
        return min(SKIPPED_RETRY_S * 2.0 ** min(self.failures, 16), FAILED_RETRY_MAX_S)


class Saver:
    """Owns two connections and the queue in front of them. Start with `run` inside the worker's task group."""

    def __init__(self, settings: ConnectSettings, *, max_waiting_bytes: int, sizes: Histogram | None = None) -> None:
        self._holders = [Dedicated(settings, ConnKind.SAVER) for _ in range(SAVER_CONNECTIONS)]
        self._queue: deque[_Pending] = deque()
        self._bytes = 0
        self._max_bytes = max_waiting_bytes
        self._sizes = sizes
        self._some = asyncio.Event()
        self._worker_id: UUID | None = None

    def serve(self, worker_id: UUID) -> None:
        """Name the worker whose claims are saved from now on (changes after a declared death)."""
        self._worker_id = worker_id

    @property
    def waiting(self) -> int:
        """Saves in the queue."""
        return len(self._queue)

    async def save(self, item: Advance) -> AdvanceOutcome:
        """Save one agent's advance and return what became of it.

        Safe to cancel: the save itself goes on in the queue's own task, only the waiting ends. Raises DataRefused when
        the content cannot be stored, SaverFull when too much waits for a Postgres that is away.
        """
        pending = _Pending(item, asyncio.get_running_loop().create_future())
        if self._bytes + pending.size > self._max_bytes:
            raise SaverFull(f"{self._bytes} bytes of results wait for Postgres")
        self._put(pending)
        return await pending.done

    async def run(self) -> None:
        """Serve the queue until cancelled; what still waits then is left to the reconcile of another process."""
        try:
            async with asyncio.TaskGroup() as group:
                for holder in self._holders:
                    group.create_task(self._serve(holder))
        finally:
            for holder in self._holders:
                await holder.close()

    def _put(self, pending: _Pending) -> None:
        self._queue.append(pending)
        self._bytes += pending.size
        self._some.set()

    async def _serve(self, holder: Dedicated) -> None:
        while True:
            await self._some.wait()
            batch = self._take()
            if batch:
                await self._save_batch(holder, batch)

    def _take(self) -> list[_Pending]:
        batch: list[_Pending] = []
        size = 0
        agents: set[UUID] = set()
        while self._queue and len(batch) < MAX_GROUP:
            following = self._queue[0].item
            if batch and (following.agent_id in agents or size + following.size > MAX_GROUP_BYTES):
                break
            pending = self._queue.popleft()
            agents.add(pending.item.agent_id)
            self._bytes -= pending.size
            size += pending.size
            batch.append(pending)
        if not self._queue:
            self._some.clear()
        batch.sort(key=lambda entry: entry.item.agent_id)
        return batch

    async def _save_batch(self, holder: Dedicated, batch: list[_Pending]) -> None:
        assert self._worker_id is not None, "serve() comes before the first save"
        try:
            async with holder.use() as connection:
                answers = await advance(connection, self._worker_id, [p.item for p in batch], SAVE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - every failure is sorted into data, definite or unknown below
            await self._after_failure(holder, batch, error)
            return
        if self._sizes is not None:
            self._sizes.observe(len(batch))
        for index, pending in enumerate(batch):
            answer = answers.get(index)
            if answer is not None:
                _settle(pending, answer)
            else:
                await self._resolve(holder, pending)

    async def _after_failure(self, holder: Dedicated, batch: list[_Pending], error: Exception) -> None:
        if is_data_error(error) or (is_definite_sql_error(error) and not is_unavailability(error)):
            if len(batch) == 1:
                _refuse(batch[0], error)
                return
            for pending in batch:
                await self._save_batch(holder, [pending])
            return
        for pending in batch:
            pending.failures += 1
        failures = batch[0].failures
        if failures & (failures - 1) == 0:  # the first, second, fourth, eighth …: an outage must not fill the log
            log.warning("save_outcome_unknown", error=type(error).__name__, saves=len(batch), failures=failures)
        for pending in batch:
            await self._resolve(holder, pending)

    async def _resolve(self, holder: Dedicated, pending: _Pending) -> None:
        """Find out by reading what became of a save, for as long as it takes; then settle it or queue it again."""
        item = pending.item
        while True:
            try:
                async with holder.use() as connection:
                    state = await read_claim(
                        connection,
                        item.agent_id,
                        step_number=item.close.number if item.close else None,
                        event_id=item.first_event,
                        from_sequence=item.known_next_sequence,
                    )
                break
            except Exception as error:  # noqa: BLE001 - Postgres is away: the finished result stays in memory
                log.debug("save_unresolved", error=type(error).__name__, agent_id=str(item.agent_id))
                await asyncio.sleep(0.2)
        outcome = judge(item, state, self._worker_id)
        if outcome is not None:
            _settle(pending, outcome)
            return
        assert state is not None, "without the agent the claim is lost"
        # The first try may still be on its way: the repeat is valid only for the row as it was read just now.
        pending.item = msgspec.structs.replace(item, seen=state.next_sequence)
        asyncio.get_running_loop().call_later(pending.pause_s, self._put, pending)


def judge(item: Advance, state: ClaimState | None, worker_id: UUID | None) -> AdvanceOutcome | None:
    """Decide from the hot row and the evidence what became of a save; None means that it did not happen: save again.

    Evidence, in this order: the first event (of the step, or of an admission) is in the log; the closed step has the
    state that this save gives it; the next step is open. A claim that is gone without evidence is lost
    (a plain release that did happen says the same to its caller: the claim is no longer held). So is one whose row is
    of another step, or has a shorter log: a failover took what the save would follow.
    """
    if state is None:
        return ClaimLost()
    held = (state.worker_id, state.claim_token, state.epoch) == (worker_id, item.claim_token, item.epoch)
    saved = state.event_sequence is not None or (item.close is not None and state.step_state == item.close.state)
    begun = item.begin is not None and held and state.step_number == item.step_number + 1
    if not saved and not begun:
        behind = state.step_number != item.step_number or state.next_sequence < item.known_next_sequence
        return ClaimLost() if behind or not held else None
    return Advanced(
        begun=begun,
        kept=held,
        first_sequence=state.event_sequence if state.event_sequence is not None else state.next_sequence,
        # What the step that began may see, not what somebody has added since.
        next_sequence=state.frontier + 1 if begun and state.frontier is not None else state.next_sequence,
        inputs_gen=item.gen if begun else state.inputs_gen,
        turn_id=state.turn_id,
        turn_sequence=state.turn_sequence,
        step_number=state.step_number,
        batch_sequence=state.batch_sequence,
        ready=state.ready,
        saved_at=state.read_at,
    )


def _settle(pending: _Pending, outcome: AdvanceOutcome) -> None:
    if not pending.done.done():
        pending.done.set_result(outcome)


def _refuse(pending: _Pending, error: Exception) -> None:
    if not pending.done.done():
        pending.done.set_exception(DataRefused(str(error)))
