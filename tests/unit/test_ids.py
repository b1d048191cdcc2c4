"""Public ids and UUIDv7: the values of the contract, and what must be refused."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise
from uuid import UUID

import pytest

from omnara import ids
from omnara.ids import IdKind, InvalidPublicId, decode, decode_any, encode, new_uuid, uuid_time_ms

AGENT = UUID("019535d9-3df7-79fb-b466-fa907fa17f9e")
AGENT_TEXT = "agt_agktlwj56547xndg7kih7il7ty"


def test_the_vector_of_the_contract() -> None:
    assert encode(IdKind.AGENT, AGENT) == AGENT_TEXT
    assert decode(IdKind.AGENT, AGENT_TEXT) == AGENT
    assert decode_any(AGENT_TEXT) == (IdKind.AGENT, AGENT)


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (UUID(int=1), "aaaaaaaaaaaaaaaaaaaaaaaaae"),
        (UUID(int=(1 << 128) - 1), "77777777777777777777777774"),
        (UUID(int=1 << 127), "qaaaaaaaaaaaaaaaaaaaaaaaaa"),
        (UUID(int=1 << 58), "aaaaaaaaaaaaabaaaaaaaaaaaa"),
    ],
)
def test_edges_of_the_encoding(value: UUID, body: str) -> None:
    assert encode(IdKind.EVENT, value) == f"evt_{body}"
    assert decode(IdKind.EVENT, f"evt_{body}") == value


def test_every_prefix_of_the_contract_exists_once() -> None:
    prefixes = (
        "org usr proj actr agt acfg aprf cron ain amb trn evt int mcc "
        "ccp tcl art mpc mdl mrev pmog sec sgr skl skr skg mpo mch "
        "mdt drt pmg pmpg prc pac pat oak oinv iin itgt moaf ioaf inst"
    )
    assert sorted(kind.value for kind in IdKind) == sorted(prefixes.split())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "starts with agt_"),
        ("agt", "starts with agt_"),
        ("agt-agktlwj56547xndg7kih7il7ty", "starts with agt_"),
        ("evt_agktlwj56547xndg7kih7il7ty", "starts with agt_"),
        ("AGT_agktlwj56547xndg7kih7il7ty", "starts with agt_"),
        ("agt_", "26 characters"),
        ("agt_agktlwj56547xndg7kih7il7t", "26 characters"),
        ("agt_agktlwj56547xndg7kih7il7tya", "26 characters"),
        ("agt_agktlwj56547xndg7kih7il7ty\n", "26 characters"),
        ("agt_AGKTLWJ56547XNDG7KIH7IL7TY", "26 characters"),
        ("agt_agktlwj56547xndg7kih7il7t1", "26 characters"),
        ("agt_agktlwj5_6547xndg7kih7il7t", "26 characters"),
        ("agt_ agktlwj56547xndg7kih7il7t", "26 characters"),
        ("agt_+gktlwj56547xndg7kih7il7ty", "26 characters"),
        ("agt_agktlwj56547xndg7kih7il7tz", "padding"),
        ("agt_agktlwj56547xndg7kih7il7t3", "padding"),
        ("agt_aaaaaaaaaaaaaaaaaaaaaaaaaa", "zero"),
        ("agt_aaaaaaaaaaaaaaaaaaaaaaaaab", "padding"),
    ],
)
def test_malformed_ids_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidPublicId, match=reason) as caught:
        decode(IdKind.AGENT, text)
    assert len(text) < 5 or text not in str(caught.value)


def test_unknown_prefixes_and_the_zero_uuid() -> None:
    with pytest.raises(InvalidPublicId, match="prefix"):
        decode_any("nope_agktlwj56547xndg7kih7il7ty")
    with pytest.raises(ValueError, match="zero"):
        encode(IdKind.AGENT, UUID(int=0))
    assert issubclass(InvalidPublicId, ValueError)


def test_new_uuids_are_version_7_and_carry_the_time() -> None:
    before = time.time_ns() // 1_000_000
    value = new_uuid()
    assert value.version == 7
    assert value.variant == "specified in RFC 4122"
    # The generator may run ahead of the clock only when 2**73 values of one millisecond are used up.
    assert before <= uuid_time_ms(value) <= time.time_ns() // 1_000_000
    with pytest.raises(ValueError, match="version 7"):
        uuid_time_ms(UUID("f47ac10b-58cc-4372-a567-0e02b2c3d479"))


def test_new_uuids_grow_even_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first = new_uuid()
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    later = [new_uuid() for _ in range(5000)]
    assert all(a < b for a, b in pairwise([first, *later]))


def test_exhausted_randomness_moves_to_the_next_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = ids._Generator()
    monkeypatch.setattr(time, "time_ns", lambda: 5_000_000_000)
    generator.next()
    generator._last_random = ids._RANDOM_MASK
    assert uuid_time_ms(generator.next()) == 5001


def test_threads_never_get_the_same_uuid() -> None:
    results: list[list[UUID]] = [[] for _ in range(4)]

    def fill(into: list[UUID]) -> None:
        into.extend(new_uuid() for _ in range(2000))

    threads = [threading.Thread(target=fill, args=(into,)) for into in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [value for part in results for value in part]
    assert len(set(everything)) == 8000
    assert all(part == sorted(part) for part in results)


def test_a_fresh_generator_refills_its_pool_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = ids._Generator()
    generator.next()
    calls = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda count: calls.append(count) or real(count))
    generator.next()
    assert calls == []
    generator.reset_after_fork()
    generator.next()
    assert calls == [4096]
