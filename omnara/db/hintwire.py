"""How hints look on the wire: packed into as few notifications as fit, none of them over the server's limit.

A payload of 8,000 bytes or more fails the whole notifying transaction, and the limit counts bytes, not characters.
Source: DESIGN §3 (Hints), field report B50.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

CHANNEL: Final = "omnara_hints"
PAYLOAD_LIMIT: Final = 7_900
"""Bytes; 7,999 is the most that the server takes. The rest is room for the envelope."""
DELTA_LIMIT: Final = 7_000
"""Bytes of one opaque delta; a longer one cannot be sent and is dropped."""


class Kind(enum.StrEnum):
    """What a hint is about. Each id is an agent's, of `MACHINES` and `COMMANDS` a machine's; it says "look again", not
    what is there.

    `READY`: the agent may have work. `EVENTS`: its log grew. `CANCEL`: work was taken away. `MACHINES`: a machine has
    work, is to be made, woken or removed, or somebody else may drive it now. `COMMANDS`: one that is there has work,
    which concerns its channel alone. `SUBSCRIBERS`: some replica streams this agent and wants its deltas. `DELTAS`:
    opaque text for the streams of one agent.
    """

    READY = "ready"
    EVENTS = "events"
    CANCEL = "cancel"
    MACHINES = "machines"
    COMMANDS = "commands"
    SUBSCRIBERS = "subscribers"
    DELTAS = "deltas"


class Hint(msgspec.Struct, frozen=True):
    """One thing to tell. `text` is empty but for deltas; `everything` means that the ids were too many to list."""

    kind: Kind
    ids: tuple[str, ...] = ()
    text: str = ""
    everything: bool = False


class _Wire(msgspec.Struct, omit_defaults=True):
    """The payload: origin, ids by kind, kinds of which everything is meant, deltas as (agent, text)."""

    o: str
    i: dict[Kind, list[str]] = {}
    e: list[Kind] = []
    d: list[tuple[str, str]] = []


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(_Wire)


def encode(origin: str, hints: Iterable[Hint]) -> Iterator[str]:
    """Yield payloads below the limit that carry `hints`, in order. Deltas over `DELTA_LIMIT` bytes are left out."""
    wire, size = _Wire(o=origin), 0
    for hint in hints:
        for piece, cost in _pieces(hint):
            if size and size + cost > PAYLOAD_LIMIT - len(origin) - 128:
                yield _encoder.encode(wire).decode()
                wire, size = _Wire(o=origin), 0
            _add(wire, piece)
            size += cost
    if size:
        yield _encoder.encode(wire).decode()


def decode(payload: str) -> tuple[str, list[Hint]]:
    """Return the sender's mark and the hints. Raises `msgspec.DecodeError` (or its subclass) on foreign text."""
    wire = _decoder.decode(payload)
    hints = [Hint(kind, tuple(ids)) for kind, ids in wire.i.items()]
    hints += [Hint(kind, everything=True) for kind in wire.e]
    hints += [Hint(Kind.DELTAS, (agent,), text) for agent, text in wire.d]
    return wire.o, hints


def _pieces(hint: Hint) -> Iterator[tuple[Hint, int]]:
    """Split a hint into its smallest parts, each with the most bytes that it can add to a payload."""
    if hint.everything:
        yield hint, 24
        return
    for agent_id in hint.ids:
        cost = len(_encoder.encode(agent_id)) + 16
        if hint.kind is Kind.DELTAS:
            cost += len(_encoder.encode(hint.text))
            if cost > DELTA_LIMIT:
                continue
        yield Hint(hint.kind, (agent_id,), hint.text), cost


def _add(wire: _Wire, piece: Hint) -> None:
    if piece.everything:
        wire.e.append(piece.kind)
    elif piece.kind is Kind.DELTAS:
        wire.d.append((piece.ids[0], piece.text))
    else:
        wire.i.setdefault(piece.kind, []).append(piece.ids[0])
