"""Answers encoded once and sent many times, for benches in which this server must not be the bottleneck.

Every id in a response derives from one token, so a response is a template in which that token is replaced.
"""

from __future__ import annotations

import secrets
import time

from omnara.testing.answer import Answer
from omnara.testing.conversation import Glance
from omnara.testing.frames import Frame
from omnara.testing.prompt_cache import Cached
from omnara.testing.signatures import Signer
from omnara.testing.wire import TOKEN_CHARS, Reply, Wire

_PLACE = b"TOKENTOKENTOKENTOKEN"
_MAX_TEMPLATES = 4096
NOT_CACHED = Cached()

_Key = tuple[str, str, bool, bool, bool, int]


def new_token() -> str:
    """Return the random token that a response's ids are made of."""
    return secrets.token_hex(TOKEN_CHARS // 2)


class Templates:
    """A cache of encoded answers by the identity of the answer, which it keeps alive; emptied when full."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._known: dict[_Key, tuple[Answer, bytes]] = {}

    def body(self, wire: Wire, answer: Answer, glance: Glance) -> bytes:
        """Return the whole response body of an answer, with fresh ids."""
        key = (
            wire.format, glance.model, glance.stream, glance.include_usage, glance.encrypted_reasoning, id(answer)
        )  # fmt: skip
        known = self._known.get(key)
        if known is None:
            known = (answer, self._encode(wire, answer, glance))
            if len(self._known) >= _MAX_TEMPLATES:
                self._known.clear()
            self._known[key] = known
        return known[1].replace(_PLACE, new_token().encode())

    def _encode(self, wire: Wire, answer: Answer, glance: Glance) -> bytes:
        reply = reply_to(glance, _PLACE.decode(), 1, self._signer)
        if not glance.stream:
            return wire.document(answer, reply)
        return b"".join(frame.data for frame in wire.frames(answer, reply))


def reply_to(glance: Glance, token: str, input_tokens: int, signer: Signer, cached: Cached = NOT_CACHED) -> Reply:
    """Return what an encoder needs to know of a request."""
    return Reply(
        token=token,
        model=glance.model,
        created=int(time.time()),
        input_tokens=input_tokens,
        signer=signer,
        cached=cached,
        include_usage=glance.include_usage,
        encrypted_reasoning=glance.encrypted_reasoning,
    )


def halves(document: bytes) -> list[Frame]:
    """Cut a document into frames, so that the faults of a stream can strike it too."""
    middle = len(document) // 2
    return [
        Frame(b"", "open"),
        Frame(document[:middle], "text"),
        Frame(document[middle:], "text"),
        Frame(b"", "end"),
    ]
