"""`upload_file` and `download_file`: files between machines and artifacts, as base64 through a shell.

Only what every POSIX shell and a base64 program can do, so that it works on any machine. A file appears under its name
only when it is whole. Source: features.md (upload and download tools); api.md §13 (limits of files).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import posixpath
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final
from uuid import UUID

from omnara.db import agents, artifacts
from omnara.db.connection import Connection
from omnara.domain.content import InlineMedia, MediaRefBlock, StructuredDataBlock
from omnara.engine.artifacts import MAX_FILE_BYTES, artifact_uuid, attach, take_in
from omnara.engine.artifacts_check import media_type_of
from omnara.engine.deps import Deps
from omnara.engine.machines.transfer import Ended, Transfer, TransferFailed, begin
from omnara.errors import InvalidRequest, RequestTooLarge, Unavailable
from omnara.ids import IdKind, encode
from omnara.tools.files import artifact_in
from omnara.tools.protocol import ToolResult, failed, succeeded

__all__ = ["AgentMachineFiles"]

HEAD_BYTES: Final = 64
"""The size, and blanks up to here: where the content begins in the output is known before it is read."""
PIECE_BYTES: Final = 57 * 1700
"""Of a file in one write: lines of base64 that are less than the limit of a write together."""

_NO_FILE, _TOO_LARGE, _NO_PROGRAM, _NOT_WRITTEN, _NOT_WHOLE = 66, 65, 69, 73, 74
_EXITS: Final = {
    _NO_FILE: ("There is no readable file of this name on the machine.", "file_not_found"),
    _TOO_LARGE: (f"The file is empty, or has more than {MAX_FILE_BYTES} bytes.", "file_too_large"),
    _NO_PROGRAM: ("The machine has neither base64 nor openssl.", "no_base64_program"),
    _NOT_WRITTEN: ("The file cannot be written there.", "file_not_written"),
    _NOT_WHOLE: ("The file did not arrive whole. Nothing was written.", "file_transfer_failed"),
}
_ENDING: Final = frozenset({"process_terminal", "stdin_closed", "stdin_write_unknown"})
"""What a write meets when the other side has given up, or is about to."""

_UPLOAD: Final = """exec 2>/dev/null
f={path}
[ -f "$f" ] && [ -r "$f" ] || exit 66
s=$(wc -c <"$f" | tr -d ' ') || exit 66
[ "$s" -gt 0 ] && [ "$s" -le {most} ] || exit 65
if command -v base64 >/dev/null; then printf '%-64s' "$s"; base64 <"$f" | tr -d '\\r\\n'
elif command -v openssl >/dev/null; then printf '%-64s' "$s"; openssl base64 <"$f" | tr -d '\\r\\n'
else exit 69; fi
"""

_DOWNLOAD: Final = """exec 2>/dev/null
f={path}
t="$f.{name}.part"
d=$(dirname "$f"); mkdir -p "$d" || exit 73
[ -d "$f" ] && exit 73
trap 'rm -f "$t"' 0
trap 'exit 74' 1 2 15
if printf 'eA==\\n' | base64 -d >/dev/null; then base64 -d >"$t" || exit 74
elif printf 'eA==\\n' | base64 -D >/dev/null; then base64 -D >"$t" || exit 74
elif command -v openssl >/dev/null; then openssl base64 -d >"$t" || exit 74
else exit 69; fi
[ -f "$t" ] || exit 73
[ "$(wc -c <"$t" | tr -d ' ')" = {size} ] || exit 74
mv -f "$t" "$f" || exit 73
"""


class AgentMachineFiles:
    """The `MachineFiles` of a process."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def upload(self, agent_id: UUID, call_id: UUID, tool_input: dict[str, Any]) -> ToolResult:
        """See `MachineFiles.upload`."""
        command = _UPLOAD.format(path=_quoted(tool_input["path"]), most=MAX_FILE_BYTES)
        begun = await begin(
            self._deps, agent_id, call_id, tool_input, purpose="upload", command=command, wait_ms=10_000
        )
        if isinstance(begun, ToolResult):
            return begun
        try:
            async with _abandoned_when_it_fails(begun):
                data = await _read_file(begun)
                await begun.forget()
        except TransferFailed as failure:
            return failure.result
        return await self._store(agent_id, tool_input, begun, data)

    async def download(self, agent_id: UUID, call_id: UUID, tool_input: dict[str, Any]) -> ToolResult:
        """See `MachineFiles.download`."""
        name = artifact_in(tool_input["artifact"])
        artifact_id = None if name is None else artifact_uuid(name)
        if artifact_id is None:
            return failed("There is no such attachment.", "artifact_not_found")
        async with self._deps.db.acquire() as connection:
            found = await artifacts.find_artifacts(connection, agent_id, [artifact_id])
        if not found:
            return failed("There is no such attachment.", "artifact_not_found")
        data = await self._deps.blobs.read(self._deps.db, found[0], 0, found[0].size)
        path = tool_input["path"]
        command = _DOWNLOAD.format(path=_quoted(path), name=encode(IdKind.TOOL_CALL, call_id), size=len(data))
        begun = await begin(self._deps, agent_id, call_id, tool_input, purpose="download", command=command, wait_ms=0)
        if isinstance(begun, ToolResult):
            return begun
        try:
            async with _abandoned_when_it_fails(begun):
                await _write_file(begun, await asyncio.to_thread(_pieces, data))
                await begun.forget()
        except TransferFailed as failure:
            return failure.result
        facts = {"path": path, "size": len(data), "machine_ref": begun.machine.machine_ref}
        return succeeded(StructuredDataBlock(facts))

    async def _store(self, agent_id: UUID, tool_input: dict[str, Any], transfer: Transfer, data: bytes) -> ToolResult:
        path: str = tool_input["path"]
        name = tool_input.get("filename") or posixpath.basename(path.replace("\\", "/")) or "file"
        media_type = media_type_of(name, data)
        if media_type is None:
            return failed(
                "Files of this kind are not accepted: put what you want to keep into text.", "file_not_accepted"
            )
        text = (await asyncio.to_thread(base64.b64encode, data)).decode()

        async def locate(connection: Connection) -> agents.AgentRef | None:
            return await agents.locate_agent(connection, agent_id)

        agent = await self._deps.db.run(locate)
        assert agent is not None, "agents are never deleted"
        try:
            blocks, taken = await take_in(self._deps, agent.org_id, [InlineMedia(media_type, text, name[-200:])])
        except (InvalidRequest, RequestTooLarge) as error:
            return failed(f"The file is not accepted: {error.detail}.", "file_not_accepted")

        async def keep(connection: Connection) -> None:
            await attach(connection, agent, taken, loose=True)

        await self._deps.db.run(keep)
        stored = blocks[0]
        assert isinstance(stored, MediaRefBlock)
        facts = {
            "artifact": stored.artifact_id,
            "path": path,
            "size": len(data),
            "type": media_type,
            "machine_ref": transfer.machine.machine_ref,
        }
        return succeeded(StructuredDataBlock(facts), stored)


