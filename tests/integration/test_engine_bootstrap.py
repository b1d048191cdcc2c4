"""The first start, providers from the environment, keys, and resolving models with their keys."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from omnara.access import tokens
from omnara.access.tokens import TokenKind
from omnara.db.connection import ConnectSettings
from omnara.db.pool import ApiPool
from omnara.domain.config import Definition, ModelChoice
from omnara.engine import bootstrap, model_admin, reads
from omnara.engine.authenticate import authenticate
from omnara.engine.catalog import ModelCatalog
from omnara.engine.known_models import ANTHROPIC, OPENAI, endpoint
from omnara.engine.launch_flat import FlatLaunch, launch_flat
from omnara.errors import ConfigurationError, InvalidRequest, NotFound, Unauthorized
from omnara.ids import new_uuid
from omnara.settings import Settings
from omnara.vault import Secret, WrongKeyRing, generate_ring
from tests.support.engine_case import FACTS, LAB, Engine

RING = generate_ring()


async def pools(dsn: str, count: int) -> list[ApiPool]:
    made = [ApiPool(ConnectSettings(dsn=dsn), size=2, acquire_timeout_s=30) for _ in range(count)]
    for pool in made:
        await pool.start()
    return made


async def rows(pool: ApiPool, sql: str, *args: Any) -> list[Any]:
    async with pool.acquire() as connection:
        return list(await connection.fetch(sql, *args))


async def test_eight_replicas_make_one_organization(database: str) -> None:
    replicas = await pools(database, 8)
    try:
        started = await asyncio.gather(*(bootstrap.first_start(pool, RING, None) for pool in replicas))
        assert sum(item.created for item in started) == 1
        assert sum(item.token is not None for item in started) == 1
        assert len({item.org for item in started}) == 1
        settings = Settings(anthropic_api_key="sk-ant-a", openai_api_key="sk-oai-a")
        made = await asyncio.gather(*(bootstrap.environment_providers(pool, RING, settings) for pool in replicas))
        assert made == [["anthropic", "openai"]] * 8
        for table, count in (("orgs", 1), ("users", 1), ("projects", 1), ("personal_access_tokens", 1), ("secrets", 2)):
            assert len(await rows(replicas[0], f"select from {table}")) == count
        models = await rows(replicas[0], "select from configured_models")
        assert len(models) == len(ANTHROPIC.slugs) + len(OPENAI.slugs)
        assert len(await rows(replicas[0], "select from project_model_grants")) == len(models)
        [project] = await rows(replicas[0], "select name from projects")
        assert project["name"] == "Default"
    finally:
        for pool in replicas:
            await pool.close()


async def test_a_given_key_is_used_once_and_checked(database: str) -> None:
    [pool] = await pools(database, 1)
    try:
        for bad in ("secret", tokens.generate(TokenKind.ORG).text, tokens.generate(TokenKind.PERSONAL).text[:-1] + "!"):
            with pytest.raises(ConfigurationError) as caught:
                await bootstrap.first_start(pool, RING, bad)
            assert bad not in str(caught.value)
        key = tokens.generate(TokenKind.PERSONAL)
        first = await bootstrap.first_start(pool, RING, key.text)
        assert (first.created, first.token) == (True, None)
        again = await bootstrap.first_start(pool, RING, tokens.generate(TokenKind.PERSONAL).text)
        assert (again.created, again.org) == (False, first.org)
        [row] = await rows(pool, "select * from personal_access_tokens")
        assert row["token_hash"] == key.hash
        assert key.text not in repr(row)
    finally:
        await pool.close()


async def test_the_wrong_key_ring_refuses_the_start(database: str) -> None:
    [pool] = await pools(database, 1)
    try:
        await bootstrap.first_start(pool, RING, None)
        with pytest.raises(WrongKeyRing):
            await bootstrap.first_start(pool, generate_ring(), None)
        await bootstrap.first_start(pool, RING, None)
    finally:
        await pool.close()


async def test_keys_live_and_die(engine: Engine) -> None:
    token, row = await bootstrap.create_key(engine.deps.db, "laptop")
    p = await authenticate(engine.deps, f"Bearer {token.text}")
    assert (p.id, p.default_project_id) == (engine.p.id, engine.project.project_id)
    assert {key.name for key in await bootstrap.list_keys(engine.deps.db)} == {"First start", "laptop"}
    [used] = await engine.fetch("select last_used_at from personal_access_tokens where id = $1", row.id)
    assert used["last_used_at"] is not None
    await authenticate(engine.deps, f"Bearer {token.text}")
    [again] = await engine.fetch("select last_used_at from personal_access_tokens where id = $1", row.id)
    assert again["last_used_at"] == used["last_used_at"], "noted at most once an hour"
    revoked = await bootstrap.revoke_key(engine.deps.db, row.token_id)
    assert revoked.revoked_at is not None
    with pytest.raises(Unauthorized):
        await authenticate(engine.deps, f"Bearer {token.text}")
    with pytest.raises(NotFound):
        await bootstrap.revoke_key(engine.deps.db, row.token_id)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "bearer x",
        "Bearer omnara_pat_v1_x",
        "Basic abc",
        pytest.param("Bearer " + tokens.generate(TokenKind.DAEMON).text, id="a daemon's"),
    ],
)
async def test_what_is_no_key_never_reaches_the_database(header: str | None) -> None:
    deps: Any = None  # any use of it would fail
    with pytest.raises(Unauthorized):
        await authenticate(deps, header)


async def test_organization_keys_authenticate_with_their_project_roles(engine: Engine) -> None:
    token = tokens.generate(TokenKind.ORG)
    key_id = new_uuid()
    await engine.fetch(
        "insert into org_api_keys (id, org_id, name, org_role, token_id, token_hash) "
        "values ($1, $2, 'ci', 'member', 't', $3)",
        key_id,
        engine.project.org_id,
        token.hash,
    )
    p = await authenticate(engine.deps, f"Bearer {token.text}")
    assert (p.id, p.default_project_id, dict(p.project_grants)) == (key_id, None, {})
    assert (await reads.list_projects(engine.deps, p, engine.project.org_id)).rows == []
    await engine.fetch(
        "insert into org_api_key_projects (key_id, project_id, role) values ($1, $2, 'operator')",
        key_id,
        engine.project.project_id,
    )
    p = await authenticate(engine.deps, f"Bearer {token.text}")
    assert p.default_project_id == engine.project.project_id
    assert len((await reads.list_projects(engine.deps, p, engine.project.org_id)).rows) == 1
    await engine.fetch("update org_api_keys set org_role = null, revoked_at = now() where id = $1", key_id)
    with pytest.raises(Unauthorized):
        await authenticate(engine.deps, f"Bearer {token.text}")


async def test_admins_of_an_organization_have_admin_access_to_all_its_projects(engine: Engine) -> None:
    token = tokens.generate(TokenKind.ORG)
    org_id, project_id = engine.project.org_id, engine.project.project_id
    await engine.fetch(
        "insert into org_api_keys (id, org_id, name, org_role, token_id, token_hash) "
        "values ($1, $2, 'ops', 'admin', 'o', $3)",
        new_uuid(),
        org_id,
        token.hash,
    )
    elsewhere, project = new_uuid(), new_uuid()
    await engine.fetch("insert into orgs (id, name) values ($1, 'other')", elsewhere)
    await engine.fetch("insert into projects (id, org_id, name) values ($1, $2, 'other')", project, elsewhere)
    p = await authenticate(engine.deps, f"Bearer {token.text}")
    assert {key: grant.role for key, grant in p.project_grants.items()} == {project_id: "admin"}
    await engine.fetch("delete from project_members where user_id = $1", engine.p.id)
    key, _ = await bootstrap.create_key(engine.deps.db, "the owner's")
    owner = await authenticate(engine.deps, f"Bearer {key.text}")
    assert {key: grant.role for key, grant in owner.project_grants.items()} == {project_id: "admin"}
    await engine.fetch("insert into project_members values ($1, $2, 'admin')", project, engine.p.id)
    owner = await authenticate(engine.deps, f"Bearer {key.text}")
    assert set(owner.project_grants) == {project_id}, "a role in a project outlives no membership"


async def test_me(engine: Engine) -> None:
    me = await reads.me(engine.deps, engine.p)
    assert (me.user.id, me.user.email, [org.role for org in me.orgs]) == (engine.p.id, "", ["owner"])


# --- providers and models ---------------------------------------------------------------------------------


async def test_a_new_key_in_the_environment_is_sealed_anew(engine: Engine) -> None:
    deps = engine.deps
    for key in ("sk-ant-one", "sk-ant-one", "sk-ant-two"):
        await bootstrap.environment_providers(deps.db, deps.ring, Settings(anthropic_api_key=key))
    [secret] = await engine.fetch("select * from secrets where name = 'ANTHROPIC_API_KEY'")
    assert secret["current_version"] == 2
    launched = await launch_flat(deps, engine.p, engine.project, FlatLaunch(model="anthropic/claude-opus-5"))
    assert launched.config is not None
    resolved = await deps.models.resolve(launched.config.row.configured_model_id, engine.project.project_id)
    assert resolved.api_key is not None
    assert resolved.api_key.reveal() == "sk-ant-two"
    assert resolved.secret_names == ("ANTHROPIC_API_KEY",)
    dump = await engine.fetch("select * from secret_versions")
    assert b"sk-ant" not in b"".join(row["ciphertext"] + row["wrapped_key"] for row in dump)


async def test_any_slug_of_an_environment_provider_can_be_used(engine: Engine) -> None:
    deps = engine.deps
    await bootstrap.environment_providers(deps.db, deps.ring, Settings(openai_api_key="sk-oai"))
    launches = await asyncio.gather(
        *(launch_flat(deps, engine.p, engine.project, FlatLaunch(model="openai/gpt-99")) for _ in range(10))
    )
    assert {item.agent.model for item in launches} == {"gpt-99"}
    assert len(await engine.fetch("select from configured_models where name = 'gpt-99'")) == 1
    for bad in ("openai/", "openai/a b", "openai/" + "x" * 300, "lab/unknown"):
        with pytest.raises(InvalidRequest):
            await launch_flat(deps, engine.p, engine.project, FlatLaunch(model=bad))


async def test_an_operators_facts_survive_the_next_start(engine: Engine) -> None:
    deps = engine.deps
    settings = Settings(openai_api_key="sk-oai")
    await bootstrap.environment_providers(deps.db, deps.ring, settings)
    await engine.fetch("update configured_model_revisions set context_window_tokens = 400000")
    await bootstrap.environment_providers(deps.db, deps.ring, settings)
    listed = await model_admin.list_models(deps.db, engine.project.org_id)
    assert {model.context_window_tokens for model in listed if model.provider_config == "openai"} == {400_000}


async def test_a_provider_of_the_same_name_is_left_alone(engine: Engine) -> None:
    deps = engine.deps
    mine = msgspec.structs.replace(LAB, name="openai")
    await model_admin.add_model(deps.db, deps.ring, engine.project.org_id, mine, Secret("sk-mine"), "m", FACTS)
    assert await bootstrap.environment_providers(deps.db, deps.ring, Settings(openai_api_key="sk-oai")) == []
    [provider] = await engine.fetch("select * from model_provider_configs where name = 'openai'")
    assert provider["base_url"] == LAB.base_url


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (None, "https://api.anthropic.com/v1"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1/v1"),
        ("http://127.0.0.1:1/v1/", "http://127.0.0.1:1/v1"),
    ],
)
def test_endpoints_are_those_that_the_sdks_would_use(given: str | None, url: str) -> None:
    assert endpoint(ANTHROPIC, given) == url
    assert endpoint(OPENAI, given or OPENAI.base_url).count("/v1") <= 1


async def test_a_changed_model_gets_a_new_revision(engine: Engine) -> None:
    deps = engine.deps
    org = engine.project.org_id
    await model_admin.add_model(deps.db, deps.ring, org, LAB, None, "small", FACTS)
    assert len(await engine.fetch("select from configured_model_revisions")) == 1
    wider = msgspec.structs.replace(FACTS, context_window_tokens=300_000)
    await model_admin.add_model(deps.db, deps.ring, org, LAB, None, "small", wider)
    assert len(await engine.fetch("select from configured_model_revisions")) == 2
    bad = msgspec.structs.replace(FACTS, max_output_tokens=100_000)
    with pytest.raises(InvalidRequest):
        await model_admin.add_model(deps.db, deps.ring, org, LAB, None, "small", bad)


async def test_a_probe_uses_the_stored_key_and_endpoint(engine: Engine) -> None:
    deps, org = engine.deps, engine.project.org_id
    await model_admin.add_model(deps.db, deps.ring, org, LAB, Secret("sk-lab-two"), "small", FACTS)
    target = await model_admin.probe_target(deps.db, deps.ring, org, LAB.name)
    assert (target.api_format, target.base_url, target.auth_kind) == (LAB.api_format, LAB.base_url, LAB.auth_kind)
    assert target.api_key is not None
    assert target.api_key.reveal() == "sk-lab-two"
    assert "sk-lab-two" not in repr(target)
    with pytest.raises(ConfigurationError, match="omnara doctor"):
        await model_admin.probe_target(deps.db, generate_ring(), org, LAB.name)
    with pytest.raises(NotFound, match="nobody"):
        await model_admin.probe_target(deps.db, deps.ring, org, "nobody")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_resolution_is_cached_for_a_second_and_asked_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    deps = engine.deps
    models = ModelCatalog(deps.db, deps.ring, deps.settings, clock=clock)
    [model] = await engine.fetch("select id from configured_models")
    project_id = engine.project.project_id
    asked = 0
    load = ModelCatalog._load

    async def counted(self: ModelCatalog, *args: Any) -> Any:
        nonlocal asked
        asked += 1
        return await load(self, *args)

    monkeypatch.setattr(ModelCatalog, "_load", counted)
    found = await asyncio.gather(*(models.resolve(model["id"], project_id) for _ in range(50)))
    assert asked == 1
    assert len({id(item) for item in found}) == 1
    clock.now += 1.1
    assert await models.resolve(model["id"], project_id) is found[0], "nothing changed, so the same object"
    assert asked == 2
    wider = msgspec.structs.replace(FACTS, context_window_tokens=300_000)
    await model_admin.add_model(deps.db, deps.ring, engine.project.org_id, LAB, Secret("sk-new"), "small", wider)
    assert (await models.resolve(model["id"], project_id)) is found[0]
    clock.now += 1.1
    renewed = await models.resolve(model["id"], project_id)
    assert renewed.api_key is not None
    assert renewed.api_key.reveal() == "sk-new"
    target = models.target(renewed, Definition("v1", "i", ModelChoice("mdl_x", cache_retention="none"), {}, 0.3))
    assert (target.context_window_tokens, target.max_output_tokens) == (300_000, 4_000)
    assert (target.cache_retention, target.temperature, target.slug) == ("none", 0.3, "lab-small-1")
    assert "sk-new" not in repr(target)
    with pytest.raises(NotFound):
        await models.resolve(new_uuid(), project_id)


async def test_configs_are_read_once(engine: Engine) -> None:
    config_id = await engine.config()
    first = await engine.deps.models.config(config_id)
    await engine.fetch("update agent_configs set definition = '{}'")
    assert await engine.deps.models.config(config_id) is first
    with pytest.raises(NotFound):
        await engine.deps.models.config(new_uuid())
