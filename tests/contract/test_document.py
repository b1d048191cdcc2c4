"""The served document says the same as the contract about every route that both have."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from omnara.api import openapi
from omnara.api.types import ClientErrorCode, ErrorCode, ServerErrorCode
from tests.contract.checker import contract
from tests.contract.normal import normal

P = "/api/v1/orgs/{orgID}/projects/{projectID}"
A = P + "/agents/{agentID}"
OPERATIONS = [
    ("get", "/api/v1/me"),
    ("get", "/api/v1/orgs/{orgID}/projects"),
    ("get", "/api/v1/tool-catalog"),
    ("post", f"{P}/agent-configs"),
    ("get", f"{P}/agent-configs/{{agentConfigID}}"),
    ("post", f"{P}/agents"),
    ("get", f"{P}/agents"),
    ("get", A),
    ("post", f"{A}/config"),
    ("post", f"{A}/cancel"),
    ("post", f"{A}/archive"),
    ("post", f"{A}/inputs"),
    ("get", f"{A}/inputs/backlog"),
    ("post", f"{A}/inputs/{{inputID}}/cancel"),
    ("post", f"{A}/inputs/{{inputID}}/move"),
    ("post", f"{A}/inputs/{{inputID}}/promote_to_steering"),
    ("post", f"{A}/inputs/{{inputID}}/demote_to_queued"),
    ("get", f"{A}/tool-calls"),
    ("post", f"{A}/tool-calls/{{toolCallID}}/result"),
    ("get", f"{A}/turns"),
    ("get", f"{A}/turns/{{turnID}}/events"),
    ("get", f"{A}/events"),
    ("get", f"{A}/events/stream"),
    ("get", f"{A}/interactions"),
    ("post", f"{A}/interactions/{{interactionID}}/resolve"),
]
ORG = "/api/v1/orgs/{orgID}"
ASKED_BY_HEADERS = {("get", f"{A}/artifacts/{{artifactID}}/content"): {"206", "304"}}
"""Statuses beyond the contract's that only a request with a Range or an If-None-Match gets."""
OPERATIONS += [
    ("get", f"{A}/artifacts/{{artifactID}}"),
    ("get", f"{A}/artifacts/{{artifactID}}/content"),
]
PROVIDER = ORG + "/model-provider-configs/{modelProviderConfigID}"
OPERATIONS += [
    ("post", "/api/v1/orgs"),
    ("delete", ORG),
    ("get", f"{ORG}/overview"),
    ("post", f"{ORG}/projects"),
    ("delete", P),
    ("get", f"{ORG}/secrets"),
    ("post", f"{ORG}/secrets"),
    ("get", f"{ORG}/secrets/{{secretID}}"),
    ("patch", f"{ORG}/secrets/{{secretID}}"),
    ("delete", f"{ORG}/secrets/{{secretID}}"),
    ("post", f"{ORG}/secrets/{{secretID}}/versions"),
    ("get", f"{ORG}/secrets/{{secretID}}/grants"),
    ("post", f"{ORG}/secrets/{{secretID}}/grants"),
    ("delete", f"{ORG}/secrets/{{secretID}}/grants/{{grantID}}"),
    ("get", f"{P}/secrets"),
    ("get", f"{P}/secrets/{{secretID}}"),
    ("post", f"{ORG}/model-provider-configs"),
    ("get", f"{ORG}/model-provider-configs"),
    ("get", PROVIDER),
    ("put", PROVIDER),
    ("delete", PROVIDER),
    ("get", f"{PROVIDER}/model-catalog"),
    ("post", f"{PROVIDER}/models"),
    ("get", f"{PROVIDER}/models"),
    ("put", f"{PROVIDER}/models/{{configuredModelID}}"),
    ("delete", f"{PROVIDER}/models/{{configuredModelID}}"),
    ("post", f"{P}/model-grants"),
    ("get", f"{P}/model-grants"),
    ("patch", f"{P}/model-grants/{{modelGrantID}}"),
    ("delete", f"{P}/model-grants/{{modelGrantID}}"),
    ("delete", "/api/v1/me"),
    ("get", f"{ORG}/members"),
    ("patch", f"{ORG}/members/{{userID}}"),
    ("delete", f"{ORG}/members/{{userID}}"),
    ("get", f"{ORG}/members/{{userID}}/projects"),
    ("put", f"{ORG}/members/{{userID}}/projects/{{projectID}}"),
    ("delete", f"{ORG}/members/{{userID}}/projects/{{projectID}}"),
    ("get", f"{ORG}/api-keys"),
    ("post", f"{ORG}/api-keys"),
    ("get", f"{ORG}/api-keys/{{keyID}}"),
    ("patch", f"{ORG}/api-keys/{{keyID}}"),
    ("post", f"{ORG}/api-keys/{{keyID}}/revoke"),
    ("get", f"{ORG}/api-keys/{{keyID}}/projects"),
    ("put", f"{ORG}/api-keys/{{keyID}}/projects/{{projectID}}"),
    ("delete", f"{ORG}/api-keys/{{keyID}}/projects/{{projectID}}"),
    ("get", "/api/v1/personal-access-tokens"),
    ("post", "/api/v1/personal-access-tokens"),
    ("post", "/api/v1/personal-access-tokens/{tokenID}/revoke"),
]
MACHINES, POOLS = f"{ORG}/machines", f"{ORG}/machine-pools"
POOL_GRANTS = f"{P}/machine-pool-grants"
OPERATIONS += [
    ("post", MACHINES),
    ("get", MACHINES),
    ("post", f"{MACHINES}/connect"),
    ("get", f"{MACHINES}/{{machineID}}"),
    ("patch", f"{MACHINES}/{{machineID}}"),
    ("delete", f"{MACHINES}/{{machineID}}"),
    ("post", f"{MACHINES}/{{machineID}}/daemon-tokens"),
    ("get", f"{MACHINES}/{{machineID}}/daemon-tokens"),
    ("post", f"{MACHINES}/{{machineID}}/daemon-tokens/{{tokenID}}/revoke"),
    ("post", POOLS),
    ("get", POOLS),
    ("get", f"{POOLS}/{{poolID}}"),
    ("put", f"{POOLS}/{{poolID}}"),
    ("delete", f"{POOLS}/{{poolID}}"),
    ("get", f"{P}/machines"),
    ("post", f"{P}/machine-grants"),
    ("get", f"{P}/machine-grants"),
    ("delete", f"{P}/machine-grants/{{grantID}}"),
    ("post", POOL_GRANTS),
    ("get", POOL_GRANTS),
    ("get", f"{POOL_GRANTS}/{{poolGrantID}}"),
    ("patch", f"{POOL_GRANTS}/{{poolGrantID}}"),
    ("delete", f"{POOL_GRANTS}/{{poolGrantID}}"),
]
NOT_FOR_OURS = ["default_machine_provider_options", "provider_auth_secret_id"]
"""What the contract requires of a new pool for the sake of its three providers in the cloud; ours need neither."""
DAEMON = "/api/v1/daemon"
OPERATIONS += [
    ("post", f"{DAEMON}/bootstrap"),
    ("post", f"{DAEMON}/failures"),
    ("post", f"{DAEMON}/runtimes"),
    ("get", f"{DAEMON}/runtimes/{{runtimeID}}/socket"),
    ("post", f"{DAEMON}/runtimes/{{runtimeID}}/end"),
    ("post", f"{DAEMON}/runtimes/{{runtimeID}}/sleep"),
]
OURS_ALONE = {("get", "/api/v1/orgs"), ("get", f"{P}/events/stream")}
"""Routes below the contract's prefix that the contract has not."""
OURS = openapi.document()


