"""Provider configs, models and grants over HTTP: what is taken, refused, shown, and felt by a running agent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from omnara.clock import poll_until
from omnara.engine.model_discovery import usable
from omnara.ids import IdKind, decode, encode, new_uuid
from omnara.providers.probe import OfferedModel
from omnara.testing import ModelServer, ModelSpec, Strictness, say
from tests.contract.server import ApiServer, api_server, invariants_hold
from tests.support.postgres import PostgresForTests

MODELS = {"scripted-1": ModelSpec(), "text-embedding-9": ModelSpec()}
SIZES = {"provider_model_slug": "scripted-1", "context_window_tokens": 100_000}


class Lab:
    """A server, a model server, and an organization's parts that most tests need."""

    def __init__(self, server: ApiServer, model: ModelServer) -> None:
        self.server = server
        self.model = model
        self.org = f"/api/v1/orgs/{server.org}"
        self.providers = f"{self.org}/model-provider-configs"

    async def post(self, path: str, body: Any, status: int = 201, **options: Any) -> Any:
        answer = await self.server.call("POST", path, body, **options)
        assert answer.status == status, answer.text
        return answer.json

    async def secret(self, value: str = "sk-lab") -> str:
        body = {"owner": {"kind": "org"}, "name": str(new_uuid()), "material": {"kind": "generic", "value": value}}
        return str((await self.post(f"{self.org}/secrets", body))["id"])

    async def provider(self, name: str, **more: Any) -> Any:
        body = {
            "name": name,
            "api_format": "openai-chat-completions",
            "base_url": f"{self.model.url}/v1",
            "credential_secret_id": await self.secret(),
        }
        return (await self.post(self.providers, body | more))["config"]

    async def granted(self, name: str, **limits: Any) -> tuple[Any, Any]:
        """Make a provider of this name with a model `main`, granted to the project; return model and grant."""
        provider = await self.provider(name)
        facts = {"supports_reasoning": True, "supported_reasoning_efforts": ["low", "high"]}
        made = await self.post(f"{self.providers}/{provider['id']}/models", {"name": "main", **SIZES, **facts})
        body = {"configured_model_id": made["id"], **limits}
        return made, (await self.post(f"{self.server.scope}/model-grants", body))["grant"]

    def model_path(self, model: Any) -> str:
        return f"{self.providers}/{model['model_provider_config_id']}/models/{model['id']}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(postgres: PostgresForTests) -> AsyncIterator[Lab]:
    async with contextlib.AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(postgres.fresh())
        model = await stack.enter_async_context(
            ModelServer(lambda _: say("Yes."), strict=Strictness(models=MODELS | {"scripted-2": ModelSpec()}))
        )
        made = Lab(await stack.enter_async_context(api_server(dsn, model)), model)
        yield made
        await invariants_hold(made.server)


# --- provider configs -------------------------------------------------------------------------------------


async def test_a_provider_config_and_what_it_offers(lab: Lab) -> None:
    body = {
        "name": "offers",
        "api_format": "anthropic-messages",
        "base_url": f"{lab.model.url}/v1/",
        "credential_secret_id": await lab.secret(),
    }
    made = await lab.post(lab.providers, body)
    config = made["config"]
    assert config["base_url"] == f"{lab.model.url}/v1"
    assert (config["endpoint_path"], config["api_variant"], config["request_timeout_ms"]) == (
        "/messages",
        "default",
        600_000,
    )
    assert (config["auth_kind"], config["auth_options"]) == ("api_key_header", {"header_name": "x-api-key"})
    assert config["management_kind"] == "tenant"
    assert made["model_catalog"]["status"] == "ok"
    assert [model["slug"] for model in made["model_catalog"]["models"]] == ["scripted-1", "scripted-2"]
    path = f"{lab.providers}/{config['id']}"
    assert await lab.server.get(path) == config
    assert await lab.server.get(f"{path}/model-catalog") == made["model_catalog"]
    again = await lab.post(lab.providers, body, 200)
    assert again["config"] == config
    other = await lab.server.call("POST", lab.providers, body | {"request_timeout_ms": 5})
    assert (other.status, other.code) == (409, "conflict")


