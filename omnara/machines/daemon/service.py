"""The daemon as a systemd service of its user: started with the session, restarted unless it ended with 0.

Exit 0 means that the machine is not ours any more or that a newer daemon has it, so a restart would be wrong then.
Commands live in the service's control group and must outlive it: only the daemon itself is signalled.
Source: machines.md §2 (exit codes), §10.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["UNIT", "Service", "ServiceFailed"]

UNIT: Final = "omnara-daemon.service"
_TIMEOUT_S: Final = 30
_TEXT: Final = """\
[Unit]
Description=omnara daemon: runs commands of agents on this machine
After=network-online.target

[Service]
ExecStart={command}
Environment={home}
WorkingDirectory=%h
Restart=on-failure
RestartSec=3
KillMode=process
UMask=0077

[Install]
WantedBy=default.target
"""


class ServiceFailed(Exception):
    """systemd would not do it; the text is what it said."""


class Service(msgspec.Struct, frozen=True):
    """The user's unit. `directory` is where systemd looks for units of this user."""

    directory: Path

    @property
    def unit(self) -> Path:
        """The unit's file."""
        return self.directory / UNIT

    def there_is_systemd(self) -> bool:
        """Say whether this user has a service manager that answers."""
        if shutil.which("systemctl") is None:
            return False
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = self._systemctl("show-environment")
            return asked.returncode == 0
        return False

    def write(self, command: list[str], home: Path) -> None:
        """Write the unit for a daemon with its files below `home`. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        # A dollar means something in the arguments of a command alone: in its program, two are two.
        program, *arguments = (_quoted(word) for word in command)
        line = " ".join([program, *(word.replace("$", "$$") for word in arguments)])
        self.unit.write_text(_TEXT.format(command=line, home=_quoted(f"OMNARA_HOME={home}")), encoding="utf-8")

    def start(self) -> None:
        """Have it started now and with every session; one that runs is started anew. Raises ServiceFailed."""
        for arguments in (("daemon-reload",), ("enable", UNIT), ("restart", UNIT)):
            self._demand(*arguments)

    def remove(self) -> bool:
        """Stop it and remove the unit; False when there was none. Raises ServiceFailed."""
        if not self.unit.exists():
            return False
        if self.there_is_systemd():
            self._demand("disable", "--now", UNIT)
        self.unit.unlink()
        return True

    def _demand(self, *arguments: str) -> None:
        try:
            done = self._systemctl(*arguments)
        except (OSError, subprocess.SubprocessError) as error:
            raise ServiceFailed(str(error)) from error
        if done.returncode != 0:
            raise ServiceFailed(done.stderr.decode(errors="replace").strip() or f"systemctl {arguments[0]} failed")

    @staticmethod
    def _systemctl(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = ["systemctl", "--user", *arguments]
        return subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)


def _quoted(word: str) -> str:
    """A word for a unit file: specifiers and quotes would mean something there."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
