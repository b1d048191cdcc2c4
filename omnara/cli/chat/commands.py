"""The words that begin with a slash."""

from __future__ import annotations

from typing import Final

from prompt_toolkit.completion import NestedCompleter, PathCompleter

__all__ = ["COMPLETER", "HELP", "command_of"]

HELP: Final = """\
Enter        sends; while the agent works, the message waits for its own turn
Alt-Enter    steers: the message joins the running turn (or Esc, then Enter)
Ctrl-C       stops the running turn; twice leaves, and the agent goes on
Ctrl-D       leaves
/steer TEXT  steers, like Alt-Enter; under a form it takes the form's place
/stop        stops the running turn
/attach FILE sends a file along with the next message; /detach drops it
/history [N] prints the last N events (20)
/status      what the agent is doing, and what it has used
/quit        leaves
Forms        y or n; a number, or several: 1,3; a number and words; words
A message that begins with a slash is sent with a blank before it."""

_ALIASES: Final = {"/exit": "/quit", "/q": "/quit", "/cancel": "/stop", "/?": "/help"}

COMPLETER: Final = NestedCompleter.from_nested_dict(
    {
        "/attach": PathCompleter(expanduser=True),
        **dict.fromkeys(("/detach", "/help", "/history", "/quit", "/status", "/steer", "/stop")),
    }
)


def command_of(line: str) -> tuple[str, str] | None:
    """Return the command and the rest of a line, or None when it is a message."""
    if not line.startswith("/"):
        return None
    name, _, rest = line.strip().partition(" ")
    return _ALIASES.get(name, name), rest.strip()