async def test_a_probe_that_fails_is_told_as_data(lab: Lab) -> None:
    made = await lab.post(
        lab.providers,
        {
            "name": "away",
            "api_format": "openai-responses",
            "base_url": "http://127.0.0.1:9",
            "credential_secret_id": await lab.secret("sk-hidden-in-errors"),
        },
    )
    assert made["config"]["endpoint_path"] == "/responses"
    assert (made["config"]["auth_kind"], made["config"]["auth_options"]) == ("bearer_token", {})
    assert made["model_catalog"]["status"] == "failed"
    assert "models" not in made["model_catalog"]
    assert "sk-hidden" not in made["model_catalog"]["error"]


@pytest.mark.parametrize(
    ("preset", "api_format", "variant", "url", "kind"),
    [
        ("openai", "openai-responses", "default", "https://api.openai.com/v1", "bearer_token"),
        ("openrouter", "openai-chat-completions", "openrouter", "https://openrouter.ai/api/v1", "bearer_token"),
        ("anthropic", "anthropic-messages", "default", "https://api.anthropic.com/v1", "api_key_header"),
    ],
)
async def test_presets(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, preset: str, api_format: str, variant: str, url: str, kind: str
) -> None:
    asked: list[str] = []

    async def probe(_gateway: Any, target: Any) -> Any:
        asked.append(target.base_url)
        from omnara.providers.probe import Catalogue

        return Catalogue((OfferedModel("m-1", created=1.0), OfferedModel("m-2", "Two", 2.0, 1_000, 10)))

    monkeypatch.setattr(type(lab.server.deps.gateway), "probe", probe)
    body = {"name": f"preset {preset}", "preset": preset, "credential_secret_id": await lab.secret()}
    made = await lab.post(lab.providers, body)
    config = made["config"]
    assert (config["api_format"], config["api_variant"]) == (api_format, variant)
    assert (config["base_url"], config["auth_kind"], asked) == (url, kind, [url])
    assert made["model_catalog"]["models"] == [
        {"slug": "m-2", "display_name": "Two", "context_window_tokens": 1_000, "max_output_tokens": 10},
        {"slug": "m-1"},
    ]
    for extra in (
        {"api_format": api_format},
        {"api_variant": "default"},
        {"base_url": url},
        {"endpoint_path": "/x"},
        {"auth_kind": kind},
        {"auth_options": {}},
    ):
        refused = await lab.server.call("POST", lab.providers, body | {"name": "x"} | extra)
        assert (refused.status, refused.code) == (400, "invalid_request"), extra
    slow = await lab.post(lab.providers, body | {"name": f"slow {preset}", "request_timeout_ms": 5_000})
    assert slow["config"]["request_timeout_ms"] == 5_000


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"api_format": None}, "validation_failed"),
        ({"base_url": "https://example.com/v1?key=1"}, "invalid_request"),
        ({"base_url": "https://user:pass@example.com/v1"}, "invalid_request"),
        ({"base_url": "http://example.com/v1"}, "invalid_request"),
        ({"base_url": "https://10.0.0.1/v1"}, "invalid_request"),
        ({"base_url": "https://[::1]/v1"}, "invalid_request"),
        ({"base_url": "https://169.254.169.254/latest"}, "invalid_request"),
        ({"base_url": "not a url"}, "invalid_request"),
        ({"endpoint_path": "chat"}, "validation_failed"),
        ({"endpoint_path": "/chat?x=1"}, "invalid_request"),
        ({"endpoint_path": "/a/../b"}, "invalid_request"),
        ({"auth_kind": "api_key_header"}, "invalid_request"),
        ({"auth_kind": "api_key_header", "auth_options": {"header_name": "host"}}, "invalid_request"),
        ({"auth_kind": "api_key_header", "auth_options": {"header_name": "a b"}}, "invalid_request"),
        ({"auth_options": {"header_name": "x-key"}}, "invalid_request"),
        ({"auth_options": {"other": "x"}}, "validation_failed"),
        ({"request_timeout_ms": 0}, "validation_failed"),
        ({"preset": "mistral"}, "validation_failed"),
        ({"name": " "}, "invalid_request"),
        ({"credential_secret_id": "sec_x"}, "validation_failed"),
        ({"credential_secret_id": encode(IdKind.SECRET, new_uuid())}, "invalid_request"),
    ],
)
async def test_provider_configs_that_cannot_be(lab: Lab, change: Any, code: str) -> None:
    body = {
        "name": "refused",
        "api_format": "openai-chat-completions",
        "base_url": f"{lab.model.url}/v1",
        "credential_secret_id": await lab.secret(),
    }
    answer = await lab.server.call("POST", lab.providers, body | change)
    assert (answer.status, answer.code) == (400, code), answer.text
    assert await lab.server.rows("select 1 from model_provider_configs where name = 'refused'") == []


