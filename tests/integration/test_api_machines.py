"""Machines, their grants and tokens over HTTP: what is taken, refused and shown, and what ends with what."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import msgspec
import pytest
import pytest_asyncio

from omnara.access import tokens
from omnara.access.tokens import TokenKind
from omnara.engine.emptying import empty_projects
from omnara.engine.machines.identity import authenticate_daemon
from omnara.errors import Unauthorized
from omnara.ids import IdKind, decode, encode, new_uuid
from tests.contract.server import Answered, ApiServer, api_server, invariants_hold
from tests.support.postgres import PostgresForTests

NOBODYS = encode(IdKind.MACHINE, UUID(int=1))  # fixed: names of tests contain it, and all processes must agree on them


class Lab:
    """A server and the paths of its organization."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.org = f"/api/v1/orgs/{server.org}"
        self.machines = f"{self.org}/machines"
        self.grants = f"{server.scope}/machine-grants"

    async def ask(self, method: str, path: str, body: Any = None, status: int = 200, **options: Any) -> Any:
        answer = await self.server.call(method, path, body, **options)
        assert answer.status == status, answer.text
        return answer.json if answer.text else None

    async def post(self, path: str, body: Any = None, status: int = 201, **options: Any) -> Any:
        return await self.ask("POST", path, body, status, **options)

    async def machine(self, name: str = "box", **more: Any) -> Any:
        return await self.post(self.machines, {"display_name": name, **more})

    async def connected(self, name: str = "laptop") -> Any:
        return await self.post(f"{self.machines}/connect", {"display_name": name, "project_ids": [self.server.project]})

    async def secret(self, **owner: Any) -> str:
        body = {"owner": owner, "name": str(new_uuid()), "material": {"kind": "generic", "value": "a value"}}
        return str((await self.post(f"{self.org}/secrets", body))["id"])

    async def refused(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, str]:
        answer: Answered = await self.server.call(method, path, body, **options)
        assert answer.status >= 400, answer.text
        return answer.status, answer.code

    async def online(self, machine_id: str, token_id: str | None = None) -> None:
        """Make a machine look as if its daemon were connected."""
        runtime = new_uuid()
        machine = decode(IdKind.MACHINE, machine_id)
        token = None if token_id is None else decode(IdKind.DAEMON_TOKEN, token_id)
        await self.server.rows(
            "insert into machine_runtimes (id, org_id, machine_id, token_id, daemon_instance_id, daemon_version,"
            " session_id, connected_at, lease_expires_at)"
            " select $1, org_id, id, $3, gen_random_uuid(), '1.0.0', gen_random_uuid(), now(), now() + interval '1 h'"
            " from machines where id = $2",
            runtime,
            machine,
            token,
        )
        await self.server.rows("update machines set current_runtime_id = $1 where id = $2", runtime, machine)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(postgres: PostgresForTests) -> AsyncIterator[Lab]:
    async with contextlib.AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(postgres.fresh())
        made = Lab(await stack.enter_async_context(api_server(dsn)))
        yield made
        await invariants_hold(made.server)


# --- machines ---------------------------------------------------------------------------------------------


async def test_a_machine_from_its_making_to_its_end(lab: Lab) -> None:
    secret = await lab.secret(kind="org")
    made = await lab.machine(
        "Build box",
        description="In the cellar",
        cwd="/srv",
        env={"CI": "1"},
        secret_env={"TOKEN": secret},
        metadata={"rack": "7"},
    )
    assert (made["source_kind"], made["provider"], made["lifecycle_state"]) == ("byo", "byo", "active")
    assert (made["connection_state"], made["connection_state_reason"]) == ("offline", "never_connected")
    assert (made["env"], made["secret_env"], made["metadata"]) == ({"CI": "1"}, {"TOKEN": secret}, {"rack": "7"})
    assert (made["cwd"], made["description"], made["last_observed_at"]) == ("/srv", "In the cellar", None)
    path = f"{lab.machines}/{made['id']}"
    assert await lab.ask("GET", path) == made
    changed = await lab.ask("PATCH", path, {"env": {"CI": "0", "A": ""}})
    assert (changed["env"], changed["cwd"], changed["secret_env"]) == ({"CI": "0", "A": ""}, "/srv", {"TOKEN": secret})
    changed = await lab.ask("PATCH", path, {"cwd": "", "secret_env": {}})
    assert (changed["cwd"], changed["secret_env"]) == ("", {})
    await lab.ask("DELETE", path, status=204)
    for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"cwd": "/"})):
        assert await lab.refused(method, path, body) == (404, "not_found")
    assert made["id"] not in {item["id"] for item in (await lab.ask("GET", lab.machines))["data"]}


