"""A machine and its agents under a test's hand: every step that a server takes for a machine, as one call each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from omnara.db.fleet import MachineClaim
from omnara.engine.machines import accept, offers, register, reports, runtimes
from omnara.engine.machines.register import NewRuntime, Registered
from omnara.engine.scope import AgentPath
from omnara.ids import IdKind, encode, new_uuid
from omnara.machines.events import (
    ActionApplied,
    ActionFailed,
    ActionUnknown,
    FinishedResult,
    ProcessFinished,
    ProcessStarted,
    ReadObservation,
    StartedResult,
)
from omnara.machines.frames import Report, ReportAck
from omnara.machines.registration import ActionClaim, Platform, ProcessClaim, ProcessDirective
from tests.support.engine_case import Call, Engine
from tests.support.machines import TestMachine, bind, make_machine

BEGAN = datetime(2026, 8, 1, 10, 0, 0, 100_000, UTC)


def at(seconds: float) -> str:
    """A machine's time, so many seconds after its process began."""
    return (BEGAN + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def prc(process_id: UUID) -> str:
    """A process's public id."""
    return encode(IdKind.PROCESS, process_id)


def pac(action_id: UUID) -> str:
    """An action's public id."""
    return encode(IdKind.PROCESS_ACTION, action_id)


class Rows:
    """The engine's database, as the helpers for machines want it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def fetch(self, query: str, *values: Any) -> list[Any]:
        """Run a query."""
        return await self._engine.fetch(query, *values)


class Job(msgspec.Struct, frozen=True):
    """A command of an agent. `call_id` None: nobody waits for it."""

    path: AgentPath
    call_id: UUID | None
    id: UUID


class Floor:
    """One machine with its server's side. `register` makes a runtime and opens its channel."""

    def __init__(self, engine: Engine, machine: TestMachine) -> None:
        self.engine = engine
        self.deps = engine.deps
        self.machine = machine
        self.sql = Rows(engine)
        self.instance = new_uuid()
        self.runtime_id = UUID(int=0)
        self.session_id = UUID(int=0)
        self.bindings: dict[UUID, UUID] = {}

    @classmethod
    async def make(cls, engine: Engine, *, register: bool = True, **settings: Any) -> Floor:
        """A machine, registered and connected; settings of the engine may be shrunk."""
        if settings:
            deps = engine.deps
            engine.deps = type(deps)(
                **{name: getattr(deps, name) for name in deps.__slots__}
                | {"settings": msgspec.structs.replace(deps.settings, **settings)}
            )
        machine = await make_machine(Rows(engine), engine.project.org_id, engine.project.project_id)
        floor = cls(engine, machine)
        if register:
            await floor.register()
        return floor

    # --- the agents' side ---------------------------------------------------------------------------------

    async def jobs(self, count: int = 1, **columns: Any) -> list[Job]:
        """A new agent whose model asked for so many commands, which are queued."""
        path = await self.engine.agent("go")
        calls = [Call("run_command", "built_in", "waiting", {"command": "true"}) for _ in range(count)]
        ids = await self.engine.turn(path, calls)
        return [await self.queue(path, call_id, **columns) for call_id in ids]

    async def job(self, **columns: Any) -> Job:
        """A new agent with one queued command."""
        return (await self.jobs(1, **columns))[0]

    async def queue(self, path: AgentPath, call_id: UUID | None, **columns: Any) -> Job:
        """Queue a command for an agent."""
        binding_id = self.bindings.get(path.agent_id)
        if binding_id is None:
            binding_id = self.bindings[path.agent_id] = await bind(self.sql, self.machine, path.agent_id)
        values: dict[str, Any] = {"env": "{}", "secret_env": "{}", "command": "true", "purpose": "command"} | columns
        process_id = new_uuid()
        await self.sql.fetch(
            "insert into processes (id, agent_id, project_id, machine_id, binding_id, tool_call_id, command, purpose,"
            " env, secret_env) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
            process_id, path.agent_id, self.machine.project_id, self.machine.id, binding_id, call_id,
            values["command"], values["purpose"], values["env"], values["secret_env"],
        )  # fmt: skip
        return Job(path, call_id, process_id)

    async def act(
        self, job: Job, kind: str, payload: Any = None, *, state: str = "queued", waits: bool = True
    ) -> tuple[UUID, UUID | None]:
        """Queue an action of a process, after a turn that asked for it; the action and its call."""
        call_id = None
        if waits:
            call = Call("read_process" if kind == "read" else "write_process", "built_in", "waiting", {"n": 1})
            call_id = (await self.engine.turn(job.path, [call]))[0]
        rows = await self.sql.fetch(
            "update processes set next_action_seq = next_action_seq + 1 where id = $1"
            " returning next_action_seq - 1 as seq",
            job.id,
        )
        action_id = new_uuid()
        await self.sql.fetch(
            "insert into process_actions (id, agent_id, process_id, machine_id, tool_call_id, seq, kind, payload,"
            " state) values ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            action_id, job.path.agent_id, job.id, self.machine.id, call_id, rows[0]["seq"], kind,
            msgspec.json.encode(payload or {}).decode(), state,
        )  # fmt: skip
        return action_id, call_id

    # --- the machine's side -------------------------------------------------------------------------------

    async def register(
        self,
        claims: Sequence[ProcessClaim] = (),
        *,
        instance: UUID | None = None,
        version: str = "1.2.3",
        channel: bool = True,
        token_id: UUID | None = None,
        driver: MachineClaim | None = None,
    ) -> Registered:
        """Register a daemon process, by default the same again, and open its channel."""
        self.instance = instance or self.instance
        registered = await register.register(
            self.deps,
            NewRuntime(
                machine_id=self.machine.id,
                token_id=token_id,
                instance_id=self.instance,
                version=version,
                platform=Platform(os="linux", arch="amd64"),
                capacity={},
                claims=claims,
                driver=driver,
            ),
        )
        self.runtime_id = registered.runtime.id
        assert [d.process_id for d in registered.directives] == [c.process_id for c in claims]
        told = msgspec.json.encode(registered.directives)
        read = msgspec.json.decode(told, type=list[ProcessDirective])
        assert msgspec.json.encode(read) == told, "a daemon can read it"
        if channel:
            await self.connect()
        return registered

    async def connect(self) -> UUID:
        """Open a channel; the session."""
        self.session_id = new_uuid()
        await runtimes.open_channel(self.deps, self.machine.id, self.runtime_id, self.session_id, self.engine.worker_id)
        return self.session_id

    async def pending(self, skip: set[UUID] | None = None) -> offers.Pending:
        """What the channel has to hand over."""
        found = await offers.pending(self.deps, self.runtime_id, self.session_id, skip or set())
        assert isinstance(found, offers.Pending)
        return found

    async def accept(self, job: Job) -> bool:
        """Ask for the grant of a process."""
        answer = await accept.accept_process(self.deps, self.runtime_id, self.session_id, job.id)
        return isinstance(answer, accept.Granted)

    async def accept_action(self, job: Job, action_id: UUID) -> accept.GrantedAction | None:
        """Ask for the grant of an action."""
        answer = await accept.accept_action(self.deps, self.runtime_id, self.session_id, job.id, action_id)
        return answer if isinstance(answer, accept.GrantedAction) else None

    async def report(self, event: Any) -> ReportAck:
        """Report an event."""
        return await reports.apply(self.deps, self.runtime_id, Report(report_id=str(new_uuid()), event=event))

    async def started(self, job: Job, output: str = "up\n", **changes: Any) -> ReportAck:
        """Report that a process runs."""
        return await self.report(started(job.id, output, **changes))

    async def finished(self, job: Job, output: str = "", **changes: Any) -> ReportAck:
        """Report that a process ended, by default well."""
        return await self.report(finished(job.id, output, **changes))

    async def running(self, **columns: Any) -> Job:
        """A command that runs, and whose call has its result."""
        job = await self.job(**columns)
        assert await self.accept(job)
        assert (await self.started(job)).ack_status == "committed"
        return job

    # --- looking ------------------------------------------------------------------------------------------

    async def row(self, job: Job) -> Any:
        """The row of a process."""
        return (await self.sql.fetch("select * from processes where id = $1", job.id))[0]

    async def state(self, job: Job) -> tuple[str, str]:
        """State and reason of a process."""
        row = await self.row(job)
        return row["state"], row["reason_code"]

    async def action(self, action_id: UUID) -> tuple[str, str]:
        """State and reason of an action."""
        rows = await self.sql.fetch("select state, reason_code from process_actions where id = $1", action_id)
        return rows[0]["state"], rows[0]["reason_code"]

    async def result(self, path: AgentPath, call_id: UUID | None) -> tuple[str, Any] | None:
        """Outcome and value of a call's result; None while it has none. Never more than one."""
        wanted = encode(IdKind.TOOL_CALL, call_id) if call_id else None
        found = [
            (payload["outcome"], payload["content_blocks"][0].get("value", payload["content_blocks"][0].get("text")))
            for kind, payload in await self.engine.log(path)
            if kind == "tool_result" and payload["tool_call_id"] == wanted
        ]
        assert len(found) <= 1
        return found[0] if found else None

    async def told(self, job: Job) -> tuple[str, Any] | None:
        """Outcome and value of the result of a job's call."""
        return await self.result(job.path, job.call_id)

    # --- time ---------------------------------------------------------------------------------------------

    async def lose(self, ago_s: float = 0.0) -> None:
        """The channel was lost so many seconds ago."""
        await runtimes.close_channel(self.deps, self.runtime_id, self.session_id)
        await self.sql.fetch(
            "update machine_runtimes set disconnected_at = now() - make_interval(secs => $2) where id = $1",
            self.runtime_id, ago_s,
        )  # fmt: skip
        await self.age(ago_s)

    async def age(self, seconds: float) -> None:
        """Make everything that waits so many seconds older."""
        for table in ("processes", "process_actions"):
            await self.sql.fetch(
                f"update {table} set created_at = created_at - make_interval(secs => $2) where machine_id = $1",
                self.machine.id, seconds,
            )  # fmt: skip


def started(process_id: UUID, output: str = "up\n", **changes: Any) -> ProcessStarted:
    """The report that a process runs."""
    result = StartedResult(process_id=prc(process_id), output=output, next_cursor=len(output.encode()))
    values = {"started_at": at(0), "observed_at": at(0.5), "result": result} | changes
    return ProcessStarted(process_id=prc(process_id), **values)


def finished(process_id: UUID, output: str = "", **changes: Any) -> ProcessFinished:
    """The report that a process ended, by default well."""
    values: dict[str, Any] = {"state": "exited", "exit_code": 0, "started_at": at(0), "ended_at": at(1)} | changes
    result = FinishedResult(
        state=values["state"], exit_code=values["exit_code"], output=output, next_cursor=len(output.encode())
    )
    return ProcessFinished(process_id=prc(process_id), **({"result": result} | values))


def applied(job: Job, action_id: UUID, seen: ReadObservation | None = None) -> ActionApplied:
    """The report that an action had its effect."""
    return ActionApplied(process_id=prc(job.id), process_action_id=pac(action_id), result=seen)


def failed(job: Job, action_id: UUID, reason: str) -> ActionFailed:
    """The report that an action had none."""
    return ActionFailed(process_id=prc(job.id), process_action_id=pac(action_id), state_reason_code=reason)


def unknown(job: Job, action_id: UUID, reason: str) -> ActionUnknown:
    """The report that nobody knows."""
    return ActionUnknown(process_id=prc(job.id), process_action_id=pac(action_id), state_reason_code=reason)


def seen(output: str, cursor: int = 0, *, truncated: bool = False, next_cursor: int | None = None) -> ReadObservation:
    """What a read saw."""
    end = cursor + len(output.encode()) if next_cursor is None else next_cursor
    return ReadObservation(output=output, cursor=cursor, next_cursor=end, truncated=truncated)


def claim(
    job: Job, phase: Any = "accepted", *, live: bool = True, committed: bool = True, **changes: Any
) -> ProcessClaim:
    """A claim of a process."""
    values: dict[str, Any] = {"action_admission_closed": False, "resolved_action_seq": 0, "actions": ()} | changes
    return ProcessClaim(
        process_id=prc(job.id),
        supervisor_instance_id="s1",
        phase=phase,
        supervisor_live=live,
        execution_committed=committed,
        **values,
    )


def local(action_id: UUID, seq: int, position: Any = "effect_committed", kind: Any = "write") -> ActionClaim:
    """A claim of an action."""
    return ActionClaim(process_action_id=pac(action_id), seq=seq, action_kind=kind, position=position)
