"""A reader's place in the joint log of a project, and the opaque text in which a client keeps it.

Everything up to one moment was sent; or that, and of what came until a second moment the part up to one agent's event:
batches are sent agent by agent. So the text is small however many agents there are, means the same to every replica,
and is in each frame: a client that comes back with any of them misses nothing and sees nothing twice.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import re
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec

from omnara.db.project_log import Here, Mark
from omnara.errors import InvalidRequest

MAX_LENGTH: Final = 12_000
"""Characters. A snapshot lists the transactions that were open; a few hundred at most, so this is far away."""
_VERSION: Final = 1
_SNAPSHOT: Final = re.compile(r"([1-9][0-9]{0,18}):([1-9][0-9]{0,18}):((?:[1-9][0-9]{0,18},)*[1-9][0-9]{0,18})?")
_TIMELINE: Final = re.compile(r"[0-9A-F]{8}")
_REFUSED: Final = "that is not a place in this project's stream; open it without one"


class Place(msgspec.Struct, frozen=True):
    """All up to `since` (None: nothing) was sent, and of what came from there to `until` all up to one event."""

    since: Mark | None
    until: Mark | None = None
    agent_id: UUID | None = None
    sequence: int = 0


class _Moment(msgspec.Struct, frozen=True, array_like=True):
    snapshot: str
    at_us: int
    timeline: str


class _Text(msgspec.Struct, frozen=True, array_like=True):
    version: int
    project: bytes
    database: str
    since: _Moment | None
    until: _Moment | None
    agent: bytes | None
    sequence: int


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Text)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def encode(project_id: UUID, database: str, place: Place) -> str:
    """Return the text of a place in the joint log of a project of this database."""
    agent = None if place.agent_id is None else place.agent_id.bytes
    text = _Text(
        _VERSION, project_id.bytes, database, _moment(place.since), _moment(place.until), agent, place.sequence
    )
    return base64.urlsafe_b64encode(_ENCODER.encode(text)).rstrip(b"=").decode()


def decode(project_id: UUID, here: Here, text: str) -> Place:
    """Return the place that a text names. Raises InvalidRequest for a damaged one, and for one of another project,
    another database or a moment that this database has not reached: it was restored from a copy.
    """
    found = _read(text)
    if found is None or found.version != _VERSION or found.project != project_id.bytes:
        raise InvalidRequest(_REFUSED)
    since, until = _mark(found.since), _mark(found.until)
    if found.database != here.database or any(_ahead(mark, here.mark) for mark in (since, until)):
        raise InvalidRequest(_REFUSED)
    return Place(since, until, None if found.agent is None else UUID(bytes=found.agent), found.sequence)


def _ahead(mark: Mark | None, now: Mark) -> bool:
    return mark is not None and mark.timeline == now.timeline and _top(mark.snapshot) > _top(now.snapshot)


def _moment(mark: Mark | None) -> _Moment | None:
    if mark is None:
        return None
    return _Moment(mark.snapshot, (mark.taken_at - _EPOCH) // timedelta(microseconds=1), mark.timeline)


def _mark(moment: _Moment | None) -> Mark | None:
    if moment is None:
        return None
    return Mark(moment.snapshot, _EPOCH + timedelta(microseconds=moment.at_us), moment.timeline)


def _top(snapshot: str) -> int:
    return int(snapshot.split(":")[1])


def _read(text: str) -> _Text | None:
    if len(text) > MAX_LENGTH:
        return None
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        found = _DECODER.decode(raw)
    except (UnicodeError, binascii.Error, msgspec.MsgspecError):
        return None
    moments = [moment for moment in (found.since, found.until) if moment is not None]
    sound = (
        all(_sound(moment) for moment in moments)
        and (found.agent is None or len(found.agent) == 16)
        and (found.agent is None or found.until is not None)
        and 0 <= found.sequence < 2**63
    )
    return found if sound else None


def _sound(moment: _Moment) -> bool:
    """Whether Postgres would take it: the database must not be asked what it would refuse."""
    parts = _SNAPSHOT.fullmatch(moment.snapshot)
    if parts is None or not 0 < moment.at_us < 2**52 or _TIMELINE.fullmatch(moment.timeline) is None:
        return False
    low, top = int(parts[1]), int(parts[2])
    open_ones = [int(item) for item in parts[3].split(",")] if parts[3] else []
    ordered = all(one < other for one, other in itertools.pairwise(open_ones))
    return low <= top < 2**63 and ordered and all(low <= item < top for item in open_ones)
