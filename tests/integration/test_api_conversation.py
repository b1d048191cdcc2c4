"""The scoped contract over HTTP: messages, tools, questions and the pages of the log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.clock import poll_until
from omnara.ids import IdKind, encode, new_uuid
from omnara.testing import Answer, Call, ModelServer, call, embed, embedded, say
from tests.contract.server import CONFIG, ApiServer, api_server, model_server
from tests.support.postgres import PostgresForTests

TOOLS = (
    CONFIG
    + """tools:
  look:
    type: custom
    description: Looks.
    input_schema: {type: object, properties: {path: {type: string}}, required: [path]}
  risky:
    type: custom
    description: Is risky.
    input_schema: {type: object, properties: {}}
    permission: {mode: always_ask}
  ask_question: {}
"""
)
QUESTION = {"questions": [{"question": "Which?", "options": [{"label": "A"}, {"label": "B"}]}]}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, model) as running:
        yield running


# --- inputs and the conversation --------------------------------------------------------------------------


async def test_inputs_and_their_keys(server: ApiServer) -> None:
    agent = await server.agent()
    headers = {"Idempotency-Key": "in-1"}
    body = {"content_blocks": [{"type": "text", "text": "hi", "metadata": {"a": "b"}}]}
    first = await server.call("POST", f"{agent}/inputs", body, headers=headers)
    again = await server.call("POST", f"{agent}/inputs", body, headers=headers)
    other = await server.call("POST", f"{agent}/inputs", body | {"delivery_mode": "steering"}, headers=headers)
    assert (first.status, again.status, other.status) == (201, 200, 409)
    assert other.code == "idempotency_key_conflict"
    assert again.json["agent_input"]["id"] == first.json["agent_input"]["id"]
    assert first.json["agent_input"]["content_blocks"] == body["content_blocks"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"content_blocks": []}, 400, "invalid_request"),
        ({"content_blocks": [{"type": "text", "text": " \n"}]}, 400, "invalid_request"),
        ({"content_blocks": [{"type": "media", "media_type": "image/png", "data": "aGk="}]}, 400, "invalid_request"),
        ({"content_blocks": [{"type": "media", "media_type": "image/xyz", "data": "aGk="}]}, 400, "validation_failed"),
        ({"content_blocks": [{"type": "media_ref", "artifact_id": "art_a"}]}, 400, "validation_failed"),
        (
            {"content_blocks": [{"type": "text", "text": "x"}], "cancel_open_interactions": True},
            400,
            "invalid_request",
        ),
        (
            {"content_blocks": [{"type": "text", "text": "x"}], "actor": {"provider_user_id": "u"}},
            400,
            "invalid_request",
        ),
        ({"content_blocks": [{"type": "text", "text": "x" * 1_048_600}]}, 413, "request_too_large"),
    ],
)
async def test_input_refusals(server: ApiServer, body: dict[str, Any], status: int, code: str) -> None:
    agent = await server.agent()
    answer = await server.call("POST", f"{agent}/inputs", body)
    assert (answer.status, answer.code) == (status, code), answer.text


async def test_org_keys_name_actors(server: ApiServer) -> None:
    agent = await server.agent()
    key = await server.org_key()
    body = {
        "content_blocks": [{"type": "text", "text": "x"}],
        "actor": {"provider_user_id": "u1", "display_name": "Ann", "metadata": {"team": "a"}},
    }
    named = await server.call("POST", f"{agent}/inputs", body, key=key)
    plain = await server.call("POST", f"{agent}/inputs", {"content_blocks": body["content_blocks"]}, key=key)
    assert (named.status, plain.status) == (201, 201)
    assert named.json["agent_input"]["actor_id"].startswith("actr_")
    assert "actor_id" not in plain.json["agent_input"]


async def test_a_custom_tool_is_answered_once(server: ApiServer) -> None:
    agent = await server.agent(embed(call("look", {"path": "/a"}), say("It is {{result 0}}.")), source=TOOLS)
    await server.settled(agent, "waiting")
    page = await server.get(f"{agent}/tool-calls?state=ready&type=custom")
    assert page["next_cursor"] is None
    (waiting,) = page["data"]
    assert waiting["input"] == {"path": "/a"}
    assert "outcome" not in waiting
    path = f"{agent}/tool-calls/{waiting['id']}/result"
    result = {"outcome": "succeeded", "content_blocks": [{"type": "text", "text": "blue"}]}
    first = await server.call("POST", path, result)
    again = await server.call("POST", path, result)
    assert (first.status, again.status, again.code) == (201, 409, "conflict")
    assert first.json["tool_call"]["state"] == "completed"
    assert first.json["tool_result"]["content_blocks"] == result["content_blocks"]
    done = await server.settled(agent)
    assert done["output"] == "It is blue."
    kinds = [event["event_kind"] for event in (await server.get(f"{agent}/events"))["data"]]
    assert kinds == ["agent_input", "agent_input", "model_output", "tool_result", "model_output"]
    assert (await server.get(f"{agent}/tool-calls?state=ready"))["data"] == []


async def test_structured_results_keep_their_value(server: ApiServer) -> None:
    agent = await server.agent(embed(call("look", {"path": "/a"}), say("ok")), source=TOOLS)
    await server.settled(agent, "waiting")
    (waiting,) = (await server.get(f"{agent}/tool-calls"))["data"]
    value = {"n": 2**60, "x": [1.5, None, True, "\u00fc"], "deep": {"a": [[[]]]}}
    body = {"outcome": "failed", "content_blocks": [{"type": "structured_data", "value": value}]}
    answer = await server.call("POST", f"{agent}/tool-calls/{waiting['id']}/result", body)
    assert answer.status == 201, answer.text
    assert answer.json["tool_result"]["content_blocks"][0]["value"] == value
    await server.settled(agent)


async def test_unknown_calls_and_interactions(server: ApiServer) -> None:
    agent = await server.agent()
    body = {"outcome": "succeeded", "content_blocks": []}
    missing = await server.call("POST", f"{agent}/tool-calls/{encode(IdKind.TOOL_CALL, new_uuid())}/result", body)
    assert (missing.status, missing.code) == (404, "not_found")
    answers = {"answers": [{"option_indices": [0]}]}
    path = f"{agent}/interactions/{encode(IdKind.INTERACTION, new_uuid())}/resolve"
    missing = await server.call("POST", path, answers)
    assert (missing.status, missing.code) == (404, "not_found")


async def test_permission_is_asked_and_answered(server: ApiServer) -> None:
    agent = await server.agent(embed(call("risky", {}), say("done")), source=TOOLS)
    await server.settled(agent, "waiting")
    (form,) = (await server.get(f"{agent}/interactions?state=open"))["data"]
    assert form["interaction_kind"] == "permission"
    assert "context" not in form["request"]
    path = f"{agent}/interactions/{form['id']}/resolve"
    bad = await server.call("POST", path, {"answers": [{"option_indices": [7]}]})
    assert (bad.status, bad.code) == (400, "invalid_request")
    deny = {"answers": [{"option_indices": [1], "text": "no"}]}
    first = await server.call("POST", path, deny)
    again = await server.call("POST", path, deny)
    other = await server.call("POST", path, {"answers": [{"option_indices": [0]}]})
    assert (first.status, again.status, other.status, other.code) == (200, 200, 409, "conflict")
    assert first.json == again.json
    assert first.json["state"] == "resolved"
    assert (await server.settled(agent))["output"] == "done"
    (denied,) = (await server.get(f"{agent}/tool-calls"))["data"]
    assert denied["outcome"] == "denied"


async def test_cancel_idle_and_waiting(server: ApiServer) -> None:
    idle = await server.agent()
    answer = await server.call("POST", f"{idle}/cancel")
    assert answer.json == {"event": None, "runtime_cancel_requested": False, "affected": False}
    agent = await server.agent(embed(call("look", {"path": "/a"}), say("late")), source=TOOLS)
    await server.settled(agent, "waiting")
    answer = await server.call("POST", f"{agent}/cancel", {})
    assert answer.json["affected"] is True
    assert answer.json["event"]["control_type"] == "cancel_current"
    assert answer.json["actor_id"].startswith("actr_")
    await server.settled(agent)
    (call_row,) = (await server.get(f"{agent}/tool-calls"))["data"]
    assert call_row["outcome"] == "canceled"


async def test_config_change_of_a_live_agent(server: ApiServer) -> None:
    agent = await server.agent()
    current = (await server.get(agent))["agent"]["current_config_id"]
    body = {"source": CONFIG.replace("brief", "loud"), "source_format": "yaml"}
    headers = {"Idempotency-Key": "cc-1"}
    stale = encode(IdKind.AGENT_CONFIG, new_uuid())
    refused = await server.call("POST", f"{agent}/config", body | {"expected_current_config_id": stale})
    assert (refused.status, refused.code) == (409, "state_transition_conflict")
    first = await server.call(
        "POST", f"{agent}/config", body | {"expected_current_config_id": current}, headers=headers
    )
    again = await server.call("POST", f"{agent}/config", body, headers=headers)
    assert (first.status, again.status) == (200, 200)
    assert again.json["event_id"] == first.json["event_id"]
    assert (await server.get(agent))["agent"]["current_config_id"] == first.json["agent_config"]["id"]
    assert "content_blocks" not in first.json["agent_input"]


# --- pages of the log -------------------------------------------------------------------------------------


async def test_all_forms_of_paging_the_log(server: ApiServer) -> None:
    agent = await server.agent()
    for number in range(4):
        await server.say(agent, f"message {number}")
        await server.settled(agent)
    whole = await server.get(f"{agent}/events")
    sequences = [event["sequence"] for event in whole["data"]]
    assert sequences == list(range(1, 10))
    assert (whole["has_more"], whole["next_after_sequence"]) == (False, 9)
    assert "next_before_sequence" not in whole
    forward = await server.get(f"{agent}/events?after_sequence=2&limit=3")
    assert [event["sequence"] for event in forward["data"]] == [3, 4, 5]
    assert (forward["next_after_sequence"], forward["has_more"]) == (5, True)
    end = await server.get(f"{agent}/events?after_sequence=9")
    assert (end["data"], end["next_after_sequence"], end["has_more"]) == ([], 9, False)
    beyond = await server.get(f"{agent}/events?after_sequence=900")
    assert (beyond["data"], beyond["next_after_sequence"]) == ([], 900)
    newest = await server.get(f"{agent}/events?before_sequence=0&after_sequence=3&limit=2")
    assert [event["sequence"] for event in newest["data"]] == [8, 9]
    assert (newest["next_before_sequence"], newest["has_more"], newest["next_after_sequence"]) == (8, True, 9)
    start = await server.get(f"{agent}/events?before_sequence=3&limit=5")
    assert [event["sequence"] for event in start["data"]] == [1, 2]
    assert (start["next_before_sequence"], start["has_more"]) == (None, False)


async def test_turns_and_their_events(server: ApiServer) -> None:
    agent = await server.agent(embed(call("look", {"path": "/a"}), say("fine")), source=TOOLS)
    await server.settled(agent, "waiting")
    (waiting,) = (await server.get(f"{agent}/tool-calls"))["data"]
    body = {"outcome": "succeeded", "content_blocks": []}
    await server.call("POST", f"{agent}/tool-calls/{waiting['id']}/result", body)
    await server.settled(agent)
    page = await server.get(f"{agent}/turns?limit=1")
    (turn,) = page["data"]
    assert (turn["turn_sequence"], turn["event_count"]) == (2, 4)
    assert [event["sequence"] for event in turn["opening_events"]] == [2]
    assert turn["latest_event"]["sequence"] == turn["latest_semantic_event"]["sequence"] == 5
    assert page["next_before_turn_sequence"] == 2
    older = await server.get(f"{agent}/turns?before_turn_sequence=2")
    assert [turn["turn_sequence"] for turn in older["data"]] == [1]
    assert older["next_before_turn_sequence"] is None
    events = await server.get(f"{agent}/turns/{turn['id']}/events?limit=3")
    assert [event["sequence"] for event in events["data"]] == [3, 4, 5]
    assert events["next_before_sequence"] == 3
    rest = await server.get(f"{agent}/turns/{turn['id']}/events?before_sequence=3")
    assert [event["sequence"] for event in rest["data"]] == [2]
    assert rest["next_before_sequence"] is None
    unknown = await server.call("GET", f"{agent}/turns/{encode(IdKind.TURN, new_uuid())}/events")
    assert unknown.status == 404


async def test_a_damaged_event_is_shown_as_an_error_in_its_place(server: ApiServer) -> None:
    agent = await server.agent("hello")
    await server.settled(agent)
    for payload in ('{"nonsense": 1}', "[]", '"x"', "{}", '{"model_call_context_id": 5}'):
        await server.rows("update events set payload = $1::json where sequence = 3", payload)
        damaged = (await server.get(f"{agent}/events"))["data"][2]
        assert (damaged["sequence"], damaged["event_kind"], damaged["stop_reason"]) == (3, "model_output", "error")
    pretty = (await server.get(f"{agent}/events"))["data"][1]
    await server.rows(
        "update events set payload = jsonb_pretty(payload::jsonb)::json where sequence = 2 and kind = 'agent_input'"
    )
    assert (await server.get(f"{agent}/events"))["data"][1] == pretty


# --- half a batch -----------------------------------------------------------------------------------------


def roles(model: ModelServer) -> list[tuple[str, list[str]]]:
    """The last request, as roles and what stands in each message."""
    found = []
    for message in model.log.entries[-1].body["messages"]:
        content = message["content"]
        blocks = [{"type": "text"}] if isinstance(content, str) else content
        found.append((message["role"], [block["type"] for block in blocks]))
    return found


@pytest.mark.parametrize("end", ["answered", "cancelled"])
async def test_messages_between_a_call_and_its_result_stand_behind_both(
    server: ApiServer, model: ModelServer, end: str
) -> None:
    """Two calls at once, one result, two messages, then the other result or a cancel. The strict provider takes it.

    Source: field-reports B01.
    """
    both = Answer(blocks=(Call("look", {"path": "a"}), Call("look", {"path": "b"})))
    agent = await server.agent(embed(both, say("fine")), source=TOOLS)
    await server.settled(agent, "waiting")
    first, second = (await server.get(f"{agent}/tool-calls?state=ready"))["data"]
    done = {"outcome": "succeeded", "content_blocks": [{"type": "text", "text": "second"}]}
    assert (await server.call("POST", f"{agent}/tool-calls/{second['id']}/result", done)).status == 201
    assert (await server.say(agent, "steered", delivery_mode="steering")).status == 201
    assert (await server.say(agent, "hello")).status == 201
    if end == "answered":
        done["content_blocks"] = [{"type": "text", "text": "first"}]
        assert (await server.call("POST", f"{agent}/tool-calls/{first['id']}/result", done)).status == 201
    else:
        assert (await server.call("POST", f"{agent}/cancel")).json["affected"]

    async def answered() -> bool:
        events = (await server.get(f"{agent}/events"))["data"]
        said = [event["content_blocks"][0].get("text") for event in events if event.get("input_kind") == "content"]
        return "hello" in said and events[-1].get("stop_reason") == "end_turn"

    assert await poll_until(answered, within_s=15, every_s=0.05)
    assert model.log.entries[-1].status == 200
    asked = roles(model)
    calls = next(at for at, (_, kinds) in enumerate(asked) if "tool_use" in kinds)
    assert asked[calls][1].count("tool_use") == 2
    role, kinds = asked[calls + 1]
    assert (role, kinds[:2]) == ("user", ["tool_result", "tool_result"])
    results = model.log.entries[-1].body["messages"][calls + 1]["content"][:2]
    uses = [item for item in model.log.entries[-1].body["messages"][calls]["content"] if item["type"] == "tool_use"]
    assert [item["tool_use_id"] for item in results] == [item["id"] for item in uses]
    assert "second" in str(results[1])
    assert "first" in str(results[0]) if end == "answered" else "cancel" in str(results[0])
    assert sum(kinds.count("tool_result") for _, kinds in asked) == 2
