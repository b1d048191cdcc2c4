"""Scripts: how the server decides what to say next.

A script is a pure function of the conversation, so that a request repeated after a crash gets the same
answer and two servers agree. What is pure can also be data: a plan of answers travels as JSON in a user
message, in a control request or in a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from omnara.testing.answer import Answer, Block, Call, Text, say
from omnara.testing.conversation import Conversation, ToolResult

Script = Callable[[Conversation], Answer]

FINAL = say("Done.")
"""What a plan says when it has run out of answers."""

_FENCE = re.compile(r"```script\n(.*?)\n```", re.DOTALL)
_SLOT = re.compile(r"\{\{\s*(result|user)(?:\s+(-?\d+))?\s*\}\}")


class ScriptError(Exception):
    """A script cannot go on from this conversation; the server answers 500 and logs why."""


class Plan(msgspec.Struct, frozen=True):
    """Answers in order. `loop` starts over at the end instead of saying `FINAL`."""

    answers: tuple[Answer, ...]
    loop: bool = False


def plan(*answers: Answer, loop: bool = False) -> Script:
    """Return the script that gives the n-th answer at turn n.

    Texts and arguments may refer to the conversation. In texts, `{{result N}}` is the text of the N-th tool
    result so far (negative: from the end) and `{{user}}` the last thing the user said. In arguments, an
    object `{"$result": N, "path": [...]}` is replaced by that result, decoded as JSON when `path` is given.
    """
    return lambda conversation: _from_plan(Plan(answers, loop), conversation.turn, conversation)


def in_order(*answers: Answer) -> Script:
    """Return a script that gives each conversation the answers in the order of its requests.

    Not pure: a repeated request gets the next answer. For tests about retries.
    """
    asked: dict[str, int] = {}

    def script(conversation: Conversation) -> Answer:
        number = asked.get(conversation.key, 0)
        asked[conversation.key] = number + 1
        return _from_plan(Plan(answers), number, conversation)

    return script


def echo(conversation: Conversation) -> Answer:
    """Repeat what the user said last, or the newest tool results when they are newer."""
    last = conversation.messages[-1] if conversation.messages else None
    if last is not None and last.results:
        said = "\n".join(result.text for result in last.results)
    else:
        said = conversation.last_user_text
    return say(said if said.strip() else "(nothing)")


def fixed(text: str = "Hello from the scripted model.") -> Script:
    """Return the script that always says `text`."""
    answer = say(text)
    return lambda _: answer


def steps(count: int = 100, tool: str = "note", text: str = "All steps are done.") -> Script:
    """Return the script that keeps an agent busy for `count` steps, every second of which runs a tool call.

    A model call and the pass over its tool call are two steps, so it calls `tool` with `{"step": turn}`
    while at least two more steps fit, and then ends the turn. Reads nothing of the conversation but its turn.
    """
    final = say(text)
    calls = [Answer(blocks=(Call(tool, {"step": turn}),)) for turn in range(max(0, count - 1) // 2)]

    def script(conversation: Conversation) -> Answer:
        turn = conversation.turn
        return calls[turn] if turn < len(calls) else final

    return script


def embed(*answers: Answer, loop: bool = False, text: str = "") -> str:
    """Return a user message that carries a plan, for `embedded` to follow."""
    data = msgspec.json.encode(Plan(answers, loop)).decode()
    return f"{text}\n```script\n{data}\n```".lstrip("\n")


def embedded(conversation: Conversation) -> Answer:
    """Follow the newest plan found in a user message, counting turns from there; without one, `echo`.

    Raises `ScriptError` when the fenced block is no plan.
    """
    for at in range(len(conversation.messages) - 1, -1, -1):
        message = conversation.messages[at]
        found = _FENCE.findall(message.text) if message.role == "user" else []
        if found:
            turn = sum(1 for later in conversation.messages[at:] if later.role == "assistant")
            return _from_plan(_decode_plan(found[-1]), turn, conversation)
    return echo(conversation)


def _decode_plan(text: str) -> Plan:
    try:
        return msgspec.json.decode(text, type=Plan)
    except msgspec.DecodeError as error:
        raise ScriptError(f"the script in the message cannot be read: {error}") from error


def _from_plan(found: Plan, turn: int, conversation: Conversation) -> Answer:
    if found.loop and found.answers:
        turn %= len(found.answers)
    answer = found.answers[turn] if turn < len(found.answers) else FINAL
    return _resolve(answer, conversation)


def _resolve(answer: Answer, conversation: Conversation) -> Answer:
    return msgspec.structs.replace(answer, blocks=tuple(_resolved(block, conversation) for block in answer.blocks))


def _resolved(block: Block, conversation: Conversation) -> Block:
    if isinstance(block, Call):
        return Call(block.name, _fill(block.arguments, conversation), block.raw, block.id)
    if isinstance(block, Text) and not block.chunks and "{{" in block.text:
        return Text(_SLOT.sub(lambda slot: _slot(slot, conversation), block.text))
    return block


def _slot(slot: re.Match[str], conversation: Conversation) -> str:
    if slot[1] == "user":
        return conversation.last_user_text
    return _result(int(slot[2] or -1), conversation).text


def _fill(value: Any, conversation: Conversation) -> Any:
    if isinstance(value, Mapping):
        if "$result" in value:
            return _lookup(value, conversation)
        return {key: _fill(item, conversation) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fill(item, conversation) for item in value]
    return value


def _lookup(reference: Mapping[str, Any], conversation: Conversation) -> Any:
    result = _result(reference["$result"], conversation)
    if "path" not in reference:
        return result.text
    try:
        found = result.json()
        for key in reference["path"]:
            found = found[key]
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ScriptError(f"{reference} is not in the tool result {result.text[:200]!r}") from error
    return found


def _result(number: int, conversation: Conversation) -> ToolResult:
    try:
        return conversation.results[number]
    except IndexError as error:
        raise ScriptError(f"there is no tool result number {number}") from error