async def test_a_key_in_a_header_of_its_own(lab: Lab) -> None:
    options = {"auth_kind": "api_key_header", "auth_options": {"header_name": "x-own-key"}}
    config = await lab.provider("own header", **options)
    assert config["auth_options"] == {"header_name": "x-own-key"}
    path = f"{lab.providers}/{config['id']}"
    other = (await lab.server.call("PUT", path, {"request_timeout_ms": 1_000})).json
    assert (other["auth_options"], other["request_timeout_ms"]) == ({"header_name": "x-own-key"}, 1_000)
    plain = (await lab.server.call("PUT", path, {"auth_kind": "bearer_token", "auth_options": {}})).json
    assert (plain["auth_kind"], plain["auth_options"]) == ("bearer_token", {})
    assert (await lab.server.call("PUT", path, {})).json == plain, "nothing to change changes nothing"
    missing = await lab.server.call("PUT", path, {"auth_kind": "api_key_header"})
    assert missing.code == "invalid_request"


async def test_lists_of_provider_configs(lab: Lab) -> None:
    for name in ("list b", "list a", "list c"):
        await lab.provider(name)
    page = await lab.server.get(f"{lab.providers}?name=LIST*&sort=name&limit=2")
    assert [item["name"] for item in page["data"]] == ["list a", "list b"]
    rest = await lab.server.get(f"{lab.providers}?name=LIST*&sort=name&limit=2&cursor={page['next_cursor']}")
    assert ([item["name"] for item in rest["data"]], rest["next_cursor"]) == (["list c"], None)
    newest = await lab.server.get(f"{lab.providers}?name=list*")
    assert [item["name"] for item in newest["data"]] == ["list c", "list a", "list b"]


async def test_what_the_environment_keeps_is_not_changed_by_api(lab: Lab) -> None:
    [config] = (await lab.server.get(f"{lab.providers}?name=anthropic"))["data"]
    assert config["management_kind"] == "cluster"
    path = f"{lab.providers}/{config['id']}"
    assert (await lab.server.call("GET", f"{lab.org}/secrets/{config['credential_secret_id']}")).code == "not_found"
    for method, body in (("PUT", {"base_url": "https://elsewhere.example/v1"}), ("DELETE", None)):
        assert (await lab.server.call(method, path, body)).code == "conflict"
    models = (await lab.server.get(f"{path}/models"))["data"]
    assert {model["management_kind"] for model in models} == {"cluster"}
    assert (await lab.server.call("DELETE", lab.model_path(models[0]))).code == "conflict"
    key = {
        "name": "thief",
        "api_format": "anthropic-messages",
        "base_url": "https://elsewhere.example/v1",
        "credential_secret_id": config["credential_secret_id"],
    }
    assert (await lab.server.call("POST", lab.providers, key)).code == "invalid_request"


async def test_a_key_that_the_server_keeps_stays_with_its_endpoint(lab: Lab) -> None:
    config = await lab.provider("by command")
    provider_id, secret_id = (
        decode(IdKind.PROVIDER_CONFIG, config["id"]),
        decode(IdKind.SECRET, config["credential_secret_id"]),
    )
    await lab.server.rows("update secrets set owner_kind = 'system' where id = $1", secret_id)
    path = f"{lab.providers}/{config['id']}"
    moved = await lab.server.call("PUT", path, {"base_url": "https://elsewhere.example/v1"})
    assert (moved.status, moved.code) == (400, "invalid_request")
    assert (await lab.server.call("PUT", path, {"request_timeout_ms": 9_000})).status == 200
    both = {"base_url": "https://elsewhere.example/v1", "credential_secret_id": await lab.secret()}
    assert (await lab.server.call("PUT", path, both)).status == 200
    await lab.server.rows("update model_provider_configs set secret_id = null where id = $1", provider_id)
    keyless = await lab.server.get(path)
    assert (await lab.server.call("GET", f"{lab.org}/secrets/{keyless['credential_secret_id']}")).code == "not_found"


