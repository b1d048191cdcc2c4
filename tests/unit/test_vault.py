"""The vault: sealing, the ring's check value, and nothing that prints a secret."""

from __future__ import annotations

import base64
import copy
import html
import pickle
from collections.abc import Callable
from urllib.parse import quote
from uuid import UUID

import msgspec
import pytest

from omnara.errors import ConfigurationError
from omnara.vault import (
    InvalidKeyRing,
    KeyRing,
    Sealed,
    Secret,
    SecretUnreadable,
    WrongKeyRing,
    check_value,
    generate_ring,
    open_sealed,
    parse_ring,
    redact,
    reseal,
    seal,
    secret_aad,
    verify_check_value,
)

K1 = base64.b64encode(bytes(range(32))).decode()
K2 = base64.b64encode(bytes(range(32, 64))).decode()
AAD = secret_aad(UUID(int=7), 3)
PLAINTEXT = b"sk-ant-very-secret"


def test_sealed_secrets_open_and_hide_the_plaintext() -> None:
    ring = generate_ring()
    sealed = seal(ring, PLAINTEXT, AAD)
    assert open_sealed(ring, sealed, AAD) == PLAINTEXT
    assert PLAINTEXT not in sealed.ciphertext + sealed.wrapped_key
    assert len(sealed.wrapped_key) == 12 + 32 + 16
    assert len(sealed.nonce) == 12


def test_each_sealing_has_its_own_key_and_nonce() -> None:
    ring = generate_ring()
    first, second = seal(ring, PLAINTEXT, AAD), seal(ring, PLAINTEXT, AAD)
    assert first.wrapped_key != second.wrapped_key
    assert first.nonce != second.nonce
    assert first.ciphertext != second.ciphertext


def test_empty_and_large_values() -> None:
    ring = generate_ring()
    for value in (b"", b"x" * 1_000_000):
        assert open_sealed(ring, seal(ring, value, AAD), AAD) == value


def flip(value: bytes) -> bytes:
    return bytes([value[0] ^ 1]) + value[1:]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: msgspec.structs.replace(s, wrapped_key=flip(s.wrapped_key)),
        lambda s: msgspec.structs.replace(s, wrapped_key=s.wrapped_key[:5]),
        lambda s: msgspec.structs.replace(s, wrapped_key=b""),
        lambda s: msgspec.structs.replace(s, nonce=flip(s.nonce)),
        lambda s: msgspec.structs.replace(s, nonce=b""),
        lambda s: msgspec.structs.replace(s, ciphertext=flip(s.ciphertext)),
        lambda s: msgspec.structs.replace(s, ciphertext=b""),
        lambda s: msgspec.structs.replace(s, key_id="k9"),
    ],
)
def test_any_change_is_noticed(change: Callable[[Sealed], Sealed]) -> None:
    ring = generate_ring()
    with pytest.raises(SecretUnreadable) as caught:
        open_sealed(ring, change(seal(ring, PLAINTEXT, AAD)), AAD)
    assert "very-secret" not in str(caught.value)


@pytest.mark.parametrize("aad", [secret_aad(UUID(int=7), 4), secret_aad(UUID(int=8), 3), b""])
def test_a_sealed_value_belongs_to_one_version_of_one_secret(aad: bytes) -> None:
    ring = generate_ring()
    with pytest.raises(SecretUnreadable):
        open_sealed(ring, seal(ring, PLAINTEXT, AAD), aad)


def test_a_data_key_cannot_be_moved_between_ring_keys() -> None:
    ring = parse_ring(f"a:{K1},b:{K1}", "a")
    sealed = msgspec.structs.replace(seal(ring, PLAINTEXT, AAD), key_id="b")
    with pytest.raises(SecretUnreadable):
        open_sealed(ring, sealed, AAD)


def test_rotation_rewraps_the_key_and_keeps_the_ciphertext() -> None:
    old = parse_ring(f"k1:{K1}")
    both = parse_ring(f"k1:{K1},k2:{K2}", "k2")
    sealed = seal(old, PLAINTEXT, AAD)
    moved = reseal(both, sealed, AAD)
    assert moved.key_id == "k2"
    assert moved.ciphertext == sealed.ciphertext
    assert reseal(both, moved, AAD) is moved
    assert open_sealed(parse_ring(f"k2:{K2}"), moved, AAD) == PLAINTEXT
    with pytest.raises(SecretUnreadable, match="lacks the key 'k1'"):
        open_sealed(parse_ring(f"k2:{K2}"), sealed, AAD)


def test_rings_are_parsed_and_written() -> None:
    ring = parse_ring(f" k1:{K1} , k2:{K2} ", "k2")
    assert ring.keys == {"k1": bytes(range(32)), "k2": bytes(range(32, 64))}
    assert parse_ring(ring.serialise(), "k2") == ring
    url_safe = base64.urlsafe_b64encode(b"\xfb\xff" * 16).decode().rstrip("=")
    assert parse_ring(f"x:{url_safe}").keys["x"] == b"\xfb\xff" * 16
    made = generate_ring()
    assert parse_ring(made.serialise(), made.active) == made
    assert generate_ring().keys != made.keys


