"""The root command: finds a command's module when it is used, and turns failures into sentences and exit codes.

Modules load late because `omnara --help` should answer at once, while a server's imports take a second.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

import click
import msgspec

__all__ = ["main", "root"]


class _Entry(msgspec.Struct, frozen=True):
    module: str
    summary: str


_COMMANDS: Final[Mapping[str, _Entry]] = {
    "demo": _Entry("omnara.cli.demo.command", "Watch an agent survive kill -9: offline, no key, a minute."),
    "serve": _Entry("omnara.cli.serve", "Run the server: API, workers and maintenance in one process."),
    "agents": _Entry("omnara.cli.agents", "Launch, list and steer agents on a running server."),
    "chat": _Entry("omnara.cli.chat.command", "Talk to an agent in the terminal, or through a pipe."),
    "daemon": _Entry("omnara.cli.daemon", "Let the agents of a server run commands on this computer."),
    "machines": _Entry("omnara.cli.machines", "Connect and list the machines that agents run commands on."),
    "keys": _Entry("omnara.cli.keys", "Create, list and revoke API keys (in the database)."),
    "models": _Entry("omnara.cli.models", "Add, list and probe models (in the database)."),
    "secrets": _Entry("omnara.cli.secrets", "Move stored secrets to another key of the ring (in the database)."),
    "migrate": _Entry("omnara.cli.migrate", "Bring the database's schema up to date."),
    "doctor": _Entry("omnara.cli.doctor", "Check settings, database, locks, notifications and data."),
    "mock-model": _Entry("omnara.cli.mock_model", "Serve a scripted model over HTTP, for tests without a provider."),
    "settings": _Entry("omnara.cli.settings", "Show every setting: name, value, meaning."),
}

OUTPUT_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE})
"""What writing to standard output may end with."""

EPILOG: Final = """\b
Exit codes
  0  done
  1  refused, not found, or a check failed
  2  wrong usage or a setting that cannot be used
  3  server or database away: the same command may work later
  70 a bug; please report it with the log
"""


class _LazyGroup(click.Group):
    """A group that imports a command's module only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = importlib.import_module(entry.module).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.module}.command is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in _COMMANDS.items()])


@click.group(cls=_LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="omnara", prog_name="omnara")
def root() -> None:
    """Omnara runs AI agents durably: every step is saved to Postgres, and a killed server goes on where it was.

    \b
    Start here:
      omnara demo                 see it work, offline
      omnara serve                run a server (embedded Postgres, http://127.0.0.1:8080)
      omnara chat --model anthropic/claude-sonnet-4-6       talk to an agent on it
    """


def main() -> None:
    """Run the command line and leave the process with a documented exit code."""
    _open_streams()
    _hear_signals()
    try:
        code = _run()
        sys.stdout.flush()
    except OSError as error:
        code = _lost_output(error)
    finally:
        _end_log()
    sys.exit(code)


def _end_log() -> None:
    """Let the exit code count although the log can go nowhere (any more): the interpreter would make it 120."""
    try:
        sys.stderr.flush()
    except OSError:
        _to_nowhere(2)


def _run() -> int:
    try:
        code = root.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("stopped", err=True)
        return 130
    except Exception as error:
        # Imported here: it knows the client's errors, and so loads an HTTP library that `--help` does not need.
        from omnara.cli.failures import explain, output_error
        from omnara.visible import visible

        lost = output_error(error)
        if lost is not None:
            raise lost from error
        failure = explain(error)
        if failure is None:
            raise
        click.echo(f"error: {visible(failure.text, lines=True)}", err=True)
        return failure.exit_code
    return code if isinstance(code, int) else 0


def _lost_output(error: OSError) -> int:
    """Say why the output ends early: a full disk, a pipe whose reader has left. Raises what is neither.

    What is left in the buffer can go nowhere. The interpreter would try once more at its end, and fail without words.
    """
    if error.errno not in OUTPUT_ERRORS:
        raise error
    _to_nowhere(1)
    if error.errno != errno.EPIPE:  # whoever has left, as `head` does, is not told
        click.echo(f"error: the output could not be written: {error.strerror}", err=True)
    return 1


def _to_nowhere(number: int) -> None:
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, number)
    os.close(sink)


def _hear_signals() -> None:
    """Undo what was inherited: while SIGCHLD is ignored, nobody learns how a process ended, and Postgres does not
    start; where SIGTERM is blocked, nothing can be stopped."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _open_streams() -> None:
    """Connect standard streams that were closed to nothing: else a socket gets their number, and uvloop aborts."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == number, "the lowest free number is given out, and those below are open"
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for the process's life