def test_only_models_for_agents_are_offered_newest_first() -> None:
    slugs = [
        "old",
        "text-embedding-3",
        "gpt-4o-audio-preview",
        "dall-e-3",
        "gpt-image-1",
        "gpt-3.5-turbo",
        "new",
        "x\ny",
    ]
    offered = tuple(OfferedModel(slug, created=float(age)) for age, slug in enumerate(slugs))
    assert [model.slug for model in usable(offered)] == ["new", "old"]
    unknown = tuple(OfferedModel(slug) for slug in ("b", "a", "c"))
    assert [model.slug for model in usable(unknown)] == ["b", "a", "c"]


# --- configured models ------------------------------------------------------------------------------------


async def test_models_with_their_defaults_and_revisions(lab: Lab) -> None:
    provider = await lab.provider("models")
    path = f"{lab.providers}/{provider['id']}/models"
    made = await lab.post(path, {"name": "main", **SIZES})
    assert (made["max_output_tokens"], made["default_max_output_tokens"]) == (8_192, 4_096)
    assert (made["supports_tools"], made["supports_reasoning"], made["default_cache_retention"]) == (
        True,
        False,
        "short",
    )
    assert (made["input_modalities"], made["api_variant_options"]) == ([], {})
    small = await lab.post(path, {"name": "small", **SIZES, "context_window_tokens": 1_000})
    assert (small["max_output_tokens"], small["default_max_output_tokens"]) == (500, 500)
    assert (await lab.post(path, {"name": "main", **SIZES}, 200)) == made
    clash = await lab.server.call("POST", path, {"name": "main", **SIZES, "supports_tools": False})
    assert (clash.status, clash.code) == (409, "conflict")

    one = f"{path}/{made['id']}"
    renamed = (await lab.server.call("PUT", one, {"name": "first"})).json
    assert (renamed["name"], renamed["current_revision_id"]) == ("first", made["current_revision_id"])
    same = (await lab.server.call("PUT", one, {"supports_tools": True})).json
    assert same["current_revision_id"] == made["current_revision_id"]
    wider = (
        await lab.server.call("PUT", one, {"context_window_tokens": 200_000, "api_variant_options": {"b": 1, "a": [2]}})
    ).json
    assert wider["current_revision_id"] != made["current_revision_id"]
    assert wider["revision_created_at"] > made["revision_created_at"]
    assert (wider["context_window_tokens"], wider["max_output_tokens"]) == (200_000, 8_192)
    assert wider["api_variant_options"] == {"b": 1, "a": [2]}
    cleared = (await lab.server.call("PUT", one, {"default_max_output_tokens": None})).json
    assert cleared["default_max_output_tokens"] is None
    taken = await lab.server.call("PUT", one, {"name": "small"})
    assert (taken.status, taken.code) == (409, "conflict")
    listed = (await lab.server.get(path))["data"]
    assert [model["name"] for model in listed] == ["small", "first"]
    page = await lab.server.get(f"{path}?limit=1")
    assert [model["name"] for model in (await lab.server.get(f"{path}?cursor={page['next_cursor']}"))["data"]] == [
        "first"
    ]
    elsewhere = await lab.provider("models elsewhere")
    for method in ("PUT", "DELETE"):
        body = {"name": "x"} if method == "PUT" else None
        wrong = await lab.server.call(method, f"{lab.providers}/{elsewhere['id']}/models/{made['id']}", body)
        assert wrong.code == "not_found"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"context_window_tokens": 1}, "validation_failed"),
        ({"context_window_tokens": 2**31}, "validation_failed"),
        ({"max_output_tokens": 100_000}, "invalid_request"),
        ({"max_output_tokens": 100, "default_max_output_tokens": 101}, "invalid_request"),
        ({"default_reasoning_effort": "high"}, "invalid_request"),
        ({"supported_reasoning_efforts": ["low"]}, "invalid_request"),
        (
            {
                "supports_reasoning": True,
                "supported_reasoning_efforts": ["low"],
                "default_reasoning_effort": "high",
            },
            "invalid_request",
        ),
        ({"provider_model_slug": " "}, "invalid_request"),
        ({"default_cache_retention": "forever"}, "validation_failed"),
    ],
)
async def test_models_that_cannot_be(lab: Lab, change: Any, code: str) -> None:
    [config] = (await lab.server.get(f"{lab.providers}?name=anthropic"))["data"]
    path = f"{lab.providers}/{config['id']}/models"
    answer = await lab.server.call("POST", path, {"name": "refused", **SIZES} | change)
    assert (answer.status, answer.code) == (400, code), answer.text
    model = (await lab.server.get(path))["data"][0]
    for bad in ({"default_max_output_tokens": None}, {"default_max_output_tokens": 0}, {"context_window_tokens": 2}):
        assert (await lab.server.call("PUT", lab.model_path(model), bad)).status == 400


