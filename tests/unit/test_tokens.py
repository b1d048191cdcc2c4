"""Bearer tokens against the published vectors, and what is refused before any query."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omnara.access import tokens
from omnara.access.tokens import InvalidToken, TokenKind

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "contract" / "bearer-token-v1.json").read_text(encoding="utf-8")
)
PAT = "omnara_pat_v1_" + "0" * 43 + "_3ovNGW"


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: f"{v['kind']}-{v['secret'][:3]}")
def test_vectors(vector: dict[str, str]) -> None:
    token = tokens.format_token(TokenKind(vector["kind"]), vector["secret"])
    assert token.text == vector["token"]
    assert tokens.parse(vector["token"]).kind == vector["kind"]


@pytest.mark.parametrize("vector", VECTORS["checksum_encoding_vectors"], ids=lambda v: v["encoded"])
def test_checksum_vectors(vector: dict[str, Any]) -> None:
    assert tokens.encode_checksum(vector["value"]) == vector["encoded"]


def test_the_vectors_agree_with_the_constants() -> None:
    assert VECTORS["secret_length"] == tokens.SECRET_LENGTH
    assert VECTORS["checksum_length"] == tokens.CHECKSUM_LENGTH
    assert {v["kind"] for v in VECTORS["vectors"]} == {kind.value for kind in TokenKind}


@pytest.mark.parametrize("value", [-1, 1 << 32])
def test_only_32_bits_have_a_checksum_text(value: int) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        tokens.encode_checksum(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "kind"),
        ("omnara_", "kind"),
        ("omnara_root_v1_" + "0" * 43 + "_000000", "kind"),
        (PAT.replace("_v1_", "_v2_"), "kind"),
        (PAT.upper(), "kind"),
        (" " + PAT, "kind"),
        (PAT + " ", "length"),
        (PAT[:-1], "length"),
        (PAT.replace("_3", "-3"), "characters"),
        (PAT.replace("00", "é0", 1), "characters"),
        (PAT.replace("00", "_0", 1), "characters"),
        (PAT.replace("3ovNGW", "3ovNGw"), "checksum"),
        (PAT.replace("00", "10", 1), "checksum"),
        (PAT.replace("pat", "org"), "checksum"),
        (PAT[:-6] + "３ovNGW"[:6], "checksum"),
    ],
)
def test_malformed_tokens_are_refused_without_being_repeated(text: str, reason: str) -> None:
    with pytest.raises(InvalidToken, match=reason) as caught:
        tokens.parse(text)
    assert "0000" not in str(caught.value)


def test_generated_tokens_are_valid_and_different() -> None:
    made = {tokens.generate(kind).text for kind in TokenKind for _ in range(50)}
    assert len(made) == 150
    for text in made:
        assert tokens.parse(text).text == text


def test_only_the_hash_of_the_full_text_is_meant_for_storage() -> None:
    token = tokens.parse(PAT)
    assert token.hash == "2c57077fd7a98b0677f3c274c6b511cae1234b4f0b8c3101e690e6f109a984ee"
    assert token.hash == tokens.hash_token(PAT) != tokens.hash_token(PAT[:-7])


def test_a_token_does_not_print_itself() -> None:
    token = tokens.parse(PAT)
    assert "000" not in repr(token)
    assert "000" not in f"{token}"


def test_token_ids_are_ten_independent_bytes() -> None:
    first, second = tokens.new_token_id(), tokens.new_token_id()
    assert first != second
    assert len(bytes.fromhex(first)) == 10


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("bearer x", None),
        ("BEARER x", None),
        ("Basic x", None),
        ("Bearer x", "x"),
        ("Bearer  x", " x"),
        ("Bearer ", ""),
        (" Bearer x", None),
    ],
)
def test_the_header_prefix_is_exact(header: str | None, expected: str | None) -> None:
    assert tokens.bearer_from_header(header) == expected
