"""Machines of a pool that run a daemon themselves: a provider without homes is a module and an entry of a table."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from omnara.access import tokens
from omnara.engine.machines import provisioning
from omnara.engine.machines.daemon_tokens import MAX_TOKENS
from omnara.engine.machines.provisioning import Times
from omnara.errors import Gone
from omnara.ids import IdKind, encode, new_uuid
from omnara.maintenance import emptying
from omnara.testing import ModelServer, embedded
from tests.contract.server import api_server, model_server
from tests.support.cloud import DAEMON, Cloud
from tests.support.postgres import PostgresForTests
from tests.support.sky import Sky, sky_over
from tests.support.waiting import until


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as server:
        yield server


@pytest.fixture
def sky(postgres: PostgresForTests, model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens a server with a cloud, its times shrunk."""

    def opened(**options: Any) -> contextlib.AbstractAsyncContextManager[Sky]:
        return sky_over(postgres, model, tmp_path, monkeypatch, **options)

    return opened


async def test_a_machine_is_made_runs_commands_is_replaced_and_removed(sky: Any) -> None:
    async with sky() as lab:
        agent = await lab.agent()
        assert "made there" in await lab.ran(agent, "echo made there; touch here; pwd")
        machine = await lab.online()
        [name] = lab.cloud.boxes
        assert (lab.cloud.root / name / "here").exists()
        assert (machine["worker_id"], machine["resource_host"]) == (None, None), "not driven, and reached by all"
        assert await lab.tokens(machine["id"]) == [(True, "")]
        stored = await lab.server.rows("select token_hash from machine_daemon_tokens")
        assert stored[0][0] == tokens.hash_token(lab.cloud.given[name])

        lab.cloud.away = True
        lab.cloud.lose(name)
        await until(lambda: lab.cloud.asked > 2, "the cloud is asked about the machine")
        assert (await lab.machine(connection="offline"))["lifecycle_state"] == "active", "nobody can tell"
        lab.cloud.away = False
        machine = await lab.online(generation=2)
        assert machine["lifecycle_reason_code"] == "container_replaced"
        assert "made again" in await lab.ran(agent, "echo made again; ls")
        assert await lab.tokens(machine["id"]) == [(False, "machine_replaced"), (True, "")]
        assert list(lab.cloud.boxes) == [f"{name[:-2]}.2"]
        assert await lab.ask(lab.cloud.given[name], "POST", "/bootstrap") == 401

        box = lab.cloud.boxes[f"{name[:-2]}.2"]
        await lab.remove_pool()
        await lab.machine(lifecycle_state="deleted")
        assert [works for works, _ in await lab.tokens(machine["id"])] == [False, False]
        assert (lab.cloud.boxes, box.poll() is None) == ({}, False)


