"""Calls again where a provider refused something that can be left out: replayed content, a file.

What is in the log stays in the log, so a refused part of it would end the conversation for good.
The files of a conversation come in here too: what they are is read for the request, since which ones fit differs.
Source: field-reports B02, B03.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard
from uuid import UUID

import msgspec

from omnara.domain.message import media_of
from omnara.domain.stream import StreamDelta
from omnara.engine.artifacts_shown import files_of, shown_parts
from omnara.engine.deps import Deps
from omnara.engine.plan import with_file_tools
from omnara.errors import Unavailable
from omnara.providers.protocol import Completed, Failed, ModelCall


class Reader(Protocol):
    """Takes the deltas of an attempt; `shown` counts them, `fail` says that they come to nothing."""

    @property
    def shown(self) -> int:
        """How many deltas there have been."""
        ...

    def fail(self, failure: Failed) -> None:
        """Void what was shown."""
        ...

    def __call__(self, delta: StreamDelta) -> None:
        """Take one delta."""
        ...


async def call_with_files(deps: Deps, agent_id: UUID, call: ModelCall, reader: Reader) -> Completed | Failed:
    """Make the call with the conversation's files, again without the newest when a file may be the reason of a refusal,
    and then without any: those before the newest were accepted earlier.

    A suspicion is kept only if the call without the files fares otherwise. Raises DamagedReplay.
    """
    context, history = call.context, call.history
    if not context.media:
        return await _call(deps, call, reader)
    media = [part for part in context.media if not part.previewed]
    previewed = len(media) < len(context.media)
    newest = [part for message in context.tail() for part in media_of(message)]
    refused = history.refused_files
    while True:
        try:
            files = await files_of(deps, agent_id, media, call.target, refused)
        except Unavailable as error:
            return Failed(kind="transient", message=f"the files of the conversation could not be read: {error}")
        if previewed or any(file.cut for file in files.values()):
            call = msgspec.structs.replace(call, tools=with_file_tools(call.tools))
        outcome = await _call(deps, msgspec.structs.replace(call, media=files), reader)
        if not _may_be_a_file(outcome):
            history.refused_files = refused
            return outcome
        shown = shown_parts(files, newest) or shown_parts(files, media)
        if not shown:
            return outcome
        if reader.shown:
            reader.fail(outcome)
        refused |= shown


async def _call(deps: Deps, call: ModelCall, reader: Reader) -> Completed | Failed:
    """Make the call, and once more without replayed content when that was refused."""
    outcome: Completed | Failed = await deps.gateway.call(call, reader)
    if isinstance(outcome, Failed) and outcome.kind == "replay_rejected":
        if reader.shown:
            reader.fail(outcome)
        outcome = await deps.gateway.call(msgspec.structs.replace(call, suppress_replay=True), reader)
    return outcome


def _may_be_a_file(outcome: Completed | Failed) -> TypeGuard[Failed]:
    if not isinstance(outcome, Failed):
        return False
    return outcome.kind in ("invalid_request", "payload_too_large") and outcome.status in (None, 400, 413, 422)
