"""Secrets over HTTP: sealed, listed by right, granted, replaced, destroyed; and never shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.db.secrets import SealedRow
from omnara.engine.catalog import open_secret
from omnara.ids import IdKind, decode, encode, new_uuid
from tests.contract.server import RING, ApiServer, api_server, invariants_hold
from tests.support.postgres import PostgresForTests

VALUE = "plain-text-7f3a-of-a-secret"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, roles=frozenset({"api"})) as running:
        yield running
        await invariants_hold(running)


def path(server: ApiServer) -> str:
    return f"/api/v1/orgs/{server.org}/secrets"


async def make(server: ApiServer, name: str, **more: Any) -> Any:
    body = {"owner": {"kind": "org"}, "name": name, "material": {"kind": "generic", "value": VALUE}, **more}
    answer = await server.call("POST", path(server), body)
    assert answer.status == 201, answer.text
    assert VALUE not in answer.text
    return answer.json


async def sealed(server: ApiServer, secret: str) -> list[SealedRow]:
    rows = await server.rows(
        "select v.secret_id, s.name, v.version, v.key_id, v.wrapped_key, v.nonce, v.ciphertext from secret_versions v"
        " join secrets s on s.id = v.secret_id where s.id = $1 order by v.version",
        decode(IdKind.SECRET, secret),
    )
    return [SealedRow(*row) for row in rows]


async def test_a_secret_is_sealed_and_shown_without_its_value(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    made = await make(server, "first", metadata={"team": "a"})
    assert made["owner"] == {"kind": "org"}
    assert (made["kind"], made["management_kind"]) == ("generic", "tenant")
    assert (made["payload_keys"], made["current_version_number"]) == (["value"], 1)
    assert made["metadata"] == {"team": "a"}
    assert await server.get(f"{path(server)}/{made['id']}") == made
    [version] = await sealed(server, made["id"])
    assert version.key_id == RING.active
    assert VALUE.encode() not in version.ciphertext + version.wrapped_key
    assert open_secret(RING, version) == VALUE
    captured = capsys.readouterr()
    assert VALUE not in captured.out + captured.err


async def test_a_new_version_replaces_the_value(server: ApiServer) -> None:
    made = await make(server, "versions")
    versions = f"{path(server)}/{made['id']}/versions"
    answers = await asyncio.gather(
        *(server.call("POST", versions, {"material": {"kind": "generic", "value": f"value {n}"}}) for n in range(4))
    )
    assert sorted(answer.json["current_version_number"] for answer in answers) == [2, 3, 4, 5]
    assert all(answer.status == 200 and "value " not in answer.text for answer in answers)
    rows = await sealed(server, made["id"])
    assert [row.version for row in rows] == [1, 2, 3, 4, 5]
    assert {open_secret(RING, row) for row in rows} == {VALUE, *(f"value {n}" for n in range(4))}


async def test_names_are_unique_for_each_owner(server: ApiServer) -> None:
    await make(server, "taken")
    other = await make(server, "other")
    body = {"owner": {"kind": "org"}, "name": "taken", "material": {"kind": "generic", "value": "x"}}
    clash = await server.call("POST", path(server), body)
    assert (clash.status, clash.code) == (409, "conflict")
    clash = await server.call("PATCH", f"{path(server)}/{other['id']}", {"name": "taken"})
    assert (clash.status, clash.code) == (409, "conflict")
    mine = await make(server, "taken", owner={"kind": "user"})
    assert mine["owner"]["kind"] == "user"
    project = await make(server, "taken", owner={"kind": "project", "project_id": server.project})
    assert project["owner"] == {"kind": "project", "project_id": server.project}


async def test_changes(server: ApiServer) -> None:
    made = await make(server, "before", metadata={"a": "1"})
    one = f"{path(server)}/{made['id']}"
    renamed = (await server.call("PATCH", one, {"name": "after"})).json
    assert (renamed["name"], renamed["metadata"]) == ("after", {"a": "1"})
    assert renamed["updated_at"] > made["updated_at"]
    described = (await server.call("PATCH", one, {"metadata": {"b": "2"}})).json
    assert (described["name"], described["metadata"], described["current_version_number"]) == ("after", {"b": "2"}, 1)
    for bad in ({}, {"value": "x"}, {"name": None}, {"metadata": {"k" * 65: "x"}}):
        assert (await server.call("PATCH", one, bad)).code == "validation_failed"
    assert (await server.call("PATCH", one, {"name": " "})).code == "invalid_request"


@pytest.mark.parametrize(
    "body",
    [
        {"owner": {"kind": "org"}, "name": "x"},
        {"owner": {"kind": "org"}, "name": "x", "material": {"kind": "generic", "value": ""}},
        {"owner": {"kind": "org"}, "name": "x", "material": {"kind": "generic", "value": VALUE, "more": 1}},
        {"owner": {"kind": "org"}, "name": 5, "material": {"kind": "generic", "value": VALUE}},
        {"owner": {"kind": "project"}, "name": "x", "material": {"kind": "generic", "value": VALUE}},
        {"owner": {"kind": "nobody"}, "name": "x", "material": {"kind": "generic", "value": VALUE}},
        {"owner": {"kind": "org"}, "name": "x", "material": {"kind": "slack_app_credentials", "value": VALUE}},
    ],
)
async def test_bodies_that_do_not_fit_are_refused_without_an_echo(
    server: ApiServer, body: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await server.call("POST", path(server), body)
    assert (answer.status, answer.code) == (400, "validation_failed")
    captured = capsys.readouterr()
    assert VALUE not in answer.text + captured.out + captured.err


async def test_other_kinds_are_read_and_refused(server: ApiServer) -> None:
    material = {"kind": "aws_credentials", "access_key_id": "a", "secret_access_key": VALUE}
    answer = await server.call("POST", path(server), {"owner": {"kind": "org"}, "name": "x", "material": material})
    assert (answer.status, answer.code) == (422, "unprocessable")
    assert VALUE not in answer.text


async def test_lists_sort_filter_and_page(server: ApiServer) -> None:
    project = (await server.call("POST", f"/api/v1/orgs/{server.org}/projects", {"name": "Lists"})).json["id"]
    owner = {"kind": "project", "project_id": project}
    for name in ("list-b", "list-a", "List-C"):
        await make(server, name, owner=owner, metadata={"of": name[-1], "list": "yes"})
    base = f"{path(server)}?owner_kind=project&owner_project_id={project}"

    async def names(query: str) -> list[str]:
        return [item["name"] for item in (await server.get(f"{base}&{query}"))["data"]]

    assert await names("sort=created_at") == ["list-b", "list-a", "List-C"]
    assert await names("") == ["List-C", "list-a", "list-b"]
    assert await names("sort=name") == ["List-C", "list-a", "list-b"]
    assert await names("sort=-name") == ["list-b", "list-a", "List-C"]
    assert await names("name=LIST-?&sort=name") == ["List-C", "list-a", "list-b"]
    assert await names("name=*a") == ["list-a"]
    assert await names("metadata[of]=a") == ["list-a"]
    assert await names("metadata[of]=a&metadata[list]=no") == []
    assert await names("kind=aws_credentials") == []
    assert await names(f"mcp_oauth_flow_id={encode(IdKind.MCP_OAUTH_FLOW, new_uuid())}") == []
    for sort in ("name", "-name", "created_at", "-created_at", "updated_at", "-updated_at"):
        found: list[str] = []
        cursor = ""
        while cursor is not None:
            page = await server.get(f"{base}&sort={sort}&limit=1{cursor and '&cursor=' + cursor}")
            found += [item["name"] for item in page["data"]]
            cursor = page["next_cursor"]
        assert found == await names(f"sort={sort}"), sort
    page = await server.get(f"{base}&sort=name&limit=1")
    for other in ("sort=-name", "sort=name&name=l*", "sort=name&metadata[a]=b"):
        answer = await server.call("GET", f"{base}&{other}&cursor={page['next_cursor']}")
        assert (answer.status, answer.code) == (400, "invalid_request"), other
    for bad in ("sort=size", "kind=x", "name=", "metadata=x", "metadata[a]=1&metadata[a]=2", "meta[a]=1", "limit=101"):
        assert (await server.call("GET", f"{base}&{bad}")).code == "validation_failed", bad
    assert (await server.call("GET", f"{base}&name=***")).code == "invalid_request"


async def test_who_sees_and_changes_what(server: ApiServer) -> None:
    org = await make(server, "of the org")
    project = await make(server, "of the project", owner={"kind": "project", "project_id": server.project})
    mine = await make(server, "of the owner", owner={"kind": "user"})
    viewer, developer, outsider = await server.user("viewer"), await server.user("developer"), await server.user(None)
    key = await server.org_key("developer")
    seen = {
        who: {item["id"] for item in (await server.get(f"{path(server)}?limit=100", key=who))["data"]}
        for who in (server.key, viewer, developer, outsider, key)
    }
    assert {org["id"], project["id"], mine["id"]} <= seen[server.key]
    assert project["id"] in seen[viewer] & seen[developer] & seen[key]
    assert seen[outsider] == set()
    for who in (viewer, developer, key, outsider):
        assert not {org["id"], mine["id"]} & seen[who]
        for hidden in (org, mine):
            assert (await server.call("GET", f"{path(server)}/{hidden['id']}", key=who)).code == "not_found"
            assert (await server.call("DELETE", f"{path(server)}/{hidden['id']}", key=who)).code == "not_found"
    one = f"{path(server)}/{project['id']}"
    assert (await server.call("GET", one, key=viewer)).status == 200
    assert (await server.call("PATCH", one, {"name": "x"}, key=viewer)).code == "forbidden"
    assert (await server.call("PATCH", one, {"name": "renamed"}, key=developer)).status == 200
    body = {"name": "y", "material": {"kind": "generic", "value": VALUE}}
    assert (await server.call("POST", path(server), {"owner": {"kind": "org"}, **body}, key=key)).code == "forbidden"
    denied = await server.call("POST", path(server), {"owner": {"kind": "user"}, **body}, key=key)
    assert (denied.status, denied.code) == (400, "invalid_request")
    theirs = {"owner": {"kind": "project", "project_id": server.project}, **body}
    assert (await server.call("POST", path(server), theirs, key=viewer)).code == "forbidden"
    assert (await server.call("POST", path(server), theirs, key=outsider)).code == "not_found"
    assert (await server.call("POST", path(server), theirs, key=key)).status == 201
    unknown = {"owner": {"kind": "project", "project_id": encode(IdKind.PROJECT, new_uuid())}, **body}
    assert (await server.call("POST", path(server), unknown)).code == "not_found"


async def test_secrets_that_the_system_keeps_are_out_of_sight(server: ApiServer) -> None:
    [row] = await server.rows("select id from secrets where owner_kind = 'system'")
    one = f"{path(server)}/{encode(IdKind.SECRET, row['id'])}"
    for method in ("GET", "DELETE"):
        assert (await server.call(method, one)).code == "not_found"
    assert (await server.call("PATCH", one, {"name": "x"})).code == "not_found"


async def test_grants_let_a_project_use_a_secret(server: ApiServer) -> None:
    secret = await make(server, "granted")
    own = await make(server, "own", owner={"kind": "project", "project_id": server.project})
    grants = f"{path(server)}/{secret['id']}/grants"
    made = await server.call("POST", grants, {"target_project_id": server.project})
    assert made.status == 201, made.text
    again = await server.call("POST", grants, {"target_project_id": server.project})
    assert (again.status, again.code) == (409, "conflict")
    itself = await server.call("POST", f"{path(server)}/{own['id']}/grants", {"target_project_id": server.project})
    assert (itself.status, itself.code) == (409, "conflict")
    nobody = await server.call("POST", grants, {"target_project_id": encode(IdKind.PROJECT, new_uuid())})
    assert nobody.code == "not_found"
    listed = await server.get(f"{grants}?name=def*&sort=name")
    [item] = listed["data"]
    assert (item["grant"], item["target_project"]["id"]) == (made.json, server.project)
    assert (await server.call("GET", f"{grants}?sort=updated_at")).code == "validation_failed"
    usable = {
        item["secret"]["name"]: item["availability"] for item in (await server.get(f"{server.scope}/secrets"))["data"]
    }
    assert usable["own"] == {"source": "direct", "project_id": server.project}
    assert usable["granted"] == {"source": "grant", "project_id": server.project, "grant_id": made.json["id"]}
    direct = await server.get(f"{server.scope}/secrets?availability_source=direct&sort=name")
    assert "granted" not in [item["secret"]["name"] for item in direct["data"]]
    granted = await server.get(f"{server.scope}/secrets?availability_source=grant")
    assert [item["secret"]["name"] for item in granted["data"]] == ["granted"]
    viewer = await server.user("viewer")
    one = await server.get(f"{server.scope}/secrets/{secret['id']}", key=viewer)
    assert one["secret"]["name"] == "granted"
    assert (await server.call("DELETE", f"{grants}/{made.json['id']}", key=viewer)).code == "not_found"
    assert (await server.call("DELETE", f"{grants}/{made.json['id']}")).status == 204
    assert (await server.call("DELETE", f"{grants}/{made.json['id']}")).code == "not_found"
    assert (await server.call("GET", f"{server.scope}/secrets/{secret['id']}")).code == "not_found"


async def test_deleting_destroys_every_version(server: ApiServer) -> None:
    made = await make(server, "short-lived")
    one = f"{path(server)}/{made['id']}"
    assert (await server.call("POST", f"{one}/grants", {"target_project_id": server.project})).status == 201
    assert (await server.call("DELETE", one)).status == 204
    assert await sealed(server, made["id"]) == []
    for method, where, body in (
        ("GET", one, None),
        ("DELETE", one, None),
        ("POST", f"{one}/versions", {"material": {"kind": "generic", "value": "x"}}),
        ("GET", f"{one}/grants", None),
    ):
        assert (await server.call(method, where, body)).code == "not_found"
    assert (await make(server, "short-lived"))["id"] != made["id"]
