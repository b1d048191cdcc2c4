"""Files in the folded conversation, and the slots that requests are made from."""

from __future__ import annotations

import msgspec
import pytest

from omnara.domain.content import OVERFLOW_KEY, MediaPart, MediaRefBlock, TextBlock
from omnara.domain.context import ContextState, ToolResultsMessage, UserMessage
from omnara.providers.media import ModelFile, fill, mark_last, slot
from tests.support.agent_log import Log, call_block


def folded(log: Log) -> ContextState:
    context = ContextState()
    context.extend(log.events)
    return context


def test_files_stand_where_they_were_said() -> None:
    log = Log()
    log.said(TextBlock("before"), MediaRefBlock("art_a"), TextBlock("after"), MediaRefBlock("art_b"))
    context = folded(log)
    [message] = context.messages()
    assert isinstance(message, UserMessage)
    assert message.parts == ("before", MediaPart("art_a"), "after", MediaPart("art_b"))
    assert context.media == [MediaPart("art_a"), MediaPart("art_b")]


def test_files_of_results_stay_with_their_call() -> None:
    log = Log()
    log.user("go")
    call = call_block()
    log.output(call)
    long = MediaRefBlock("art_long", {OVERFLOW_KEY: "true"})
    log.result(call.tool_call_id, TextBlock("the beginning"), long, MediaRefBlock("art_a"))
    context = folded(log)
    results = context.messages()[-1]
    assert isinstance(results, ToolResultsMessage)
    [answer] = results.results
    assert answer.media == (MediaPart("art_a"),)
    assert answer.text == "the beginning\n[Attachment art_a]"
    assert context.media == [MediaPart("art_long", previewed=True), MediaPart("art_a")]


def test_a_checkpoint_forgets_the_files_before_it_but_not_that_there_are_long_ones() -> None:
    log = Log()
    log.said(MediaRefBlock("art_old"))
    call = call_block()
    log.output(call)
    log.result(call.tool_call_id, MediaRefBlock("art_long", {OVERFLOW_KEY: "true"}))
    log.output(TextBlock("seen"))
    through = log.last
    log.checkpoint(through, "a summary")
    log.said(MediaRefBlock("art_new"))
    assert folded(log).media == [MediaPart("art_long", previewed=True), MediaPart("art_new")]


def parts(file: ModelFile) -> list[bytes]:
    named = msgspec.json.encode({"text": file.label})
    return [named, b'{"data":"' + file.data + b'"}'] if file.data else [named]


def test_slots_are_filled_from_the_files_of_the_request() -> None:
    body = b'{"content":[{"text":"x"},' + slot("art_a") + b"," + mark_last(slot("art_b"), b',"mark":1') + b"]}"
    files = {"art_a": ModelFile(artifact_id="art_a", media_type="image/png", size=3, data=b"YWJj")}
    filled = msgspec.json.decode(fill(body, files, parts, b',"mark":1'))
    assert filled["content"] == [
        {"text": "x"},
        {"text": "[Attachment art_a: image/png, 3 bytes]"},
        {"data": "YWJj"},
        {"text": "[Attachment art_b] Its content is not shown.", "mark": 1},
    ]


@pytest.mark.parametrize("text", ["ÿ", "\\xff", "\x00", "😀\ud7ff"])
def test_no_text_is_taken_for_a_slot(text: str) -> None:
    body = msgspec.json.encode({"text": text})
    assert fill(body, {}, parts) == body
