"""From settings and files to a running daemon: which server, which machine, and is it still the same one?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from omnara.errors import ConfigurationError
from omnara.log import get_logger
from omnara.machines.daemon.client import AuthorityLost, Refused, Superseded
from omnara.machines.daemon.config import DaemonConfig, Home, checked_url
from omnara.machines.daemon.daemon import Daemon, Knobs, identify
from omnara.machines.posix import base_environment
from omnara.setting_daemon import DaemonSettings

__all__ = ["binding", "daemon_of", "run_daemon"]

log = get_logger(__name__)


async def run_daemon(settings: DaemonSettings, home: Home, stop: asyncio.Event, *, knobs: Knobs | None = None) -> int:
    """Run the daemon of a home whose lock is held, until `stop` or until the server has no use for it.

    Returns the exit code (see `Daemon.run`). Raises ConfigurationError when it is not known what to connect to, or when
    the token stands for another machine than the files here. Source: machines.md §10 (fixed binding).
    """
    times = knobs or Knobs(sleep_after_s=settings.sleep_after_s)
    kept = home.load()
    api_url, token = binding(settings, kept)
    asking = asyncio.ensure_future(identify(api_url, token, knobs=times))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((asking, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            return 0
        who = asking.result()
    except AuthorityLost as error:
        log.error("the server does not know this machine's token", error=str(error))
        return 0 if kept is None else await daemon_of(settings, home, kept, times).destroy()
    except (Refused, Superseded) as error:
        log.error("the server refuses this daemon", error=str(error))
        return 1
    finally:
        asking.cancel()
        stopping.cancel()
        await asyncio.gather(asking, stopping, return_exceptions=True)
    if kept is not None and (kept.installation_id, kept.machine_id) != (who.installation_id, who.machine_id):
        raise ConfigurationError(
            f"{home.root} belongs to machine {kept.machine_id}, but the token is that of {who.machine_id}; "
            "use another OMNARA_HOME, or run `omnara daemon uninstall` first"
        )
    config = DaemonConfig(
        api_url=api_url,
        installation_id=who.installation_id,
        machine_id=who.machine_id,
        machine_token=token,
        runner_path="" if kept is None else kept.runner_path,
    )
    return await daemon_of(settings, home, config, times).run(stop)


def binding(settings: DaemonSettings, kept: DaemonConfig | None) -> tuple[str, str]:
    """Return the server's address and the machine's token: what was given now, else what is kept.

    Raises ConfigurationError when one is missing or the address cannot be used.
    """
    api_url = settings.api_url or (None if kept is None else kept.api_url)
    token = settings.machine_token or (None if kept is None else kept.machine_token)
    if api_url is None or token is None:
        missing = " and ".join(
            name for name, value in (("OMNARA_API_URL", api_url), ("OMNARA_MACHINE_TOKEN", token)) if value is None
        )
        raise ConfigurationError(f"this daemon is bound to no machine: set {missing}, or run `omnara daemon install`")
    if not all("!" <= character <= "~" for character in token):
        raise ConfigurationError("the machine's token must be printable ASCII without blanks or line breaks")
    return checked_url(api_url), token


def _here(environment: Mapping[str, str]) -> str:
    """The daemon's own directory, where commands without one run. Source: machines.md §7 (cwd)."""
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return environment.get("HOME") or "/"


def daemon_of(settings: DaemonSettings, home: Home, config: DaemonConfig, knobs: Knobs | None = None) -> Daemon:
    """Return the daemon for a machine, with the environment that its commands may see."""
    environment = settings.environment
    return Daemon(
        home,
        config,
        base_env=base_environment(environment, path=config.runner_path or None),
        default_cwd=_here(environment),
        knobs=knobs,
    )
