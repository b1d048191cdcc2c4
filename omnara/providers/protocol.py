"""What the engine asks of a model, and what it gets back: the seam between durable steps and wire formats.

An adapter makes one attempt and says how it ended. It never retries, never sleeps and never writes: whether and when
to try again is the engine's durable decision, so that it survives the process.
Source: engine.md §5 (kinds and signals); DESIGN §5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol
from uuid import UUID

import msgspec

from omnara.domain.content import ReasoningBlock, TextBlock
from omnara.domain.context import ContextState
from omnara.domain.events import StopReason
from omnara.domain.stream import ModelUsage, Sink
from omnara.providers.media import ModelFile
from omnara.providers.rendered import RenderedHistory

ErrorKind = Literal[
    "context_window",
    "payload_too_large",
    "rate_limit",
    "transient",
    "provider_unavailable",
    "auth",
    "billing_account",
    "invalid_request",
    "replay_rejected",
    "response_too_large",
    "unknown",
]

CacheRetention = Literal["none", "short", "long"]

AuthKind = Literal["bearer_token", "api_key_header"]

MAX_CALL_ID_BYTES = 2000
"""Longest provider call id that is stored. Source: engine.md §1.1."""

MAX_MESSAGE_BYTES = 2000
"""Longest stored error message. Source: engine.md §5."""


class ApiKey:
    """A provider credential that does not show itself in logs, errors or tracebacks."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The plaintext, for a request header only."""
        return self._value

    def __repr__(self) -> str:
        return "ApiKey(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiKey) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


class Limits(msgspec.Struct, frozen=True):
    """Time limits of one attempt, in seconds. `first_byte` ends with the headers of the answer; from then on `idle`
    counts since the last event that carried something new: keep-alives do not.

    Source: DESIGN §5; field-reports B44.
    """

    connect: float = 5.0
    first_byte: float = 120.0
    idle: float = 300.0
    total: float = 600.0


class ModelTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A configured model, resolved: where it is, how to speak to it, and what it can do."""

    revision_id: str
    provider: str
    api_format: str
    slug: str
    base_url: str = ""
    request_path: str = ""
    api_variant: str = "default"
    auth_kind: AuthKind = "bearer_token"
    auth_header: str | None = None
    api_key: ApiKey | None = None
    context_window_tokens: int = 200_000
    max_output_tokens: int = 4096
    supports_tools: bool = True
    supports_reasoning: bool = False
    input_modalities: tuple[str, ...] = ()  # of text, image, file; none named: whatever the format carries
    reasoning_effort: str = ""
    cache_retention: CacheRetention = "short"
    temperature: float | None = None
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    limits: Limits = Limits()


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool on offer. `input_schema` is a JSON Schema of type object."""

    name: str
    description: str
    input_schema: dict[str, Any]


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt.

    `history` is the caller's cache slot for this agent: it is filled on the way and makes the next request cost its
    new events only; a fresh one is always correct. `new_call_id` makes the id of a tool call when its block opens
    and returns it with its public form. `suppress_replay` leaves provider-exact content out (after
    `replay_rejected`), and the slot remembers that for what is now in it. `media` has the files of the conversation by
    artifact id (see `omnara.providers.media`); one that is missing is named and not shown.
    """

    target: ModelTarget
    system: str
    tools: Sequence[ToolSpec]
    context: ContextState
    history: RenderedHistory
    new_call_id: Callable[[], tuple[UUID, str]]
    suppress_replay: bool = False
    media: Mapping[str, ModelFile] = msgspec.field(default_factory=dict)


class RequestedCall(msgspec.Struct, frozen=True):
    """A call that the model asks for. With a `problem` its arguments are unusable: it must fail, and never run.

    `input` is as the model wrote it: it may hold characters that cannot be stored.
    """

    id: UUID
    public_id: str
    provider_call_id: str
    name: str
    input: dict[str, Any]
    problem: str | None = None


CompletedBlock = TextBlock | ReasoningBlock | RequestedCall


class Completed(msgspec.Struct, frozen=True):
    """A whole, well-formed answer. `replay` is what the same model must get back unchanged, if anything."""

    stop_reason: StopReason
    blocks: tuple[CompletedBlock, ...]
    usage: ModelUsage = ModelUsage()
    replay: bytes | None = None
    request_id: str = ""

    @property
    def calls(self) -> tuple[RequestedCall, ...]:
        """The calls, in order."""
        return tuple(block for block in self.blocks if isinstance(block, RequestedCall))


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt without an answer.

    `message` is safe to store and to show (no credential, at most 2000 bytes). `ambiguous`: the provider may have
    worked, and charged, all the same. `retry_after_s` and `should_retry` are what the provider asked for.
    """

    kind: ErrorKind
    message: str
    ambiguous: bool = False
    retry_after_s: float | None = None
    should_retry: bool | None = None
    status: int | None = None
    provider_code: str = ""
    request_id: str = ""


Outcome = Completed | Failed


class ModelAdapter(Protocol):
    """Speaks one wire format."""

    async def call(self, call: ModelCall, sink: Sink | None) -> Outcome:
        """Make one attempt. Deltas go to `sink`, synchronously, as they are parsed; None means nobody listens.

        Cancellation closes the connection at once and propagates.

        Raises DamagedReplay when stored provider content of the history is unreadable.
        """
        ...

    async def close(self) -> None:
        """Close connections. Calls that are under way must have ended or been cancelled before."""
        ...
