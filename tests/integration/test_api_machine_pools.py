"""Machine pools and their grants over HTTP: what is taken, refused and shown, and what ends with them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.engine.emptying import empty_projects
from omnara.ids import IdKind, decode, encode, new_uuid
from tests.contract.server import CONFIG, api_server, invariants_hold
from tests.integration.test_api_machines import Lab
from tests.support.postgres import PostgresForTests

BASE = {"provider": "docker", "max_total_machines": 3}
SIZES = [
    *("default_machine_cpu", "default_machine_memory_mb", "max_total_cpu", "max_total_memory_mb"),
    *("min_machine_cpu", "min_machine_memory_mb", "max_machine_cpu", "max_machine_memory_mb"),
]
NULLS = dict.fromkeys([*SIZES, "delete_after_idle_minutes"])


class PoolLab(Lab):
    """With paths of pools."""

    @property
    def pools(self) -> str:
        return f"{self.org}/machine-pools"

    @property
    def pool_grants(self) -> str:
        return f"{self.server.scope}/machine-pool-grants"

    async def pool(self, name: str, status: int = 201, **more: Any) -> Any:
        return await self.post(self.pools, BASE | {"name": name} | more, status)

    async def pool_machine(self, grant: Any, state: str = "active", **more: Any) -> str:
        """Make a machine as if an agent had got it; return its id."""
        machine = new_uuid()
        pool, grant_id = decode(IdKind.MACHINE_POOL, grant["machine_pool_id"]), decode(IdKind.POOL_GRANT, grant["id"])
        org, project = decode(IdKind.ORG, self.server.org), decode(IdKind.PROJECT, self.server.project)
        await self.server.rows(
            "insert into machines (id, org_id, source_kind, pool_id, pool_grant_id, project_id, display_name, provider,"
            " cpu, memory_mb, lifecycle_state) values ($1, $2, 'pool', $3, $4, $5, 'made', 'docker', $6, $7, $8)",
            *(machine, org, pool, grant_id, project, more.get("cpu"), more.get("memory_mb"), state),
        )
        await self.server.rows(
            "insert into machine_grants (id, org_id, project_id, machine_id, pool_grant_id, source_kind)"
            " values (gen_random_uuid(), $1, $2, $3, $4, 'pool')",
            *(org, project, machine, grant_id),
        )
        return encode(IdKind.MACHINE, machine)

    async def lifecycle(self, machine: str) -> tuple[str, str]:
        query = "select lifecycle_state, lifecycle_reason_code from machines where id = $1"
        [row] = await self.server.rows(query, decode(IdKind.MACHINE, machine))
        return row[0], row[1]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(postgres: PostgresForTests) -> AsyncIterator[PoolLab]:
    async with contextlib.AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(postgres.fresh())
        made = PoolLab(await stack.enter_async_context(api_server(dsn, roles=frozenset({"api"}))))
        yield made
        await invariants_hold(made.server)


# --- pools ------------------------------------------------------------------------------------------------


async def test_a_pool_and_its_settings(lab: PoolLab) -> None:
    secret = await lab.secret(kind="org")
    body = {
        "description": "Containers",
        "provider_config": {"image": "debian:12", "allowed_images": ["alpine"], "network": "none"},
        "default_machine_provider_options": {"image": "alpine"},
        "default_machine_cpu": 2,
        "max_machine_cpu": 4,
        "min_machine_memory_mb": 0,
        "default_machine_env": {"A": "1"},
        "default_machine_secret_env": {"B": secret},
        "default_cwd": "/home",
        "delete_after_idle_minutes": 5,
        "metadata": {"team": "x"},
    }
    made = await lab.pool("full", **body)
    assert {name: made[name] for name in body} == body
    assert (made["management_kind"], made["runtime_protection_enabled"]) == ("tenant", False)
    assert (made["max_machine_memory_mb"], "usage" in made, "provider_auth_secret_id" in made) == (None, False, False)
    path = f"{lab.pools}/{made['id']}"
    assert await lab.ask("GET", path) == made
    assert await lab.pool("full", 200, **body) == made
    assert await lab.refused("POST", lab.pools, BASE | {"name": "full"}) == (409, "conflict")
    assert await lab.ask("PUT", path, {}) == made
    change = {"default_machine_cpu": None, "max_machine_cpu": 1, "default_machine_env": {}, "name": "fuller"}
    changed = await lab.ask("PUT", path, change)
    assert changed | {"updated_at": made["updated_at"]} == made | change
    assert await lab.refused("DELETE", f"{lab.org}/secrets/{secret}") == (409, "conflict")
    await lab.pool("taken")
    assert await lab.refused("PUT", path, {"name": "taken"}) == (409, "conflict")
    plain = await lab.pool("plain")
    assert {name: plain[name] for name in NULLS} == NULLS


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"provider": "unikraft"}, (422, "unprocessable")),
        ({"provider": "daytona"}, (422, "unprocessable")),
        ({"provider": "blaxel"}, (422, "unprocessable")),
        ({"provider": "cloud"}, (400, "invalid_request")),
        ({"provider": ""}, (400, "validation_failed")),
        ({"max_total_machines": -1}, (400, "validation_failed")),
        ({"max_total_machines": 2**31}, (400, "validation_failed")),
        ({"max_total_machines": None}, (400, "validation_failed")),
        ({"default_machine_cpu": 0}, (400, "validation_failed")),
        ({"delete_after_idle_minutes": 4}, (400, "validation_failed")),
        ({"delete_after_idle_minutes": 0}, (400, "validation_failed")),
        ({"min_machine_cpu": 3, "max_machine_cpu": 2}, (400, "invalid_request")),
        ({"default_machine_cpu": 3, "max_machine_cpu": 2}, (400, "invalid_request")),
        ({"default_machine_memory_mb": 3, "min_machine_memory_mb": 4}, (400, "invalid_request")),
        ({"default_machine_memory_mb": 30, "max_total_memory_mb": 4}, (400, "invalid_request")),
        ({"provider_config": {"image": "-x"}}, (400, "invalid_request")),
        ({"provider_config": {"network": "host"}}, (400, "invalid_request")),
        ({"provider_config": {"privileged": True}}, (400, "invalid_request")),
        ({"provider_config": {"pids_limit": "many"}}, (400, "invalid_request")),
        ({"provider_config": {"pids_limit": 10**400}}, (400, "invalid_request")),
        ({"provider_config": {"image": "x" * 70_000}}, (400, "invalid_request")),
        ({"provider_config": []}, (400, "validation_failed")),
        ({"default_machine_provider_options": {"image": "other"}}, (400, "invalid_request")),
        ({"provider": "local", "provider_config": {"image": "x"}}, (400, "invalid_request")),
        ({"default_machine_env": {"OMNARA_X": ""}}, (400, "invalid_request")),
        ({"default_machine_env": {"A": None}}, (400, "validation_failed")),
        ({"default_machine_secret_env": {"A": encode(IdKind.SECRET, new_uuid())}}, (400, "invalid_request")),
        ({"provider_auth_secret_id": encode(IdKind.SECRET, new_uuid())}, (400, "invalid_request")),
        ({"metadata": {"observed_platform": ""}}, (400, "validation_failed")),
        ({"name": "a\tb"}, (400, "invalid_request")),
        ({"default_cwd": "a\nb"}, (400, "invalid_request")),
    ],
)
async def test_pools_that_cannot_be(lab: PoolLab, change: Any, expected: tuple[int, str]) -> None:
    count = "select count(*)::integer from machine_pools"
    before = await lab.server.rows(count)
    assert await lab.refused("POST", lab.pools, BASE | {"name": "refused"} | change) == expected
    assert await lab.server.rows(count) == before
    if "provider" in change:
        return
    pool = await lab.pool(str(new_uuid()))
    assert await lab.refused("PUT", f"{lab.pools}/{pool['id']}", change) == expected
    assert await lab.ask("GET", f"{lab.pools}/{pool['id']}") == pool


async def test_what_is_deeply_nested_is_refused(lab: PoolLab) -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"a": deep}
    body = BASE | {"name": "deep", "provider_config": deep}
    assert await lab.refused("POST", lab.pools, body) == (400, "validation_failed")


async def test_the_provider_of_a_pool_is_for_good(lab: PoolLab) -> None:
    pool = await lab.pool("for good")
    path = f"{lab.pools}/{pool['id']}"
    assert await lab.refused("PUT", path, {"provider": "local"}) == (400, "validation_failed")
    other = BASE | {"name": "for good", "provider": "local"}
    assert await lab.refused("POST", lab.pools, other) == (409, "conflict")


async def test_a_pool_of_the_cluster_is_only_tuned(lab: PoolLab) -> None:
    pool = await lab.pool("cluster's")
    path, pool_id = f"{lab.pools}/{pool['id']}", decode(IdKind.MACHINE_POOL, pool["id"])
    await lab.server.rows("update machine_pools set management_kind = 'cluster' where id = $1", pool_id)
    tuned = await lab.ask("PUT", path, {"default_machine_cpu": 2, "delete_after_idle_minutes": 30, "name": "cluster's"})
    assert (tuned["default_machine_cpu"], tuned["management_kind"]) == (2, "cluster")
    for change in ({"name": "mine"}, {"max_total_machines": 9}, {"provider_config": {"network": "bridge"}}):
        assert await lab.refused("PUT", path, change) == (409, "conflict")
    assert await lab.refused("DELETE", path) == (409, "conflict")


async def test_lists_of_pools_say_what_is_used(lab: PoolLab) -> None:
    pools = [await lab.pool(name) for name in ("list b", "list a")]
    grant = await lab.post(lab.pool_grants, {"machine_pool_id": pools[0]["id"]})
    await lab.pool_machine(grant, cpu=2, memory_mb=512)
    await lab.pool_machine(grant, "deleting", cpu=1)
    page = await lab.ask("GET", f"{lab.pools}?name=list*&sort=name&limit=1")
    assert [item["name"] for item in page["data"]] == ["list a"]
    assert page["data"][0]["usage"] == {"machines": 0, "cpu": 0, "memory_mb": 0}
    rest = await lab.ask("GET", f"{lab.pools}?name=list*&sort=name&limit=1&cursor={page['next_cursor']}")
    assert rest["data"][0]["usage"] == {"machines": 2, "cpu": 3, "memory_mb": 512}
    assert rest["next_cursor"] is None


# --- grants of pools --------------------------------------------------------------------------------------


async def test_a_grant_says_what_differs(lab: PoolLab) -> None:
    pool = await lab.pool("granted", max_machine_cpu=4, default_machine_cpu=2, default_machine_env={"A": "1"})
    secret = await lab.secret(kind="project", project_id=lab.server.project)
    body = {
        "machine_pool_id": pool["id"],
        "description": "narrower",
        "default_machine_env_overlay": {"A": None, "B": "2"},
        "default_machine_secret_env_overlay": {"C": secret, "D": None},
        "max_machine_cpu": 3,
        "max_total_machines": 1,
        "delete_after_idle_minutes": 0,
        "metadata": {f"k{n}": "" for n in range(16)},
    }
    headers = {"Idempotency-Key": "pool grant"}
    made = await lab.post(lab.pool_grants, body, headers=headers)
    assert {name: made[name] for name in body} == body
    assert made["default_machine_cpu"] is None
    path = f"{lab.pool_grants}/{made['id']}"
    assert await lab.ask("GET", path) == made
    assert await lab.post(lab.pool_grants, body, 200, headers=headers) == made
    conflict = (409, "idempotency_key_conflict")
    assert await lab.refused("POST", lab.pool_grants, body | {"description": "x"}, headers=headers) == conflict
    assert await lab.refused("POST", lab.pool_grants, body) == (409, "conflict")
    [item] = (await lab.ask("GET", f"{lab.pool_grants}?name=granted"))["data"]
    assert (item["grant"], item["machine_pool"]["name"]) == (made, "granted")
    change = {"max_machine_cpu": None, "default_machine_env_overlay": {}, "delete_after_idle_minutes": None}
    changed = await lab.ask("PATCH", path, change)
    assert changed | {"updated_at": made["updated_at"]} == made | change
    for refused, code in (
        ({}, "validation_failed"),
        ({"delete_after_idle_minutes": 3}, "validation_failed"),
        ({"max_machine_cpu": 1}, "invalid_request"),
        ({"min_machine_cpu": 5}, "invalid_request"),
        ({"default_machine_cpu": 5}, "invalid_request"),
        ({"default_machine_env_overlay": {"c": "1"}}, "invalid_request"),
        ({"default_machine_secret_env_overlay": {"A": "sec_x"}}, "validation_failed"),
        ({"default_machine_secret_env_overlay": {"A": await lab.secret(kind="org")}}, "invalid_request"),
        ({"default_machine_provider_options_overlay": {"image": "else"}}, "invalid_request"),
        ({"machine_pool_id": pool["id"]}, "validation_failed"),
    ):
        assert await lab.refused("PATCH", path, refused) == (400, code), refused
    await lab.ask("DELETE", path, status=204)
    for method, patch in (("GET", None), ("PATCH", {"description": ""}), ("DELETE", None)):
        assert await lab.refused(method, path, patch) == (404, "not_found")
    assert await lab.refused("POST", lab.pool_grants, body, headers=headers) == conflict


async def test_who_may_do_what_with_pools(lab: PoolLab) -> None:
    pool = await lab.pool("roles")
    made = await lab.post(lab.pool_grants, {"machine_pool_id": pool["id"]})
    grant = f"{lab.pool_grants}/{made['id']}"
    for role in ("viewer", "operator", "developer", "admin"):
        for key in (await lab.server.user(role), await lab.server.org_key(role)):
            for method, path, body in (
                ("GET", lab.pools, None),
                ("POST", lab.pools, BASE | {"name": "x"}),
                ("GET", f"{lab.pools}/{pool['id']}", None),
                ("PUT", f"{lab.pools}/{pool['id']}", {"name": "x"}),
                ("DELETE", f"{lab.pools}/{pool['id']}", None),
            ):
                assert await lab.refused(method, path, body, key=key) == (403, "forbidden")
            assert await lab.ask("GET", grant, key=key) == made
            if role != "admin":
                for method, body in (("PATCH", {"description": "x"}), ("DELETE", None)):
                    assert await lab.refused(method, grant, body, key=key) == (403, "forbidden")
                body = {"machine_pool_id": pool["id"]}
                assert await lab.refused("POST", lab.pool_grants, body, key=key) == (403, "forbidden")
    admin = await lab.server.user("admin")
    await lab.ask("DELETE", grant, status=204, key=admin)
    again = await lab.refused("POST", lab.pool_grants, {"machine_pool_id": pool["id"]}, key=admin)
    assert again == (404, "not_found"), "who does not have it cannot give it"


async def test_an_agents_machine_has_what_pool_and_grant_say(lab: PoolLab) -> None:
    metadata = {f"k{n}": "v" for n in range(15)}
    pool = await lab.pool(
        "made from", default_machine_env={"A": "1", "B": "1"}, default_cwd="/pool", metadata=metadata, max_machine_cpu=4
    )
    overlay = {"default_machine_env_overlay": {"A": None, "C": "3"}, "default_machine_cpu": 3}
    await lab.post(lab.pool_grants, {"machine_pool_id": pool["id"], **overlay})
    agent = await lab.server.agent(source=f"{CONFIG}tools: {{}}\nmachine_sources: [{{pool: made from}}]\n")
    [listed] = (await lab.ask("GET", f"{lab.server.scope}/machines?name=made*from-*"))["data"]
    path = f"{lab.machines}/{listed['id']}"
    made = await lab.ask("GET", path)
    assert (made["env"], made["cwd"], made["machine_pool_id"]) == ({"B": "1", "C": "3"}, "/pool", pool["id"])
    assert (made["metadata"], made["lifecycle_state"]) == (metadata, "provisioning")
    assert (made["connection_state"], made["connection_state_reason"]) == ("offline", "provisioning")
    [used] = (await lab.ask("GET", f"{lab.pools}?name=made*from"))["data"]
    assert used["usage"] == {"machines": 1, "cpu": 3, "memory_mb": 0}
    place = """{"directory": "/var/lib/omnara/x", "ip_address": "10.0.0.2"}"""
    await lab.server.rows(
        "update machines set metadata = metadata || $2::jsonb, observed_platform = 'linux/amd64' where id = $1",
        *(decode(IdKind.MACHINE, made["id"]), place),
    )
    assert (await lab.ask("GET", path))["metadata"] == metadata | {"observed_platform": "linux/amd64"}
    await lab.post(f"{agent}/archive", status=200)
    assert (await lab.lifecycle(made["id"]))[0] == "deleting"


# --- what ends with what ----------------------------------------------------------------------------------


async def test_machines_of_a_pool_end_with_the_grant_or_the_pool(lab: PoolLab) -> None:
    pool = await lab.pool("ending", max_total_machines=9)
    grant = await lab.post(lab.pool_grants, {"machine_pool_id": pool["id"]})
    first = [await lab.pool_machine(grant, state) for state in ("active", "provisioning", "provision_failed")]
    failed = await lab.pool_machine(grant, "delete_failed")
    shown = await lab.ask("GET", f"{lab.machines}/{first[0]}")
    assert (shown["machine_pool_id"], shown["source_kind"]) == (pool["id"], "pool")
    assert await lab.refused("DELETE", f"{lab.machines}/{first[0]}") == (400, "invalid_request")
    assert await lab.refused("POST", f"{lab.machines}/{first[0]}/daemon-tokens") == (400, "invalid_request")
    assert await lab.refused("POST", lab.grants, {"machine_id": first[0]}) == (400, "invalid_request")
    [listed, *_] = (await lab.ask("GET", f"{lab.server.scope}/machines?source_kind=pool"))["data"]
    generated = listed["access"]["sources"][1]["grant_id"]
    assert await lab.refused("DELETE", f"{lab.grants}/{generated}") == (409, "conflict")
    await lab.ask("DELETE", f"{lab.pool_grants}/{grant['id']}", status=204)
    assert [await lab.lifecycle(one) for one in first] == [("deleting", "machine_pool_grant_revoked")] * 3
    assert await lab.lifecycle(failed) == ("delete_failed", "")
    again = await lab.post(lab.pool_grants, {"machine_pool_id": pool["id"]})
    second = await lab.pool_machine(again)
    await lab.ask("DELETE", f"{lab.pools}/{pool['id']}", status=204)
    assert await lab.lifecycle(second) == ("deleting", "machine_pool_deleted")
    assert await lab.refused("GET", f"{lab.pools}/{pool['id']}") == (404, "not_found")
    assert await lab.refused("GET", f"{lab.pool_grants}/{again['id']}") == (404, "not_found")


async def test_machines_end_with_their_project_and_organization(lab: PoolLab) -> None:
    org = (await lab.post("/api/v1/orgs", {"name": "short-lived"}))["org"]["id"]
    base = f"/api/v1/orgs/{org}"
    project = (await lab.post(f"{base}/projects", {"name": "p"}))["id"]
    connected = await lab.post(f"{base}/machines/connect", {"display_name": "box", "project_ids": [project]})
    pool = await lab.post(f"{base}/machine-pools", BASE | {"name": "pool"})
    await lab.post(f"{base}/projects/{project}/machine-pool-grants", {"machine_pool_id": pool["id"]})
    org_id, project_id = decode(IdKind.ORG, org), decode(IdKind.PROJECT, project)

    async def left() -> list[int]:
        [row] = await lab.server.rows(
            "select (select count(*) from machine_grants where project_id = $2 and deleted_at is null),"
            " (select count(*) from machine_pool_grants where project_id = $2 and deleted_at is null),"
            " (select count(*) from machine_pools where org_id = $1 and deleted_at is null),"
            " (select count(*) from machines where org_id = $1 and deleted_at is null),"
            " (select count(*) from machine_daemon_tokens where org_id = $1 and revoked_at is null)",
            *(org_id, project_id),
        )
        return list(row)

    assert await left() == [1, 1, 1, 1, 1]
    await lab.ask("DELETE", f"{base}/projects/{project}", status=204)
    await empty_projects(lab.server.deps)
    assert await left() == [0, 0, 1, 1, 1]
    assert (await lab.ask("GET", f"{base}/machines/{connected['machine']['id']}"))["lifecycle_state"] == "active"
    await lab.ask("DELETE", base, status=204)
    assert await empty_projects(lab.server.deps), "as a process with a worker does within seconds"
    assert await left() == [0, 0, 0, 0, 0]
