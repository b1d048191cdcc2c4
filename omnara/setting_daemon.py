"""The variables of `omnara daemon`: few, since a daemon is somebody's laptop, and apart from those of a server.

`settings` reads the environment into it, as for everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from omnara.errors import ConfigurationError

__all__ = ["DAEMON_VARIABLES", "DaemonSettings", "read_daemon_settings"]

_HOME: Final = "OMNARA_HOME"
_API_URL: Final = "OMNARA_API_URL"
_TOKEN: Final = "OMNARA_MACHINE_TOKEN"  # noqa: S105 - the variable's name
_SLEEP: Final = "OMNARA_DAEMON_SLEEP_AFTER_MS"
_SLEEP_LEAST_MS: Final = 30_000

DAEMON_VARIABLES: Final = (_HOME, _API_URL, _TOKEN, _SLEEP)
"""They are no settings of a server, and a server that finds them does not warn of a misspelling."""


class DaemonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`environment` is the whole environment, out of which commands get what they may see. `repr` shows no secret."""

    home: Path
    api_url: str | None = None
    machine_token: str | None = None
    sleep_after_s: float | None = None
    environment: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"DaemonSettings(home={str(self.home)!r}, api_url={self.api_url!r})"


def read_daemon_settings(source: Mapping[str, str]) -> DaemonSettings:
    """Return the daemon's settings out of an environment. An empty variable counts as unset.

    Raises ConfigurationError that names the variable. Source: machines.md §9 (sleep of at least 30 s).
    """
    home = source.get(_HOME, "").strip() or "~/.omnara"
    try:
        root = Path(home).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{_HOME} is not set, and this user has no home directory to put it in") from error
    if not root.is_absolute():
        raise ConfigurationError(f"{_HOME} must be an absolute path")
    return DaemonSettings(
        home=root,
        api_url=source.get(_API_URL, "").strip() or None,
        machine_token=source.get(_TOKEN, "").strip() or None,
        sleep_after_s=_sleep_after(source.get(_SLEEP, "").strip()),
        environment={**source, _HOME: str(root)},
    )


def _sleep_after(text: str) -> float | None:
    if not text:
        return None
    if not text.isdecimal() or int(text) < _SLEEP_LEAST_MS:
        raise ConfigurationError(f"{_SLEEP} must be a number of milliseconds, at least {_SLEEP_LEAST_MS}")
    return int(text) / 1000