async def test_a_used_key_returns_what_it_made(lab: Lab) -> None:
    headers = {"Idempotency-Key": "first"}
    made = await lab.post(lab.machines, {"display_name": "first"}, headers=headers)
    again = await lab.post(lab.machines, {"display_name": "second", "cwd": "/x"}, 200, headers=headers)
    assert again == made
    await lab.ask("DELETE", f"{lab.machines}/{made['id']}", status=204)
    gone = await lab.post(lab.machines, {"display_name": "third"}, 200, headers=headers)
    assert (gone["id"], gone["lifecycle_state"]) == (made["id"], "deleted")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"display_name": ""}, "validation_failed"),
        ({"display_name": " "}, "invalid_request"),
        ({"display_name": "a\nb"}, "invalid_request"),
        ({"cwd": "/a\0b"}, "invalid_request"),
        ({"cwd": "x" * 5_000}, "invalid_request"),
        ({"description": "x" * 5_000}, "invalid_request"),
        ({"env": {"OMNARA_URL": "x"}}, "invalid_request"),
        ({"env": {"omnara_url": "x"}}, "invalid_request"),
        ({"env": {"Path": "x", "PATH": "y"}}, "invalid_request"),
        ({"env": {"A": "x"}, "secret_env": {"a": "the secret"}}, "invalid_request"),
        ({"env": {"": "x"}}, "invalid_request"),
        ({"env": {"A=B": "x"}}, "invalid_request"),
        ({"env": {"A": "x\0y"}}, "invalid_request"),
        ({"env": {"A": 1}}, "validation_failed"),
        ({"env": {f"N{n}": "" for n in range(4_097)}}, "invalid_request"),
        ({"secret_env": {"A": "sec_x"}}, "validation_failed"),
        ({"secret_env": {"A": encode(IdKind.SECRET, UUID(int=1))}}, "invalid_request"),
        ({"secret_env": {"A": "a project's"}}, "invalid_request"),
        ({"metadata": {"observed_platform": "x"}}, "validation_failed"),
        ({"metadata": {f"k{n}": "" for n in range(16)}}, "validation_failed"),
        ({"metadata": {"a": "x" * 513}}, "validation_failed"),
        ({"other": 1}, "validation_failed"),
    ],
)
async def test_machines_that_cannot_be(lab: Lab, change: Any, code: str) -> None:
    secrets = {
        "the secret": await lab.secret(kind="org"),
        "a project's": await lab.secret(kind="project", project_id=lab.server.project),
    }
    named = change.get("secret_env", {})
    change = change | ({"secret_env": {k: secrets.get(v, v) for k, v in named.items()}} if named else {})
    body = {"display_name": "refused"} | change
    assert await lab.refused("POST", lab.machines, body) == (400, code)
    assert await lab.server.rows("select 1 from machines where display_name = 'refused'") == []
    if not set(change) <= {"cwd", "env", "secret_env"}:
        return
    kept = await lab.machine("kept")
    assert await lab.refused("PATCH", f"{lab.machines}/{kept['id']}", change) == (400, code)
    assert await lab.ask("GET", f"{lab.machines}/{kept['id']}") == kept


async def test_the_largest_environment(lab: Lab) -> None:
    made = await lab.machine(
        "large", env={f"N{n}": "x" for n in range(4_096)}, metadata={f"k{n}": "" for n in range(15)}
    )
    assert len(made["env"]) == 4_096
    clash = {"secret_env": {"n1": await lab.secret(kind="org")}, "env": {"N1": "x"}}
    assert await lab.refused("PATCH", f"{lab.machines}/{made['id']}", clash) == (400, "invalid_request")
    half = {"secret_env": clash["secret_env"]}
    assert await lab.refused("PATCH", f"{lab.machines}/{made['id']}", half) == (400, "invalid_request")


