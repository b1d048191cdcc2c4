"""A home of processes with shrunk limits, and looks at what really runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from omnara.machines.posix import Launcher, Limits, PosixHome, base_environment
from omnara.machines.posix.keeper import files, identity
from omnara.machines.processes import ProcessRecord, ProcessSpec
from tests.support.waiting import until

QUICK = Limits(piece_bytes=64 * 1024, pieces=5, grace_s=0.3, write_s=0.4)
PATH = "/usr/local/bin:/usr/bin:/bin"


class HomeOfTest:
    """A home in a directory, what was begun in it, and the processes of the system behind it."""

    def __init__(self, root: Path, launcher: Launcher, limits: Limits = QUICK) -> None:
        self.root = root
        self.launcher = launcher
        self.limits = limits
        self.numbers = itertools.count(1)
        self.work = root.parent
        self.home = self.opened()

    def opened(self) -> PosixHome:
        """One more opener of the same directory."""
        return PosixHome(
            self.root,
            base_env=base_environment({"HOME": "/", "OMNARA_API_KEY": "x"}, path=PATH),
            default_cwd=str(self.work),
            launcher=self.launcher,
            limits=self.limits,
        )

    async def start(self, command: str, wait_s: float = 10.0, **fields: object) -> ProcessRecord:
        """Prepare and execute."""
        spec = ProcessSpec(process_id=f"prc_{next(self.numbers)}", command=command, **fields)  # type: ignore[arg-type]
        await self.home.prepare(spec)
        return await self.home.execute(spec.process_id, wait_s)

    async def ended(self, process_id: str, limit_s: float = 20.0) -> ProcessRecord:
        """Wait for the end."""
        async with asyncio.timeout(limit_s):
            record = await self.home.watch(process_id, 1 << 60, limit_s)
        assert record.exit is not None, record
        return record

    async def run(self, command: str, **fields: object) -> ProcessRecord:
        """Start it and wait for its end."""
        return await self.ended((await self.start(command, 0.0, **fields)).process_id)

    async def text(self, process_id: str) -> str:
        """All output that is kept."""
        return (await self.home.read(process_id, 0, 1 << 20)).data.decode()

    async def said(self, process_id: str, text: str) -> None:
        """Wait until the output holds a text."""

        async def there() -> bool:
            return text in await self.text(process_id)

        await until(there, f"{text!r} in the output")

    def directory(self, process_id: str) -> Path:
        """The files of a process."""
        return self.root / "processes" / process_id

    async def leader(self, process_id: str) -> int:
        """The shell's process, once it runs."""
        await until(lambda: self._leader(process_id) is not None, "the shell runs")
        return self._leader(process_id) or 0

    def _leader(self, process_id: str) -> int | None:
        fd = os.open(self.directory(process_id), os.O_RDONLY)
        try:
            pair = files.read_bit(fd)
        finally:
            os.close(fd)
        return None if pair is None or pair[1] is None else int(pair[1]["pid"])

    def _held(self, process_id: str) -> bool:
        fd = os.open(self.directory(process_id), os.O_RDONLY)
        try:
            return files.held(fd)
        finally:
            os.close(fd)

    async def keeper(self, process_id: str) -> int:
        """The keeper's process: the shell's parent."""
        status = Path(f"/proc/{await self.leader(process_id)}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])

    async def end_all(self) -> None:
        """Leave nothing behind."""
        for record in await self.home.processes():
            await self.home.stop(record.process_id, "test_over")
            faults = self.directory(record.process_id) / "fault.txt"
            assert not faults.exists(), faults.read_text()
            await until(lambda: not self._held(record.process_id), "its keeper is gone")  # noqa: B023 - awaited here


def alive(pid: int) -> bool:
    """Tell whether a process runs (a zombie does not)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in "ZX"


def kill(pid: int) -> None:
    """SIGKILL, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def living_session(session: int) -> list[int]:
    """Who lives in a session."""
    return [member.pid for member in identity.members(session)]


@contextlib.asynccontextmanager
async def posix_home(root: Path, limits: Limits = QUICK) -> AsyncIterator[HomeOfTest]:
    """Open a home; at the end all its commands are ended and its fork server is gone."""
    launcher = Launcher()
    try:
        found = HomeOfTest(root, launcher, limits)
        yield found
        await found.end_all()
        await found.home.close()
    finally:
        await asyncio.to_thread(launcher.close)