async def test_parallel_models_of_one_name(lab: Lab) -> None:
    provider = await lab.provider("race")
    path = f"{lab.providers}/{provider['id']}/models"
    answers = await asyncio.gather(*(lab.server.call("POST", path, {"name": "m", **SIZES}) for _ in range(4)))
    assert sorted(answer.status for answer in answers) == [200, 200, 200, 201]
    assert len({answer.text for answer in answers}) == 1


async def test_things_are_deleted_in_order(lab: Lab) -> None:
    model, grant = await lab.granted("order")
    provider = f"{lab.providers}/{model['model_provider_config_id']}"
    config = await lab.server.get(provider)
    order = [
        f"{lab.server.scope}/model-grants/{grant['id']}",
        lab.model_path(model),
        provider,
        f"{lab.org}/secrets/{config['credential_secret_id']}",
    ]
    for path in order[1:]:
        assert (await lab.server.call("DELETE", path)).code == "conflict", path
    for path in order:
        assert (await lab.server.call("DELETE", path)).status == 204, path
        assert (await lab.server.call("DELETE", path)).code == "not_found", path


async def test_only_managers_of_the_organization_see_providers(lab: Lab) -> None:
    member, key = await lab.server.user("admin"), await lab.server.org_key("admin")
    for who in (member, key):
        for method, path in (("GET", lab.providers), ("POST", lab.providers)):
            body = None
            if method == "POST":
                body = {"name": "x", "preset": "openai", "credential_secret_id": encode(IdKind.SECRET, new_uuid())}
            assert (await lab.server.call(method, path, body, key=who)).code == "forbidden"


# --- grants -----------------------------------------------------------------------------------------------


async def test_grants_narrow_what_the_model_has(lab: Lab) -> None:
    model, grant = await lab.granted("narrow", context_window_tokens=50_000, default_reasoning_effort="low")
    path = f"{lab.server.scope}/model-grants"
    assert (grant["context_window_tokens"], grant["max_output_tokens"]) == (50_000, None)
    assert "default_cache_retention" not in grant
    again = {"configured_model_id": model["id"], "context_window_tokens": 50_000, "default_reasoning_effort": "low"}
    assert (await lab.post(path, again, 200))["grant"] == grant
    other = await lab.server.call("POST", path, {"configured_model_id": model["id"]})
    assert (other.status, other.code) == (409, "conflict")

    source = "instruction: x\nmodel: {provider_config: narrow, name: main}\n"
    config = await lab.server.get(f"{lab.server.scope}/agent-configs/{await lab.server.config(source)}")
    assert config["model"]["context_window_tokens"] == 50_000
    assert config["model"]["default_reasoning_effort"] == "low"
    one = f"{path}/{grant['id']}"
    changed = (
        await lab.server.call(
            "PATCH",
            one,
            {
                "context_window_tokens": None,
                "max_output_tokens": 1_000,
                "default_reasoning_effort": None,
                "default_cache_retention": "long",
                "supports_tools": False,
                "supported_reasoning_efforts": ["high"],
            },
        )
    ).json["grant"]
    assert (changed["context_window_tokens"], changed["max_output_tokens"]) == (None, 1_000)
    assert "default_reasoning_effort" not in changed
    shown = (await lab.server.get(f"{lab.server.scope}/agent-configs/{config['id']}"))["model"]
    assert (shown["context_window_tokens"], shown["max_output_tokens"]) == (100_000, 1_000)
    assert (shown["supports_tools"], shown["supported_reasoning_efforts"]) == (False, ["high"])
    assert shown["default_cache_retention"] == "long"
    tools = source + "tools: {web_fetch: {}}\n"
    refused = await lab.server.call(
        "POST", f"{lab.server.scope}/agent-configs", {"source": tools, "source_format": "yaml"}
    )
    assert refused.code == "invalid_request"
    assert (await lab.server.call("PATCH", one, {})).code == "validation_failed"
    assert (await lab.server.call("PATCH", one, {"context_window_tokens": 0})).code == "validation_failed"


