"""The use cases on a real database, and a hand-driven worker that puts agents into every state they can be in.

The worker writes through the engine's own statements (claim and advance), so what the API meets here is what it meets
in production.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import msgspec
import pytest_asyncio

from omnara.access.principals import Principal
from omnara.access.roles import ProjectScope
from omnara.db import advance as advance_db
from omnara.db import sched, snapshot
from omnara.db.catalog import ModelFacts
from omnara.db.connection import ConnectSettings
from omnara.db.inputs import InputRow
from omnara.db.pool import ApiPool
from omnara.db.sqlfiles import sql_root
from omnara.domain.advance import (
    Admission,
    Advance,
    Advanced,
    BeginStep,
    CloseStep,
    MovedCall,
    NewCall,
    NewEvent,
    NewInteraction,
)
from omnara.domain.claim import Claim
from omnara.domain.content import OutputBlock, TextBlock, ToolCallBlock
from omnara.domain.events import (
    AgentInputPayload,
    EventMeta,
    ModelOutputPayload,
    StopReason,
    ToolResultPayload,
    encode_payload,
)
from omnara.domain.state import LogState, fold
from omnara.engine import bootstrap, launch, model_admin
from omnara.engine.authenticate import authenticate
from omnara.engine.catalog import ModelCatalog
from omnara.engine.configs import create_config
from omnara.engine.deps import Deps
from omnara.engine.feed import Feed
from omnara.engine.launch import Launched
from omnara.engine.model_admin import ProviderSpec
from omnara.engine.scope import AgentPath
from omnara.ids import IdKind, encode, new_uuid
from omnara.metrics import Metrics
from omnara.providers.gateway import ModelGateway
from omnara.settings import Settings
from omnara.tools.interactions import permission_form, question_form
from omnara.tools.registry import BUILT_IN
from omnara.vault import Secret, generate_ring

_tokens = itertools.count(1)

CONFIG: dict[str, Any] = {
    "instruction": "Look things up.",
    "model": {"provider_config": "lab", "name": "small"},
    "tools": {
        "ask_question": {},
        "web_fetch": {},
        "look": {
            "type": "custom",
            "description": "Looks at a path.",
            "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    },
}


class RecordedHints:
    """Keeps what the use cases announce."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, UUID]] = []

    def ready(self, agent_ids: Any) -> None:
        self.sent += [("ready", agent_id) for agent_id in agent_ids]

    def events(self, agent_ids: Any) -> None:
        self.sent += [("events", agent_id) for agent_id in agent_ids]

    def cancel(self, agent_ids: Any) -> None:
        self.sent += [("cancel", agent_id) for agent_id in agent_ids]

    def machines(self, machine_ids: Any) -> None:
        self.sent += [("machines", machine_id) for machine_id in machine_ids]

    def commands(self, machine_ids: Any) -> None:
        self.sent += [("commands", machine_id) for machine_id in machine_ids]


class Call(msgspec.Struct):
    """A tool call that the hand-driven model asks for."""

    name: str
    type: str = "custom"
    state: str = "ready"
    input: dict[str, Any] = msgspec.field(default_factory=lambda: {"path": "/"})
    form: str | None = None


QUESTIONS = {"questions": [{"prompt": "Blue?", "options": ["yes", "no"]}]}
ASK = Call("ask_question", "built_in", "waiting", QUESTIONS, "question")
LOOK = Call("look")


def needs_permission(call: Call) -> Call:
    """The same call, waiting for a person's permission."""
    return msgspec.structs.replace(call, state="awaiting_permission", form="permission")


