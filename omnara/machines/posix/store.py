"""The directory of a home: one directory for each process, and what its files say.

A process's directory is made aside and renamed into place, so that it is there whole or not at all. Everything here
blocks; the home calls it in threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from omnara.log import get_logger
from omnara.machines.posix import records
from omnara.machines.posix.keeper import files, identity
from omnara.machines.processes import ActionOutcome, ActionRecord, ExitRecord, OutputSlice, ProcessRecord

__all__ = ["Store"]

log = get_logger(__name__)

_STALE_S = 3600.0


class Store:
    """Reads and writes the files of all processes of a home."""

    def __init__(self, root: Path) -> None:
        """Use a directory, which is made when something is first put into it."""
        self.root = root
        self._processes = root / "processes"
        self._new = root / "new"
        self._gone = root / "gone"
        self._settled: dict[str, tuple[int, int, ProcessRecord]] = {}

    def path(self, process_id: str) -> Path:
        """Where a process's files are."""
        return self._processes / records.checked(process_id)

    @contextlib.contextmanager
    def opened(self, process_id: str) -> Iterator[int | None]:
        """Open a process's directory; None when there is none."""
        try:
            fd = os.open(self.path(process_id), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)

    def create(self, process_id: str, launch: dict[str, Any]) -> ProcessRecord:
        """Make a process's directory, durably, unless it is there. Raises OSError; nothing is left then."""
        target = self.path(process_id)
        made = None if target.exists() else self._make(process_id, target, launch)
        record = made or self.record(process_id)
        if record is None:
            raise FileNotFoundError(target)
        return record

    def _make(self, process_id: str, target: Path, launch: dict[str, Any]) -> ProcessRecord | None:
        """Make it aside and put it into its place; None when somebody else did meanwhile."""
        aside = self._new / f"{process_id}.{secrets.token_hex(8)}"
        supervisor_id = secrets.token_hex(16)
        try:
            self._make_aside(aside)
            self._fill(aside, supervisor_id, launch)
            aside.rename(target)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            if files.is_full(error) or not target.exists():
                raise
            supervisor_id = ""
        self._sync(self._processes)
        return records.prepared(process_id, supervisor_id) if supervisor_id else None

    def _make_aside(self, aside: Path) -> None:
        try:
            aside.mkdir(mode=0o700)
        except FileNotFoundError:
            for place in (self._processes, self._new, self._gone):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside.mkdir(mode=0o700)

    @staticmethod
    def _fill(directory: Path, supervisor_id: str, launch: dict[str, Any]) -> None:
        meta = {
            "supervisor_id": supervisor_id,
            "created": time.time_ns(),
            "piece_bytes": launch["limits"]["piece_bytes"],
        }
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            files.fresh_files(fd, json.dumps(launch).encode(), meta)  # as ASCII, also of names that are no text
        finally:
            os.close(fd)

    @staticmethod
    def _sync(directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def record(self, process_id: str) -> ProcessRecord | None:
        """Read what is known of a process; None when there is none."""
        with self.opened(process_id) as fd:
            return None if fd is None else records.record_of(fd, process_id)

    def records(self) -> list[ProcessRecord]:
        """Read all, oldest first, and clear away what was half made or half removed when somebody died."""
        self._clean()
        found: list[tuple[int, ProcessRecord]] = []
        try:
            names = os.listdir(self._processes)
        except FileNotFoundError:
            return []
        settled: dict[str, tuple[int, int, ProcessRecord]] = {}
        for name in names:
            known = self._read(name)
            if known is not None:
                found.append(known[1:])
                if records.is_settled(known[2]):
                    settled[name] = known
        self._settled = settled
        return [record for _, record in sorted(found, key=lambda pair: (pair[0], pair[1].process_id))]

    def _read(self, name: str) -> tuple[int, int, ProcessRecord] | None:
        """Read one of all. One that is damaged is put aside, so that it does not keep the others from being known."""
        try:
            with self.opened(name) as fd:
                return None if fd is None else self._known(name, fd)
        except (ValueError, KeyError, FileNotFoundError) as error:
            log.warning("a process's files are damaged and were put aside", process_id=name, error=str(error)[:200])
            damaged = self.root / "damaged"
            damaged.mkdir(mode=0o700, exist_ok=True)
            (self._processes / name).rename(damaged / f"{name}.{secrets.token_hex(8)}")
            return None

    def _known(self, name: str, fd: int) -> tuple[int, int, ProcessRecord]:
        """Return a record with when it last could change and when it was made.

        All that can still happen to a settled one makes a new file: those, which are most, are read once.
        """
        changed = os.fstat(fd).st_mtime_ns
        kept = self._settled.get(name)
        if kept is not None and kept[0] == changed:
            return kept
        return changed, (files.read_meta(fd) or {})["created"], records.record_of(fd, name)

    def _clean(self) -> None:
        for place, age in ((self._gone, 0.0), (self._new, _STALE_S)):
            with contextlib.suppress(FileNotFoundError):
                for entry in list(os.scandir(place)):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime >= age:
                        shutil.rmtree(entry.path, ignore_errors=True)

    def output(self, process_id: str, cursor: int, max_bytes: int) -> OutputSlice | None:
        """Read output; None when there is no such process."""
        with self.opened(process_id) as fd:
            if fd is None:
                return None
            closed = files.read_exit(fd) is not None
            reader = records.reader_of(fd)
            start, data = reader.read(cursor, max_bytes)
            end = max(reader.span()[1], start + len(data) if data else 0)
            return OutputSlice(
                data=data,
                cursor=start,
                next_cursor=start + len(data),
                end=end,
                dropped=start > cursor,
                closed=closed,
            )

    def acknowledge(self, process_id: str, slot: str) -> None:
        """Keep that a slot's report has arrived. Raises OSError."""
        with self.opened(process_id) as fd:
            if fd is None or slot in records.acknowledged(fd):
                return
            file = os.open(
                records.ACKNOWLEDGED, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=fd
            )
            try:
                os.write(file, f"{slot}\n".encode())
                os.fsync(file)
            finally:
                os.close(file)

    def action(self, process_id: str, action_id: str) -> ActionRecord | None:
        """Read one action's record."""
        with self.opened(process_id) as fd:
            return None if fd is None else records.action_of(fd, action_id)

    def settle(self, process_id: str, action: ActionRecord) -> ActionOutcome:
        """Record the outcome of an action whose process has nobody to do it; what is recorded already stands."""
        if action.outcome is None:
            raise ValueError("an outcome is needed")
        name = files.action_file(records.checked(action.action_id))
        with self.opened(process_id) as fd:
            if fd is None:
                return action.outcome
            with contextlib.suppress(FileExistsError):
                files.create_pair(fd, name, {"kind": action.kind, "seq": action.seq})
                files.fill_pair(fd, name, msgspec.to_builtins(action.outcome))
            known = records.action_of(fd, action.action_id)
            return known.outcome if known is not None and known.outcome is not None else action.outcome

    def finish(self, process_id: str, record: ExitRecord) -> bool:
        """Write how a process ended that has no keeper, killing what one left behind. False: a keeper is with it.

        One that was never begun never will be. What is written already stands. Raises OSError.
        """
        with self.opened(process_id) as fd:
            if fd is None:
                return True
            lock = files.try_lock(fd)
            if lock is None:
                return False
            try:
                self._finish(fd, record)
            finally:
                os.close(lock)
            return True

    @staticmethod
    def _finish(fd: int, record: ExitRecord) -> None:
        if files.read_exit(fd) is not None:
            return
        bit = files.read_bit(fd)
        if bit is None:
            files.take_bit(fd, {})
        else:
            identity.kill_left_over(bit[1] or {})
            record = msgspec.structs.replace(record, started_at=bit[0].get("started_at"))
        files.write_exit(fd, msgspec.to_builtins(record))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(files.LAUNCH, dir_fd=fd)

    @staticmethod
    def _free(fd: int, process_id: str) -> int | None:
        """Take the lock of a process that is over, or return None: its keeper, which may still be there, does no more
        than to have the end that it wrote kept by the disk."""
        lock = files.try_lock(fd)
        if lock is None and files.read_exit(fd) is None:
            raise ValueError(f"{process_id} is still running")
        return lock

    def remove(self, process_id: str) -> None:
        """Remove a process's directory. Raises ValueError while a keeper is with it."""
        with self.opened(process_id) as fd:
            if fd is None:
                return
            lock = self._free(fd, process_id)
            aside = self._gone / f"{process_id}.{secrets.token_hex(8)}"
            try:
                self.path(process_id).rename(aside)
                shutil.rmtree(aside, ignore_errors=True)  # under the lock: a keeper that is told to begin now does not
            finally:
                if lock is not None:
                    os.close(lock)
