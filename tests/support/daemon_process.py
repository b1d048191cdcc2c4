"""`omnara daemon run` as a process of its own, and the cable between it and its server, which a test can pull."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from omnara.settings import child_environment
from tests.support.processes import ROOT


class DaemonProcess:
    """A daemon with its files in a directory; `home` may be elsewhere, and `around` is a command that runs it."""

    def __init__(
        self, directory: Path, url: str, token: str, *, home: Path | None = None, around: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        self.home = home or directory / "home"
        self.work = directory / "work"
        self.work.mkdir(parents=True)
        self.log = directory / "daemon.log"
        self._around = around
        self._environment = child_environment(
            {
                "OMNARA_API_URL": url,
                "OMNARA_MACHINE_TOKEN": token,
                "OMNARA_HOME": str(self.home),
                "PYTHONPATH": str(ROOT),
            }
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; again after it was killed."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._around, sys.executable, "-m", "omnara", "daemon", "run"],
                env=self._environment, cwd=self.work, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        """`kill -9` of the daemon; its commands and their keepers are left."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(30)
        self.process = None
        return code

    def die(self) -> None:
        """End everything of the machine without mercy, as when its power goes."""
        self.kill()
        end_all_below(self.directory, self.home)

    @property
    def connected(self) -> bool:
        """Whether this very process says that it is connected, and not one before it that was killed."""
        try:
            said = json.loads((self.home / "status.json").read_bytes())
        except FileNotFoundError:
            return False
        return self.process is not None and (said["pid"], said["state"]) == (self.process.pid, "connected")

    def lines(self, name: str) -> list[str]:
        """The lines of a file where the commands run."""
        path = self.work / name
        return path.read_text().splitlines() if path.exists() else []

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-2000:] if self.log.exists() else "(no log)"

    def family(self) -> list[psutil.Process]:
        """The daemon and all that works for its home: fork server, keepers, commands."""
        found = [] if self.process is None else [psutil.Process(self.process.pid)]
        for process in psutil.process_iter(["cwd", "ppid"]):
            with contextlib.suppress(psutil.Error):
                if _below(process, self.directory, self.home) and process not in found:
                    found.append(process)
        return found


def _below(process: psutil.Process, *directories: Path) -> bool:
    """Whether a process works, or was told to work, below one of these directories."""
    places = [Path(place) for place in (process.cwd(), *process.cmdline()) if place.startswith("/")]
    return any(place.is_relative_to(directory) for place in places for directory in directories)


def end_all_below(*directories: Path) -> None:
    """Kill what still runs with its working directory or its program's arguments below a directory."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _below(process, *directories):
                process.kill()


class NetworkNamespace:
    """A network of its own with one cable to this one. Pulled, packets are lost as on a wire: nobody is told."""

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._ours, self._theirs = f"{name}h", f"{name}d"
        self.address = f"10.213.{number}.1"
        self._other = f"10.213.{number}.2"
        self.around = ("ip", "netns", "exec", name)
        """Runs a command inside, where `host.docker.internal` is this side of the cable."""

    def __enter__(self) -> NetworkNamespace:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("a network namespace needs root and iproute2")
        made = _ip("netns", "add", self._name, check=False)
        if made.returncode != 0:
            pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
        try:
            _ip("link", "add", self._ours, "type", "veth", "peer", "name", self._theirs, "netns", self._name)
            _ip("addr", "add", f"{self.address}/30", "dev", self._ours)
            _ip("-n", self._name, "addr", "add", f"{self._other}/30", "dev", self._theirs)
            _ip("-n", self._name, "link", "set", "lo", "up")
            _ip("-n", self._name, "link", "set", self._theirs, "up")
            self.plug()
            self._hosts.parent.mkdir(parents=True, exist_ok=True)
            self._hosts.write_text(f"127.0.0.1 localhost\n{self.address} host.docker.internal\n")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        _ip("link", "del", self._ours, check=False)
        _ip("netns", "del", self._name)
        shutil.rmtree(self._hosts.parent, ignore_errors=True)

    @property
    def _hosts(self) -> Path:
        return Path("/etc/netns") / self._name / "hosts"

    def pull(self) -> None:
        """Lose every packet from now on."""
        _ip("link", "set", self._ours, "down")

    def plug(self) -> None:
        """Let packets through again."""
        _ip("link", "set", self._ours, "up")


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@contextlib.contextmanager
def running(daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """Start a daemon; it and all that it left are ended with the block."""
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.die()
