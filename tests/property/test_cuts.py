"""Wherever a conversation is cut, a reader who starts at the checkpoint sees what is left, and nothing is lost."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from omnara.domain.content import TextBlock
from omnara.domain.context import AssistantMessage, ContextState, ToolResultsMessage, UserMessage
from omnara.domain.context_size import message_bytes
from omnara.domain.events import EventMeta
from tests.property.test_context import check_well_formed
from tests.support.agent_log import Log, call_block

Draw = st.DrawFn


class Story:
    """A log as the engine writes it: an answer has seen what was there, calls are answered before the next answer."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.log = Log()
        self.log.config_change()
        self.state = ContextState()

    def tell(self) -> None:
        """Something happens; afterwards no call is open."""
        kind = self._draw(st.sampled_from(["ask", "ask", "tools", "late", "error", "cut", "config", "cancel"]))
        log = self.log
        if kind in ("ask", "error", "late"):
            log.user(f"question {log.last}.")
        seen = log.last
        if kind in ("late", "config"):
            log.config_change()
        if kind == "tools":
            self._tools()
        elif kind == "cancel":
            self._tools(cancel=True)
        elif kind == "error":
            log.error(f"error {log.last}.")
        elif kind == "cut":
            log.output(TextBlock(f"half {log.last}."), stop="max_tokens", meta=self._meta(truncations=1))
        elif kind in ("ask", "late"):
            log.output(TextBlock(f"answer {log.last}."), meta=EventMeta(seen, answers=1))
        self.state.extend(log.events)

    def _tools(self, *, cancel: bool = False) -> None:
        calls = [call_block(n=self.log.last) for _ in range(self._draw(st.integers(1, 2)))]
        self.log.output(*calls, meta=self._meta())
        if cancel:
            self.log.cancel()
        for call in self._draw(st.permutations(calls)):
            if self._draw(st.booleans()):
                self.log.config_change()
            self.log.result(call.tool_call_id, TextBlock(f"result {self.log.last}."))

    def _meta(self, *, truncations: int = 0) -> EventMeta:
        return EventMeta(self.log.last, truncations=truncations, answers=self.state.answers + 1)

    def cut(self) -> int | None:
        """Cut anywhere that is allowed and return what the checkpoint stands for."""
        cuts = self.state.cuts()
        assert [cut.through for cut in cuts] == sorted({cut.through for cut in cuts})
        if not cuts:
            return None
        cut = self._draw(st.sampled_from(cuts))
        gone = self.state.up_to(cut)
        assert cut.before <= self.state.told_bytes
        if cut.index is not None:
            assert cut.before == sum(map(message_bytes, gone))
        meta = EventMeta(compactions=self.state.compactions + 1, truncations=self.state.truncations)
        meta = msgspec.structs.replace(meta, answers=self.state.answers)
        self.log.checkpoint(cut.through, f"summary {self.log.last}.", meta)
        self.state.extend(self.log.events)
        return cut.through


def cold(log: Log) -> ContextState:
    """What a reader knows who starts at the last checkpoint."""
    state = ContextState()
    last = next((event for event in reversed(log.events) if event.kind == "context_checkpoint"), None)
    if last is not None:
        state.start_after(last)
    state.extend(log.events[state.sequence :])
    return state


@st.composite
def stories(draw: Draw) -> tuple[Story, int]:
    story = Story(draw)
    through = 0
    for _ in range(draw(st.integers(1, 10))):
        story.tell()
        if draw(st.integers(0, 3)) == 0:
            through = story.cut() or through
    return story, through


@settings(max_examples=300, deadline=None)
@given(stories())
def test_a_reader_who_starts_at_the_checkpoint_sees_the_same_conversation(told: tuple[Story, int]) -> None:
    story, _ = told
    fresh = cold(story.log)
    assert fresh.messages() == story.state.messages()
    assert fresh.cuts() == story.state.cuts()
    assert fresh.told_bytes == story.state.told_bytes
    assert (fresh.compactions, fresh.truncations) == (story.state.compactions, story.state.truncations)
    assert fresh.answers == story.state.answers
    check_well_formed(fresh.messages())


@settings(max_examples=300, deadline=None)
@given(stories())
def test_what_is_not_summarized_is_said_exactly_once_and_what_is_not_at_all(told: tuple[Story, int]) -> None:
    story, through = told
    said: list[str] = []
    for message in story.state.messages():
        if isinstance(message, UserMessage):
            said += message.texts
        elif isinstance(message, ToolResultsMessage):
            said += [result.text for result in message.results]
        elif isinstance(message, AssistantMessage):
            said += [block.text for block in message.blocks if isinstance(block, TextBlock)]
    whole = "\n".join(said)
    for event in story.log.events:
        for block in getattr(event.payload, "content_blocks", ()):
            if isinstance(block, TextBlock):
                assert whole.count(block.text) == (event.sequence > through), (event.sequence, through)
    summaries = [event for event in story.log.events if event.kind == "context_checkpoint"]
    for event in summaries:
        assert whole.count(event.payload.summary) == (event is summaries[-1])  # type: ignore[union-attr]
