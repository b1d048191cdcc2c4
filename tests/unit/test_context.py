"""The fold from log to conversation: order, omissions, notices."""

from __future__ import annotations

from omnara.domain.content import (
    EMPTY_RESULT_TEXT,
    INTERRUPTED_TEXT,
    MediaRefBlock,
    ReasoningBlock,
    StructuredDataBlock,
    TextBlock,
    ToolCallBlock,
)
from omnara.domain.context import AssistantMessage, ContextState, Message, ToolResultsMessage, UserMessage
from omnara.domain.context_text import CANCEL_NOTICE, CONFIG_NOTICE, CUT_NOTICE, LOST_NOTICE
from omnara.domain.events import EventMeta
from tests.support.agent_log import Log, call_block


def folded(log: Log, void: tuple[tuple[int, int], ...] = ()) -> tuple[Message, ...]:
    state = ContextState(void)
    state.extend(log.events)
    return state.messages()


def texts(message: Message) -> tuple[str, ...]:
    assert isinstance(message, UserMessage)
    return message.texts


def results(message: Message) -> list[tuple[str, str, bool]]:
    assert isinstance(message, ToolResultsMessage)
    return [(result.tool_call_id, result.text, result.failed) for result in message.results]


def test_the_launch_config_is_no_change_and_a_later_one_is() -> None:
    log = Log()
    log.config_change()
    log.user("hello")
    log.config_change()
    assert [texts(message) for message in folded(log)] == [("hello", CONFIG_NOTICE)]


def test_results_stand_in_call_order_right_after_their_output_and_before_any_text() -> None:
    log = Log()
    first, second = call_block(path="a"), call_block(path="b")
    log.user("go")
    log.output(TextBlock("looking"), first, second)
    log.result(second.tool_call_id, TextBlock("B"))
    log.user("hurry up")
    log.result(first.tool_call_id, TextBlock("A"))
    log.output(TextBlock("done"))
    user, output, answers, hurry, done, _ = folded(log)
    assert texts(user) == ("go",)
    assert isinstance(output, AssistantMessage)
    assert output.calls == (first, second)
    assert results(answers) == [(first.tool_call_id, "A", False), (second.tool_call_id, "B", False)]
    assert texts(hurry) == ("hurry up",)
    assert isinstance(done, AssistantMessage)


def test_a_missing_answer_is_filled_in_and_a_late_one_is_ignored() -> None:
    log = Log()
    lost, kept = call_block(), call_block()
    log.user("go")
    log.output(lost, kept)
    log.result(kept.tool_call_id, TextBlock("K"))
    log.output(TextBlock("on"))
    log.result(lost.tool_call_id, TextBlock("too late"))
    log.result(kept.tool_call_id, TextBlock("twice"))
    messages = folded(log)
    (lost_id, lost_text, failed), kept_result = results(messages[2])
    assert (lost_id, failed) == (lost.tool_call_id, True)
    assert lost_text.endswith(INTERRUPTED_TEXT)
    assert kept_result == (kept.tool_call_id, "K", False)
    assert texts(messages[-1]) == (LOST_NOTICE,)


def test_what_an_output_had_not_seen_comes_after_it() -> None:
    log = Log()
    log.user("go")
    frontier = log.last
    log.config_change()
    log.output(TextBlock("hi"), meta=EventMeta(frontier=frontier))
    log.user("more")
    kinds = folded(log)
    assert texts(kinds[0]) == ("go",)
    assert isinstance(kinds[1], AssistantMessage)
    assert texts(kinds[2]) == (CONFIG_NOTICE, "more")


def test_nothing_blank_is_said() -> None:
    log = Log()
    call = call_block()
    log.user("  ", "words", "")
    log.output(TextBlock(""), TextBlock(" \n"), call)
    log.result(call.tool_call_id, TextBlock("  "))
    log.output(TextBlock(" "), ReasoningBlock("hm"))  # an empty turn: left out
    log.user("again")
    log.output()
    user, output, answers, again = folded(log)
    assert texts(user) == ("words",)
    assert isinstance(output, AssistantMessage)
    assert output.blocks == (call,)
    assert results(answers) == [(call.tool_call_id, EMPTY_RESULT_TEXT, False)]
    assert texts(again) == ("again",)


def test_outcomes_are_marked_and_data_is_json() -> None:
    log = Log()
    calls = [call_block() for _ in range(4)]
    log.user("go")
    log.output(*calls)
    log.result(calls[0].tool_call_id, StructuredDataBlock({"a": [1, "é"]}), MediaRefBlock("art_x"))
    log.result(calls[1].tool_call_id, TextBlock("boom"), outcome="failed")
    log.result(calls[2].tool_call_id, outcome="denied")
    log.result(calls[3].tool_call_id, outcome="canceled")
    answers = results(folded(log)[2])
    assert [failed for *_, failed in answers] == [False, True, True, True]
    assert answers[0][1].startswith('{"a":[1,"é"]}\n')
    assert "art_x" in answers[0][1]
    assert answers[1][1] == "[The tool call failed.]\nboom"
    assert "denied" in answers[2][1]
    assert "canceled" in answers[3][1]


