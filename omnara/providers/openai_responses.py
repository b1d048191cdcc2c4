"""OpenAI Responses: how a conversation becomes a request, and its stream an answer.

Nothing is stored at the provider: each request carries the whole conversation, and reasoning travels as encrypted items
that go back as they came. An item's last event says all of it; deltas are for those who watch.
Source: DESIGN §5; field-reports B02, B04, B43.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from omnara.domain.stream import ModelStopReason, ModelUsage
from omnara.providers import openai_responses_wire as wire
from omnara.providers.json_events import BadEvent
from omnara.providers.media import fill
from omnara.providers.openai_responses_media import parts_of
from omnara.providers.openai_responses_replay import WireItem, exact_items, is_sendable_call_id
from omnara.providers.openai_responses_request import ResponsesRenderer, head, url
from omnara.providers.output import MAX_BLOCKS, OutputBuilder
from omnara.providers.protocol import ModelCall, ModelTarget, Outcome
from omnara.providers.replay import Replay, pack
from omnara.providers.streaming import Assembler, StreamedError
from omnara.providers.usage import token_count

API_FORMAT: Final = "openai_responses"

KEY_HEADER: Final = "api-key"

_STOP: Final[dict[str, ModelStopReason]] = {
    "completed": "end_turn",
    "max_output_tokens": "max_tokens",
    "content_filter": "content_filter",
}


class OpenAIResponses:
    """The wire format `openai_responses`."""

    headers: Mapping[str, str] = MappingProxyType({})
    key_header = KEY_HEADER

    def url(self, target: ModelTarget) -> str:
        """See `Wire.url`."""
        return url(target)

    def body(self, call: ModelCall) -> bytes:
        """See `Wire.body`. Everything that differs between two requests of an agent stands at the end."""
        renderer = ResponsesRenderer(call.target)
        settled, open_side = call.history.render(call.context, renderer, renderer.key)
        body = b"".join((head(call), settled, b"," if settled else b"", open_side, b"]}"))
        return fill(body, call.media, parts_of) if call.context.media else body

    def assembler(self, call: ModelCall, output: OutputBuilder) -> Assembler:
        """See `Wire.assembler`."""
        return _Assembler(output)


class _Assembler:
    """Builds the answer from the stream's events."""

    def __init__(self, output: OutputBuilder) -> None:
        self.done = False
        self._output = output
        self._items: list[WireItem] = []
        self._open: dict[int, WireItem] = {}
        self._ended: set[str] = set()
        self._stop = "unknown"
        self._refused = False
        self._usage = ModelUsage()

    @property
    def complete(self) -> bool:
        """See `Assembler.complete`: only an event about the whole answer makes it so."""
        return self.done

    def event(self, data: bytes) -> bool:
        """See `Assembler.event`."""
        event = wire.decoder.decode(data)
        if isinstance(event, wire.DELTAS):
            self._delta(event)
        elif isinstance(event, wire.ItemAdded):
            self._begin(event.output_index, event.item)
        elif isinstance(event, wire.ItemDone):
            self._end(event.output_index, event.item, wire.exact_item(data))
        elif isinstance(event, wire.Completed | wire.Incomplete):
            self._finish(event, data)
        elif isinstance(event, wire.FailedResponse):
            raise StreamedError({"error": event.response.error})
        elif isinstance(event, wire.Error):
            raise StreamedError({"error": event.error or {"code": event.code, "message": event.message}})
        else:
            return isinstance(event, wire.Created)
        return True

    def finish(self, request_id: str) -> Outcome:
        """See `Assembler.finish`."""
        for item in self._items:
            if item.kind == "function_call" and item.call < 0:
                self._open_call(item, "", "")
        reason = _STOP.get(self._stop, "unknown")
        if self._refused and reason == "end_turn":
            reason = "refusal"
        return self._output.finish(reason, self._usage, replay=self._replay, request_id=request_id)

    def _delta(self, event: wire.Delta) -> None:
        index = event.output_index
        if isinstance(event, wire.ArgumentsDelta):
            self._arguments(self._item(index, "function_call"), event.delta)
        elif isinstance(event, wire.SummaryDelta):
            self._thought(self._item(index, "reasoning"), event.summary_index, event.delta)
        elif isinstance(event, wire.ReasoningDelta):
            self._thought(self._item(index, "reasoning"), event.content_index, event.delta)
        else:
            self._refused = self._refused or isinstance(event, wire.RefusalDelta)
            self._text(self._item(index, "message"), event.content_index, event.delta)

    # --- items --------------------------------------------------------------------------------------------

    def _item(self, index: int, kind: str) -> WireItem:
        """The open item at `index`; one whose beginning never came begins now."""
        item = self._open.get(index)
        if item is None:
            if len(self._items) == MAX_BLOCKS:  # items of kinds that are not known become no blocks
                raise BadEvent(f"the answer has more than {MAX_BLOCKS} blocks")
            item = self._open[index] = WireItem(index, kind)
            self._items.append(item)
        elif item.kind != kind:
            raise BadEvent(f"an item of the stream is both a {item.kind[:50]} and a {kind[:50]}")
        return item

    def _begin(self, index: int, given: wire.Item) -> None:
        if index in self._open:
            raise BadEvent("two items of the stream have the same index")
        item = self._item(index, given.type)
        if given.type == "function_call" and given.name and given.call_id:
            # What is not said at the beginning is at the end.
            self._open_call(item, given.call_id, given.name)

    def _end(self, index: int, given: wire.Item, raw: bytes | None) -> None:
        for name in (given.id, given.call_id):
            if isinstance(name, str) and name and index not in self._open and name in self._ended:
                raise BadEvent("an item of the stream ends twice")
        self._ended.update(name for name in (given.id, given.call_id) if isinstance(name, str))
        item = self._item(index, given.type)
        del self._open[index]
        item.raw = raw
        if given.type == "message":
            self._end_message(item, given)
        elif given.type == "function_call":
            if item.call < 0:
                self._open_call(item, given.call_id, given.name)
            if isinstance(given.arguments, str):
                self._output.settle(item.call, given.arguments)
        elif given.type == "reasoning":
            texts = wire.texts_of(given.summary) or wire.texts_of(given.content)
            if texts:
                self._thought(item, item.part, "")
                self._output.settle(item.blocks[0], "\n\n".join(texts))
        for block in item.blocks.values():
            self._output.close(block)

    def _end_message(self, item: WireItem, given: wire.Item) -> None:
        for at, part in enumerate(given.content if isinstance(given.content, list) else ()):
            if wire.texts_of([part], "refusal"):
                self._refused = True
            for text in wire.texts_of([part]) or wire.texts_of([part], "refusal"):
                self._text(item, at, "")
                self._output.settle(item.blocks[at], text)

    def _text(self, item: WireItem, part: int, piece: str) -> None:
        if part not in item.blocks:
            item.blocks[part] = self._output.open("text")
        self._output.add(item.blocks[part], piece)

    def _thought(self, item: WireItem, part: int, piece: str) -> None:
        """All parts of some reasoning are one block, with a blank line between them."""
        if not item.blocks:
            item.blocks[0] = self._output.open("thinking")
        elif part != item.part:
            self._output.add(item.blocks[0], "\n\n")
        item.part = part
        self._output.add(item.blocks[0], piece)

    def _arguments(self, item: WireItem, piece: str) -> None:
        if item.call < 0:
            item.held.append(piece)
        else:
            self._output.add(item.call, piece)

    def _open_call(self, item: WireItem, call_id: Any, name: Any) -> None:
        # An id that the provider itself would not take back counts as missing: ours takes its place.
        sendable = isinstance(call_id, str) and is_sendable_call_id(call_id)
        item.call = self._output.open_call(call_id if sendable else "", name if isinstance(name, str) else "")
        item.blocks[0] = item.call
        self._output.add(item.call, "".join(item.held))

    # --- the end ------------------------------------------------------------------------------------------

    def _finish(self, event: wire.Completed | wire.Incomplete, data: bytes) -> None:
        response = event.response
        if response.status in ("failed", "cancelled"):
            raise StreamedError({"error": response.error})
        if not self._items:
            # Some endpoints stream nothing and say all at the end.
            for index, (item, raw) in enumerate(wire.whole_output(data)):
                self._end(index, item, raw)
        details = response.incomplete_details
        if details is not None and details.reason:
            self._stop = details.reason
        elif isinstance(event, wire.Completed) and response.status != "incomplete":
            self._stop = "completed"
        if response.usage is not None:
            self._usage = _usage(response.usage)
        self.done = True

    def _replay(self) -> bytes | None:
        ids = tuple(self._output.provider_ids)
        content, item_ids = exact_items(sorted(self._items, key=lambda item: item.index), self._output)
        return pack(Replay(API_FORMAT, ids, content, item_ids)) if ids or content else None


def _usage(usage: wire.Usage) -> ModelUsage:
    given = usage.input_tokens_details or wire.InputDetails()
    made = usage.output_tokens_details or wire.OutputDetails()
    total, cached = token_count(usage.input_tokens), token_count(given.cached_tokens)
    return ModelUsage(
        input_tokens_total=total,
        uncached_input_tokens=None if total is None else max(0, total - (cached or 0)),
        output_tokens_total=token_count(usage.output_tokens),
        reasoning_output_tokens=token_count(made.reasoning_tokens),
        cache_read_input_tokens=cached,
        cache_write_input_tokens=token_count(given.cache_write_tokens),
    )
