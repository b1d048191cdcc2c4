"""OpenAI Chat Completions, as OpenAI speaks it and as the many servers that imitate it do.

The imitators differ in what they leave out or repeat: the index of a call, the reason to stop, the end marker, the
name of the reasoning field. What can be understood is understood; what cannot is tried again.
Source: DESIGN §5; field-reports B02, B04, B43.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from omnara.domain.stream import ModelStopReason, ModelUsage
from omnara.domain.text import clean_text, is_blank
from omnara.providers import openai_chat_wire as wire
from omnara.providers.json_events import BadEvent
from omnara.providers.media import fill
from omnara.providers.openai_chat_media import parts_of
from omnara.providers.openai_chat_request import ChatRenderer, assistant_message, call_value, head, url
from omnara.providers.output import MAX_BLOCKS, OutputBuilder
from omnara.providers.protocol import ModelCall, ModelTarget, Outcome
from omnara.providers.replay import Replay, pack
from omnara.providers.streaming import Assembler, StreamedError
from omnara.providers.usage import token_count

API_FORMAT: Final = "openai_chat_completions"

KEY_HEADER: Final = "api-key"

_STOP: Final[dict[str | None, ModelStopReason]] = {
    "stop": "end_turn",
    "eos": "end_turn",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "length": "max_tokens",
    "content_filter": "content_filter",
}


class OpenAIChat:
    """The wire format `openai_chat_completions`."""

    headers: Mapping[str, str] = MappingProxyType({})
    key_header = KEY_HEADER

    def url(self, target: ModelTarget) -> str:
        """See `Wire.url`."""
        return url(target)

    def body(self, call: ModelCall) -> bytes:
        """See `Wire.body`. Everything that differs between two requests of an agent stands at the end."""
        renderer = ChatRenderer(call.target)
        settled, open_side = call.history.render(call.context, renderer, renderer.key)
        body = b"".join((head(call), settled, b"," if settled else b"", open_side, b"]}"))
        return fill(body, call.media, parts_of) if call.context.media else body

    def assembler(self, call: ModelCall, output: OutputBuilder) -> Assembler:
        """See `Wire.assembler`."""
        return _Assembler(output)


class _Call(msgspec.Struct):
    """A call under construction. It opens when its name is known; arguments that come earlier are held."""

    id: str = ""
    index: int = -1
    held: list[str] = msgspec.field(default_factory=list)
    extra: Any = None


class _Assembler:
    """Builds the answer from the stream's chunks."""

    def __init__(self, output: OutputBuilder) -> None:
        self.done = False
        self._output = output
        self._open = {"text": -1, "thinking": -1}
        self._texts: list[int] = []
        self._thoughts: list[int] = []
        self._reasoning_field = "reasoning_content"
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}
        self._finish: str | None = None
        self._refused = False
        self._usage = ModelUsage()

    @property
    def complete(self) -> bool:
        """See `Assembler.complete`. Some servers leave out the end marker, others the reason."""
        return self._finish is not None or self.done

    def event(self, data: bytes) -> bool:
        """See `Assembler.event`."""
        if data == wire.DONE:
            self.done = True
            return True
        chunk = wire.decoder.decode(data)
        if chunk is None:
            return False
        if chunk.error is not None:
            raise StreamedError({"error": chunk.error})
        fresh = False
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
            fresh = True
        for choice in chunk.choices or ():
            if not choice.index and self._choice(choice):
                fresh = True
        return fresh

    def finish(self, request_id: str) -> Outcome:
        """See `Assembler.finish`."""
        for call in self._calls:
            if call.index < 0:
                self._begin(call, "")
        reason = _STOP.get(self._finish, "unknown")
        if self._refused and reason == "end_turn":
            reason = "refusal"
        return self._output.finish(reason, self._usage, replay=self._replay, request_id=request_id)

    def _choice(self, choice: wire.Choice) -> bool:
        fresh = False
        delta = choice.delta
        if delta is not None:
            if isinstance(delta.content, str) and delta.content:
                fresh = self._add("text", delta.content)
            elif isinstance(delta.content, list):
                for part in delta.content:
                    fresh = self._part(part) or fresh
            for call in delta.tool_calls or ():
                self._call(call)
                fresh = True
            thought = delta.reasoning_content or delta.reasoning
            if thought:
                self._reasoning_field = "reasoning_content" if delta.reasoning_content else "reasoning"
                fresh = self._add("thinking", thought)
            if delta.refusal:
                self._refused = True
                fresh = self._add("text", delta.refusal)
        if choice.finish_reason:
            self._finish = choice.finish_reason
            fresh = True
        return fresh

    def _add(self, kind: Any, piece: str) -> bool:
        index = self._open[kind]
        if index < 0:
            self._close_open()
            index = self._output.open(kind)
            self._open[kind] = index
            (self._texts if kind == "text" else self._thoughts).append(index)
        self._output.add(index, piece)
        return True

    def _part(self, part: Any) -> bool:
        """A typed part of a content list; kinds that are not known add nothing."""
        if not isinstance(part, dict):
            return False
        text, thought = part.get("text"), part.get("thinking")
        if part.get("type") == "text" and isinstance(text, str) and text:
            return self._add("text", text)
        if part.get("type") == "thinking" and isinstance(thought, list):
            texts = [item.get("text") for item in thought if isinstance(item, dict)]
            whole = "".join(piece for piece in texts if isinstance(piece, str))
            return bool(whole) and self._add("thinking", whole)
        return False

    def _close_open(self) -> None:
        for kind, index in self._open.items():
            if index >= 0:
                self._output.close(index)
                self._open[kind] = -1

    def _call(self, part: wire.CallDelta) -> None:
        function = part.function or wire.Function()
        call = self._find(part)
        if call is None:
            call = self._new_call()
        if part.id and not call.id:
            call.id = part.id
            self._by_id.setdefault(part.id, call)
        if part.index is not None:
            self._by_index[part.index] = call
        if part.extra_content is not None:
            call.extra = part.extra_content
        if call.index < 0 and function.name:
            self._begin(call, function.name)
        arguments = function.arguments or ""
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        if call.index < 0:
            call.held.append(arguments)
        else:
            self._output.add(call.index, arguments)

    def _find(self, part: wire.CallDelta) -> _Call | None:
        """The call that a piece belongs to. A new id starts a new call, also under an index that was used."""
        last = self._calls[-1] if self._calls else None
        call = last if part.index is None else self._by_index.get(part.index)
        if call is not None and part.id and call.id and part.id != call.id:
            return self._by_id.get(part.id)
        return call

    def _new_call(self) -> _Call:
        # Counted here too: one that never gets a name becomes no block.
        if len(self._calls) == MAX_BLOCKS:
            raise BadEvent(f"the answer has more than {MAX_BLOCKS} blocks")
        call = _Call()
        self._calls.append(call)
        return call

    def _begin(self, call: _Call, name: str) -> None:
        self._close_open()
        call.index = self._output.open_call(call.id, name)
        self._output.add(call.index, "".join(call.held))

    def _replay(self) -> bytes | None:
        ids = tuple(self._output.provider_ids)
        if not ids:
            return None
        # `finish` opened every call; they stand in the output in the order of their opening.
        calls = sorted(self._calls, key=lambda call: call.index)
        return pack(Replay(API_FORMAT, ids, self._content(ids, calls)))

    def _content(self, ids: tuple[str, ...], calls: list[_Call]) -> tuple[bytes, ...]:
        """The whole message, when it has what only its maker understands: reasoning beside calls, or signed calls."""
        thought = "".join(self._output.raw(index) for index in self._thoughts)
        if not thought and not any(call.extra for call in calls):
            return ()
        values = []
        for call_id, call in zip(ids, calls, strict=True):
            arguments, _ = self._output.arguments(call.index)
            value = call_value(call_id, self._output.call_name(call.index), arguments)
            values.append(value if call.extra is None else {**value, "extra_content": call.extra})
        texts = [clean_text(self._output.raw(index)) for index in self._texts]
        message = assistant_message([text for text in texts if not is_blank(text)], values)
        if thought:
            message[self._reasoning_field] = clean_text(thought)
        return (msgspec.json.encode(message),)


def _usage(usage: wire.Usage) -> ModelUsage:
    prompt = usage.prompt_tokens_details or wire.PromptDetails()
    completion = usage.completion_tokens_details or wire.CompletionDetails()
    total, cached = token_count(usage.prompt_tokens), token_count(prompt.cached_tokens)
    return ModelUsage(
        input_tokens_total=total,
        uncached_input_tokens=None if total is None else max(0, total - (cached or 0)),
        output_tokens_total=token_count(usage.completion_tokens),
        reasoning_output_tokens=token_count(completion.reasoning_tokens),
        cache_read_input_tokens=cached,
        cache_write_input_tokens=token_count(prompt.cache_write_tokens),
    )