async def test_a_token_is_good_for_its_machine_alone(sky: Any) -> None:
    async with sky() as lab:
        for _ in range(2):
            await lab.agent()
        await until(lambda: len(lab.cloud.given) == 2, "both are made")
        second = await lab.online()
        [first] = await lab.server.rows("select * from machines where id <> $1", second["id"])
        token = lab.cloud.given[first["resource_id"]]
        runtime = encode(IdKind.DAEMON_RUNTIME, second["current_runtime_id"])
        assert await lab.ask(token, "POST", "/bootstrap") == 200
        assert encode(IdKind.MACHINE, first["id"]) in lab.answer
        for path in ("end", "sleep"):
            assert await lab.ask(token, "POST", f"/runtimes/{runtime}/{path}") == 410
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        upgrade["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
        assert await lab.ask(token, "GET", f"/runtimes/{runtime}/socket", headers=upgrade) == 410
        assert (await lab.online())["current_runtime_id"] == second["current_runtime_id"]


async def test_machines_that_a_server_drives_take_no_daemon(sky: Any) -> None:
    """Nobody gets a token for one; and one that there is all the same is of no use while it is driven."""
    async with sky(command="exec sleep 1000") as lab:
        await lab.agent()
        machine = await lab.machine(lifecycle_state="active")
        path = f"/api/v1/orgs/{lab.server.org}/machines/{encode(IdKind.MACHINE, machine['id'])}/daemon-tokens"
        assert (await lab.server.call("POST", path, {"name": "mine"})).status == 400
        await lab.server.rows(
            "update machines set worker_id = (select id from workers limit 1), claim_token = 1 where id = $1",
            machine["id"],
        )
        body = {"daemon_instance_id": str(new_uuid()), "daemon_version": "0.0.0-dev", "processes": []}
        token = lab.cloud.given[machine["resource_id"]]
        assert await lab.ask(token, "POST", "/runtimes", body=body) == 410
        assert "itself runs" in lab.answer


async def test_what_a_failed_attempt_made_is_adopted_with_the_token_it_was_given(sky: Any) -> None:
    async with sky() as lab:
        lab.cloud.fails = ["the cloud answered late: {token}"]
        await lab.agent()
        failed = await lab.machine(lifecycle_state="provision_failed")
        assert failed["lifecycle_reason_message"] == "the cloud answered late: [redacted]"
        machine = await lab.online()
        assert await lab.tokens(machine["id"]) == [(True, ""), (False, "superseded")]
        [name] = lab.cloud.boxes
        assert await lab.ask(lab.cloud.given[name], "POST", "/bootstrap") == 200
        # Nothing happens on it for its time.
        await lab.server.rows("update machines set delete_after_idle_minutes = 5")
        assert (await lab.machine(lifecycle_state="deleted"))["lifecycle_reason_code"] == "machine_idle"
        assert lab.cloud.boxes == {}
        assert await lab.ask(lab.cloud.given[name], "POST", "/bootstrap") == 401


async def test_a_pools_credential_goes_with_each_call_and_nowhere_else(sky: Any) -> None:
    with capture_logs() as logs:
        async with sky(key="first-key-of-the-cloud", retries_s=(60.0,)) as lab:
            unnamed = await lab.make_pool()
            assert (unnamed.status, unnamed.code) == (400, "invalid_request")
            assert "provider_auth_secret_id" in unnamed.json["error"]
            secret = await lab.secret("mistyped-key-of-the-cloud")
            await lab.use_pool(provider_auth_secret_id=secret)
            agent = await lab.agent()
            failed = await lab.machine(lifecycle_state="provision_failed")
            assert failed["lifecycle_reason_message"] == "the cloud does not know [redacted]"
            await lab.rotate(secret, lab.cloud.key)
            await lab.server.rows("update machines set next_reconcile_after = now()")
            machine = await lab.online()

            lab.cloud.key = "second-key-of-the-cloud"
            lab.cloud.suspend(machine["resource_id"])
            await until(lambda: "does not tell of it" in str(logs), "the first key is refused")
            assert (await lab.machine())["lifecycle_state"] == "active", "nobody can tell"
            await lab.rotate(secret, lab.cloud.key)
            await lab.machine(connection="asleep")
            assert "woken" in await lab.ran(agent, "echo woken")

            lab.cloud.key = "third-key-of-the-cloud"
            await lab.rotate(secret, lab.cloud.key)
            await lab.remove_pool()
            await lab.machine(lifecycle_state="deleted")
            assert lab.cloud.boxes == {}
            asked = {(what, key.partition("-")[0]) for what, key in lab.cloud.admitted}
            assert asked >= {("provision", "first"), ("inspect", "second"), ("wake", "second"), ("delete", "third")}
            for table in ("machines", "machine_pools", "processes", "events"):
                stored = await lab.server.rows(f"select t::text from {table} t")
                assert stored, table
                assert "key-of-the-cloud" not in str(stored), table
    assert "key-of-the-cloud" not in str(logs)


async def test_a_deleted_organization_keeps_the_key_until_its_machines_are_gone(
    sky: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emptying, "LOOK_S", 0.2)
    async with sky(key="key-of-the-cloud") as lab:
        await lab.use_pool(provider_auth_secret_id=await lab.secret(lab.cloud.key))
        await lab.secret("of no further use")
        await lab.agent()
        await lab.online()
        values = (
            "select count(*) from secret_versions v join secrets s on s.id = v.secret_id where s.owner_kind = 'org'"
        )
        lab.cloud.key = "the cloud refuses everybody for a while"
        await lab.delete_org()
        await lab.machine(lifecycle_state="delete_failed")

        async def left() -> bool:
            return bool((await lab.server.rows(values))[0][0] == 1)

        await until(left, "all that nobody needs any more is gone")
        lab.cloud.key = "key-of-the-cloud"
        await lab.machine(lifecycle_state="deleted")

        async def empty() -> bool:
            marked = await lab.server.rows("select from projects where emptying")
            return not marked and (await lab.server.rows(values))[0][0] == 0

        await until(empty, "the key is gone as well", limit_s=20)


async def test_a_machine_to_which_no_daemon_comes_is_given_up(sky: Any) -> None:
    async with sky(command="exec sleep 1000", startup_s=1.5) as lab:
        agent = await lab.agent()
        machine = await lab.machine(lifecycle_state="deleted")
        assert machine["lifecycle_reason_code"] == "startup_or_daemon_bootstrap_failed"
        assert [works for works, _ in await lab.tokens(machine["id"])] == [False]
        assert lab.cloud.boxes == {}
        assert (await lab.server.get(agent))["machine_ids"] == []


@pytest.mark.parametrize("by", ["daemon", "cloud"])
async def test_what_was_suspended_is_woken_for_a_command(sky: Any, by: str) -> None:
    """Its daemon has said that it may be, or the cloud just did it."""
    async with sky() as lab:
        agent = await lab.agent()
        machine = await lab.online()
        name, runtime = machine["resource_id"], machine["current_runtime_id"]
        lab.cloud.suspend(name)
        if by == "daemon":
            path = f"/runtimes/{encode(IdKind.DAEMON_RUNTIME, runtime)}/sleep"
            assert await lab.ask(lab.cloud.given[name], "POST", path) == 200
        await lab.machine(connection="asleep")
        lab.cloud.slow = True
        await lab.begin(agent, "echo awake again")
        await until(lambda: bool(lab.cloud.woken), "it is woken")
        waking = await lab.machine(connection="asleep")
        assert waking["wake_until"] is not None, "until its daemon is back, so that what waits for it does not give up"
        lab.cloud.resume(name)
        assert "awake again" in await lab.result(agent)
        lab.cloud.slow = False
        woken = await lab.online()
        assert (woken["asleep_since"], woken["wake_until"]) == (None, None)
        assert (woken["current_runtime_id"], woken["generation"]) == (runtime, 1)
        if by == "daemon":
            lab.cloud.suspend(name)
            assert await lab.ask(lab.cloud.given[name], "POST", path) == 200
            await lab.machine(connection="asleep")
            lab.cloud.lose(name)
            assert "another" in await lab.ran(agent, "echo another")
            assert (await lab.online(generation=2))["current_runtime_id"] != runtime


async def test_what_is_suspended_in_the_middle_of_its_work_goes_on(sky: Any) -> None:
    async with sky() as lab:
        agent = await lab.agent()
        machine = await lab.online()
        await lab.begin(agent, "echo begun > begun; while [ ! -e go ]; do sleep 0.05; done; echo over")
        box = lab.cloud.root / machine["resource_id"]
        await until((box / "begun").exists, "the command runs")
        lab.cloud.suspend(machine["resource_id"])
        await until(lambda: bool(lab.cloud.woken), "it is woken")
        (box / "go").touch()
        assert "over" in await lab.result(agent)
        assert (await lab.online())["current_runtime_id"] == machine["current_runtime_id"]


async def test_a_pool_is_refused_whose_machines_would_not_find_this_server(sky: Any) -> None:
    async with sky(url="") as lab:
        answer = await lab.make_pool()
        assert (answer.status, answer.code) == (422, "unprocessable"), answer.text
        assert "OMNARA_PUBLIC_URL" in answer.json["error"]


async def test_a_provider_that_this_server_has_not_is_refused(postgres: PostgresForTests, model: ModelServer) -> None:
    async with postgres.fresh() as dsn, api_server(dsn, model) as server:
        answer = await Sky(server, Cloud(Path(), DAEMON)).make_pool()
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert "there are docker and local" in answer.json["error"]


async def test_attempts_leave_a_bounded_number_of_tokens_and_none_without_the_claim(sky: Any) -> None:
    async with sky(command="exec sleep 1000", retries_s=(60.0,)) as lab:
        lab.cloud.fails = ["no"]
        await lab.agent()
        failed = await lab.machine(lifecycle_state="provision_failed")
        await lab.no_more_is_made()
        deps = lab.server.deps
        await lab.server.rows("update machines set next_reconcile_after = now()")
        worker = (await lab.server.rows("select id from workers"))[0][0]
        async with deps.db.acquire() as connection:
            [claimed] = await provisioning.claim_due(connection, worker, [("cloud", "")], Times(), 8)
        minted = [await provisioning.begin(deps, claimed, Times(), with_token=True) for _ in range(30)]
        working = await lab.server.rows(
            "select token_hash from machine_daemon_tokens where machine_id = $1 and revoked_at is null"
            " order by created_at",
            failed["id"],
        )
        assert [row[0] for row in working] == [token.hash for token in minted[-MAX_TOKENS:] if token is not None]
        assert await provisioning.begin(deps, claimed, Times(), with_token=False) is None
        stale = msgspec.structs.replace(claimed, claim_token=claimed.claim_token + 1)
        with pytest.raises(Gone):
            await provisioning.begin(deps, stale, Times(), with_token=True)
        assert len(await lab.tokens(failed["id"])) == 31