async def test_what_is_shown_of_a_connection(lab: Lab) -> None:
    made = await lab.connected()
    path = f"{lab.machines}/{made['machine']['id']}"
    machine_id = decode(IdKind.MACHINE, made["machine"]["id"])

    async def state() -> tuple[str, str | None]:
        shown = await lab.ask("GET", path)
        return shown["connection_state"], shown.get("connection_state_reason")

    await lab.online(made["machine"]["id"], made["token_record"]["id"])
    assert await state() == ("online", None)
    for change, reason in (
        ("session_id = null, disconnected_at = now()", "disconnected"),
        ("disconnected_at = null, lease_expires_at = now() - interval '1 s'", "lease_expired"),
        ("state = 'ended', ended_at = now(), state_reason_code = 'daemon_ended'", "daemon_ended"),
    ):
        await lab.server.rows(f"update machine_runtimes set {change} where machine_id = $1", machine_id)
        assert await state() == ("offline", reason)
    report = {"stage": "startup_script", "exit_status": 7, "output_tail": "no such file", "output_truncated": False}
    stored = msgspec.json.encode(report | {"reported_at": "2026-08-01T10:00:00Z"}).decode()
    await lab.server.rows(
        "update machines set asleep_since = now(), observed_platform = 'linux/amd64', last_observed_at = now(),"
        " failure_report = $2 where id = $1",
        machine_id,
        stored,
    )
    assert await state() == ("asleep", "asleep")
    shown = await lab.ask("GET", path)
    assert shown["metadata"] == {"observed_platform": "linux/amd64"}
    assert shown["failure_report"] == report | {"reported_at": "2026-08-01T10:00:00Z"}
    assert shown["last_observed_at"] is not None


async def test_lists_of_machines(lab: Lab) -> None:
    for name in ("list b", "list a", "list c"):
        await lab.machine(name)
    page = await lab.ask("GET", f"{lab.machines}?name=LIST*&sort=name&limit=2&source_kind=byo")
    assert [item["display_name"] for item in page["data"]] == ["list a", "list b"]
    cursor = page["next_cursor"]
    rest = await lab.ask("GET", f"{lab.machines}?name=LIST*&sort=name&limit=2&source_kind=byo&cursor={cursor}")
    assert ([item["display_name"] for item in rest["data"]], rest["next_cursor"]) == (["list c"], None)
    assert await lab.refused("GET", f"{lab.machines}?sort=name&cursor={cursor}") == (400, "invalid_request")
    newest = (await lab.ask("GET", f"{lab.machines}?name=list*"))["data"]
    assert [item["display_name"] for item in newest] == ["list c", "list a", "list b"]
    assert newest[0]["access"] == {"can_manage": True, "sources": [{"kind": "org_role"}]}
    assert (await lab.ask("GET", f"{lab.machines}?name=list*&source_kind=pool"))["data"] == []
    assert (await lab.ask("GET", f"{lab.server.scope}/machines?name=list*"))["data"] == []


# --- connecting one's own ---------------------------------------------------------------------------------


async def test_connecting_a_machine(lab: Lab) -> None:
    made = await lab.connected("My laptop")
    machine, [grant] = made["machine"], made["project_grants"]
    assert (grant["machine_id"], grant["source_kind"]) == (machine["id"], "explicit")
    assert made["token_record"]["name"] == "My laptop"
    assert tokens.parse(made["token"]).kind is TokenKind.DAEMON
    token_id = decode(IdKind.DAEMON_TOKEN, made["token_record"]["id"])
    [stored] = await lab.server.rows("select token_hash from machine_daemon_tokens where id = $1", token_id)
    assert stored[0] == tokens.hash_token(made["token"])
    identity = await authenticate_daemon(lab.server.deps, made["token"])
    assert identity.machine_id == decode(IdKind.MACHINE, machine["id"])
    [listed] = (await lab.ask("GET", f"{lab.server.scope}/machines?name=My*"))["data"]
    sources = listed["access"]["sources"]
    assert sources == [
        {"kind": "org_role"},
        {
            "kind": "project_machine_grant",
            "project_id": lab.server.project,
            "grant_id": grant["id"],
            "grant_source_kind": "explicit",
        },
    ]
    [item] = (await lab.ask("GET", f"{lab.grants}?name=My*"))["data"]
    assert (item["grant"], item["machine"]["id"]) == (grant, machine["id"])
    nowhere = {"display_name": "x", "project_ids": [encode(IdKind.PROJECT, new_uuid())]}
    assert await lab.refused("POST", f"{lab.machines}/connect", nowhere) == (404, "not_found")
    twice = {"display_name": "x", "project_ids": [lab.server.project] * 2}
    assert await lab.refused("POST", f"{lab.machines}/connect", twice) == (400, "validation_failed")
    key = await lab.server.org_key("admin")
    body = {"display_name": "x", "project_ids": []}
    assert await lab.refused("POST", f"{lab.machines}/connect", body, key=key) == (403, "forbidden")


