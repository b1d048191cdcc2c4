"""Taking work away: cancel, archive, release, deletion, a revoked token. Nothing queued runs, nothing is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.access import tokens
from omnara.access.tokens import TokenKind
from omnara.db import runtimes as runtimes_db
from omnara.engine.appending import Appending, wake_if_runnable
from omnara.engine.cancel import cancel_agent
from omnara.engine.lifecycle import archive
from omnara.engine.machines import closing, identity, offers, redact, runtimes
from omnara.engine.machines.completing import Told
from omnara.engine.machines.runtimes import RuntimeEnded
from omnara.engine.org_secrets import Owner, create_secret
from omnara.errors import Unauthorized
from omnara.ids import new_uuid
from omnara.vault import REDACTED, Secret
from tests.support.engine_case import Engine
from tests.support.machine_floor import Floor, applied, failed, prc, seen


async def test_what_is_canceled_before_its_grant_never_runs(engine: Engine) -> None:
    floor = await Floor.make(engine)
    first, second = await floor.jobs(2)
    await floor.accept(first)
    await cancel_agent(floor.deps, engine.p, first.path)
    assert await floor.state(second) == ("failed", "agent_canceled_before_grant")
    assert not await floor.accept(second)
    assert await floor.state(first) == ("starting", "")
    assert (await floor.pending()).terminations == [first.id], "until it is reported"
    assert (await floor.pending()).terminations == [first.id]
    assert ("machines", floor.machine.id) in engine.hints
    for job in (first, second):
        assert (await floor.told(job) or ("",))[0] == "canceled"
    ack = await floor.finished(first, state="killed", exit_code=None, state_reason_code="terminate_requested")
    assert ack.ack_status == "cleanup_only"
    assert (await floor.pending()).terminations == []
    await engine.assert_coherent(first.path)


async def test_a_background_command_survives_a_cancel_and_ends_with_its_agent(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.running()
    write, _ = await floor.act(job, "write", {"data": "x"})
    read, _ = await floor.act(job, "read", {"max_bytes": 9}, waits=False)
    await floor.accept_action(job, write)
    await cancel_agent(floor.deps, engine.p, job.path)
    assert await floor.action(write) == ("unknown", "agent_canceled_after_grant")
    assert await floor.action(read) == ("queued", ""), "not the canceled turn's"
    assert (await floor.pending()).terminations == []
    assert (await floor.report(applied(job, write))).ack_status == "cleanup_only"
    await archive(floor.deps, engine.p, job.path)
    assert (await floor.pending()).terminations == [job.id]
    assert await floor.action(read) == ("failed", "agent_archived")
    assert (await floor.finished(job)).ack_status == "cleanup_only"


async def test_a_cancel_and_a_grant_race_for_one_row(engine: Engine) -> None:
    floor = await Floor.make(engine)
    for _ in range(6):
        job = await floor.job()
        _, granted = await asyncio.gather(cancel_agent(floor.deps, engine.p, job.path), floor.accept(job))
        if granted:
            assert (await floor.pending()).terminations == [job.id]
            await floor.finished(job, state="killed", exit_code=None)
        else:
            assert await floor.state(job) == ("failed", "agent_canceled_before_grant")
            assert (await floor.pending()).terminations == []


async def test_a_released_binding_lets_nobody_wait(engine: Engine) -> None:
    floor = await Floor.make(engine)
    first, second = await floor.jobs(2)
    await floor.accept(first)
    binding_id = floor.bindings[first.path.agent_id]

    async def work(connection: Any) -> set[UUID]:
        appending = await Appending.lock(connection, first.path.agent_id)
        machines = await closing.close_binding(connection, appending, binding_id)
        await appending.write(wake_if_runnable(appending.hot))
        await connection.execute("update agent_machine_bindings set state = 'released' where id = $1", binding_id)
        return machines

    assert await floor.deps.db.run(work) == {floor.machine.id}
    for job, state in ((first, "unknown"), (second, "failed")):
        outcome, value = await floor.told(job) or ("", {})
        assert (outcome, value["error_code"], value["state"]) == ("failed", "machine_binding_released", state)
    assert (await floor.pending()).terminations == [first.id]
    assert (await floor.finished(first)).ack_status == "cleanup_only"
    assert (await engine.assert_coherent(first.path))["ready_at"] is not None


async def close_machine(floor: Floor, token_id: UUID | None = None) -> None:
    async def work(connection: Any) -> Told:
        assert await runtimes_db.lock_machine(connection, floor.machine.id) is not None
        if token_id is not None:
            return await closing.close_token(connection, floor.machine.id, token_id)
        return await closing.close_machine(connection, floor.machine.id)

    (await floor.deps.db.run(work)).tell(floor.deps)


async def test_a_deleted_machine_leaves_nobody_waiting(engine: Engine) -> None:
    floor = await Floor.make(engine)
    queued, granted = await floor.jobs(2)
    await floor.accept(granted)
    running = await floor.running()
    write, call = await floor.act(running, "write", {"data": "x"})
    await floor.accept_action(running, write)
    await close_machine(floor)
    assert await floor.state(queued) == ("failed", "machine_decommissioned")
    for job in (granted, running):
        assert await floor.state(job) == ("unknown", "machine_decommissioned")
    assert await floor.action(write) == ("unknown", "machine_decommissioned")
    for job in (queued, granted):
        assert (await floor.told(job) or ("", {}))[1]["error_code"] == "machine_decommissioned"
    assert await floor.result(running.path, call) is not None
    ended = await runtimes.beat(floor.deps, floor.runtime_id, floor.session_id, floor.instance)
    assert ended == RuntimeEnded("machine_decommissioned")
    assert await offers.pending(floor.deps, floor.runtime_id, floor.session_id, set()) == ended
    assert {agent for kind, agent in engine.hints if kind == "ready"} >= {queued.path.agent_id, running.path.agent_id}


async def test_who_waits_for_a_machine_that_cannot_be_made_is_told_why(engine: Engine) -> None:
    floor = await Floor.make(engine)
    job = await floor.job()

    async def work(connection: Any) -> Told:
        assert await runtimes_db.lock_machine(connection, floor.machine.id) is not None
        return await closing.close_machine(connection, floor.machine.id, message="There is no machine: no image x.")

    (await floor.deps.db.run(work)).tell(floor.deps)
    outcome, value = await floor.told(job) or ("", {})
    assert (outcome, value["error_code"]) == ("failed", "machine_decommissioned")
    assert value["error"] == "There is no machine: no image x."


async def test_a_revoked_token_ends_only_what_it_let_in(engine: Engine) -> None:
    floor = await Floor.make(engine)
    who = await identity.authenticate_daemon(floor.deps, floor.machine.token)
    assert (who.machine_id, who.org_id) == (floor.machine.id, floor.machine.org_id)
    queued, granted = await floor.jobs(2)
    await floor.accept(granted)
    await close_machine(floor, who.token_id)
    assert await floor.state(granted) == ("starting", ""), "this runtime did not use it"
    await floor.sql.fetch("update machine_runtimes set token_id = $1", who.token_id)
    await close_machine(floor, who.token_id)
    assert await floor.state(granted) == ("unknown", "authorization_revoked")
    assert await floor.state(queued) == ("queued", ""), "another daemon may take it"
    ended = await runtimes.beat(floor.deps, floor.runtime_id, floor.session_id, floor.instance)
    assert ended == RuntimeEnded("authorization_revoked")
    await floor.register(instance=new_uuid())
    await floor.accept(queued)
    await floor.finished(queued)


async def test_a_token_is_one_machines_or_nobodys(engine: Engine) -> None:
    floor = await Floor.make(engine, register=False)
    unknown = tokens.generate(TokenKind.DAEMON).text
    for bad in ("", "omnara_daemon_v1_x", floor.machine.token[:-1] + "_", unknown, tokens.generate(TokenKind.ORG).text):
        with pytest.raises(Unauthorized):
            await identity.authenticate_daemon(floor.deps, bad)
    assert (await identity.authenticate_daemon(floor.deps, floor.machine.token)).machine_id == floor.machine.id
    used = "select last_used_at from machine_daemon_tokens"
    first = (await floor.sql.fetch(used))[0][0]
    assert first is not None
    await identity.authenticate_daemon(floor.deps, floor.machine.token)
    assert (await floor.sql.fetch(used))[0][0] == first, "noted once an hour"
    await floor.sql.fetch("update machine_daemon_tokens set revoked_at = now()")
    with pytest.raises(Unauthorized):
        await identity.authenticate_daemon(floor.deps, floor.machine.token)


async def test_the_installation_has_one_id(engine: Engine) -> None:
    first = await asyncio.gather(*(identity.installation_id(engine.deps) for _ in range(4)))
    assert len(set(first)) == 1


# --- secrets ----------------------------------------------------------------------------------------------------


async def secret(engine: Engine, value: str, name: str = "deploy") -> UUID:
    owner = Owner("project", engine.project.project_id)
    row = await create_secret(engine.deps, engine.p, engine.project.org_id, owner, name, Secret(value), {})
    return row.id


async def test_secrets_are_resolved_at_hand_over_and_never_told(engine: Engine) -> None:
    floor = await Floor.make(engine)
    secret_id = await secret(engine, "hunter2-hunter2")
    job = await floor.job(env='{"A":"1"}', secret_env=msgspec.json.encode({"TOKEN": secret_id}).decode())
    (offer,) = (await floor.pending()).processes
    assert dict(offer.env) == {"A": "1", "TOKEN": "hunter2-hunter2"}
    await floor.accept(job)
    await floor.started(job, "TOKEN=hunter2-hunter2\nhunter2-hu")
    value = (await floor.told(job) or ("", {}))[1]
    assert value["output"] == f"TOKEN={REDACTED}\n{REDACTED}"
    assert value["next_cursor"] == 32, "places in the output stay as they are"
    read, call = await floor.act(job, "read", {"max_bytes": 100})
    await floor.accept_action(job, read)
    await floor.report(applied(job, read, seen("nter2 aHVudGVyMi1odW50ZXIy", 32)))
    assert "aHVudGVy" not in (await floor.result(job.path, call) or ("", {}))[1]["output"]
    write, call = await floor.act(job, "write", {"data": "x"})
    await floor.accept_action(job, write)
    said = msgspec.structs.replace(
        failed(job, write, "stdin_closed"), state_reason_message="no input with TOKEN=hunter2-hunter2"
    )
    await floor.report(said)
    assert (await floor.result(job.path, call) or ("", {}))[1]["error"] == f"no input with TOKEN={REDACTED}"
    why = {"state_reason_code": "signal", "state_reason_message": "hunter2-hunter2: broken"}
    await floor.finished(job, state="failed", exit_code=-1, **why)
    assert (await floor.sql.fetch("select reason_message from processes"))[0][0] == f"{REDACTED}: broken"
    everything = await floor.sql.fetch(
        "select payload::text as text from events union all select row_to_json(p)::text from processes p"
    )
    assert not [row["text"] for row in everything if "hunter2-hunter2" in row["text"]]


async def test_a_command_whose_secrets_cannot_be_had_is_told_so(engine: Engine) -> None:
    floor = await Floor.make(engine)
    theirs = await create_secret(
        engine.deps, engine.p, engine.project.org_id, Owner("org"), "org", Secret("organization"), {}
    )
    env = msgspec.json.encode({"TOKEN": theirs.id}).decode()
    job = await floor.job(secret_env=env)
    (offer,) = (await floor.pending()).processes
    assert (offer.command, dict(offer.env)) == ("", {})
    assert "TOKEN" in offer.preparation_error
    # The machine's own variables may name what its organization owns.
    await floor.sql.fetch("update machines set secret_env = $1::text::jsonb", env)
    (offer,) = (await floor.pending()).processes
    assert dict(offer.env) == {"TOKEN": "organization"}
    large = await floor.job(env=msgspec.json.encode({"BIG": "x" * 2**20}).decode())
    await floor.accept(job)
    (offer,) = (await floor.pending()).processes
    assert "1 MiB" in offer.preparation_error
    for each in (job, large):
        await floor.accept(each)
        await floor.finished(each)


def test_parts_of_values_go_at_the_edges_only() -> None:
    value = "correct-horse-battery"
    assert redact.without(f"a {value} b", [value]) == f"a {REDACTED} b"
    assert redact.without("x correct-horse", [value]) == f"x {REDACTED}"
    assert redact.without("se-battery y", [value]) == f"{REDACTED} y"
    assert redact.without("x correct-horse y", [value]) == "x correct-horse y"
    assert redact.without("correct", [value]) == "correct"
    assert redact.without("rect-horse-b", [value]) == REDACTED, "a read from its middle"
    assert prc(new_uuid()).startswith("prc_")
