"""What a compaction takes away, and when there is none that helps."""

from __future__ import annotations

import pytest

from omnara.domain.compaction import MAX_COMPACTIONS, TAIL_TOKENS, ModelRoom, margin, plan_compaction
from omnara.domain.content import TextBlock
from omnara.domain.context import ContextState
from omnara.domain.context_size import tokens
from omnara.domain.events import EventMeta
from omnara.domain.transcript import RESULT_BYTES, shorten, write_transcript
from omnara.engine.compaction import Unusable, read_summary
from omnara.providers.protocol import Completed
from tests.support.agent_log import Log, call_block

SMALL = ModelRoom(window=32_768, max_output=4096, fixed=500)


def talk(turns: int, size: int = 4000) -> tuple[Log, ContextState]:
    log, state = Log(), ContextState()
    for number in range(turns):
        log.user(f"question {number} " + "q" * size)
        log.output(TextBlock(f"answer {number} " + "a" * size))
    log.user("and now?")
    state.extend(log.events)
    return log, state


@pytest.mark.parametrize(
    ("window", "expected"), [(2048, 102), (4096, 1024), (32_768, 1638), (100_000, 5000), (200_000, 8192)]
)
def test_the_margin_grows_with_the_window_within_bounds(window: int, expected: int) -> None:
    assert margin(window) == expected


def test_a_model_whose_answers_may_fill_its_window_still_takes_requests() -> None:
    assert ModelRoom(8192, 8191, 0).budget == 8192 - 4096 - 1024


def test_a_quarter_of_the_budget_stays_and_the_summary_fits() -> None:
    _, state = talk(14)
    assert not SMALL.fits(state)
    plan = plan_compaction(state, SMALL)
    assert plan is not None
    left = tokens(state.told_bytes - plan.cut.before)
    assert left <= (SMALL.budget - SMALL.fixed) // 4
    assert left + plan.most + SMALL.fixed <= SMALL.budget
    assert plan.cut.between_turns
    assert plan.prompt + plan.answer + margin(SMALL.window) <= SMALL.window


def test_what_stays_of_a_large_window_is_bounded() -> None:
    _, state = talk(300)
    large = ModelRoom(window=500_000, max_output=8192, fixed=0)
    plan = plan_compaction(state, large)
    assert plan is not None
    assert tokens(state.told_bytes - plan.cut.before) <= TAIL_TOKENS


def test_another_compaction_in_a_row_keeps_less_and_a_third_is_refused() -> None:
    log, state = talk(14)
    first = plan_compaction(state, SMALL)
    assert first is not None
    log.checkpoint(first.cut.through, "summary", EventMeta(compactions=1))
    state.extend(log.events)
    second = plan_compaction(state, SMALL)
    assert second is not None
    assert second.cut == state.cuts()[-1]
    log.checkpoint(second.cut.through, "summary", EventMeta(compactions=MAX_COMPACTIONS))
    state.extend(log.events)
    assert plan_compaction(state, SMALL) is None


@pytest.mark.parametrize(("compactions", "helps"), [(MAX_COMPACTIONS - 1, True), (MAX_COMPACTIONS, False)])
def test_the_number_in_a_row_is_bounded_even_if_more_could_go(compactions: int, helps: bool) -> None:
    log, state = talk(14)
    log.checkpoint(state.cuts()[0].through, "summary", EventMeta(compactions=compactions))
    state.extend(log.events)
    assert len(state.cuts()) > 2
    assert (plan_compaction(state, SMALL) is not None) is helps


def test_nothing_helps_when_what_must_stay_is_too_much() -> None:
    _, state = talk(14)
    assert plan_compaction(state, ModelRoom(32_768, 4096, fixed=27_000)) is None
    log, state = Log(), ContextState()
    log.user("x" * 200_000)
    state.extend(log.events)
    assert plan_compaction(state, SMALL) is None


def test_reductions_take_away_about_half() -> None:
    _, state = talk(14)
    whole, half, quarter = (plan_compaction(state, SMALL, reductions) for reductions in range(3))
    assert whole is not None
    assert half is not None
    assert quarter is not None
    assert whole.cut.before > half.cut.before > quarter.cut.before
    assert abs(half.cut.before - whole.cut.before / 2) < 9000
    assert (half.prompt, quarter.prompt) == (whole.prompt // 2, whole.prompt // 4)


def test_an_answer_is_a_summary_only_when_it_is_whole_and_smaller() -> None:
    _, state = talk(14)
    plan = plan_compaction(state, SMALL)
    assert plan is not None

    def read(text: str, stop: str = "end_turn") -> str | Unusable:
        return read_summary(Completed(stop, (TextBlock(text),)), plan)  # type: ignore[arg-type]

    assert read(" fine\x00 ") == "fine\ufffd"
    assert isinstance(read("  "), Unusable)
    assert isinstance(read("cut", "max_tokens"), Unusable)
    assert isinstance(read("no", "refusal"), Unusable)
    assert read("x" * (plan.most * 4 - 4)) != ""
    assert isinstance(read("x" * (plan.most * 4)), Unusable)


def test_a_transcript_has_everybody_s_words_and_bounded_tool_output() -> None:
    log, state = Log(), ContextState()
    call = call_block(path="/x")
    log.user('look, please\n{"role":"assistant"}')
    log.output(TextBlock("I look"), call)
    log.result(call.tool_call_id, TextBlock("HEAD" + "z" * 100_000 + "TAIL"), outcome="failed")
    log.output(TextBlock("seen"))
    state.extend(log.events)
    lines = write_transcript(state.settled, 10**9).split("\n")
    assert lines[0] == '{"role":"user","text":"look, please\\n{\\"role\\":\\"assistant\\"}"}'
    assert lines[1] == '{"role":"assistant","text":"I look"}'
    assert lines[2] == '{"role":"assistant","text":"{\\"path\\":\\"/x\\"}","tool":"look"}'
    assert lines[3].startswith('{"role":"tool","text":"[The tool call failed.]\\nHEADzz')
    assert "zzTAIL" in lines[3]
    assert len(lines[3]) < RESULT_BYTES + 200
    assert len(lines) == 5


@pytest.mark.parametrize("room", [60_000, 20_000, 5_000, 2_000])
def test_a_transcript_keeps_to_its_size_and_to_the_earlier_summary(room: int) -> None:
    log, state = Log(), ContextState()
    log.user("old")
    log.output(TextBlock("older"))
    log.checkpoint(2, "the earlier summary")
    for number in range(40):
        log.user(f"question {number} " + "é" * 2000)
        log.output(TextBlock(f"answer {number} " + "a" * 2000))
    state.extend(log.events)
    text = write_transcript(state.settled, room)
    assert len(text.encode()) <= room + 100
    assert "the earlier summary" in text
    assert "answer 39" in text


def test_shortening_keeps_head_and_tail_and_whole_characters() -> None:
    assert shorten("short", 100) == "short"
    cut = shorten("é" * 1000, 101)
    assert cut.startswith("é" * 37 + "\n[… ")
    assert cut.endswith("é" * 12)
    assert "\ufffd" not in cut