@pytest.mark.parametrize(
    ("text", "active", "reason"),
    [
        ("", None, "entry 1 is not"),
        (K1, None, "entry 1 is not"),
        (f"k1:{K1},", "k1", "entry 2 is not"),
        (f"k 1:{K1}", None, "entry 1 is not"),
        (f"k1:{K1},k1:{K2}", "k1", "repeats"),
        ("k1:", None, "32 bytes"),
        ("k1:AAAA", None, "32 bytes"),
        (f"k1:{K1}AAAA", None, "32 bytes"),
        (f"k1:{K1[:-2]}!=", None, "32 bytes"),
        (f"k1:{K1}é", None, "32 bytes"),
        (f"k1:{K1},k2:{K2}", None, "active"),
        (f"k1:{K1}", "k2", "active"),
    ],
)
def test_unusable_rings_are_refused_without_showing_keys(text: str, active: str | None, reason: str) -> None:
    with pytest.raises(InvalidKeyRing, match=reason) as caught:
        parse_ring(text, active)
    assert K1[:8] not in str(caught.value)
    assert caught.value.__cause__ is None
    assert isinstance(caught.value, ConfigurationError)


def test_a_ring_shows_only_ids() -> None:
    ring = parse_ring(f"k1:{K1}")
    assert repr(ring) == "KeyRing(ids=['k1'], active='k1')"
    assert "ciphertext" not in repr(seal(ring, PLAINTEXT, AAD))
    with pytest.raises(InvalidKeyRing, match="31 bytes"):
        KeyRing({"k1": b"x" * 31}, "k1")
    with pytest.raises(InvalidKeyRing, match="key ids"):
        KeyRing({"": b"x" * 32}, "")


def test_the_check_value_accepts_the_ring_and_refuses_others() -> None:
    ring = parse_ring(f"k1:{K1}")
    stored = check_value(ring)
    assert verify_check_value(stored, ring) == stored
    with pytest.raises(WrongKeyRing, match="'k1' is not the key"):
        verify_check_value(stored, parse_ring(f"k1:{K2}"))
    with pytest.raises(WrongKeyRing, match="lacks the key 'k1'"):
        verify_check_value(stored, parse_ring(f"k2:{K1}"))
    assert K1 not in stored
    assert bytes(range(32)).hex() not in stored


def test_the_check_value_grows_with_the_ring_and_then_guards_the_new_key_too() -> None:
    stored = check_value(parse_ring(f"k1:{K1}"))
    both = parse_ring(f"k1:{K1},k2:{K2}", "k2")
    grown = verify_check_value(stored, both)
    assert grown == check_value(both) != stored
    with pytest.raises(WrongKeyRing, match="'k2' is not the key"):
        verify_check_value(grown, parse_ring(f"k1:{K1},k2:{K1}", "k2"))


@pytest.mark.parametrize("stored", ["", "v2 k1=00", "v1", "v1 k1", "nonsense"])
def test_an_unreadable_check_value_refuses_the_start(stored: str) -> None:
    with pytest.raises(WrongKeyRing, match="not readable"):
        verify_check_value(stored, parse_ring(f"k1:{K1}"))


def test_a_secret_never_prints_formats_or_pickles_its_value() -> None:
    secret = Secret("hunter2-hunter2")
    assert secret.reveal() == "hunter2-hunter2"
    shown = [repr(secret), str(secret), f"{secret}", f"{secret:>20}", f"{secret!r}", repr({"key": secret})]
    assert not any("hunter" in text for text in shown)
    for attempt in (pickle.dumps, copy.copy, msgspec.json.encode):
        with pytest.raises(TypeError) as caught:
            attempt(secret)
        assert "hunter" not in str(caught.value)


def test_secrets_compare_by_value() -> None:
    assert Secret("a") == Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a"), Secret("b")}) == 2
    assert Secret("\ud800") == Secret("\ud800")
    assert not Secret("")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key s3cr/et+1 end", "key [redacted] end"),
        ("https://x/?k=s3cr%2Fet%2B1", "https://x/?k=[redacted]"),
        ("czNjci9ldCsx", "[redacted]"),
        ("nothing", "nothing"),
    ],
)
def test_redaction_finds_the_usual_disguises(text: str, expected: str) -> None:
    assert redact(text, [Secret("s3cr/et+1")]) == expected


PEM = "-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END KEY-----\n"
AWKWARD = 'it\'s 7% <of> "it" / more'


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        (PEM, PEM.replace("\n", "\r\n")),
        (PEM, "sh: 2: MIIEvQIBADANBgkq: not found"),
        (PEM, "  hkiG9w0BAQEFAASC  "),
        (AWKWARD, "export X='" + AWKWARD.replace("'", "'\\''") + "'"),
        (AWKWARD, "export X='" + AWKWARD.replace("'", "'\"'\"'") + "'"),
        (AWKWARD, repr(AWKWARD)),
        (AWKWARD, html.escape(AWKWARD)),
        (AWKWARD, quote(AWKWARD)),
        (AWKWARD, AWKWARD.encode().hex()),
        *[
            (value, base64.b64encode(before + value.encode() + after).decode())
            for value in ("s3cr/et+1", "s3cr/et+12", "s3cr/et+123")
            for before in (b"", b"u:", b"me:", b"you:")
            for after in (b"", b"\n", b"\r\n")
        ],
    ],
)
def test_redaction_finds_what_programs_make_of_a_value(secret: str, text: str) -> None:
    found = redact(text, [secret])
    assert "[redacted]" in found
    left = found.replace("[redacted]", "")
    for line in secret.splitlines():
        encoded = base64.b64encode(line.encode()).decode().rstrip("=")
        for size in range(8, len(line) + 1):
            assert line[-size:] not in left
            assert line[:size] not in left
        assert encoded[: len(encoded) // 2] not in left


def test_redaction_takes_the_longest_first_and_leaves_short_values() -> None:
    assert redact("abcdefgh abcd abc", [Secret("abcd"), "abcdefgh", Secret("abc"), Secret("")]) == (
        "[redacted] [redacted] abc"
    )
    assert redact('{"p":"quo\\"te"}', [Secret('quo"te')]) == '{"p":"[redacted]"}'
