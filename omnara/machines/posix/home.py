"""A home of processes in a directory of this computer. The keepers do the work; this finds them and reads after them.

Nothing that counts is kept in memory: whoever opens the directory next, after whatever death, sees the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from omnara.machines.posix import environment, speech
from omnara.machines.posix.beginnings import Beginnings, Keeper
from omnara.machines.posix.keeper.stdin import UNRECOVERABLE
from omnara.machines.posix.keeper.talk import LONGEST_DATA, message
from omnara.machines.posix.launcher import Launcher
from omnara.machines.posix.records import checked, without_keeper
from omnara.machines.posix.store import Store
from omnara.machines.posix.terms import Limits, Sandbox, User
from omnara.machines.posix.threads import at_once, in_thread
from omnara.machines.processes import (
    ActionKind,
    ActionOutcome,
    ActionRecord,
    ExitRecord,
    HomeFull,
    HomeLost,
    OutputSlice,
    ProcessRecord,
    ProcessSpec,
)

__all__ = ["PosixHome"]

_COMMIT_S = 15.0
"""How long a keeper may take until it holds the execution bit; beyond that the computer is in trouble."""
_LAUNCHES = 3
_TURNS = 100
"""A keeper that is just ending hangs up and is gone within a few of them."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.2
_SMALL_BYTES, _JUST_ENDED = 65_536, 64
"""What was written a moment ago, and is no more than a report may hold, is read without a thread. Of as many processes
as a channel's 32 reports on their way can be about, twice over: who is not among them is read in a thread."""


