"""The daemon's files: what it is bound to (`daemon.json`), what it keeps for that machine, its lock, how it is doing.

The token is in `daemon.json`, which only its owner can read. Source: machines.md §10 (fields, mode, which URLs).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from omnara.errors import ConfigurationError

__all__ = ["DaemonConfig", "Home", "Status", "checked_url"]

SCHEMA_VERSION: Final = 1
_LOCK_TRIES: Final = 20


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon is bound to. `runner_path`: the PATH that commands get, as it was when the daemon was installed."""

    schema_version: int = SCHEMA_VERSION
    api_url: str
    installation_id: str
    machine_id: str
    machine_token: str
    no_update: bool = True
    runner_path: str = ""

    def __repr__(self) -> str:
        return f"DaemonConfig(api_url={self.api_url!r}, machine_id={self.machine_id!r})"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How the running daemon is doing, for `omnara daemon status`. `since` is this computer's time."""

    pid: int
    state: str
    since: str
    detail: str = ""


def checked_url(text: str) -> str:
    """Return the server's address without a slash at its end.

    Raises ConfigurationError for one to which the token would travel in the open: http is for loopback and for
    `host.docker.internal` alone. Source: machines.md §10.
    """
    try:
        parts = urlsplit(text.strip())
        host = parts.hostname or ""
        odd = parts.username or parts.password or parts.query or parts.fragment or parts.port == 0
    except ValueError:
        raise ConfigurationError("the server's address is no URL; write it as https://omnara.example.com") from None
    if not host or odd or parts.scheme not in ("http", "https"):
        raise ConfigurationError("the server's address must look like https://omnara.example.com")
    if parts.scheme == "http" and not _near(host):
        raise ConfigurationError(
            "the server's address must begin with https:// (http:// only for this computer and host.docker.internal): "
            "else this machine's token would travel in the open"
        )
    return text.strip().rstrip("/")


def _near(host: str) -> bool:
    if host in ("localhost", "host.docker.internal"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _taken(fd: int) -> bool:
    # A `status` holds the lock for a moment; a daemon holds it for its life.
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return True
    return False


class Home:
    """The directory that a daemon has to itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._config = root / "daemon.json"
        self._status = root / "status.json"

    def load(self) -> DaemonConfig | None:
        """Return what the daemon is bound to; None when it is not installed. Raises ConfigurationError."""
        try:
            text = self._config.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError(f"cannot read {self._config}: {error.strerror}") from error
        try:
            config = msgspec.json.decode(text, type=DaemonConfig)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"{self._config} is damaged; run `omnara daemon install` again") from error
        if config.schema_version != SCHEMA_VERSION:
            raise ConfigurationError(f"{self._config} was written by another version; update this one")
        return config

    def save(self, config: DaemonConfig) -> None:
        """Write what the daemon is bound to, whole or not at all, readable by its owner alone. Raises OSError."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(self._config, msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n", sync=True)

    def _write(self, target: Path, content: bytes, *, sync: bool) -> None:
        # The mode of a temporary file is 0600 from its first moment.
        with tempfile.NamedTemporaryFile(dir=self.root, prefix=f".{target.name}.", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
                Path(file.name).replace(target)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise

    def state(self, config: DaemonConfig) -> Path:
        """Where the processes of the machine that the daemon is bound to are kept."""
        return self.root / "installations" / config.installation_id / "machines" / config.machine_id

    def wipe(self, config: DaemonConfig) -> None:
        """Delete everything that is kept for the machine, and the binding to it. What is not there is fine."""
        shutil.rmtree(self.state(config), ignore_errors=True)
        try:
            kept = self.load()
        except ConfigurationError:
            return  # not ours to judge: somebody else's file, or a damaged one, which names no machine
        if kept is not None and kept.machine_token == config.machine_token:
            self._config.unlink(missing_ok=True)

    def remove_config(self) -> None:
        """Forget the binding; what is kept for the machine stays."""
        self._config.unlink(missing_ok=True)

    # --- the running daemon ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the lock of this home's one daemon for the block; False when another process has it.

        Raises ConfigurationError for a place that is not this user's to write to.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.root / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"cannot use {self.root}: {error.strerror}") from error
        try:
            yield _taken(fd)
        finally:
            os.close(fd)

    def say(self, status: Status) -> None:
        """Keep how the daemon is doing. On a full disk nothing is kept: it is for people only."""
        with contextlib.suppress(OSError):
            self._write(self._status, msgspec.json.encode(status), sync=False)

    def said(self) -> Status | None:
        """Return how the daemon is doing, or None when none runs."""
        if not self.root.is_dir():
            return None
        with self.locked() as free:
            if free:
                return None
        try:
            return msgspec.json.decode(self._status.read_bytes(), type=Status)
        except (OSError, msgspec.DecodeError):
            return Status(pid=0, state="starting", since="")