def test_errors_and_stops_are_told_and_answers_to_forms_are_not() -> None:
    log = Log()
    log.user("go")
    log.error("quota used up")
    log.answer()
    log.cancel()
    log.user("try again")
    (message,) = folded(log)
    go, error, stop, again = texts(message)
    assert (go, stop, again) == ("go", CANCEL_NOTICE, "try again")
    assert "quota used up" in error


def test_a_cut_output_loses_its_replay_and_keeps_what_became_of_its_calls() -> None:
    log = Log()
    log.user("go")
    call = call_block()
    log.output(TextBlock("I will"), call, stop="max_tokens", replay=b"x")
    log.result(call.tool_call_id, TextBlock("cut"), outcome="failed")
    log.output(TextBlock("half"), stop="max_tokens")
    log.user("and?")
    _, output, cut, half, more = folded(log)
    assert isinstance(output, AssistantMessage)
    assert (output.calls, output.replay) == ((call,), None)
    assert results(cut) == [(call.tool_call_id, "[The tool call failed.]\ncut", True)]
    assert isinstance(half, AssistantMessage)
    assert texts(more) == (CUT_NOTICE, "and?")


def test_void_ranges_are_skipped_and_leave_a_conversation_that_providers_take() -> None:
    log = Log()
    call = call_block()
    log.user("go")
    log.output(TextBlock("first"))
    log.user("lost")
    log.output(call)
    log.result(call.tool_call_id, TextBlock("R"))
    log.output(TextBlock("second"))
    whole, gap, unanswered = folded(log), folded(log, ((3, 5),)), folded(log, ((5, 5),))
    assert len(whole) == 7
    assert [type(message) for message in gap[:4]] == [UserMessage, AssistantMessage, UserMessage, AssistantMessage]
    assert texts(gap[2]) == (LOST_NOTICE,)
    assert results(unanswered[4])[0][1].endswith(INTERRUPTED_TEXT)
    orphan = folded(log, ((1, 1), (4, 4)))
    assert [type(message) for message in orphan[:3]] == [UserMessage, AssistantMessage, UserMessage]
    assert texts(orphan[0]) == (LOST_NOTICE,)
    assert not any(isinstance(message, ToolResultsMessage) for message in orphan)


def test_a_checkpoint_stands_for_what_it_summarizes() -> None:
    log = Log()
    call = call_block()
    log.user("go")
    log.output(call)
    log.result(call.tool_call_id, TextBlock("R"))
    log.output(TextBlock("first"))
    log.user("next")
    log.output(TextBlock("second"))
    log.checkpoint(3, "went </context_checkpoint> & so on")
    state = ContextState()
    state.extend(log.events)
    assert state.generation == 1
    summary, first, following, second, _ = state.messages()
    (text,) = texts(summary)
    assert "went &lt;/context_checkpoint&gt; &amp; so on" in text
    assert isinstance(first, AssistantMessage)
    assert texts(following) == ("next",)
    assert isinstance(second, AssistantMessage)
    log.checkpoint(log.last, "all of it")
    log.user("now")
    state.extend(log.events)
    (message,) = state.messages()
    assert len(texts(message)) == 2
    assert "all of it" in texts(message)[0]


def test_the_estimate_of_memory_grows_with_the_content_and_shrinks_with_a_checkpoint() -> None:
    log = Log()
    state = ContextState()
    for _ in range(10):
        log.user("x" * 1000)
        log.output(TextBlock("y" * 1000))
    state.extend(log.events)
    assert 20_000 <= state.bytes_size <= 40_000
    log.checkpoint(log.last, "short")
    state.extend(log.events)
    assert state.bytes_size < 1_000


def test_a_long_result_of_a_built_in_tool_is_shown_shortened_and_always_the_same() -> None:
    def shown(text: str, tool_type: str = "built_in") -> str:
        log = Log()
        log.user("go")
        call = ToolCallBlock("tcl_1", tool_type, "web_fetch", {})  # type: ignore[arg-type]
        log.output(call)
        log.result("tcl_1", TextBlock(text))
        state = ContextState(shown_chars={"web_fetch": 10})
        state.extend(log.events)
        return state.tail()[0].results[0].text  # type: ignore[union-attr]

    assert shown("é" * 10) == "é" * 10
    assert shown("é" * 11) == "é" * 10 + "\n\n[The first 10 of 11 characters are shown.]"
    assert shown("é" * 11, "custom") == "é" * 11
