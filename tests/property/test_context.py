"""Whatever the log, the conversation is well-formed, and folding in pieces gives the same as folding at once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from omnara.domain.context import AssistantMessage, ContextState, Message, ToolResultsMessage, UserMessage
from omnara.domain.text import is_blank
from tests.support.agent_log import Log
from tests.support.any_log import Void, logs, voids


def check_well_formed(messages: tuple[Message, ...]) -> None:
    assert isinstance(messages[0], UserMessage)
    assert not isinstance(messages[-1], AssistantMessage)
    for before, after in pairwise(messages):
        if isinstance(before, AssistantMessage) and before.calls:
            assert isinstance(after, ToolResultsMessage)
            assert [item.tool_call_id for item in after.results] == [call.tool_call_id for call in before.calls]
        elif isinstance(before, AssistantMessage):
            assert isinstance(after, UserMessage)
        else:
            assert not isinstance(after, ToolResultsMessage)
            assert not (isinstance(before, UserMessage) and isinstance(after, UserMessage))
    for message in messages:
        if isinstance(message, UserMessage):
            assert message.texts
            assert not any(map(is_blank, message.texts))
        elif isinstance(message, AssistantMessage):
            assert message.blocks
        else:
            assert not any(is_blank(item.text) for item in message.results)


@settings(max_examples=300, deadline=None)
@given(logs(), voids)
def test_the_conversation_is_well_formed_and_independent_of_when_it_was_looked_at(log: Log, void: Void) -> None:
    at_once = ContextState(void)
    at_once.extend(log.events)
    in_pieces = ContextState(void)
    for event in log.events:
        in_pieces.extend(log.events[: event.sequence])
        check_well_formed(in_pieces.messages())
    assert in_pieces.messages() == at_once.messages()
    assert in_pieces.bytes_size == at_once.bytes_size


@settings(max_examples=200, deadline=None)
@given(logs(), st.integers(0, 13))
def test_a_checkpoint_anywhere_leaves_a_well_formed_conversation(log: Log, through: int) -> None:
    log.checkpoint(min(through, log.last), "summary")
    log.user("on")
    state = ContextState()
    state.extend(log.events)
    messages = state.messages()
    check_well_formed(messages)
    assert any("summary" in text for m in messages if isinstance(m, UserMessage) for text in m.texts)