# --- tokens -----------------------------------------------------------------------------------------------


async def test_tokens_of_a_daemon(lab: Lab) -> None:
    machine = await lab.machine("tokens")
    path = f"{lab.machines}/{machine['id']}/daemon-tokens"
    nameless = await lab.post(path)
    assert (nameless["token_record"]["name"], nameless["token_record"]["metadata"]) == ("", {})
    named = await lab.post(path, {"name": "two", "metadata": {"a": "b"}})
    listed = (await lab.ask("GET", path))["data"]
    assert listed == [named["token_record"], nameless["token_record"]]
    assert not any(made["token"] in msgspec.json.encode(listed).decode() for made in (nameless, named))
    page = await lab.ask("GET", f"{path}?limit=1")
    assert (await lab.ask("GET", f"{path}?limit=1&cursor={page['next_cursor']}"))["data"] == [nameless["token_record"]]
    for _ in range(18):
        await lab.post(path)
    assert await lab.refused("POST", path) == (409, "conflict")
    revoke = f"{path}/{named['token_record']['id']}/revoke"
    revoked = await lab.ask("POST", revoke)
    assert (revoked["revoked_at"] is None, revoked["revoke_reason"]) == (False, "revoked")
    assert await lab.ask("POST", revoke) == revoked
    await lab.post(path)
    with pytest.raises(Unauthorized):
        await authenticate_daemon(lab.server.deps, named["token"])
    other = await lab.machine("other")
    foreign = f"{lab.machines}/{other['id']}/daemon-tokens/{nameless['token_record']['id']}/revoke"
    assert await lab.refused("POST", foreign) == (404, "not_found")
    await authenticate_daemon(lab.server.deps, nameless["token"])


async def test_a_revoked_token_takes_its_daemon_along_and_no_other(lab: Lab) -> None:
    made = await lab.connected("revoked")
    path = f"{lab.machines}/{made['machine']['id']}"
    spare = await lab.post(f"{path}/daemon-tokens", {"name": "spare"})
    await lab.online(made["machine"]["id"], made["token_record"]["id"])
    await lab.ask("POST", f"{path}/daemon-tokens/{spare['token_record']['id']}/revoke")
    assert (await lab.ask("GET", path))["connection_state"] == "online"
    await lab.ask("POST", f"{path}/daemon-tokens/{made['token_record']['id']}/revoke")
    shown = await lab.ask("GET", path)
    assert (shown["connection_state"], shown["connection_state_reason"]) == ("offline", "authorization_revoked")
    [row] = await lab.server.rows(
        "select state, state_reason_code from machine_runtimes where machine_id = $1",
        decode(IdKind.MACHINE, made["machine"]["id"]),
    )
    assert tuple(row) == ("ended", "authorization_revoked")


async def test_a_deleted_machine_takes_everything_along(lab: Lab) -> None:
    made = await lab.connected("doomed")
    machine_id = decode(IdKind.MACHINE, made["machine"]["id"])
    await lab.online(made["machine"]["id"], made["token_record"]["id"])
    await lab.ask("DELETE", f"{lab.machines}/{made['machine']['id']}", status=204)
    [row] = await lab.server.rows(
        "select m.lifecycle_state, r.state, t.revoke_reason, g.deleted_at is not null from machines m"
        " join machine_runtimes r on r.machine_id = m.id join machine_daemon_tokens t on t.machine_id = m.id"
        " join machine_grants g on g.machine_id = m.id where m.id = $1",
        machine_id,
    )
    assert tuple(row) == ("deleted", "ended", "machine_decommissioned", True)
    with pytest.raises(Unauthorized):
        await authenticate_daemon(lab.server.deps, made["token"])


# --- grants -----------------------------------------------------------------------------------------------


async def test_grants_and_their_keys(lab: Lab) -> None:
    machine = await lab.machine("granted")
    body = {"machine_id": machine["id"], "description": "for tests", "metadata": {"b": "1", "a": "2"}}
    headers = {"Idempotency-Key": "grant"}
    made = await lab.post(lab.grants, body, headers=headers)
    assert made["machine"] == machine
    assert (made["grant"]["source_kind"], made["grant"]["description"]) == ("explicit", "for tests")
    assert await lab.post(lab.grants, body, 200, headers=headers) == made
    other = (409, "idempotency_key_conflict")
    assert await lab.refused("POST", lab.grants, body | {"metadata": {}}, headers=headers) == other
    assert await lab.refused("POST", lab.grants, body) == other
    assert await lab.refused("POST", lab.grants, {"machine_id": NOBODYS}) == (404, "not_found")
    path = f"{lab.grants}/{made['grant']['id']}"
    await lab.ask("DELETE", path, status=204)
    assert await lab.refused("DELETE", path) == (404, "not_found")
    assert await lab.refused("POST", lab.grants, body, headers=headers) == other
    again = await lab.post(lab.grants, body)
    assert again["grant"]["id"] != made["grant"]["id"]