@pytest.mark.parametrize(
    "limits",
    [
        {"context_window_tokens": 100_001},
        {"max_output_tokens": 8_193},
        {"context_window_tokens": 100, "max_output_tokens": 100},
        {"max_output_tokens": 100, "default_max_output_tokens": 101},
        {"context_window_tokens": 100, "default_max_output_tokens": 100},
        {"supported_reasoning_efforts": ["max"]},
        {"default_reasoning_effort": "max"},
        {"supported_reasoning_efforts": ["low"], "default_reasoning_effort": "high"},
        {"supports_reasoning": False, "default_reasoning_effort": "low"},
    ],
)
async def test_grants_that_widen_or_contradict(lab: Lab, limits: Any) -> None:
    found = (await lab.server.get(f"{lab.providers}?name=widen"))["data"]
    if not found:
        await lab.granted("widen")
        found = (await lab.server.get(f"{lab.providers}?name=widen"))["data"]
    [model] = (await lab.server.get(f"{lab.providers}/{found[0]['id']}/models"))["data"]
    grants = (await lab.server.get(f"{lab.server.scope}/model-grants?limit=100"))["data"]
    [grant] = [item["grant"] for item in grants if item["model"]["id"] == model["id"]]
    refused = await lab.server.call("PATCH", f"{lab.server.scope}/model-grants/{grant['id']}", limits)
    assert (refused.status, refused.code) == (400, "invalid_request"), refused.text
    fresh = await lab.server.call(
        "POST", f"{lab.server.scope}/model-grants", {"configured_model_id": model["id"], **limits}
    )
    assert (fresh.status, fresh.code) == (400, "invalid_request")


async def test_who_grants(lab: Lab) -> None:
    model, grant = await lab.granted("who")
    path = f"{lab.server.scope}/model-grants"
    one = f"{path}/{grant['id']}"
    body = {"configured_model_id": model["id"]}
    developer, admin, outsider = (
        await lab.server.user("developer"),
        await lab.server.user("admin"),
        await lab.server.user(None),
    )
    key = await lab.server.org_key("admin")
    assert (await lab.server.call("POST", path, body, key=key)).code == "forbidden", "people grant, keys do not"
    assert (await lab.server.call("POST", path, body, key=admin)).status == 200
    assert (await lab.server.call("PATCH", one, {"supports_tools": False}, key=key)).status == 200
    for method, where, sent in (("POST", path, body), ("PATCH", one, {"supports_tools": None}), ("DELETE", one, None)):
        assert (await lab.server.call(method, where, sent, key=developer)).code == "forbidden"
        assert (await lab.server.call(method, where, sent, key=outsider)).code == "not_found"
    listed = await lab.server.get(f"{path}?name=MAIN&sort=name&limit=100", key=developer)
    assert model["id"] in [item["model"]["id"] for item in listed["data"]]
    assert {item["model"]["name"] for item in listed["data"]} == {"main"}
    nobody = {"configured_model_id": encode(IdKind.CONFIGURED_MODEL, new_uuid())}
    assert (await lab.server.call("POST", path, nobody)).code == "not_found"
    made = await lab.post("/api/v1/orgs", {"name": "Other"})
    elsewhere = f"/api/v1/orgs/{made['org']['id']}/projects/{made['project']['id']}/model-grants"
    assert (await lab.server.call("POST", elsewhere, body)).code == "not_found", "a model of another organization"


