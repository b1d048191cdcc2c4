"""Properties of ids and tokens over generated values."""

from __future__ import annotations

import base64
import string
import zlib
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnara.access import tokens
from omnara.access.tokens import InvalidToken, TokenKind
from omnara.ids import IdKind, InvalidPublicId, decode, decode_any, encode

KINDS = st.sampled_from(list(IdKind))
UUIDS = st.integers(min_value=1, max_value=(1 << 128) - 1).map(lambda number: UUID(int=number))
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
SECRETS = st.text(alphabet=BASE62, min_size=43, max_size=43)
TOKEN_KINDS = st.sampled_from(list(TokenKind))


@given(KINDS, UUIDS)
def test_ids_are_rfc_4648_and_come_back(kind: IdKind, value: UUID) -> None:
    text = encode(kind, value)
    assert text == f"{kind.value}_{base64.b32encode(value.bytes).decode().lower().rstrip('=')}"
    assert decode(kind, text) == value
    assert decode_any(text) == (kind, value)


@given(KINDS, KINDS, UUIDS)
def test_ids_are_never_translated_between_kinds(kind: IdKind, other: IdKind, value: UUID) -> None:
    if kind is not other:
        with pytest.raises(InvalidPublicId):
            decode(other, encode(kind, value))


@given(KINDS, st.text(max_size=40))
def test_any_text_is_decoded_or_refused_and_has_one_spelling(kind: IdKind, text: str) -> None:
    for candidate in (text, f"{kind.value}_{text}"):
        try:
            value = decode(kind, candidate)
        except InvalidPublicId:
            continue
        assert encode(kind, value) == candidate


@given(KINDS, st.text(alphabet="abcdefghijklmnopqrstuvwxyz234567", min_size=26, max_size=26))
def test_of_all_spellings_only_the_canonical_one_is_read(kind: IdKind, body: str) -> None:
    try:
        value = decode(kind, f"{kind.value}_{body}")
    except InvalidPublicId:
        assert body[-1] not in "aeimquy4" or set(body) == {"a"}
    else:
        assert encode(kind, value) == f"{kind.value}_{body}"


@given(UUIDS, UUIDS)
def test_different_uuids_have_different_texts(first: UUID, second: UUID) -> None:
    assert (encode(IdKind.EVENT, first) == encode(IdKind.EVENT, second)) is (first == second)


@given(TOKEN_KINDS, SECRETS)
def test_tokens_come_back(kind: TokenKind, secret: str) -> None:
    token = tokens.format_token(kind, secret)
    assert tokens.parse(token.text) == token
    assert len(token.text) == len(f"omnara_{kind.value}_v1_") + 50


@given(TOKEN_KINDS, SECRETS, st.data())
def test_one_changed_character_is_always_noticed(kind: TokenKind, secret: str, data: st.DataObject) -> None:
    text = tokens.format_token(kind, secret).text
    position = data.draw(st.integers(min_value=0, max_value=len(text) - 1))
    replacement = data.draw(st.sampled_from([c for c in BASE62 + "_ é\n" if c != text[position]]))
    with pytest.raises(InvalidToken) as caught:
        tokens.parse(text[:position] + replacement + text[position + 1 :])
    assert secret not in str(caught.value)


@given(st.text(max_size=80))
def test_any_text_is_a_token_or_refused(text: str) -> None:
    with pytest.raises(InvalidToken):
        tokens.parse(text)


@given(st.integers(min_value=0, max_value=0xFFFFFFFF))
def test_checksums_are_the_number_in_base_62(value: int) -> None:
    text = tokens.encode_checksum(value)
    assert len(text) == 6
    number = 0
    for character in text:
        number = number * 62 + BASE62.index(character)
    assert number == value


@given(TOKEN_KINDS, SECRETS)
def test_the_tail_is_the_crc_of_the_rest(kind: TokenKind, secret: str) -> None:
    body, _, tail = tokens.format_token(kind, secret).text.rpartition("_")
    assert tail == tokens.encode_checksum(zlib.crc32(body.encode()))
