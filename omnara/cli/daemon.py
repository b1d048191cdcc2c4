"""`omnara daemon`: lets the agents of a server run commands on this computer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from omnara.cli.output import json_option, print_json, print_line

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from omnara.log import Level
    from omnara.setting_daemon import DaemonSettings

T = TypeVar("T")


@click.group("daemon")
def command() -> None:
    """Let the agents of a server run commands on this computer.

    The daemon dials out to the server and waits for commands; nothing dials in. What it runs belongs to your user, sees
    a small environment, and outlives the daemon: stop it, update it or kill it, and the commands go on. It can do
    whatever your user can, so give it a user, a container or a computer of its own if you do not trust the agents.

    \b
    Connect this computer:
      1. omnara machines connect NAME      where you have a key of the server: shows a token, once
      2. curl -fsS https://omnara.example.com/install/omnarad.sh | OMNARA_MACHINE_TOKEN=omnara_daemon_v1_… sh
         or, where omnara is installed already:
         OMNARA_MACHINE_TOKEN=omnara_daemon_v1_… omnara daemon install --api-url https://omnara.example.com
      3. omnara daemon status
    """


_API_URL = click.option("--api-url", metavar="URL", help="Address of the server; overrides OMNARA_API_URL.")
_HOME = click.option("--home", metavar="PATH", help="Where the daemon keeps its files; overrides OMNARA_HOME.")


def _settings(api_url: str | None, home: str | None) -> DaemonSettings:
    from omnara.settings import load_daemon

    given = {"OMNARA_API_URL": api_url, "OMNARA_HOME": None if home is None else str(Path(home).absolute())}
    return load_daemon(overrides={name: value for name, value in given.items() if value is not None})


@command.command("run")
@_API_URL
@_HOME
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def run_command(api_url: str | None, home: str | None, log_level: Level) -> None:
    """Run the daemon in the foreground, until SIGTERM or Ctrl-C. Commands that run go on.

    Uses what `omnara daemon install` wrote; or, without it, OMNARA_API_URL and OMNARA_MACHINE_TOKEN, which is what a
    container wants. OMNARA_HOME (default ~/.omnara) holds what runs and its output: keep it, and a restarted daemon
    goes on with it. With OMNARA_DAEMON_SLEEP_AFTER_MS (at least 30000) an idle machine tells the server that it may be
    suspended.

    A command that names no directory runs in the `cwd` of the agent's machine source, or else of the machine. Where
    neither is set it runs in the directory in which this is started, so start it where the agents are to work.

    Exit code 0 also when the server has revoked the token or deleted the machine: then everything that ran is ended and
    deleted, and a restart would be of no use.

    \b
    Examples:
      omnara daemon run
      OMNARA_API_URL=http://127.0.0.1:8080 OMNARA_MACHINE_TOKEN=omnara_daemon_v1_… omnara daemon run --home ./machine
    """
    from omnara.log import configure

    settings = _settings(api_url, home)
    configure(log_level, "auto")
    sys.exit(_run(_serve(settings)))


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in an event loop without any handler of signals but its own."""
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _serve(settings: DaemonSettings) -> int:
    import asyncio
    import signal

    from omnara.machines.daemon.config import Home
    from omnara.machines.daemon.run import run_daemon

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    home = Home(settings.home)
    with home.locked() as ours:
        if not ours:
            print_line(f"error: another daemon runs with the files in {home.root}", err=True)
            return 1
        return await run_daemon(settings, home, stop)


@command.command("install")
@_API_URL
@_HOME
@click.option("--no-start", "--install-only", is_flag=True, help="Only write the files; start nothing.")
def install(api_url: str | None, home: str | None, no_start: bool) -> None:
    """Bind this computer to a machine of the server, and start the daemon.

    The token comes from OMNARA_MACHINE_TOKEN, since what is typed is kept by shells. The server is asked which machine
    it stands for; that and the token go into daemon.json in OMNARA_HOME (default ~/.omnara), readable by you alone.
    Where your user has systemd, the daemon becomes a service of it. Run it again to change the token, or after an
    update.

    \b
    Examples:
      OMNARA_MACHINE_TOKEN=omnara_daemon_v1_… omnara daemon install --api-url https://omnara.example.com
      omnara daemon install --no-start && omnara daemon run
    """
    from omnara.cli.failures import AWAY
    from omnara.machines.daemon.client import ServerAway
    from omnara.machines.daemon.service import UNIT, ServiceFailed
    from omnara.machines.daemon.setup import bind, daemon_command, user_service

    settings = _settings(api_url, home)
    try:
        config = _run(bind(settings))
    except ServerAway as error:
        print_line(f"error: no usable answer from the server ({error}); is its address right?", err=True)
        sys.exit(AWAY)
    print_line(f"bound to {config.machine_id} of {config.api_url}; files in {settings.home}")
    service = user_service(settings)
    if no_start or not service.there_is_systemd():
        print_line("start it with: " + " ".join(daemon_command(settings.home)))
        return
    try:
        service.write(daemon_command(settings.home), settings.home)
        service.start()
    except (ServiceFailed, OSError) as error:
        raise click.ClickException(f"the service could not be started: {error}; `omnara daemon run` works") from error
    print_line(f"started as {UNIT} (journalctl --user -u {UNIT}); to keep it when you log out: loginctl enable-linger")


@command.command("status")
@_HOME
@json_option
def status(home: str | None, as_json: bool) -> None:
    """Show what this computer is bound to and whether its daemon runs. Exit code 1 when it does not.

    \b
    Examples:
      omnara daemon status
      omnara daemon status --json | jq -r .state
    """
    from omnara.machines.daemon.config import Home

    settings = _settings(None, home)
    files = Home(settings.home)
    config, running = files.load(), files.said()
    shown = {
        "home": str(settings.home),
        "server": None if config is None else config.api_url,
        "machine_id": None if config is None else config.machine_id,
        "state": "not running" if running is None else running.state,
        "pid": None if running is None else running.pid,
        "since": None if running is None else running.since,
        "detail": "" if running is None else running.detail,
    }
    if as_json:
        print_json(shown)
    else:
        for name, value in shown.items():
            if value:
                print_line(f"{name:<11}{value}")
    sys.exit(0 if running is not None else 1)


@command.command("uninstall")
@_HOME
@click.option("--purge", is_flag=True, help="Also end what runs and delete what is kept of it.")
def uninstall(home: str | None, purge: bool) -> None:
    """Stop the daemon's service and forget which machine this is. What runs goes on, unless --purge is given.

    The machine stays on the server; delete it there, or revoke its token.

    \b
    Examples:
      omnara daemon uninstall
      omnara daemon uninstall --purge
    """
    from omnara.machines.daemon.config import Home
    from omnara.machines.daemon.service import ServiceFailed
    from omnara.machines.daemon.setup import purge_machine, user_service

    settings = _settings(None, home)
    files = Home(settings.home)
    try:
        stopped = user_service(settings).remove()
    except (ServiceFailed, OSError) as error:
        raise click.ClickException(f"the service could not be stopped: {error}") from error
    with files.locked() as ours:
        if not ours:
            raise click.ClickException("a daemon runs here; stop it first")
        config = files.load()
        if config is not None and purge:
            _run(purge_machine(settings, files, config))
        files.remove_config()
    print_line("the service is gone" if stopped else "there was no service")
    print_line("bound to no machine any more" if config is not None else "was bound to no machine")
