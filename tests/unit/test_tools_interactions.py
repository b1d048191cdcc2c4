"""Forms and answers, exactly as the contract describes them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnara.domain.content import StructuredDataBlock
from omnara.errors import InvalidRequest
from omnara.tools import interactions
from omnara.tools.interactions import Answer, check_answers, permission_form, permission_result, question_form
from omnara.tools.permission import Authorised, Completed, NeedsPermission, authorise
from omnara.tools.protocol import Effect, Tool, ToolResult
from omnara.tools.registry import BUILT_IN

ONE = question_form([{"prompt": "Which?", "options": ["A", "B"]}])
MANY = question_form(
    [{"prompt": "Which?", "options": ["A", "B", "C"], "multiple": True}, {"prompt": "Name?", "options": []}]
)
PERMISSION = permission_form("web_fetch", {"url": "https://x.example", "a": 1})


def served(form: interactions.Form) -> Any:
    return msgspec.json.decode(msgspec.json.encode(form))


def value_of(result: ToolResult) -> Any:
    (block,) = result.content_blocks
    assert isinstance(block, StructuredDataBlock)
    return block.value


def test_the_permission_form_of_the_contract() -> None:
    assert served(PERMISSION) == {
        "title": "Allow web_fetch?",
        "context": [{"label": "Input", "value": '{"a":1,"url":"https://x.example"}'}],
        "questions": [
            {
                "prompt": "May the agent run this tool?",
                "options": [{"label": "Allow"}, {"label": "Deny", "allows_text": True}],
            }
        ],
    }


def test_an_empty_input_is_not_shown() -> None:
    assert "context" not in served(permission_form("x", {}))


def test_canonical_json_is_sorted_readable_and_stable() -> None:
    assert interactions.canonical_json({"b": [1.5, None], "a": {"ü": "<x>", "A": True}}) == (
        '{"a":{"A":true,"ü":"<x>"},"b":[1.5,null]}'
    )


def test_question_forms_get_the_other_option_and_a_title_by_number() -> None:
    assert served(ONE) == {
        "title": "Question",
        "questions": [
            {"prompt": "Which?", "options": [{"label": "A"}, {"label": "B"}, {"label": "Other", "allows_text": True}]}
        ],
    }
    built = served(MANY)
    assert built["title"] == "Questions"
    assert built["questions"][0]["multiple"] is True
    assert built["questions"][1] == {"prompt": "Name?", "options": [{"label": "Other", "allows_text": True}]}


def test_options_may_be_objects_with_a_label() -> None:
    assert question_form([{"prompt": "Which?", "options": [{"label": "A"}, "B"]}]) == ONE


def test_answers_are_normalised() -> None:
    given = [Answer((2, 0, 1)), Answer((0,), "  Ada \n")]
    assert check_answers(MANY, given) == (Answer((0, 1, 2)), Answer((0,), "Ada"))
    assert check_answers(ONE, [Answer((2,), "   ")]) == (Answer((2,)),)
    assert check_answers(ONE, [Answer((0,), "  ")]) == (Answer((0,)),)


@pytest.mark.parametrize(
    ("form", "answers", "reason"),
    [
        (ONE, [], "1 answers are expected, 0"),
        (ONE, [Answer((0,)), Answer((0,))], "1 answers are expected, 2"),
        (MANY, [Answer((0,))], "2 answers are expected, 1"),
        (ONE, [Answer(())], "exactly one"),
        (ONE, [Answer((0, 1))], "exactly one"),
        (ONE, [Answer((0, 0))], "exactly one"),
        (MANY, [Answer(()), Answer((0,))], "at least one"),
        (MANY, [Answer((1, 1)), Answer((0,))], "twice"),
        (ONE, [Answer((3,))], "does not exist"),
        (ONE, [Answer((-1,))], "does not exist"),
        (ONE, [Answer((10**30,))], "does not exist"),
        (ONE, [Answer((0,), "why")], "no chosen option takes"),
        (PERMISSION, [Answer((0,), "why")], "no chosen option takes"),
    ],
)
def test_answers_that_do_not_fit_are_a_400(form: interactions.Form, answers: list[Answer], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        check_answers(form, answers)
    assert caught.value.status == 400


def test_text_is_taken_when_any_chosen_option_takes_it() -> None:
    assert check_answers(MANY, [Answer((0, 3), "and D"), Answer((0,))])[0] == Answer((0, 3), "and D")


def test_answers_decode_strictly() -> None:
    assert msgspec.json.decode(b'{"option_indices":[1]}', type=Answer) == Answer((1,))
    for body in (b'{"option_indices":[1],"x":1}', b'{"option_indices":["1"]}', b"{}", b'{"option_indices":[1.5]}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(body, type=Answer)


def test_the_model_learns_the_answers() -> None:
    result = interactions.question_result(MANY, check_answers(MANY, [Answer((0, 3), "and D"), Answer((0,))]))
    assert result.outcome == "succeeded"
    assert value_of(result) == {
        "answers": [
            {
                "question_index": 0,
                "question": "Which?",
                "selected_options": [{"option_index": 0, "label": "A"}, {"option_index": 3, "label": "Other"}],
                "text": "and D",
            },
            {
                "question_index": 1,
                "question": "Name?",
                "selected_options": [{"option_index": 0, "label": "Other"}],
            },
        ]
    }


def test_permission_results() -> None:
    assert permission_result("x", check_answers(PERMISSION, [Answer((0,))])) is None
    denied = permission_result("x", check_answers(PERMISSION, [Answer((1,), " too costly ")]))
    assert denied is not None
    assert (denied.outcome, denied.error_code) == ("denied", "permission_denied")
    assert value_of(denied)["reason"] == "too costly"
    silent = permission_result("x", check_answers(PERMISSION, [Answer((1,))]))
    assert silent is not None
    assert "reason" not in value_of(silent)


CUSTOM = Tool(
    name="count",
    description="Counts.",
    input_schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    type="custom",
    effect=Effect.WAIT,
)


def completed(decision: object) -> ToolResult:
    assert isinstance(decision, Completed)
    return decision.result


def test_the_order_of_the_checks_before_a_call_runs() -> None:
    unknown = completed(authorise(None, "nope", {"n": "x"}, "always_deny"))
    assert (unknown.outcome, unknown.error_code) == ("failed", "unsupported")
    bad = completed(authorise(CUSTOM, "count", {"n": "x"}, "always_deny"))
    assert (bad.outcome, bad.error_code) == ("failed", "malformed")
    assert value_of(bad)["error_code"] == "malformed"
    assert "/n" in value_of(bad)["error"]
    assert completed(authorise(CUSTOM, "count", {"n": 1}, "always_deny")).outcome == "denied"
    assert authorise(CUSTOM, "count", {"n": 1}, "always_allow") == Authorised(CUSTOM)
    asked = authorise(CUSTOM, "count", {"n": 1}, "always_ask")
    assert asked == NeedsPermission(CUSTOM, permission_form("count", {"n": 1}))
    with pytest.raises(ValueError, match="unknown permission mode"):
        authorise(CUSTOM, "count", {"n": 1}, "sometimes")


@pytest.mark.parametrize(
    "questions",
    [
        None,
        [],
        [{"prompt": "", "options": []}],
        [{"prompt": "   ", "options": []}],
        [{"prompt": "x"}],
        [{"prompt": "x", "options": ["  "]}],
        [{"prompt": "x", "options": [{"label": ""}]}],
        [{"prompt": "x", "options": [], "multiple": "yes"}],
        [{"prompt": "x", "options": [], "extra": 1}],
    ],
)
def test_questions_that_could_not_be_shown_are_malformed(questions: Any) -> None:
    tool = BUILT_IN["ask_question"]
    result = completed(authorise(tool, tool.name, {"questions": questions}, "always_allow"))
    assert result.error_code == "malformed"