class PosixHome:
    """The processes below one directory. One instance at a time should use it; two do no harm.

    Implements `omnara.machines.processes.Home`. Raises HomeLost only when keepers cannot be started.
    """

    def __init__(
        self,
        root: Path,
        *,
        base_env: Mapping[str, str],
        default_cwd: str,
        launcher: Launcher | None = None,
        user: User | None = None,
        sandbox: Sandbox | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Use `root`, made when needed and only for this user.

        Commands get `base_env` under their own environment and nothing else; `default_cwd` is for those that name none.
        A launcher that is given stays the caller's, to be shared by homes and closed after them.
        """
        self._store = Store(root)
        self._base_env = dict(base_env)
        self._default_cwd = default_cwd
        self._launcher = launcher or Launcher()
        self._own_launcher = self._launcher if launcher is None else None
        self._user = user
        self._limits = limits or Limits()
        self._just_ended: dict[str, None] = {}
        self._beginnings = Beginnings(self._store, self._launcher, sandbox)

    async def close(self) -> None:
        """Let go of everything. Commands go on."""
        try:
            await self._beginnings.close()
        finally:
            if self._own_launcher is not None:  # also when we are cancelled meanwhile
                await asyncio.shield(asyncio.to_thread(self._own_launcher.close))

    async def processes(self) -> list[ProcessRecord]:
        """See `Home`. Also has the fork server ready for the first command."""
        await asyncio.to_thread(self._launcher.warm)
        return await in_thread(self._store.records)

    async def prepare(self, spec: ProcessSpec) -> ProcessRecord:
        """See `Home`. What cannot be started is prepared all the same: executing it says why, as an exit record."""
        refusal = environment.refusal(spec)
        launch = {
            "refusal": refusal,
            "shell": [] if refusal else environment.shell(spec.shell),
            "command": "" if refusal else spec.command,
            "cwd": "" if refusal else environment.directory(spec, self._default_cwd),
            "env": {} if refusal else {**self._base_env, **spec.env},
            "io_mode": spec.io_mode,
            "timeout_seconds": spec.timeout_seconds,
            "uid": None if self._user is None else self._user.uid,
            "gid": None if self._user is None else self._user.gid,
            "umask": 0o022,
            "limits": msgspec.to_builtins(self._limits),
        }
        record = await in_thread(self._store.create, spec.process_id, launch)
        if not record.execution_committed and record.exit is None:
            self._beginnings.make_ready(spec.process_id)
        return record

    async def _record(self, process_id: str) -> ProcessRecord:
        return self._known(await in_thread(self._store.record, process_id), process_id)

    @staticmethod
    def _known(record: ProcessRecord | None, process_id: str) -> ProcessRecord:
        if record is None:
            raise KeyError(process_id)
        return record

    async def execute(self, process_id: str, wait_s: float) -> ProcessRecord:
        """See `Home`. Raises HomeFull, HomeLost; KeyError for what was not prepared."""
        deadline = time.monotonic() + wait_s
        for _ in range(_LAUNCHES):
            keeper = await self._beginnings.take(process_id)
            if keeper is None:
                return await self.watch(process_id, 0, max(0.0, deadline - time.monotonic()))
            with keeper.line:
                if await self._committed(keeper, process_id, deadline):
                    return self._fresh(process_id)
        raise HomeLost(f"{process_id} could not be started: its keeper died {_LAUNCHES} times")

    def _fresh(self, process_id: str) -> ProcessRecord:
        """Read what a keeper has just written; if the process is over, its output is soon asked for."""
        record = self._known(at_once(self._store.record, process_id), process_id)
        if record.exit is not None and record.output_end <= _SMALL_BYTES:
            self._just_ended[process_id] = None
            while len(self._just_ended) > _JUST_ENDED:
                del self._just_ended[next(iter(self._just_ended))]
        return record

    @staticmethod
    async def _committed(keeper: Keeper, process_id: str, deadline: float) -> bool:
        """Wait until the command has begun, and then as asked. False: its keeper was gone before it could tell."""
        connection, inside = keeper
        asked = {"op": "watch", "end": 0, "sandbox": None if inside is None else {"pid": inside}}
        try:
            connection.send(message(asked))
            said = await speech.answer(connection, _COMMIT_S)
        except ConnectionError:
            return False
        except TimeoutError as error:
            raise HomeLost(f"{process_id}: no keeper began within {_COMMIT_S:.0f} s") from error
        if said is not None and said["event"] == "full":
            raise HomeFull("the machine's disk is full")
        if said is None:
            return False
        with contextlib.suppress(TimeoutError):
            return await speech.answer(connection, max(0.0, deadline - time.monotonic())) is not None
        return True

    async def watch(self, process_id: str, known_end: int, wait_s: float) -> ProcessRecord:
        """See `Home`. A process whose keeper died is ended here, as unknown."""
        deadline = time.monotonic() + wait_s
        pause_s = _FIRST_PAUSE_S
        while True:
            record = await self._record(process_id)
            left = deadline - time.monotonic()
            if record.exit is not None or record.output_end > known_end:
                return record
            if record.execution_committed and not record.supervisor_live:
                await self._bury(process_id, "supervisor_lost", "What watched over the process was killed.")
            elif left <= 0:
                return record
            elif not record.execution_committed or not await self._heard(process_id, known_end, left):
                await asyncio.sleep(min(pause_s, left))
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _heard(self, process_id: str, known_end: int, wait_s: float) -> bool:
        """Wait for the keeper's word. False when there was none to be had at once."""
        try:
            return await self._ask(process_id, message({"op": "watch", "end": known_end}), wait_s) is not None
        except TimeoutError:
            return True

    async def _ask_surely(self, process_id: str, request: bytes, wait_s: float) -> dict[str, Any] | None:
        try:
            return await self._ask(process_id, request, wait_s + _COMMIT_S)
        except TimeoutError as error:
            raise HomeLost(f"{process_id}: its keeper does not answer") from error

    async def _ask(self, process_id: str, request: bytes, wait_s: float) -> dict[str, Any] | None:
        """Return the keeper's answer; None when it is not there (any more). Raises TimeoutError."""
        sock = await speech.connect(self._store.path(process_id))
        if sock is None:
            return None
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.get_running_loop().sock_sendall(sock, request)
            return await speech.answer(sock, wait_s)
        except (ConnectionError, BrokenPipeError):
            return None
        finally:
            sock.close()

    async def _bury(self, process_id: str, code: str, text: str) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        record = ExitRecord(state="unknown", reason_code=code, reason_message=text, ended_at=now)
        return await in_thread(self._store.finish, process_id, record)

    async def read(self, process_id: str, cursor: int, max_bytes: int) -> OutputSlice:
        """See `Home`. A cursor beyond the end gives nothing; `end` tells. Raises KeyError for an unknown process."""
        if process_id in self._just_ended:
            del self._just_ended[process_id]
            found = at_once(self._store.output, process_id, cursor, max_bytes)
        else:
            found = await in_thread(self._store.output, process_id, cursor, max_bytes)
        if found is None:
            raise KeyError(process_id)
        return found

    async def write(self, process_id: str, action_id: str, seq: int, data: bytes, close: bool) -> ActionOutcome:
        """See `Home`. Also `stdin_closed`, and `close_stdin_unsupported` for a terminal. At most 131,072 bytes.

        Raises HomeFull, KeyError, ValueError.
        """
        if len(data) > LONGEST_DATA:
            raise ValueError(f"{len(data)} bytes at once are too many")
        request = {"op": "write", "id": checked(action_id), "seq": seq, "size": len(data), "close": close}
        return await self._act(process_id, action_id, seq, "write", message(request, data))

    async def signal(
        self, process_id: str, action_id: str, seq: int, kind: Literal["interrupt", "terminate"]
    ) -> ActionOutcome:
        """See `Home`. Returns when the signal is sent; the end is to be watched for. Raises HomeFull, KeyError."""
        request = {"op": kind, "id": checked(action_id), "seq": seq}
        return await self._act(process_id, action_id, seq, kind, message(request))

    async def _act(self, process_id: str, action_id: str, seq: int, kind: ActionKind, request: bytes) -> ActionOutcome:
        pause_s = _FIRST_PAUSE_S
        for _ in range(_TURNS):
            record = await self._record(process_id)
            known = next((action for action in record.actions if action.action_id == action_id), None)
            if known is not None and known.outcome is not None:
                return known.outcome
            if not (record.execution_committed and record.supervisor_live):
                outcome = UNRECOVERABLE if known is not None else without_keeper(record, kind)
                mark = ActionRecord(
                    action_id=action_id, kind=kind, seq=seq, outcome=msgspec.convert(outcome, ActionOutcome)
                )
                return await in_thread(self._store.settle, process_id, mark)
            said = await self._ask_surely(process_id, request, 2 * self._limits.write_s)
            if said is not None and said.get("event") == "full":
                raise HomeFull("the machine's disk is full")
            if said is not None and "outcome" in said:
                return msgspec.convert(said["outcome"], ActionOutcome)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        raise HomeLost(f"{process_id}: its keeper is there but does not answer")

    async def stop(self, process_id: str, reason_code: str) -> None:
        """See `Home`. Returns when the end is recorded. What was never executed never will be. Unknown ids are fine."""
        self._beginnings.send_away(process_id)
        pause_s = _FIRST_PAUSE_S
        while True:
            record = await in_thread(self._store.record, process_id)
            if record is None or record.exit is not None:
                return
            if record.execution_committed and record.supervisor_live:
                request = message({"op": "stop", "reason": reason_code})
                await self._ask_surely(process_id, request, 4 * self._limits.grace_s)
            elif await self._bury(process_id, reason_code, f"The process was stopped: {reason_code}."):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def acknowledge(self, process_id: str, slot: str) -> None:
        """See `Home`. Raises HomeFull."""
        await in_thread(self._store.acknowledge, process_id, checked(slot))

    async def forget(self, process_id: str) -> None:
        """See `Home`. Raises ValueError while the process runs."""
        self._beginnings.send_away(process_id)
        self._just_ended.pop(process_id, None)
        await in_thread(self._store.remove, process_id)