class Engine:
    """Use cases, a principal with every right, and the worker."""

    def __init__(self, deps: Deps, p: Principal, project: ProjectScope, worker_id: UUID) -> None:
        self.deps = deps
        self.p = p
        self.project = project
        self.worker_id = worker_id

    @property
    def hints(self) -> list[tuple[str, UUID]]:
        """What was announced so far."""
        hints = self.deps.hints
        assert isinstance(hints, RecordedHints)
        return hints.sent

    async def config(self, **changes: Any) -> UUID:
        """Store a config and return its id."""
        source = msgspec.json.encode(CONFIG | changes).decode()
        return (await create_config(self.deps, self.p, self.project, source, "json")).config.row.id

    async def launch(self, message: str | None = None, **options: Any) -> Launched:
        """Launch an agent with the usual config."""
        config_id = await self.config()
        return await launch.launch_agent(self.deps, self.p, self.project, config_id, message=message, **options)

    async def agent(self, message: str | None = None) -> AgentPath:
        """Launch an agent and return its path."""
        return AgentPath((await self.launch(message)).agent.id)

    # --- the worker ---------------------------------------------------------------------------------------

    async def claim(self, path: AgentPath) -> Claim:
        """Claim exactly this agent, which must be ready."""
        async with self.deps.db.acquire() as connection:
            claims = await sched.claim_agents(
                connection, self.worker_id, limit=1000, since=sched.ALWAYS, token=next(_tokens), suspects=True
            )
        found = [claim for claim in claims if claim.agent_id == path.agent_id]
        assert found, "the agent was not ready"
        return found[0]

    async def advance(self, item: Advance) -> Advanced | None:
        """Write one item; None when the fence refused it."""
        async with self.deps.db.acquire() as connection:
            return (await advance_db.advance(connection, self.worker_id, [item], 10)).get(0)

    async def begin_model(self, claim: Claim) -> Advanced:
        """Admit what waits (all steering, else one queued message) and begin a model step."""
        async with self.deps.db.acquire() as connection:
            _, waiting = await snapshot.read_for_step(connection, claim.agent_id, 1, 0)
        steering = [item for item in waiting if item.delivery_mode == "steering"]
        admit = steering or ([] if claim.turn_open else waiting[:1])
        turn_id = new_uuid() if admit else claim.turn_id
        assert turn_id is not None
        entries = []
        for item in admit:
            payload = AgentInputPayload(
                encode(IdKind.AGENT_INPUT, item.id), "content", msgspec.json.decode(item.content, type=list[TextBlock])
            )
            event = NewEvent(new_uuid(), "agent_input", turn_id, None, encode_payload(payload), True, True)
            entries.append(Admission(item.id, event))
        begin = BeginStep(
            "model", 1, claim.config_id, turn_id, new_turn=bool(admit), call_id=new_uuid(), admit=tuple(entries)
        )
        done = await self.advance(_advance(claim, mode="begin", begin=begin))
        assert done is not None
        assert done.begun
        claim.follow(done)
        return done

    async def save_output(self, claim: Claim, calls: Sequence[Call] = (), text: str = "Done.") -> list[UUID] | None:
        """Save a model output and give the claim back; returns the ids of its calls, None when the fence refused."""
        ids = [new_uuid() for _ in calls]
        blocks: list[OutputBlock] = [TextBlock(text)] if text else []
        blocks += [
            ToolCallBlock(encode(IdKind.TOOL_CALL, call_id), call.type, call.name, call.input)  # type: ignore[arg-type]
            for call_id, call in zip(ids, calls, strict=True)
        ]
        stop: StopReason = "tool_use" if calls else "end_turn"
        payload = ModelOutputPayload(encode(IdKind.MODEL_CALL, new_uuid()), stop, blocks)
        assert claim.turn_id is not None
        event = NewEvent(
            new_uuid(),
            "model_output",
            claim.turn_id,
            claim.turn_sequence,
            encode_payload(payload),
            is_semantic=not calls,
            meta=encode_payload(EventMeta(claim.next_sequence - 1)),
        )
        item = _advance(
            claim,
            mode="release",
            close=CloseStep(claim.step_number, "succeeded", "wait", usage='{"input_tokens_total":10}'),
            events=(event,),
            calls=tuple(_new_call(n, i, c) for n, (i, c) in enumerate(zip(ids, calls, strict=True))),
            asked=tuple(_form(i, c) for i, c in zip(ids, calls, strict=True) if c.form),
            turn_open=bool(calls),
            output_position=0,
            opened=len(calls),
            ready_s=None,
        )
        return None if await self.advance(item) is None else ids

    async def turn(self, path: AgentPath, calls: Sequence[Call] = (), text: str = "Done.") -> list[UUID]:
        """Run one model step of a ready agent: admit, call, save."""
        claim = await self.claim(path)
        await self.begin_model(claim)
        ids = await self.save_output(claim, calls, text)
        assert ids is not None
        return ids

    async def go_on(self, claim: Claim) -> Advanced:
        """Save a failed attempt and begin the next one in the same statement, as a holder that keeps its claim does."""
        assert claim.turn_id is not None
        item = _advance(
            claim,
            mode="begin",
            close=CloseStep(claim.step_number, "failed", "retry_model"),
            attempt=1,
            begin=BeginStep("model", 2, claim.config_id, claim.turn_id, call_id=new_uuid()),
        )
        done = await self.advance(item)
        assert done is not None
        return done

    async def park(self, claim: Claim) -> None:
        """Save a failed attempt whose retry is due in an hour, and give the claim back."""
        item = _advance(
            claim,
            mode="release",
            close=CloseStep(claim.step_number, "failed", "retry_model", error='{"kind":"rate_limit"}'),
            attempt=3,
            retry_s=3600.0,
            ready_s=3600.0,
        )
        assert await self.advance(item) is not None

    async def save_result(self, claim: Claim, call_id: UUID) -> Advanced | None:
        """Save the result of a running call and give the claim back."""
        payload = ToolResultPayload(encode(IdKind.TOOL_CALL, call_id), "succeeded", [TextBlock("page")])
        assert claim.turn_id is not None
        event = NewEvent(new_uuid(), "tool_result", claim.turn_id, claim.turn_sequence, encode_payload(payload))
        moved = MovedCall(call_id, "running", "completed", "succeeded", 0)
        return await self.advance(
            _advance(
                claim,
                mode="release",
                events=(event,),
                moved=(moved,),
                answered=1,
                ready_s=0.0,
                close=CloseStep(claim.step_number, "succeeded", "model"),
            )
        )

    # --- looking ------------------------------------------------------------------------------------------

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run SQL of a test's own."""
        async with self.deps.db.acquire() as connection:
            return list(await connection.fetch(sql, *args))

    async def hot(self, path: AgentPath) -> Any:
        """The hot row."""
        return (await self.fetch("select * from agent_sched where agent_id = $1", path.agent_id))[0]

    async def log(self, path: AgentPath) -> list[tuple[str, Any]]:
        """Kinds and payloads, oldest first; checks that the log is gapless."""
        rows = await self.fetch(
            "select sequence, kind, payload from events where agent_id = $1 order by sequence", path.agent_id
        )
        assert [row["sequence"] for row in rows] == list(range(1, len(rows) + 1))
        return [(row["kind"], msgspec.json.decode(row["payload"])) for row in rows]

    async def folded(self, path: AgentPath) -> LogState:
        """The canonical reading of the log."""
        async with self.deps.db.acquire() as connection:
            rows = await snapshot.read_events(connection, path.agent_id, 1)
        void = (await self.hot(path))["void"] or []
        return fold(
            snapshot.decode_event(row) for row in rows if not any(r.lower <= row["sequence"] < r.upper for r in void)
        )

    async def assert_coherent(self, path: AgentPath) -> Any:
        """The hot row says what the log says, and every call has what its state promises. Returns the hot row."""
        hot = await self.hot(path)
        state = await self.folded(path)
        last = await self.fetch("select max(sequence) as n from events where agent_id = $1", path.agent_id)
        assert hot["next_sequence"] == last[0]["n"] + 1
        assert hot["open_calls"] == len(state.open_calls)
        assert hot["batch_sequence"] == state.batch_sequence
        assert hot["turn_open"] == state.turn_open
        rows = await self.fetch(
            "select id, state from tool_calls where agent_id = $1 and state <> 'completed'", path.agent_id
        )
        assert {encode(IdKind.TOOL_CALL, row["id"]) for row in rows} == set(state.open_calls)
        orphans = await self.fetch(
            "select i.id from interactions i join tool_calls t on t.agent_id = i.agent_id and t.id = i.tool_call_id "
            "where i.agent_id = $1 and i.state = 'open' and t.state = 'completed'",
            path.agent_id,
        )
        assert not orphans
        if hot["worker_id"] is None and hot["turn_open"] and hot["open_calls"] == 0 and hot["gate"] == "open":
            assert hot["ready_at"] is not None, "model work that nobody will look for"
        return hot

    async def broken_invariants(self) -> dict[str, list[dict[str, Any]]]:
        """Every query of `sql/checks` that returns rows, with them."""
        found: dict[str, list[dict[str, Any]]] = {}
        for check in sorted((sql_root() / "checks").glob("*.sql")):
            rows = await self.fetch(check.read_text(encoding="utf-8"))
            if rows:
                found[check.stem] = [dict(row) for row in rows]
        return found

    async def inputs(self, path: AgentPath) -> dict[str, str]:
        """States of the inputs by id text."""
        rows = await self.fetch("select id, state from inputs where agent_id = $1", path.agent_id)
        return {str(row["id"]): row["state"] for row in rows}


