"""The serialized conversation: bytes that only ever grow, so that a request costs its new events.

Providers cache by prefix, so request n+1 must begin with the bytes of request n; and a long conversation must not be
encoded again at every step. Both follow from one rule: what is settled is encoded once and appended, and only the open
side after it is encoded per request.
Source: DESIGN §4 (cost per step), §9 (history).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from omnara.domain.context import AssistantMessage, ContextState, Message
from omnara.domain.events import EventMeta
from omnara.providers.replay import DamagedReplay, Replay, unpack


class Renderer(Protocol):
    """Turns neutral messages into the JSON objects of one wire format."""

    def group(self, messages: Sequence[Message], ids: dict[str, str], *, marked: bool) -> bytes:
        """Encode one user side (results, texts) as comma-joined JSON objects; `marked` adds the cache mark at the end.

        `ids` translates public call ids to the ids that the assistant message before used.
        """
        ...

    def assistant(self, message: AssistantMessage, replay: Replay | None, ids: dict[str, str]) -> bytes:
        """Encode one assistant message as a JSON object, its calls under `ids`."""
        ...

    def same_model(self, meta: EventMeta) -> bool:
        """Whether an output with this `meta` came from the model that is asked now."""
        ...

    def takes_id(self, call_id: str) -> bool:
        """Whether an endpoint of this format takes a call back under this id."""
        ...


class RenderedHistory:
    """One agent's settled messages in the bytes of one wire format. A cache slot: an empty one is always correct.

    Not safe for two calls at a time; an agent has one.
    """

    __slots__ = (
        "_bytes",
        "_count",
        "_generation",
        "_ids",
        "_key",
        "_led",
        "_replays",
        "_source",
        "_suppressed",
        "_used",
        "refused_files",
    )

    def __init__(self) -> None:
        self._suppressed = 0
        self.refused_files: frozenset[str] = frozenset()
        """Artifacts that a provider refused in a request: they are named and not shown from then on."""
        self._key: Hashable = None
        self._reset(None)

    @property
    def bytes_size(self) -> int:
        """Memory held, in bytes."""
        return len(self._bytes)

    @property
    def replays(self) -> int:
        """How many messages carry provider-exact content: none means that a refusal cannot be about it."""
        return self._replays

    @property
    def led_by_reasoning(self) -> bool:
        """Whether the last assistant message begins with replayed reasoning."""
        return self._led

    def suppress(self, sequence: int) -> None:
        """Leave the provider-exact content of outputs up to `sequence` out from now on."""
        if sequence > self._suppressed:
            self._suppressed = sequence
            self._reset(None)

    def render(self, context: ContextState, renderer: Renderer, key: Hashable) -> tuple[bytearray, bytes]:
        """Bring the slot up to `context` and return (settled, open side), both comma-joined JSON objects.

        The settled part is the slot's own buffer: copy it before the next call. The open side carries the cache
        mark. `key` names wire format and model: another one starts anew.

        Raises DamagedReplay.
        """
        fresh = self._source is not context or self._generation != context.generation or self._key != key
        if fresh or self._count > len(context.settled):
            self._reset(context)
            self._key = key
        try:
            self._append(context.settled, renderer)
        except DamagedReplay:
            self._reset(None)
            raise
        return self._bytes, renderer.group(context.tail(), self._ids, marked=True)

    def _reset(self, context: ContextState | None) -> None:
        self._source = context
        self._generation = context.generation if context is not None else -1
        self._bytes = bytearray()
        self._count = 0
        self._ids: dict[str, str] = {}
        self._used: set[str] = set()
        self._replays = 0
        self._led = False

    def _append(self, settled: Sequence[Message], renderer: Renderer) -> None:
        side: list[Message] = []
        for message in settled[self._count :]:
            if isinstance(message, AssistantMessage):
                if side:
                    self._add(renderer.group(side, self._ids, marked=False))
                side = []
                self._add(self._assistant(message, renderer))
            else:
                side.append(message)
        self._count = len(settled)

    def _assistant(self, message: AssistantMessage, renderer: Renderer) -> bytes:
        calls = message.calls
        replay = None
        if message.replay is not None and message.sequence > self._suppressed and renderer.same_model(message.meta):
            replay = unpack(message.replay, message.sequence, calls=len(calls))
        if replay is not None and not self._used.isdisjoint((*replay.call_ids, *replay.item_ids)):
            replay = None  # some servers count their ids from zero in every answer, and others refuse that
        if replay is not None and not all(map(renderer.takes_id, replay.call_ids)):
            replay = None  # stored before such ids were replaced as they arrive
        names = replay.call_ids if replay is not None else tuple(call.tool_call_id for call in calls)
        self._used.update(names)
        if replay is not None:
            self._used.update(replay.item_ids)
        self._ids = {call.tool_call_id: name for call, name in zip(calls, names, strict=True)}
        self._led = replay is not None and bool(replay.content) and b'thinking"' in replay.content[0][:28]
        self._replays += replay is not None and bool(replay.content)
        return renderer.assistant(message, replay, self._ids)

    def _add(self, item: bytes) -> None:
        if self._bytes:
            self._bytes += b","
        self._bytes += item