@asynccontextmanager
async def _abandoned_when_it_fails(transfer: Transfer) -> AsyncIterator[None]:
    """End the process and drop its pieces whatever goes wrong; one that is canceled is ended with its call."""
    try:
        yield
    except Exception:
        with suppress(Unavailable):  # its own limit ends it then
            await transfer.abandon()
        raise


async def _read_file(transfer: Transfer) -> bytes:
    _check(await transfer.finish())
    head = await transfer.read(0, HEAD_BYTES)
    if not head.strip().isdigit():
        raise TransferFailed(failed(*_EXITS[_NOT_WHOLE]))
    size = int(head)
    text = await transfer.read(HEAD_BYTES, HEAD_BYTES + (size + 2) // 3 * 4)
    try:
        return (await asyncio.to_thread(binascii.a2b_base64, text))[:size]
    except ValueError:  # it grew or shrank meanwhile
        raise TransferFailed(failed("The file changed while it was read.", "file_changed", retryable=True)) from None


async def _write_file(transfer: Transfer, pieces: list[str]) -> None:
    try:
        await transfer.write(pieces)
    except TransferFailed as failure:
        ended = await transfer.ended()
        if ended is None and failure.result.error_code in _ENDING:
            ended = await transfer.finish()  # that it takes no more was heard before its end was
        if ended is not None:  # it ended before it took everything, and says why
            _check(ended)
        raise
    _check(await transfer.finish())


def _check(ended: Ended) -> None:
    if ended.state == "exited":
        return
    error, code = _EXITS.get(ended.exit_code or 0, ("", ""))
    if not code:
        reason = ended.reason_code or "file_transfer_failed"
        error, code = f"The machine could not do it: {ended.reason_message or reason}.", reason
    raise TransferFailed(failed(error, code))


def _pieces(data: bytes) -> list[str]:
    return [
        base64.encodebytes(data[start : start + PIECE_BYTES]).decode() for start in range(0, len(data), PIECE_BYTES)
    ]


def _quoted(path: str) -> str:
    """A path as a word of the shell; a leading ~ is the home directory, as in a command."""
    if path == "~" or path.startswith("~/"):
        return '"${HOME}"' + shlex.quote(path[1:])
    return shlex.quote(path)