def texts(row: InputRow) -> list[str]:
    """The texts of an input."""
    return [block["text"] for block in msgspec.json.decode(row.content)]


def _advance(claim: Claim, **changes: Any) -> Advance:
    return Advance(
        agent_id=claim.agent_id,
        claim_token=claim.claim_token,
        epoch=claim.epoch,
        gen=claim.inputs_gen,
        turn_id=claim.turn_id,
        turn_sequence=claim.turn_sequence,
        step_number=claim.step_number,
        known_next_sequence=claim.next_sequence,
        **changes,
    )


def _new_call(ordinal: int, call_id: UUID, call: Call) -> NewCall:
    return NewCall(
        ordinal, call_id, f"call_{ordinal}", call.name, call.type, msgspec.json.encode(call.input).decode(), call.state
    )


def _form(call_id: UUID, call: Call) -> NewInteraction:
    form = question_form(call.input["questions"]) if call.form == "question" else permission_form(call.name, call.input)
    kind: Any = call.form
    return NewInteraction(new_uuid(), call_id, kind, msgspec.json.encode(form).decode())


@contextlib.asynccontextmanager
async def open_engine(dsn: str, *, connections: int = 24) -> AsyncIterator[Engine]:
    """The use cases on one database, with an organization, a project, a key and a model."""
    pool = ApiPool(ConnectSettings(dsn=dsn), size=connections, acquire_timeout_s=30)
    await pool.start()
    ring = generate_ring()
    settings = Settings()
    gateway = ModelGateway()
    try:
        started = await bootstrap.first_start(pool, ring, None)
        models = ModelCatalog(pool, ring, settings)
        deps = Deps(pool, ring, Feed(), RecordedHints(), BUILT_IN, gateway, models, settings, Metrics.create())
        await model_admin.add_model(pool, ring, started.org.org_id, LAB, Secret("sk-lab-key"), "small", FACTS)
        token = started.token.text if started.token else (await bootstrap.create_key(pool, "test"))[0].text
        p = await authenticate(deps, f"Bearer {token}")
        worker_id = new_uuid()
        async with pool.acquire() as connection:
            await connection.execute(
                "insert into workers (id, lock_key, roles, version, lease_expires_at) "
                "values ($1, $2, '{worker}', 'test', now() + interval '1 hour')",
                worker_id,
                next(_tokens),
            )
        project = ProjectScope(started.org.org_id, started.org.project_id)
        yield Engine(deps, p, project, worker_id)
    finally:
        await gateway.close()
        await pool.close()


LAB = ProviderSpec(
    name="lab",
    api_format="anthropic_messages",
    base_url="http://127.0.0.1:9/v1",
    request_path="/messages",
    auth_kind="api_key_header",
)
FACTS = ModelFacts(
    provider_model_slug="lab-small-1",
    context_window_tokens=100_000,
    max_output_tokens=8_000,
    default_max_output_tokens=4_000,
    supports_reasoning=True,
    supported_reasoning_efforts=("low", "high"),
)


@pytest_asyncio.fixture(loop_scope="session")
async def engine(database: str) -> AsyncIterator[Engine]:
    """The use cases on a fresh database, whose invariants must hold when the test is over."""
    async with open_engine(database) as opened:
        yield opened
        assert not await opened.broken_invariants()