def both(method: str, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return OURS["paths"][path][method], contract()["paths"][path][method]


def parameters(operation: dict[str, Any], document: dict[str, Any]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for parameter in operation["parameters"]:
        plain = normal(parameter, document)
        found[plain["in"], plain["name"]] = (plain.get("required", False), plain["schema"])
    return found


def bodies(operation: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, response in operation["responses"].items():
        plain = normal(response, document)
        found[status] = {kind: content["schema"] for kind, content in plain.get("content", {}).items()}
    return found


def test_every_route_of_the_contract_surface_is_compared() -> None:
    served = {(m, path) for path, item in OURS["paths"].items() for m in item if path.startswith("/api/v1/")}
    assert served == set(OPERATIONS) | OURS_ALONE


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_operation_ids_are_equal(method: str, path: str) -> None:
    ours, theirs = both(method, path)
    assert ours["operationId"] == theirs["operationId"]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_parameters_are_equal(method: str, path: str) -> None:
    ours, theirs = both(method, path)
    assert parameters(ours, OURS) == parameters(theirs, contract())


@pytest.mark.parametrize(("method", "path"), [one for one in OPERATIONS if one != ("post", POOLS)])
def test_request_bodies_are_equal(method: str, path: str) -> None:
    ours, theirs = both(method, path)
    assert ("requestBody" in ours) == ("requestBody" in theirs)
    if "requestBody" in ours:
        one, other = normal(ours["requestBody"], OURS), normal(theirs["requestBody"], contract())
        assert one.get("required", False) == other.get("required", False)
        assert one["content"] == other["content"]


def test_a_new_pool_is_the_contracts_but_for_its_providers() -> None:
    """The same fields with the same limits; which of them a provider needs is for the provider to say."""
    [ours] = normal(both("post", POOLS)[0]["requestBody"], OURS)["content"].values()
    base = normal(contract()["components"]["schemas"]["CreateMachinePoolRequestBase"], contract())
    assert ours["schema"]["required"] == sorted(set(base["required"]) - set(NOT_FOR_OURS))
    assert ours["schema"] | {"required": []} == base | {"required": []}


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_status_codes_and_answers_are_equal(method: str, path: str) -> None:
    ours, theirs = bodies(both(method, path)[0], OURS), bodies(both(method, path)[1], contract())
    families = {status for status in theirs if status.endswith("XX")}
    assert set(theirs) - families <= set(ours)
    for status in set(ours) - ASKED_BY_HEADERS.get((method, path), set()):
        assert ours[status] == theirs[status if status in theirs else f"{status[0]}XX"], status


def test_every_status_is_named() -> None:
    """No family such as 4XX, which tells nobody what to expect."""
    for path, item in OURS["paths"].items():
        for method, operation in item.items():
            statuses = set(operation["responses"])
            assert all(status.isdecimal() for status in statuses), (method, path)
            assert {"401", "413", "500", "503"} <= statuses, (method, path)


def test_components_with_the_contracts_names_are_equal() -> None:
    """Generators name classes after components, so a name of the contract must mean the same here."""
    ours, theirs = OURS["components"]["schemas"], contract()["components"]["schemas"]
    shared = set(ours) & set(theirs)
    assert len(shared) > 60
    for name in sorted(shared):
        assert normal(ours[name], OURS) == normal(theirs[name], contract()), name


@pytest.mark.parametrize(
    ("name", "kind"), [("ClientErrorCode", ClientErrorCode), ("ServerErrorCode", ServerErrorCode), ("Error", ErrorCode)]
)
def test_error_codes_are_equal(name: str, kind: Any) -> None:
    schema = contract()["components"]["schemas"][name]
    schema = schema["properties"]["code"] if name == "Error" else schema
    assert set(kind.__args__) == set(schema["enum"])


def test_the_yaml_is_the_document() -> None:
    assert yaml.load(openapi.yaml_text(), Loader=yaml.CSafeLoader) == OURS


def test_normal_tells_different_schemas_apart() -> None:
    """The comparison itself must be able to fail."""
    document: dict[str, Any] = {"components": {"schemas": {"X": {"type": "string"}}}}
    x = {"$ref": "#/components/schemas/X"}
    assert normal({"allOf": [x]}, document) == {"type": "string"}
    assert normal({"oneOf": [x, {"type": "null"}]}, document) == normal({"type": ["null", "string"]}, document)
    closed = {"type": "object", "additionalProperties": False}
    assert normal(closed, document) != normal({"type": "object"}, document)
    assert normal({"type": "string", "minLength": 1}, document) != normal(x, document)
    assert normal({"type": "object", "required": ["a"]}, document) != normal({"type": "object"}, document)