async def test_who_may_do_what_with_a_machine(lab: Lab) -> None:
    """Members see what a project of theirs may use, and change nothing; to others it does not exist."""
    made, hidden = await lab.connected("seen"), await lab.machine("hidden")
    path, unseen = (f"{lab.machines}/{one['id']}" for one in (made["machine"], hidden))
    grant = f"{lab.grants}/{made['project_grants'][0]['id']}"
    tried = [
        ("PATCH", "", {"cwd": "/x"}),
        ("DELETE", "", None),
        ("POST", "/daemon-tokens", {}),
        ("GET", "/daemon-tokens", None),
        ("POST", f"/daemon-tokens/{made['token_record']['id']}/revoke", None),
    ]
    for role in ("viewer", "operator", "developer", "admin"):
        for key in (await lab.server.user(role), await lab.server.org_key(role)):
            assert (await lab.ask("GET", path, key=key))["id"] == made["machine"]["id"]
            assert await lab.refused("GET", unseen, key=key) == (404, "not_found")
            names = {item["display_name"] for item in (await lab.ask("GET", lab.machines, key=key))["data"]}
            assert {"seen", "hidden"} & names == {"seen"}
            for method, tail, body in tried:
                assert await lab.refused(method, path + tail, body, key=key) == (403, "forbidden")
                assert await lab.refused(method, unseen + tail, body, key=key) == (404, "not_found")
            assert await lab.refused("POST", lab.machines, {"display_name": "x"}, key=key) == (403, "forbidden")
            granting = await lab.refused("POST", lab.grants, {"machine_id": hidden["id"]}, key=key)
            assert granting == ((404, "not_found") if role == "admin" else (403, "forbidden"))
            if role != "admin":
                assert await lab.refused("DELETE", grant, key=key) == (403, "forbidden")
    nobody = await lab.server.user(None)
    assert await lab.refused("GET", path, key=nobody) == (404, "not_found")
    assert (await lab.ask("GET", lab.machines, key=nobody))["data"] == []
    admin = await lab.server.user("admin")
    await lab.ask("DELETE", grant, status=204, key=admin)
    assert await lab.refused("GET", path, key=admin) == (404, "not_found"), "and with the grant its sight is gone"


async def test_seeing_a_machine_is_not_enough_to_grant_it(lab: Lab) -> None:
    """A viewer of one project who is the admin of another."""
    made = await lab.connected("tempting")
    second = (await lab.post(f"{lab.org}/projects", {"name": "second"}))["id"]
    key = await lab.server.user("viewer")
    me = (await lab.server.get("/api/v1/me", key=key))["user"]["id"]
    await lab.ask("PUT", f"{lab.org}/members/{me}/projects/{second}", {"role": "admin"}, status=200)
    body = {"machine_id": made["machine"]["id"]}
    there = f"{lab.org}/projects/{second}/machine-grants"
    assert await lab.refused("POST", there, body, key=key) == (403, "forbidden")
    await lab.ask("PUT", f"{lab.org}/members/{me}/projects/{lab.server.project}", {"role": "admin"}, status=200)
    assert (await lab.post(there, body, key=key))["grant"]["project_id"] == second
    await lab.ask("DELETE", f"{lab.org}/projects/{second}", status=204)
    await empty_projects(lab.server.deps)
    left = await lab.server.rows(
        "select 1 from machine_grants where project_id = $1 and deleted_at is null", decode(IdKind.PROJECT, second)
    )
    assert left == []


async def test_a_secret_that_a_machine_uses_stays(lab: Lab) -> None:
    secret = await lab.secret(kind="org")
    machine = await lab.machine("keeper", secret_env={"A": secret})
    path = f"{lab.org}/secrets/{secret}"
    assert await lab.refused("DELETE", path) == (409, "conflict")
    await lab.ask("PATCH", f"{lab.machines}/{machine['id']}", {"secret_env": {}})
    await lab.ask("DELETE", path, status=204)
