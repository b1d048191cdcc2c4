"""The API's small parts: cursors, bodies, parameters, numbering of deltas, the text of frames and events."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnara.access.principals import Credential, Principal, PrincipalKind
from omnara.api import body, frames
from omnara.api.auth import Authenticator
from omnara.api.cursors import MAX_LENGTH, Binding, Position
from omnara.api.event_json import DAMAGED_TEXT, Owner, live_event, stored_event, timestamp
from omnara.api.sse import Previews
from omnara.db.reads import EventRow
from omnara.domain.content import TextBlock, ToolCallBlock
from omnara.domain.events import Event, EventMeta, ModelOutputPayload, encode_payload
from omnara.domain.stream import TextDelta
from omnara.engine.feed_items import Delta, ModelDelta
from omnara.errors import InvalidRequest, Unauthorized, ValidationFailed
from omnara.ids import new_uuid

# --- cursors ----------------------------------------------------------------------------------------------

BINDING = Binding("agents", ("p1", None, "-created_at"))


def test_cursors_come_back_exactly() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    position = Position.at(now, new_uuid())
    cursor = BINDING.encode(position)
    assert BINDING.decode(cursor) == position
    assert BINDING.decode(cursor).time == now
    assert "=" not in cursor
    assert len(cursor) < 400


@given(st.text(max_size=100), st.uuids())
def test_any_name_comes_back(name: str, item: object) -> None:
    name = name.replace("\0", "").encode("utf-8", "replace").decode()
    position = Position(name, item)  # type: ignore[arg-type]
    assert BINDING.decode(BINDING.encode(position)) == position


@pytest.mark.parametrize(
    "other",
    [
        Binding("turns", BINDING.parts),
        Binding("agents", ("p2", None, "-created_at")),
        Binding("agents", ("p1", "a*", "-created_at")),
        Binding("agents", ("p1", None, "name")),
    ],
)
def test_a_cursor_fits_only_where_it_was_made(other: Binding) -> None:
    with pytest.raises(InvalidRequest):
        other.decode(BINDING.encode(Position("x", new_uuid())))


@given(st.binary(max_size=200))
def test_damaged_cursors_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        BINDING.decode(base64.urlsafe_b64encode(raw).decode())


@pytest.mark.parametrize("text", ["", "!", "a" * MAX_LENGTH, "\u00fc", "e30=", "bnVsbA"])
def test_texts_that_are_no_cursor(text: str) -> None:
    with pytest.raises(InvalidRequest):
        BINDING.decode(text)


@pytest.mark.parametrize("key", ["yesterday", "2026-01-01T00:00:00", "9" * 40])
def test_a_key_that_is_no_time(key: str) -> None:
    with pytest.raises(InvalidRequest):
        _ = Position(key, new_uuid()).time


# --- bodies -----------------------------------------------------------------------------------------------


class Sample(msgspec.Struct, forbid_unknown_fields=True):
    text: str


@given(st.text())
def test_every_honest_text_survives_decoding(text: str) -> None:
    clean = text.encode("utf-8", "replace").decode()
    for raw in (msgspec.json.encode({"text": clean}), json.dumps({"text": clean}).encode()):
        assert body.decode(raw, msgspec.json.Decoder(Sample)).text == clean


@given(st.binary(max_size=300))
def test_any_bytes_give_a_value_or_a_4xx(raw: bytes) -> None:
    with contextlib.suppress(ValidationFailed):
        body.decode(raw, msgspec.json.Decoder(Sample))


@given(st.text(alphabet='\\u"dD8cCfF0aA9', max_size=40))
def test_any_mess_of_escapes_gives_a_value_or_a_4xx(mess: str) -> None:
    raw = b'{"text":"' + mess.encode() + b'"}'
    try:
        found = body.decode(raw, msgspec.json.Decoder(Sample)).text
    except ValidationFailed:
        return
    found.encode()


def test_depth() -> None:
    deep: object = 1
    for _ in range(99):
        deep = [deep]
    body.check_depth(deep)
    with pytest.raises(ValidationFailed):
        body.check_depth({"a": [deep]})
    body.check_depth([[1, 2, {"a": None}]] * 10_000)


# --- numbering of deltas ----------------------------------------------------------------------------------


def run(first: int, last: int | None = None, *, call: str = "mcc_1") -> Delta:
    last = first if last is None else last
    return Delta("trn_1", call, first, last, last - first + 1, "text_delta", 0, "x")


def numbers(previews: Previews, *runs: Delta) -> list[tuple[int, int, int]]:
    found = []
    for delta in runs:
        data = msgspec.json.decode(previews.frame(delta).split(b"data: ", 1)[1])
        found.append((data["seq"], data["source_seq_start"], data["source_seq_end"]))
        assert data["coalesced_count"] == data["source_seq_end"] - data["source_seq_start"] + 1
    return found


def test_merged_runs_take_one_number() -> None:
    assert numbers(Previews(), run(1), run(2, 5), run(6), run(7, 8), run(9)) == [
        (1, 1, 1),
        (2, 2, 5),
        (3, 6, 6),
        (4, 7, 8),
        (5, 9, 9),
    ]


def test_lost_deltas_leave_a_gap_and_late_readers_start_above_one() -> None:
    assert [seq for seq, _, _ in numbers(Previews(), run(1), run(2, 3), run(6), run(7))] == [1, 2, 5, 6]
    assert [seq for seq, _, _ in numbers(Previews(), run(50), run(51, 52), run(53))] == [50, 51, 52]


def test_each_call_is_numbered_by_itself_and_over_when_its_output_was_sent() -> None:
    previews = Previews()
    assert [seq for seq, _, _ in numbers(previews, run(1, 4), run(1, call="mcc_2"), run(2, call="mcc_2"))] == [1, 1, 2]
    previews.output_sent("mcc_2")
    assert previews.frame(run(3, call="mcc_2")) == b""
    assert previews.frame(run(1, call="mcc_3")) != b""


def test_readers_of_the_same_delta_share_its_bytes() -> None:
    delta = Delta.of(ModelDelta("trn_1", "mcc_1", 1, TextDelta(0, "hi")))
    one, other = Previews().frame(delta), Previews().frame(delta)
    assert one is other
    assert one == (
        b'event: model_output_delta\ndata: {"turn_id":"trn_1","model_call_context_id":"mcc_1","seq":1,'
        b'"source_seq_start":1,"source_seq_end":1,"coalesced_count":1,'
        b'"event":{"kind":"text_delta","block_index":0,"delta":"hi"}}\n\n'
    )


# --- frames and events ------------------------------------------------------------------------------------

OWNER = Owner.of(new_uuid(), new_uuid(), new_uuid())


def test_content_cannot_forge_a_frame() -> None:
    evil = "\r\n\r\nid: 999\nevent: x\ndata: y\u2028"
    frame = frames.error("internal_error", evil)
    assert frame.count(b"\n\n") == 1
    payload = ModelOutputPayload("mcc_1", "end_turn", [TextBlock(evil)])
    event = Event(1, new_uuid(), "model_output", new_uuid(), 1, False, payload, EventMeta(), None, datetime.now(UTC))
    frame = frames.durable(1, "model_output", live_event(OWNER, event))
    assert frame.count(b"\n") == 4
    assert b"\r" not in frame


def row(kind: str, payload: str) -> EventRow:
    return EventRow(7, new_uuid(), kind, new_uuid(), 3, False, payload, datetime(2026, 1, 1, 0, 0, 0, 5, tzinfo=UTC))


def test_stored_and_live_events_have_the_same_text() -> None:
    payload = ModelOutputPayload(
        "mcc_1", "tool_use", [TextBlock("\u00fc\n"), ToolCallBlock("tcl_1", "custom", "t", {"a": [1, 2.5, None]})]
    )
    stored = row("model_output", encode_payload(payload))
    event = Event(7, stored.id, "model_output", stored.turn_id, 3, False, payload, EventMeta(), None, stored.created_at)
    assert stored_event(OWNER, stored) == ("model_output", live_event(OWNER, event))
    shown = msgspec.json.decode(live_event(OWNER, event))
    assert shown["content_blocks"][1]["input"] == {"a": [1, 2.5, None]}
    assert shown["created_at"] == "2026-01-01T00:00:00.000005Z"


@pytest.mark.parametrize("payload", ["", "x", "{}", "[]", "null", '{"model_call_context_id":"mcc_1"}', '{"a":1}'])
@pytest.mark.parametrize("kind", ["model_output", "agent_input", "tool_result", "context_checkpoint", "surprise"])
def test_damaged_rows_are_shown_as_errors(kind: str, payload: str) -> None:
    shown_as, text = stored_event(OWNER, row(kind, payload))
    shown = msgspec.json.decode(text)
    assert shown_as == shown["event_kind"] == "model_output"
    assert (shown["stop_reason"], shown["content_blocks"][0]["text"]) == ("error", DAMAGED_TEXT)
    assert shown["sequence"] == 7


def test_timestamps_are_utc() -> None:
    east = timezone(timedelta(hours=3))
    assert timestamp(datetime(2026, 1, 1, 3, 0, tzinfo=east)) == "2026-01-01T00:00:00Z"


# --- who is calling ---------------------------------------------------------------------------------------

TOKEN = "omnara_pat_v1_0000000000000000000000000000000000000000000_3ovNGW"


class Request:
    def __init__(self, *values: str) -> None:
        self.headers = self
        self.values_ = list(values)

    def getall(self, _name: str, _default: list[str]) -> list[str]:
        return self.values_


def caller() -> Principal:
    return Principal(
        kind=PrincipalKind.USER,
        credential=Credential.PERSONAL_TOKEN,
        id=new_uuid(),
        org_roles={},
        project_grants={},
    )


async def test_a_burst_with_one_key_asks_once_and_a_second_later_again() -> None:
    asked: list[str] = []
    known: list[Principal] = [caller()]

    async def load(header: str) -> Principal:
        asked.append(header)
        await asyncio.sleep(0.01)
        if not known:
            raise Unauthorized
        return known[0]

    authenticator = Authenticator(load, ttl_s=0.05)
    request: object = Request(f"Bearer {TOKEN}")
    found = await asyncio.gather(*(authenticator.principal(request) for _ in range(100)))  # type: ignore[arg-type]
    assert set(map(id, found)) == {id(known[0])}
    assert len(asked) == 1
    known.clear()
    await asyncio.sleep(0.06)
    with pytest.raises(Unauthorized):
        await authenticator.principal(request)  # type: ignore[arg-type]
    with pytest.raises(Unauthorized):
        await authenticator.principal(request)  # type: ignore[arg-type]
    assert len(asked) == 3, "a refusal is not remembered"


async def test_a_malformed_key_never_reaches_the_database() -> None:
    async def load(_header: str) -> Principal:
        raise AssertionError("asked")

    for values in ([], ["Bearer x"], [f"Bearer {TOKEN}", f"Bearer {TOKEN}"], [f"bearer {TOKEN}"]):
        with pytest.raises(Unauthorized):
            await Authenticator(load).principal(Request(*values))  # type: ignore[arg-type]
