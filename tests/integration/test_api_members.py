"""Members, keys and tokens over HTTP: who belongs where, with which rights, and what a person alone may do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from omnara.access.principals import Credential, OrgRole, Principal, PrincipalKind
from omnara.access.roles import ProjectScope
from omnara.engine import credentials, members
from omnara.engine.authenticate import authenticate
from omnara.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unauthorized
from omnara.ids import IdKind, decode, encode, new_uuid
from tests.contract.server import ApiServer, api_server, invariants_hold
from tests.support.postgres import PostgresForTests

TOKENS = "/api/v1/personal-access-tokens"


@pytest_asyncio.fixture(loop_scope="session")
async def server(postgres: PostgresForTests) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, roles=frozenset({"api"})) as running:
        yield running


def org(server: ApiServer) -> str:
    return f"/api/v1/orgs/{server.org}"


async def me(server: ApiServer, key: str | None = None) -> str:
    answer = await server.get("/api/v1/me", **({} if key is None else {"key": key}))
    return str(answer["user"]["id"])


async def at_a_browser(server: ApiServer) -> Principal:
    """The owner, as a session would show them; this release has no sessions of its own."""
    p = await authenticate(server.deps, f"Bearer {server.key}")
    return msgspec.structs.replace(p, credential=Credential.SESSION)


# --- members ----------------------------------------------------------------------------------------------


async def test_members_are_listed_promoted_and_removed(server: ApiServer) -> None:
    other = await server.user("viewer")
    other_id, owner_id = await me(server, other), await me(server)
    listed = (await server.get(f"{org(server)}/members?sort=name", key=other))["data"]
    assert [(item["display_name"], item["role"]) for item in listed] == [("Other", "member"), ("Owner", "owner")]
    [found] = (await server.get(f"{org(server)}/members?name=own*"))["data"]
    assert (found["user_id"], found["email"]) == (owner_id, "")
    page = await server.get(f"{org(server)}/members?limit=1")
    rest = await server.get(f"{org(server)}/members?limit=1&cursor={page['next_cursor']}")
    assert [item["user_id"] for item in page["data"] + rest["data"]] == [other_id, owner_id]

    one, owner = f"{org(server)}/members/{other_id}", f"{org(server)}/members/{owner_id}"
    assert (await server.call("PATCH", one, {"role": "admin"}, key=other)).code == "forbidden"
    assert (await server.call("PATCH", one, {"role": "boss"})).code == "invalid_request"
    assert (await server.call("PATCH", one, {"role": "admin"})).json["role"] == "admin"
    # An admin manages members, but makes and unmakes no owners.
    for where, role in ((one, "owner"), (owner, "member")):
        assert (await server.call("PATCH", where, {"role": role}, key=other)).code == "forbidden"
    assert (await server.call("DELETE", owner, key=other)).code == "forbidden"
    for method, body in (("PATCH", {"role": "member"}), ("DELETE", None)):
        assert (await server.call(method, owner, body)).code == "conflict", "the last owner stays"
    assert (await server.call("DELETE", one)).status == 204
    assert (await server.call("DELETE", one)).code == "not_found"
    assert (await server.call("GET", f"{org(server)}/members", key=other)).code == "not_found"
    assert (await server.call("GET", f"{server.scope}/agents", key=other)).code == "not_found"


async def test_two_owners_cannot_both_leave(server: ApiServer) -> None:
    other = await server.user(None)
    ids = {server.key: await me(server), other: await me(server, other)}
    assert (await server.call("PATCH", f"{org(server)}/members/{ids[other]}", {"role": "owner"})).status == 200
    answers = await asyncio.gather(
        *(server.call("DELETE", f"{org(server)}/members/{user}", key=key) for key, user in ids.items())
    )
    assert sorted(answer.status for answer in answers) == [204, 409]
    owners = await server.rows("select user_id from org_members where role = 'owner'")
    assert len(owners) == 1


async def test_roles_in_projects(server: ApiServer) -> None:
    other = await server.user(None)
    other_id = await me(server, other)
    roles = f"{org(server)}/members/{other_id}/projects"
    one = f"{roles}/{server.project}"
    assert (await server.call("PUT", one, {"role": "viewer"}, key=other)).code == "not_found"
    assert (await server.call("PUT", one, {"role": "king"})).code == "invalid_request"
    made = await server.call("PUT", one, {"role": "viewer"})
    assert (made.status, made.json["project_id"], made.json["project_name"]) == (200, server.project, "Default")
    assert (await server.get(f"{server.scope}/agents", key=other))["data"] == []
    assert (await server.call("PUT", one, {"role": "admin"}, key=other)).code == "forbidden"
    again = (await server.call("PUT", one, {"role": "operator"})).json
    assert (again["role"], again["created_at"]) == ("operator", made.json["created_at"])
    assert (await server.get(roles, key=other))["data"] == [again], "everybody sees their own"
    stranger = await server.user(None)
    assert (await server.call("GET", roles, key=stranger)).code == "forbidden"
    assert (await server.call("DELETE", one)).status == 204
    assert (await server.call("DELETE", one)).code == "not_found"
    assert (await server.call("GET", f"{server.scope}/agents", key=other)).code == "not_found"
    nobody = f"{org(server)}/members/{encode(IdKind.USER, new_uuid())}/projects/{server.project}"
    assert (await server.call("PUT", nobody, {"role": "viewer"})).code == "not_found"


async def test_a_user_ends_with_everything_of_their_own(server: ApiServer) -> None:
    other, key = await server.user("operator"), await server.org_key()
    other_id = decode(IdKind.USER, await me(server, other))
    body = {"owner": {"kind": "user"}, "name": "mine", "material": {"kind": "generic", "value": "v"}}
    assert (await server.call("POST", f"{org(server)}/secrets", body, key=other)).status == 201
    assert (await server.call("DELETE", "/api/v1/me", key=key)).code == "forbidden"
    assert (await server.call("DELETE", "/api/v1/me")).code == "conflict", "an organization keeps an owner"
    made = (await server.call("POST", "/api/v1/orgs", {"name": "Own"}, key=other)).json
    assert (await server.call("DELETE", "/api/v1/me", key=other)).code == "conflict"
    assert (await server.call("DELETE", f"/api/v1/orgs/{made['org']['id']}", key=other)).status == 204
    assert (await server.call("DELETE", "/api/v1/me", key=other)).status == 204
    assert (await server.call("GET", "/api/v1/me", key=other)).status == 401
    assert len((await server.get(f"{org(server)}/members"))["data"]) == 1
    [user] = await server.rows("select * from users where id = $1", other_id)
    assert (user["display_name"], user["email"]) == ("", None)
    left = await server.rows(
        "select 1 from secret_versions v join secrets s on s.id = v.secret_id where s.owner_user_id = $1", other_id
    )
    assert left == []
    await invariants_hold(server)


# --- personal tokens --------------------------------------------------------------------------------------


async def test_a_token_lists_and_revokes_tokens_but_makes_none(server: ApiServer) -> None:
    made = await credentials.create_token(server.deps, await at_a_browser(server), "laptop")
    assert (await server.call("POST", TOKENS, {"name": "x"})).code == "forbidden"
    assert (await server.call("POST", TOKENS, {})).code == "validation_failed"
    listed = (await server.get(TOKENS, key=made.token.text))["data"]
    assert [item["name"] for item in listed] == ["laptop", "First start"]
    assert listed[0]["revoked_at"] is None
    page = await server.get(f"{TOKENS}?limit=1")
    assert (await server.get(f"{TOKENS}?limit=1&cursor={page['next_cursor']}"))["data"][0]["name"] == "First start"
    revoke = f"{TOKENS}/{listed[0]['id']}/revoke"
    stranger = await server.user()
    assert (await server.call("POST", revoke, key=stranger)).code == "not_found"
    first = (await server.call("POST", revoke)).json
    assert first["revoked_at"] is not None
    assert (await server.call("POST", revoke)).json == first
    assert (await server.call("GET", TOKENS, key=made.token.text)).status == 401
    key = await server.org_key()
    assert (await server.call("GET", TOKENS, key=key)).code == "forbidden"


# --- organization keys ------------------------------------------------------------------------------------


async def test_keys_of_an_organization(server: ApiServer) -> None:
    deps, p = server.deps, await at_a_browser(server)
    org_id, project_id = decode(IdKind.ORG, server.org), decode(IdKind.PROJECT, server.project)
    project = ProjectScope(org_id, project_id)
    made = await credentials.create_key(deps, p, org_id, "ci", "member")
    with pytest.raises(Conflict):
        await credentials.create_key(deps, p, org_id, "ci", "admin")
    other = await credentials.create_key(deps, p, org_id, "cd", "admin")
    with pytest.raises(Conflict):
        await credentials.update_key(deps, p, org_id, other.row.id, "ci", None)
    changed = await credentials.update_key(deps, p, org_id, other.row.id, "deploy", "member")
    assert (changed.name, changed.org_role) == ("deploy", "member")

    keys = f"{org(server)}/api-keys"
    listed = (await server.get(keys))["data"]
    assert [(item["name"], item["org_role"]) for item in listed] == [("deploy", "member"), ("ci", "member")]
    one = f"{keys}/{listed[1]['id']}"
    assert await server.get(one) == listed[1]
    assert listed[1]["created_by_user_id"] == await me(server)
    assert (await server.call("GET", f"{server.scope}/agents", key=made.token.text)).code == "not_found"

    role = await members.set_project_role(deps, p, project, made.row.id, "operator", user=False)
    assert role.role == "operator"
    assert (await server.get(f"{server.scope}/agents", key=made.token.text))["data"] == []
    assert [item["role"] for item in (await server.get(f"{one}/projects"))["data"]] == ["operator"]
    with pytest.raises(InvalidRequest):
        await members.set_project_role(deps, p, project, made.row.id, "root", user=False)
    await members.remove_project_role(deps, p, project, made.row.id, user=False)
    with pytest.raises(NotFound):
        await members.remove_project_role(deps, p, project, made.row.id, user=False)

    revoked = await credentials.revoke_key(deps, p, org_id, made.row.id)
    assert (revoked.org_role, await credentials.revoke_key(deps, p, org_id, made.row.id)) == ("", revoked)
    with pytest.raises(Unauthorized):
        await authenticate(deps, f"Bearer {made.token.text}")
    for attempt in (
        credentials.update_key(deps, p, org_id, made.row.id, "x", None),
        members.set_project_role(deps, p, project, made.row.id, "viewer", user=False),
    ):
        with pytest.raises(Conflict):
            await attempt
    again = await credentials.create_key(deps, p, org_id, "ci", "member")
    assert again.row.id != made.row.id, "the name of a revoked key is free"
    with pytest.raises(NotFound):
        await credentials.get_key(deps, p, org_id, new_uuid())


async def test_a_token_may_look_at_keys_and_change_none(server: ApiServer) -> None:
    key = await server.org_key()
    keys = f"{org(server)}/api-keys"
    [listed] = (await server.get(keys))["data"]
    assert listed["created_by_user_id"] == await me(server), "a key of unknown make is the first owner's"
    one = f"{keys}/{listed['id']}"
    attempts: list[tuple[str, str, Any]] = [
        ("POST", keys, {"name": "x", "org_role": "member"}),
        ("PATCH", one, {"name": "x"}),
        ("POST", f"{one}/revoke", None),
        ("PUT", f"{one}/projects/{server.project}", {"role": "viewer"}),
        ("DELETE", f"{one}/projects/{server.project}", None),
    ]
    for method, path, body in attempts:
        assert (await server.call(method, path, body)).code == "forbidden", path
    assert (await server.call("POST", keys, {"name": "x", "org_role": "owner"})).code == "validation_failed"
    assert (await server.call("PATCH", one, {})).code == "validation_failed"
    member = await server.user("admin")
    for who in (member, key):
        for path in (keys, one, f"{one}/projects"):
            assert (await server.call("GET", path, key=who)).code == "forbidden"


async def test_keys_make_no_personal_tokens(server: ApiServer) -> None:
    machine = Principal(
        kind=PrincipalKind.ORG_KEY,
        credential=Credential.ORG_KEY,
        id=new_uuid(),
        org_roles={new_uuid(): OrgRole.ADMIN},
        project_grants={},
    )
    with pytest.raises(Forbidden):
        await credentials.create_token(server.deps, machine, "x")
    with pytest.raises(Forbidden):
        await credentials.list_tokens(server.deps, machine, after=None, limit=1)
