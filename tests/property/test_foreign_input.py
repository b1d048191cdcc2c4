"""Whatever a model or a tenant sends to the tools comes back as a value, never as an exception or a connection."""

from __future__ import annotations

import ipaddress
from typing import Any
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from omnara.tools.allow_list import AllowList
from omnara.tools.extract import Extractor
from omnara.tools.interactions import Answer, check_answers, question_form, question_result
from omnara.tools.plain_html import page_title, plain_text
from omnara.tools.protocol import ToolCallRequest, ToolContext
from omnara.tools.registry import BUILT_IN, execute
from omnara.tools.schema import check_input, check_tool_schema
from omnara.tools.ssrf import is_public

_APPLIED = ["type", "properties", "items", "anyOf", "allOf", "not", "required", "pattern", "enum", "minimum", "x"]
_OTHER = ["patternProperties", "additionalProperties", "$defs", "$ref", "prefixItems", "$id", "$schema", "if"]
KEYWORDS = st.sampled_from([*_APPLIED, *_OTHER])
TEXT = st.one_of(
    st.text(max_size=10), st.sampled_from(["object", "string", "#", "#/properties/x", "#/$defs/x", "(", "a+"])
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYWORDS, inner, max_size=4))
SCHEMAS = st.dictionaries(KEYWORDS, VALUES, max_size=5).map(lambda schema: {**schema, "type": "object"})


@given(SCHEMAS, VALUES)
def test_a_schema_is_refused_or_it_judges_every_value(schema: dict[str, Any], value: Any) -> None:
    if not check_tool_schema(schema):
        assert isinstance(check_input(schema, value), list)


@given(VALUES)
def test_anything_can_be_offered_as_a_schema(schema: Any) -> None:
    assert isinstance(check_tool_schema(schema), list)


class Nowhere:
    """Every name is inside a private network, so that no test leaves the machine."""

    async def resolve(self, host: str, port: int) -> list[str]:
        return ["10.0.0.1"]


URLS = st.one_of(
    st.text(max_size=60),
    st.builds(
        "{}://{}{}".format, st.sampled_from(["http", "https", "ftp", "HTTP", ""]), st.text(max_size=30), st.text()
    ),
    st.builds("https://{}/".format, st.ip_addresses().filter(lambda address: not is_public(address)).map(str)),
)


@settings(deadline=None, max_examples=200)
@given(URLS)
async def test_no_url_gets_out_or_raises(url: str) -> None:
    context = ToolContext(extractor=Extractor(), allow=AllowList(), resolver=Nowhere())
    call = ToolCallRequest(UUID(int=1), UUID(int=2), "web_fetch", {"url": url, "timeout": 1})
    result = await execute(call, context)
    assert result.outcome == "failed"
    assert result.error_code in {
        "malformed",
        "web_fetch_invalid_url",
        "web_fetch_address_blocked",
        "web_fetch_dns_failed",
    }


@given(st.ip_addresses(v=4).filter(lambda address: not is_public(address)))
def test_a_blocked_address_is_blocked_in_every_disguise(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    for disguise in (0xFFFF << 32 | number, number, 0x64FF9B << 96 | number, 0x2002 << 112 | number << 80):
        assert not is_public(ipaddress.IPv6Address(disguise))


@given(st.text(alphabet=st.sampled_from("<>/!-&#;x abpscriptle'\"=\n"), max_size=200))
def test_any_page_has_some_text(page: str) -> None:
    assert isinstance(plain_text(page), str)
    page_title(page)


QUESTIONS = st.lists(
    st.fixed_dictionaries(
        {"prompt": st.text(min_size=1, max_size=20), "options": st.lists(st.text(min_size=1, max_size=9), max_size=4)},
        optional={"multiple": st.booleans()},
    ),
    min_size=1,
    max_size=4,
)


@given(QUESTIONS, st.data())
def test_every_answer_that_fits_is_accepted_and_stays_the_same(
    questions: list[dict[str, Any]], data: st.DataObject
) -> None:
    form = question_form(questions)
    answers = []
    for question in form.questions:
        places = st.integers(min_value=0, max_value=len(question.options) - 1)
        most = len(question.options) if question.multiple else 1
        chosen = data.draw(st.lists(places, min_size=1, max_size=most, unique=True))
        other = len(question.options) - 1 in chosen
        answers.append(Answer(tuple(chosen), data.draw(st.none() | st.text()) if other else None))
    checked = check_answers(form, answers)
    assert check_answers(form, checked) == checked
    assert question_result(form, checked).outcome == "succeeded"


def test_the_schema_of_questions_accepts_what_the_forms_are_made_of() -> None:
    schema = BUILT_IN["ask_question"].input_schema
    assert check_input(schema, {"questions": [{"prompt": "x", "options": []}]}) == []
