"""Anthropic Messages: how a conversation becomes a request, and its stream an answer.

Source: DESIGN §5; field-reports B01, B02, B04, B43.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from omnara.domain.stream import ModelStopReason, ModelUsage
from omnara.providers import anthropic_wire as wire
from omnara.providers.anthropic_replay import WireBlock, signed_content
from omnara.providers.anthropic_request import MessagesRenderer, head, url
from omnara.providers.json_events import BadEvent
from omnara.providers.names import is_sendable_id
from omnara.providers.output import MAX_BLOCKS, OutputBuilder
from omnara.providers.protocol import ModelCall, ModelTarget, Outcome
from omnara.providers.replay import Replay, pack
from omnara.providers.streaming import Assembler, StreamedError
from omnara.providers.usage import token_count, total_count

API_FORMAT: Final = "anthropic_messages"

API_VERSION: Final = "2023-06-01"
"""The version whose requests and events this module speaks, whatever the SDKs have moved on to: the next one,
2026-10-21, refuses every request with a `temperature`, which agents may set. Source: the provider's migration guide.
"""

KEY_HEADER: Final = "x-api-key"

_STOP: Final[dict[str | None, ModelStopReason]] = {
    "end_turn": "end_turn",
    "stop_sequence": "end_turn",
    "tool_use": "tool_use",
    "max_tokens": "max_tokens",
    "refusal": "refusal",
    "pause_turn": "pause",
    "model_context_window_exceeded": "context_window",
}


class AnthropicMessages:
    """The wire format `anthropic_messages`."""

    headers: Mapping[str, str] = MappingProxyType({"anthropic-version": API_VERSION})
    key_header = KEY_HEADER

    def url(self, target: ModelTarget) -> str:
        """See `Wire.url`."""
        return url(target)

    def body(self, call: ModelCall) -> bytes:
        """See `Wire.body`. Everything that differs between two requests of an agent stands at the end."""
        renderer = MessagesRenderer(call.target)
        settled, open_side = call.history.render(call.context, renderer, renderer.key)
        start = head(call, led=call.history.led_by_reasoning)
        body = b"".join((start, b'"messages":[', settled, b"," if settled else b"", open_side, b"]}"))
        return renderer.with_media(body, call.media) if call.context.media else body

    def assembler(self, call: ModelCall, output: OutputBuilder) -> Assembler:
        """See `Wire.assembler`."""
        return _Assembler(output)


class _Assembler:
    """Builds the answer from the stream's events."""

    def __init__(self, output: OutputBuilder) -> None:
        self.done = False
        self._output = output
        self._blocks: dict[int, WireBlock] = {}
        self._stop: str | None = None
        self._usage = wire.Usage()

    @property
    def complete(self) -> bool:
        """See `Assembler.complete`: only `message_stop` makes it so."""
        return self.done

    def event(self, data: bytes) -> bool:
        """See `Assembler.event`."""
        event = wire.decoder.decode(data)
        if isinstance(event, wire.BlockDelta):
            self._delta(event)
        elif event is None or isinstance(event, wire.Ping):
            return False
        elif isinstance(event, wire.BlockStart):
            self._start(event)
        elif isinstance(event, wire.BlockStop):
            self._close(event.index)
        elif isinstance(event, wire.MessageDelta):
            self._stop = event.delta.stop_reason or self._stop
            self._count(event.usage)
        elif isinstance(event, wire.MessageStart):
            self._count(event.message.usage)
        elif isinstance(event, wire.MessageStop):
            self.done = True
        else:
            raise StreamedError({"error": event.error})
        return True

    def finish(self, request_id: str) -> Outcome:
        """See `Assembler.finish`."""
        reason = _STOP.get(self._stop, "unknown")
        return self._output.finish(reason, _usage(self._usage), replay=self._replay, request_id=request_id)

    def _start(self, event: wire.BlockStart) -> None:
        if event.index in self._blocks:
            raise BadEvent("two blocks of the stream have the same index")
        if len(self._blocks) == MAX_BLOCKS:  # those of kinds that are not known never reach the output
            raise BadEvent(f"the answer has more than {MAX_BLOCKS} blocks")
        started = event.content_block
        block = WireBlock(started.type)
        self._blocks[event.index] = block
        if started.type == "text":
            block.index = self._output.open("text")
            self._output.add(block.index, started.text or "")
        elif started.type == "thinking":
            block.index = self._output.open("thinking")
            block.signed.append(started.signature or "")
            self._output.add(block.index, started.thinking or "")
        elif started.type == "redacted_thinking":
            block.data = started.data or ""
        elif started.type == "tool_use":
            # An id that some endpoint let through and a strict one refuses counts as missing: ours takes its place.
            call_id = started.id if started.id and is_sendable_id(started.id) else ""
            block.index = self._output.open_call(call_id, started.name or "")
            block.given = started.input

    def _delta(self, event: wire.BlockDelta) -> None:
        block = self._blocks.get(event.index)
        if block is None:
            raise BadEvent("a block of the stream goes on that never began")
        delta = event.delta
        if delta.type == "signature_delta":
            block.signed.append(delta.signature or "")
        elif block.index >= 0:
            # Kinds that are not known carry none of the three and add nothing.
            self._output.add(block.index, delta.text or delta.partial_json or delta.thinking or "")

    def _close(self, index: int) -> None:
        block = self._blocks.get(index)
        if block is None or block.index < 0:
            return
        if isinstance(block.given, dict) and block.given and not self._output.raw(block.index):
            # Some endpoints give the whole input at the start instead of streaming it.
            self._output.add(block.index, msgspec.json.encode(block.given).decode())
        self._output.close(block.index)

    def _count(self, usage: wire.Usage | None) -> None:
        if usage is None:
            return
        for name in usage.__struct_fields__:
            value = getattr(usage, name)
            if isinstance(value, int):
                # The counts only grow, and some endpoints send zeros at one end of the stream.
                setattr(self._usage, name, max(value, getattr(self._usage, name) or 0))
            elif value is not None:
                setattr(self._usage, name, value)

    def _replay(self) -> bytes | None:
        ids = tuple(self._output.provider_ids)
        content = signed_content([block for _, block in sorted(self._blocks.items())], self._output)
        return pack(Replay(API_FORMAT, ids, content)) if ids or content else None


def _usage(usage: wire.Usage) -> ModelUsage:
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    thinking = usage.output_tokens_details.thinking_tokens if usage.output_tokens_details else None
    return ModelUsage(
        input_tokens_total=total_count(*parts),
        uncached_input_tokens=token_count(usage.input_tokens),
        output_tokens_total=token_count(usage.output_tokens),
        reasoning_output_tokens=token_count(thinking),
        cache_read_input_tokens=token_count(usage.cache_read_input_tokens),
        cache_write_input_tokens=token_count(usage.cache_creation_input_tokens),
    )
