"""The script that becomes the command: who it is, its environment, its directory, and then `exec`.

It goes into the container over standard input, to a directory in memory that only its user can read, and is removed by
itself before the command begins: the environment may hold secrets, and `docker inspect`, argv and disks must not.
Source: machines.md §7 (shells, working directory, environment).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Final

from omnara.machines.processes import ProcessSpec, StartFailed

__all__ = ["DURABLE", "TRANSIENT", "launch_script"]

DURABLE: Final = "/home/.omnara"
"""Where a container keeps what is known of its processes; on the volume, beside the agent's directory, not in it."""
TRANSIENT: Final = "/run/omnara"
"""Pipes, environments not used yet, and who serves: in memory, gone with the container's run."""

MAX_ARGUMENT: Final = 131_072 - 1
"""Linux takes no longer string in argv or environment (MAX_ARG_STRLEN, with its NUL)."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SHELLS: Final[Mapping[str, str]] = {
    "": "/bin/sh -c",
    "default": "/bin/sh -c",
    "sh": "/bin/sh -c",
    "bash": "bash -c",
    "zsh": "zsh -c",
    "pwsh": "pwsh -NoLogo -NoProfile -NonInteractive -Command",
    "powershell": "powershell -NoLogo -NoProfile -NonInteractive -Command",
}


def launch_script(spec: ProcessSpec, default_cwd: str, base_env: Mapping[str, str]) -> bytes:
    """Return the script for one command. Raises StartFailed when no process could be given these values."""
    shell = _SHELLS.get(spec.shell)
    if shell is None:
        raise StartFailed(f"there is no shell {spec.shell!r} on this machine")
    _check(spec)
    cwd = posixpath.join(default_cwd, spec.cwd) if spec.cwd else default_cwd
    here, kept = f"{TRANSIENT}/p/{spec.process_id}", f"{DURABLE}/{spec.process_id}"
    lines = [
        "read -r l </proc/$$/stat; l=${l##*) }; set -- $l",
        f"read -r b <{TRANSIENT}/boot",
        f'printf "%s %s %s\\n" "$b" $$ "${{20}}" >{here}/pg',
        f"rm -f {here}/go",
        "umask 022",
    ]
    if spec.io_mode == "pty":
        lines.append("stty rows 24 cols 80 2>/dev/null")
    lines += [f"export {name}={_quoted(value)}" for name, value in {**base_env, **spec.env}.items()]
    lines += [
        f"cd -- {_quoted(cwd)} 2>/dev/null || {{ echo cwd >{kept}/fail; exit 127; }}",
        f"command -v {shell.split()[0]} >/dev/null 2>&1 || {{ echo shell >{kept}/fail; exit 127; }}",
        f"exec {shell} {_quoted(spec.command)}",
    ]
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")


def _check(spec: ProcessSpec) -> None:
    """Refuse what the kernel or a shell could not be given, before anything durable exists."""
    if "\0" in spec.command or "\0" in spec.cwd:
        raise StartFailed("a command and its directory cannot contain NUL")
    if len(spec.command.encode("utf-8", "surrogateescape")) > MAX_ARGUMENT:
        raise StartFailed(f"the command is longer than the {MAX_ARGUMENT} bytes that Linux takes; put it into a file")
    for name, value in spec.env.items():
        if not _NAME.match(name):
            raise StartFailed(f"{name!r} cannot be the name of an environment variable in a shell")
        if "\0" in value:
            raise StartFailed(f"the environment variable {name} contains NUL")
        if len(name) + len(value.encode("utf-8", "surrogateescape")) + 1 > MAX_ARGUMENT:
            raise StartFailed(
                f"the environment variable {name} is longer than the {MAX_ARGUMENT} bytes that Linux takes"
            )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
