"""A machine that does what a test tells it: it takes offers and reports through the engine's own functions, by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec

from omnara.engine.deps import Deps
from omnara.engine.machines import accept, offers, register, reports, runtimes
from omnara.engine.machines.register import NewRuntime
from omnara.ids import IdKind, decode, encode, new_uuid
from omnara.machines.events import (
    ActionApplied,
    FinishedResult,
    ProcessFinished,
    ProcessStarted,
    ReadObservation,
    StartedResult,
)
from omnara.machines.frames import ActionOffer, ProcessOffer, Report, ReportAck
from omnara.machines.registration import Platform
from tests.support.engine import Engine
from tests.support.waiting import until


def now() -> str:
    """This moment as a machine writes it."""
    return datetime.now(UTC).isoformat()


class HandMachine:
    """Somebody's own machine, registered, with an open channel. `deps` are those of any replica."""

    def __init__(self, deps: Deps, machine_id: UUID) -> None:
        self.deps = deps
        self.id = machine_id
        self.instance = uuid4()
        self.session = uuid4()
        self.runtime = UUID(int=0)
        self.accepted: set[UUID] = set()
        self._started: dict[str, str] = {}

    async def connect(self) -> None:
        """Register and open a channel."""
        new = NewRuntime(
            machine_id=self.id,
            token_id=None,
            instance_id=self.instance,
            version="1.2.3",
            platform=Platform(os="linux", arch="amd64"),
            capacity={},
            claims=[],
        )
        self.runtime = (await register.register(self.deps, new)).runtime.id
        self.session = uuid4()
        await runtimes.open_channel(self.deps, self.id, self.runtime, self.session, uuid4())

    async def disconnect(self) -> None:
        """Lose the channel."""
        await runtimes.close_channel(self.deps, self.runtime, self.session)

    async def pending(self) -> offers.Pending:
        """What is offered now, without what was accepted."""
        found = await offers.pending(self.deps, self.runtime, self.session, self.accepted)
        assert isinstance(found, offers.Pending)
        return found

    async def offered(self, count: int = 1, *, limit_s: float = 20.0) -> list[ProcessOffer]:
        """Wait until so many processes are offered."""
        found: list[ProcessOffer] = []

        async def there() -> bool:
            found[:] = (await self.pending()).processes
            return len(found) >= count

        await until(there, f"{count} commands are offered", limit_s=limit_s)
        return found

    async def take(self) -> ProcessOffer:
        """Wait for a command and accept it."""
        [offer, *_] = await self.offered()
        assert await self.accept(offer)
        return offer

    async def accept(self, offer: ProcessOffer) -> bool:
        """Ask for the grant of an offer."""
        process_id = decode(IdKind.PROCESS, offer.process_id)
        granted = await accept.accept_process(self.deps, self.runtime, self.session, process_id)
        self.accepted.add(process_id)
        return isinstance(granted, accept.Granted)

    async def take_action(self) -> ActionOffer:
        """Wait for an action and accept it."""
        found: list[ActionOffer] = []

        async def there() -> bool:
            found[:] = (await self.pending()).actions
            return bool(found)

        await until(there, "an action is offered")
        process_id = decode(IdKind.PROCESS, found[0].process_id)
        action_id = decode(IdKind.PROCESS_ACTION, found[0].process_action_id)
        granted = await accept.accept_action(self.deps, self.runtime, self.session, process_id, action_id)
        assert isinstance(granted, accept.GrantedAction)
        self.accepted.add(action_id)
        return found[0]

    async def report(self, event: Any) -> ReportAck:
        """Report an event."""
        return await reports.apply(self.deps, self.runtime, Report(report_id=str(uuid4()), event=event))

    async def started(self, process_id: str, output: str = "") -> ReportAck:
        """Report that a process runs on."""
        at = self._started.setdefault(process_id, now())
        result = StartedResult(process_id=process_id, output=output, next_cursor=len(output))
        return await self.report(ProcessStarted(process_id=process_id, started_at=at, observed_at=now(), result=result))

    async def finished(self, process_id: str, output: str = "", code: int = 0) -> ReportAck:
        """Report that a process ended by itself."""
        at = self._started.setdefault(process_id, now())
        state: Any = "failed" if code else "exited"
        reason = "nonzero_exit" if code else ""
        result = FinishedResult(state=state, exit_code=code, output=output, next_cursor=len(output), error=reason)
        return await self.report(
            ProcessFinished(
                process_id=process_id,
                state=state,
                exit_code=code,
                state_reason_code=reason,
                started_at=at,
                ended_at=now(),
                result=result,
            )
        )

    async def killed(self, process_id: str) -> ReportAck:
        """Report that a process ended because it was told to."""
        at = self._started.setdefault(process_id, now())
        result = FinishedResult(state="killed", error="terminate_requested")
        return await self.report(
            ProcessFinished(
                process_id=process_id,
                state="killed",
                state_reason_code="terminate_requested",
                started_at=at,
                ended_at=now(),
                result=result,
            )
        )

    async def applied(self, action: ActionOffer, output: str | None = None, cursor: int = 0) -> ReportAck:
        """Report that an action had its effect; a read says what it saw."""
        seen = None
        if output is not None:
            seen = ReadObservation(
                process_id=action.process_id, output=output, cursor=cursor, next_cursor=cursor + len(output)
            )
        return await self.report(
            ActionApplied(process_id=action.process_id, process_action_id=action.process_action_id, result=seen)
        )


