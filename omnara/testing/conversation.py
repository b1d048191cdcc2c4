"""A provider request, seen the same way whatever its wire format.

Scripts decide from this and from nothing else, so one script serves all formats. Parsing is lazy: a script
for a bench that asks for the turn only never pays for the history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

Format = Literal["anthropic", "chat", "responses"]


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool that the request offers."""

    name: str
    schema: dict[str, Any]
    description: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that an earlier answer asked for, as the client replayed it."""

    id: str
    name: str
    arguments: Any


class ToolResult(msgspec.Struct, frozen=True):
    """The result of a call, with the call's name and arguments looked up."""

    call_id: str
    name: str
    arguments: Any
    text: str
    is_error: bool = False

    def json(self) -> Any:
        """Return the text decoded as JSON. Raises `msgspec.DecodeError` when it is not JSON."""
        return msgspec.json.decode(self.text)


class Message(msgspec.Struct, frozen=True):
    """One side's turn: adjacent items of one role are one message."""

    role: Literal["user", "assistant"]
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    thinking: int = 0


class Parsed(msgspec.Struct, frozen=True):
    """The neutral content of a request body."""

    model: str
    system: str
    tools: tuple[ToolSpec, ...]
    messages: tuple[Message, ...]
    stream: bool
    max_tokens: int | None = None


class Glance(msgspec.Struct, frozen=True):
    """What every answer needs of a request, at a price that does not depend on the size of its contents."""

    model: str
    turn: int
    stream: bool
    include_usage: bool = False
    encrypted_reasoning: bool = False


class Conversation:
    """A request as a script sees it.

    `turn` counts the assistant's messages so far; `attempt` is 1 for the first request of this
    conversation at this turn, 2 for its first repetition, and so on; `key` is the conversation header, or
    the first user text when there is none.
    """

    __slots__ = ("_body", "_glance", "_load", "_parse", "_parsed", "attempt", "format", "key")

    def __init__(
        self, format: Format, glance: Glance, load: Callable[[], Any], parse: Callable[[Any], Parsed], *, key: str = ""
    ) -> None:
        self.format = format
        self.key = key
        self.attempt = 1
        self._glance = glance
        self._load = load
        self._parse = parse
        self._body: Any = None
        self._parsed: Parsed | None = None

    @property
    def body(self) -> Any:
        """The decoded request; decoded when first asked for."""
        if self._body is None:
            self._body = self._load()
        return self._body

    @property
    def parsed(self) -> Parsed:
        """The whole request; parsed when first asked for."""
        if self._parsed is None:
            self._parsed = self._parse(self.body)
        return self._parsed

    @property
    def glance(self) -> Glance:
        """The request's outline."""
        return self._glance

    @property
    def model(self) -> str:
        """The model slug that was asked for."""
        return self._glance.model

    @property
    def turn(self) -> int:
        """How many assistant messages the request holds."""
        return self._glance.turn

    @property
    def system(self) -> str:
        """The system prompt, joined."""
        return self.parsed.system

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools on offer."""
        return self.parsed.tools

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages, adjacent ones of one role joined."""
        return self.parsed.messages

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """Every tool result so far, in order."""
        return tuple(result for message in self.messages for result in message.results)

    @property
    def user_texts(self) -> tuple[str, ...]:
        """The texts of the user's messages that have any, in order."""
        return tuple(message.text for message in self.messages if message.role == "user" and message.text)

    @property
    def first_user_text(self) -> str:
        """The first thing the user said, or an empty string."""
        texts = self.user_texts
        return texts[0] if texts else ""

    @property
    def last_user_text(self) -> str:
        """The last thing the user said, or an empty string."""
        texts = self.user_texts
        return texts[-1] if texts else ""

    def tool(self, name: str) -> ToolSpec | None:
        """Return the tool of that name, if it is offered."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def results_of(self, name: str) -> tuple[ToolResult, ...]:
        """Return the results of all calls of tool `name`, in order."""
        return tuple(result for result in self.results if result.name == name)


def merged(messages: list[Message]) -> tuple[Message, ...]:
    """Join adjacent messages of one role, texts by a line break."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1].role == message.role:
            last = out[-1]
            texts = [text for text in (last.text, message.text) if text]
            out[-1] = Message(
                message.role,
                "\n".join(texts),
                last.calls + message.calls,
                last.results + message.results,
                last.thinking + message.thinking,
            )
        else:
            out.append(message)
    return tuple(out)
