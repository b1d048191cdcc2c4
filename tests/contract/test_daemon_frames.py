"""The daemon's wire protocol against frames written down by hand: what others send is what we read and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omnara.machines import wire

VECTORS = Path(__file__).parent / "daemon_frames"


def _vectors(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text())


@pytest.mark.parametrize("frame", _vectors("from_daemon"), ids=lambda frame: frame["type"])
def test_what_a_daemon_sends_survives_reading_and_writing(frame: dict[str, Any]) -> None:
    value = wire.decode_from_daemon(json.dumps(frame))
    assert not isinstance(value, wire.Unknown)
    assert json.loads(wire.encode(value)) == frame
    assert wire.decode_from_daemon(wire.encode(value)) == value


@pytest.mark.parametrize("frame", _vectors("from_server"), ids=lambda frame: frame["type"])
def test_what_a_server_sends_survives_reading_and_writing(frame: dict[str, Any]) -> None:
    value = wire.decode_from_server(json.dumps(frame))
    assert not isinstance(value, wire.Unknown)
    assert json.loads(wire.encode(value)) == frame
    assert wire.encode(wire.decode_from_server(wire.encode(value))) == wire.encode(value)


@pytest.mark.parametrize("frame", _vectors("from_daemon") + _vectors("from_server"), ids=lambda frame: frame["type"])
def test_fields_that_nobody_knows_are_ignored(frame: dict[str, Any]) -> None:
    decode = wire.decode_from_daemon if frame in _vectors("from_daemon") else wire.decode_from_server
    newer = {**frame, "trace": 1, "payload": {**frame["payload"], "newer": {"a": None}}}
    assert wire.encode(decode(json.dumps(newer))) == wire.encode(decode(json.dumps(frame)))


@pytest.mark.parametrize("name", sorted(_vectors("bodies")))
def test_the_bodies_of_a_registration_survive_reading_and_writing(name: str) -> None:
    kind = getattr(wire, name)
    for body in _vectors("bodies")[name]:
        value = msgspec.json.decode(json.dumps(body), type=kind)
        assert json.loads(msgspec.json.encode(value)) == body


def test_every_frame_of_both_directions_has_a_vector() -> None:
    assert {frame["type"] for frame in _vectors("from_daemon")} == set(wire._FROM_DAEMON)
    assert {frame["type"] for frame in _vectors("from_server")} == set(wire._FROM_SERVER)


def test_an_unknown_type_is_a_value() -> None:
    assert wire.decode_from_server(b'{"type":"newer","payload":{}}') == wire.Unknown("newer")
    assert wire.decode_from_daemon(b'{"type":"newer","payload":{}}') == wire.Unknown("newer")
    # A server answers this with an error and goes on.
    assert wire.decode_from_daemon(b'{"type":"heartbeat_ack","payload":{}}') == wire.Unknown("heartbeat_ack")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"type":"heartbeat_ack"}',
        b'{"payload":{}}',
        b'{"type":1,"payload":{}}',
        b'{"type":"newer","payload":null}',
        b'{"type":"heartbeat_ack","payload":null}',
        b'{"type":"heartbeat_ack","payload":[]}',
        b'{"type":"heartbeat_ack","payload":{}}',
        b'{"type":"heartbeat_ack","payload":{"next_heartbeat_after_ms":0}}',
        b'{"type":"heartbeat_ack","payload":{"next_heartbeat_after_ms":1}} {}',
        b'{"type":"process_offer","payload":{"process_id":"prc_\xff"}}',
        b'{"type":"action_offer","payload":{"process_id":"p","process_action_id":"a","action_kind":"read","seq":0}}',
        b'{"type":"report","payload":{"report_id":"r","event":{"type":"process_finished"}}}',
        b'{"type":"heartbeat","payload":{"daemon_instance_id":"5b0c1f7e-2d0a-4c6e-9f5b-0c1d2e3f4a5b"}}',
        b'{"type":"newer","payload":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    ],
)
def test_a_malformed_frame_is_refused(data: bytes) -> None:
    with pytest.raises(wire.FrameError):
        wire.decode_from_server(data)


def test_the_text_of_a_refusal_repeats_nothing() -> None:
    with pytest.raises(wire.FrameError) as refused:
        wire.decode_from_server(b'{"type":"process_offer","payload":{"process_id":"p","env":{"KEY":["hunter2"]}}}')
    assert "hunter2" not in str(refused.value)


def test_a_frame_has_at_most_a_mebibyte() -> None:
    offer = wire.ProcessOffer(process_id="prc_a", command="x" * (wire.MAX_FRAME_BYTES - 200))
    assert wire.decode_from_server(wire.encode(offer)) == offer
    larger = wire.ProcessOffer(process_id="prc_a", command="x" * wire.MAX_FRAME_BYTES)
    with pytest.raises(wire.FrameError):
        wire.encode(larger)
    with pytest.raises(wire.FrameError):
        wire.decode_from_server(json.dumps({"type": "newer", "payload": {"command": larger.command}}))
    # Counted in bytes, not characters.
    with pytest.raises(wire.FrameError):
        wire.decode_from_server('{"type":"newer","payload":{"a":"' + "ä" * 600_000 + '"}}')


def test_an_offer_that_could_not_be_prepared_has_nothing_else() -> None:
    offer = wire.decode_from_server(
        b'{"type":"process_offer","payload":{"process_id":"prc_a","preparation_error":"too large","io_mode":"",'
        b'"command":"","shell_selector":"","cwd":"","timeout_seconds":0}}'
    )
    assert offer == wire.ProcessOffer(process_id="prc_a", preparation_error="too large")


ENCODED = (VECTORS / "encoded.jsonl").read_bytes().splitlines(keepends=True)
"""Frames byte for byte as a peer's encoder writes them, which is not how `json` does: order, escapes, line's end."""


def _encoded_events() -> list[Any]:
    frames = [wire.decode_from_daemon(line) for line in ENCODED]
    return [frame.event for frame in frames if isinstance(frame, wire.Report)]


def test_frames_are_read_as_others_encode_them() -> None:
    frames = [wire.decode_from_daemon(line) for line in ENCODED]
    assert [type(frame).__name__ for frame in frames[:4]] == ["Heartbeat", "Heartbeat", "ProcessAccept", "ActionAccept"]
    assert [type(event).__name__ for event in _encoded_events()] == (
        ["ProcessStarted"] + ["ProcessFinished"] * 8 + ["ActionApplied"] * 3 + ["ActionFailed", "ActionUnknown"]
    )
    assert frames == [wire.decode_from_daemon(line.decode()) for line in ENCODED], "text or bytes"


def test_what_others_encode_means_the_same_here() -> None:
    started, exited, *others = _encoded_events()
    assert wire.moment(started.started_at) == wire.moment("2026-08-01T10:00:00.106511Z")
    assert wire.moment(started.observed_at) == wire.moment("2026-08-01T10:00:01.606511Z"), "told in another zone"
    assert (exited.exit_code, exited.observed_at) == (0, None)
    assert exited.result.output == 'a\ufffd?\0<&>\u2028"\\\U0001f600\n'
    ends = [
        (end.state, end.exit_code, end.exit_signal, end.state_reason_code, end.ended_at is None) for end in others[:7]
    ]
    assert ends == [
        ("failed", 1, "", "nonzero_exit", False),
        ("failed", -1, "killed", "signal", False),
        ("failed", 0xC0000005, "", "nonzero_exit", False),
        ("killed", None, "killed", "terminate_requested", False),
        ("failed", None, "", "start_failed", True),
        ("unknown", None, "", "local_process_unrecoverable", True),
        ("failed", None, "", wire.STORAGE_EXHAUSTED, True),
    ]
    assert others[5].result.next_cursor == 2**63 - 1
    assert (others[6].result, others[6].state_reason_message) == (None, wire.STORAGE_EXHAUSTED_MESSAGE)


def _finished(**times: str) -> Any:
    event = {"type": "process_finished", "process_id": "prc_a", "state": "unknown", **times}
    frame = wire.decode_from_daemon(json.dumps({"type": "report", "payload": {"report_id": "r", "event": event}}))
    assert isinstance(frame, wire.Report)
    return frame.event


def test_the_first_moment_of_year_one_is_a_missing_time() -> None:
    absent = "0001-01-01T00:00:00Z"
    assert _finished(started_at=absent, ended_at=absent, observed_at=absent) == _finished()
    assert wire.moment(absent) is None
    assert wire.moment("") is None
    assert wire.moment("0001-01-01T00:00:00-08:00") is None


def test_fractions_of_nine_digits_are_cut_to_microseconds() -> None:
    event = _finished(started_at="2026-08-01T10:00:00.123456999Z")
    assert wire.moment(event.started_at) == wire.moment("2026-08-01T10:00:00.123456Z")
    assert wire.moment("2026-08-01T12:00:00.1+02:00") == wire.moment("2026-08-01T10:00:00.1Z")


@pytest.mark.parametrize(
    "text", ["yesterday", "2026-08-01", "2026-13-01T00:00:00Z", "2026-02-30T00:00:00Z", "9999-12-31T23:59:59-23:00"]
)
def test_what_is_no_time_makes_the_frame_malformed(text: str) -> None:
    with pytest.raises(wire.FrameError):
        _finished(started_at=text)


@pytest.mark.parametrize(
    "event",
    [b'{"type":"newer"}', b'{"type":"process_finished","process_id":"p","state":"queued"}', b"{}", b"null"],
)
def test_an_event_that_cannot_be_leaves_a_report_that_can_be_answered(event: bytes) -> None:
    frame = wire.decode_from_daemon(b'{"type":"report","payload":{"report_id":"r","event":' + event + b"}}")
    assert frame == wire.UnfitReport("r")


@pytest.mark.parametrize(
    "event", [b'{"type":1}', b"[]", b'{"exit_code":1.5}', b'{"state":"queued","ended_at":"now"}', b'{"process_id":{}}']
)
def test_a_report_that_is_malformed_is_refused(event: bytes) -> None:
    with pytest.raises(wire.FrameError):
        wire.decode_from_daemon(b'{"type":"report","payload":{"report_id":"r","event":' + event + b"}}")


def test_a_reads_payload_is_strict() -> None:
    assert wire.read_payload(msgspec.Raw(b"{}")) == wire.ReadPayload(max_bytes=8192)
    for wrong in (b'{"cursor":null}', b'{"other":1}', b'{"max_bytes":65537}', b'{"wait_ms":10001}', b"[]", b"null"):
        with pytest.raises(wire.FrameError):
            wire.read_payload(msgspec.Raw(wrong))


def test_a_writes_payload_is_strict() -> None:
    assert wire.write_payload(msgspec.Raw(b'{"close_stdin":true}')) == wire.WritePayload(close_stdin=True)
    too_much = json.dumps({"data": "ä" * 65_537}).encode()
    for wrong in (b"{}", b'{"data":""}', b'{"data":"a","b":1}', too_much):
        with pytest.raises(wire.FrameError):
            wire.write_payload(msgspec.Raw(wrong))
