"""Installing and removing: the binding in `daemon.json`, and the service that keeps the daemon running."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import msgspec

from omnara.errors import ConfigurationError
from omnara.machines.daemon.client import AuthorityLost, Refused, ServerAway, ServerClient, Superseded
from omnara.machines.daemon.config import DaemonConfig, Home
from omnara.machines.daemon.daemon import identify
from omnara.machines.daemon.run import binding, daemon_of
from omnara.machines.daemon.service import Service
from omnara.setting_daemon import DaemonSettings

__all__ = ["bind", "daemon_command", "purge_machine", "user_service"]


async def bind(settings: DaemonSettings) -> DaemonConfig:
    """Ask the server which machine the token stands for and write that down. Run again, it updates address and token.

    Raises ConfigurationError (nothing to connect to, a refused token, files of another machine), ServerAway.
    """
    home = Home(settings.home)
    kept = home.load()
    api_url, token = binding(settings, kept)
    try:
        who = await identify(api_url, token, patient=False)
    except (AuthorityLost, Refused, Superseded) as error:
        raise ConfigurationError(f"the server does not accept this machine's token ({error})") from error
    if kept is not None and (kept.installation_id, kept.machine_id) != (who.installation_id, who.machine_id):
        raise ConfigurationError(
            f"{home.root} is bound to machine {kept.machine_id}; run `omnara daemon uninstall` first, "
            "or choose another OMNARA_HOME"
        )
    config = DaemonConfig(
        api_url=api_url,
        installation_id=who.installation_id,
        machine_id=who.machine_id,
        machine_token=token,
        runner_path=_path_to_keep(settings.environment.get("PATH", "")),
    )
    if kept is not None and kept.machine_token == token:
        config = msgspec.structs.replace(config, runner_path=kept.runner_path or config.runner_path)
    home.save(config)
    return config


def _path_to_keep(path: str) -> str:
    """Leave out directories whose names are no UTF-8: JSON has no way to write them."""
    return ":".join(place for place in path.split(":") if not any("\ud800" <= letter <= "\udfff" for letter in place))


async def purge_machine(settings: DaemonSettings, home: Home, config: DaemonConfig) -> None:
    """End everything that runs here for the machine, and delete what is kept of it. The home's lock is held.

    The server is told if it can be reached; if not, it finds out when the machine's commands are not heard of.
    """
    await daemon_of(settings, home, config).destroy()
    with contextlib.suppress(AuthorityLost, Refused, ServerAway, Superseded):
        async with ServerClient(config.api_url, config.machine_token) as client:
            await client.uninstalled()


def daemon_command(home: Path) -> list[str]:
    """Return the command that runs the daemon: the installer's link if there is one, which follows updates."""
    link = home / "bin" / "omnara"
    program = [str(link)] if link.exists() else [sys.executable, "-m", "omnara"]
    return [*program, "daemon", "run"]


def user_service(settings: DaemonSettings) -> Service:
    """Return the service of this user, where systemd looks for it."""
    given = settings.environment.get("XDG_CONFIG_HOME", "")
    base = given if given.startswith("/") else os.path.expanduser("~/.config")  # there may be no home
    return Service(Path(base) / "systemd" / "user")
