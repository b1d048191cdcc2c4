"""What a command finds in its environment, and which program reads it.

Source: machines.md §7 (shells; of the environment of whoever runs the home only what is named here is passed on).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from omnara.machines.processes import ProcessSpec

__all__ = ["base_environment", "directory", "refusal", "shell"]

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TMPDIR", "TMP", "TEMP")
_OWN = "OMNARA_HOME"
_POWERSHELL = ("-NoLogo", "-NoProfile", "-NonInteractive", "-Command")
_SHELLS: Mapping[str, Sequence[str]] = {
    "": ("/bin/sh", "-c"),
    "default": ("/bin/sh", "-c"),
    "sh": ("/bin/sh", "-c"),
    "bash": ("bash", "-c"),
    "zsh": ("zsh", "-c"),
    "pwsh": ("pwsh", *_POWERSHELL),
    "powershell": ("powershell", *_POWERSHELL),
}


def base_environment(environ: Mapping[str, str], *, path: str | None = None) -> dict[str, str]:
    """Choose from `environ` what commands may see. `path`: the search path, as it was when the home was set up."""
    chosen = {name: environ[name] for name in (*_PASSED_ON, _OWN) if name in environ}
    return {**chosen, "PATH": path or environ.get("PATH") or DEFAULT_PATH}


def shell(selector: str) -> Sequence[str]:
    """Return the program and its options that a command is given to. Raises KeyError for what no POSIX system has."""
    return _SHELLS[selector]


def directory(spec: ProcessSpec, default: str) -> str:
    """Return where a command starts; a relative directory is one below `default`. Source: machines.md §7."""
    return posixpath.join(default, spec.cwd) if spec.cwd else default


def refusal(spec: ProcessSpec) -> str | None:
    """Say, for the model, why this can never be started on a POSIX system; None when it can be tried."""
    if spec.shell not in _SHELLS:
        return f"The shell {spec.shell!r} is not available on this machine."
    for what, text in (("command", spec.command), ("working directory", spec.cwd)):
        if "\0" in text:
            return f"The {what} contains a NUL character, which no shell can take."
        if not _encodable(text):
            return f"The {what} is not valid Unicode text."
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name + value or not _encodable(name + value):
            return f"The environment variable {name!r} cannot be passed to a process."
    return None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