async def test_a_running_agent_feels_every_change_with_its_next_call(lab: Lab) -> None:
    model, grant = await lab.granted("live")
    source = "instruction: x\nmodel: {provider_config: live, name: main}\n"
    agent = await lab.server.agent("one", source=source)
    await lab.server.settled(agent)
    asked = lab.model.log.entries[-1].body
    assert (asked["model"], asked["max_completion_tokens"]) == ("scripted-1", 4_096)

    async def said(check: Any) -> bool:
        """Talk until the change has arrived, which takes a second at most."""

        async def once() -> bool:
            assert (await lab.server.say(agent, "more")).status == 201
            await lab.server.settled(agent)
            return bool(check(lab.model.log.entries[-1].body))

        return await poll_until(once, within_s=20, every_s=0.1)

    changes = {"provider_model_slug": "scripted-2", "api_variant_options": {"verbosity": "low"}}
    assert (await lab.server.call("PUT", lab.model_path(model), changes)).status == 200
    assert await said(lambda body: (body["model"], body.get("verbosity")) == ("scripted-2", "low"))
    grants = f"{lab.server.scope}/model-grants/{grant['id']}"
    assert (await lab.server.call("PATCH", grants, {"max_output_tokens": 77})).status == 200
    assert await said(lambda body: body["max_completion_tokens"] == 77)
    assert (await lab.server.call("DELETE", grants)).status == 204

    async def refused() -> bool:
        assert (await lab.server.say(agent, "again")).status == 201
        await lab.server.settled(agent)
        page = await lab.server.get(f"{agent}/events?before_sequence=0&limit=1")
        return bool(page["data"][0].get("stop_reason") == "error")

    assert await poll_until(refused, within_s=20, every_s=0.1)
    assert (await lab.post(f"{lab.server.scope}/model-grants", {"configured_model_id": model["id"]}))["grant"]
    assert await said(lambda body: msgspec.json.encode(body).count(b"again") > 0)


async def test_a_grant_that_was_taken_away_does_not_come_back_by_itself(lab: Lab) -> None:
    grants = (await lab.server.get(f"{lab.server.scope}/model-grants?name=claude-haiku-4-5"))["data"]
    [item] = grants
    assert (await lab.server.call("DELETE", f"{lab.server.scope}/model-grants/{item['grant']['id']}")).status == 204
    from omnara.engine.bootstrap import environment_providers

    deps = lab.server.deps
    assert await environment_providers(deps.db, deps.ring, deps.settings) == ["anthropic"]
    assert (await lab.server.get(f"{lab.server.scope}/model-grants?name=claude-haiku-4-5"))["data"] == []
    flat = await lab.server.call("POST", "/agents", {"model": "anthropic/claude-haiku-4-5", "system_prompt": "x"})
    assert (flat.status, flat.code) == (400, "invalid_request")


async def test_a_damaged_key_hurts_only_its_users(lab: Lab) -> None:
    """Source: field-reports B23."""
    model, _ = await lab.granted("damaged")
    await lab.granted("whole")
    provider = f"{lab.providers}/{model['model_provider_config_id']}"
    secret = (await lab.server.get(provider))["credential_secret_id"]
    await lab.server.rows(
        "update secret_versions set ciphertext = set_byte(ciphertext, 0, get_byte(ciphertext, 0) # 1)"
        " where secret_id = $1",
        decode(IdKind.SECRET, secret),
    )
    asked = len(lab.model.log.entries)
    hurt = await lab.server.agent("one", source="instruction: x\nmodel: {provider_config: damaged, name: main}\n")
    await lab.server.settled(hurt)
    told = (await lab.server.get(f"{hurt}/events"))["data"][-1]
    assert (told["event_kind"], told["stop_reason"]) == ("model_output", "error")
    assert "key of this agent's model provider cannot be read" in msgspec.json.encode(told).decode()
    assert len(lab.model.log.entries) == asked
    fine = await lab.server.agent("one", source="instruction: x\nmodel: {provider_config: whole, name: main}\n")
    assert (await lab.server.settled(fine))["output"] == "Yes."
    for path in (f"{lab.org}/secrets?limit=100", f"{lab.org}/secrets/{secret}", f"{lab.providers}?limit=100"):
        await lab.server.get(path)
    catalog = await lab.server.get(f"{provider}/model-catalog")
    assert "cannot be read" in str(catalog)
    versions = f"{lab.org}/secrets/{secret}/versions"
    renewed = await lab.server.call("POST", versions, {"material": {"kind": "generic", "value": "sk-new"}})
    assert renewed.status == 200

    async def mended() -> bool:
        assert (await lab.server.say(hurt, "again")).status == 201
        return bool((await lab.server.settled(hurt))["output"] == "Yes.")

    assert await poll_until(mended, within_s=20, every_s=0.1)