async def add_machine(engine: Engine, name: str = "laptop", **columns: Any) -> UUID:
    """Insert somebody's own machine, granted to the engine's project."""
    machine_id = new_uuid()
    names = "".join(f", {column}" for column in columns)
    values = "".join(f", ${number}" for number in range(4, 4 + len(columns)))
    await engine.sql.execute(
        f"insert into machines (id, org_id, source_kind, display_name, activated_at{names}) "
        f"values ($1, $2, 'byo', $3, now(){values})",
        machine_id,
        engine.org_id,
        name,
        *columns.values(),
    )
    await engine.sql.execute(
        """insert into machine_grants (id, org_id, project_id, machine_id, source_kind)
           values ($1, $2, $3, $4, 'explicit')""",
        new_uuid(),
        engine.org_id,
        engine.project_id,
        machine_id,
    )
    return machine_id


async def bind(engine: Engine, agent_id: UUID, machine_id: UUID, ref: str, **columns: Any) -> UUID:
    """Attach a machine to an agent."""
    binding_id = new_uuid()
    names = "".join(f", {column}" for column in columns)
    values = "".join(f", ${number}" for number in range(7, 7 + len(columns)))
    await engine.sql.execute(
        "insert into agent_machine_bindings (id, org_id, project_id, agent_id, machine_id, machine_ref, binding_kind"
        f"{names}) values ($1, $2, $3, $4, $5, $6, 'explicit'{values})",
        binding_id,
        engine.org_id,
        engine.project_id,
        agent_id,
        machine_id,
        ref,
        *columns.values(),
    )
    return binding_id


async def add_pool(
    engine: Engine, name: str = "pool", *, most: int = 10, granted: dict[str, Any] | None = None, **columns: Any
) -> UUID:
    """Insert a pool and its grant to the engine's project."""
    pool_id = new_uuid()
    names = "".join(f", {column}" for column in columns)
    values = "".join(f", ${number}" for number in range(5, 5 + len(columns)))
    await engine.sql.execute(
        f"insert into machine_pools (id, org_id, name, provider, max_total_machines{names}) "
        f"values ($1, $2, $3, 'docker', $4{values})",
        pool_id,
        engine.org_id,
        name,
        most,
        *columns.values(),
    )
    granted = granted or {}
    names = "".join(f", {column}" for column in granted)
    values = "".join(f", ${number}" for number in range(5, 5 + len(granted)))
    await engine.sql.execute(
        f"insert into machine_pool_grants (id, org_id, project_id, pool_id{names}) values ($1, $2, $3, $4{values})",
        new_uuid(),
        engine.org_id,
        engine.project_id,
        pool_id,
        *granted.values(),
    )
    return pool_id


async def results(engine: Engine, agent_id: UUID) -> list[Any]:
    """The values of the tool results of an agent, in the order of its log: (outcome, value)."""
    found = []
    for _, kind, payload in await engine.events(agent_id):
        if kind == "tool_result":
            block = payload["content_blocks"][0]
            found.append((payload["outcome"], block.get("value", block.get("text"))))
    return found


async def call_states(engine: Engine, agent_id: UUID) -> dict[str, list[str]]:
    """States of the calls of an agent by the name of their tool."""
    rows = await engine.sql.fetch(
        "select name, state from tool_calls where agent_id = $1 order by output_sequence, ordinal", agent_id
    )
    states: dict[str, list[str]] = {}
    for row in rows:
        states.setdefault(row["name"], []).append(row["state"])
    return states


async def until_call(engine: Engine, agent_id: UUID, name: str, state: str) -> None:
    """Wait until the newest call of a tool is in a state."""

    async def there() -> bool:
        states = (await call_states(engine, agent_id)).get(name, [])
        return bool(states) and states[-1] == state

    await until(there, f"{name} is {state}")


async def processes(engine: Engine, agent_id: UUID) -> list[asyncpg.Record]:
    """The processes of an agent, oldest first."""
    rows: list[asyncpg.Record] = await engine.sql.fetch(
        "select * from processes where agent_id = $1 order by created_at, id", agent_id
    )
    return rows


def public(process: asyncpg.Record) -> str:
    """The public id of a process's row."""
    return encode(IdKind.PROCESS, process["id"])


def definition(text: str) -> Any:
    """A stored JSON text."""
    return msgspec.json.decode(text)
