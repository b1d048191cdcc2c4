"""Reads the settings: the only module that looks at the environment.

A wrong value stops the start with a sentence that names the variable; a variable that is no setting is pointed out,
since a misspelt limit that silently does nothing is found in the worst hour.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from omnara.errors import ConfigurationError
from omnara.setting_daemon import DAEMON_VARIABLES, DaemonSettings, read_daemon_settings
from omnara.setting_table import SPECS, Settings
from omnara.setting_types import Address, Role, Spec, default_text, parse

__all__ = [
    "Address",
    "DaemonSettings",
    "Role",
    "Settings",
    "Spec",
    "child_environment",
    "interpreter_environment",
    "load",
    "load_daemon",
    "markdown_table",
    "unknown_variables",
]

_DEFAULTS: Final = Settings()
_HEADER_KEYS: Final = frozenset({"anthropic_api_key", "openai_api_key", "api_key"})
_ORIGIN: Final = re.compile(
    r"(?!http://[^/]*:80$)(?!https://[^/]*:443$)[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
)
_PUBLIC_URL: Final = re.compile(r"https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?")
_HOST_PORT: Final = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(:[0-9]{0,5})?")
_IGNORED_PREFIX: Final = "OMNARA_TEST_"
"""Variables of the test suite, which a server started by a test inherits."""


def load(environ: Mapping[str, str] | None = None, *, overrides: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from `environ` (default: the process environment). An empty variable counts as unset.

    `overrides` are variables given elsewhere, such as on the command line; they win.
    Raises ConfigurationError that names each bad variable and says what its value should look like.
    """
    source = {**(os.environ if environ is None else environ), **(overrides or {})}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, kind, spec in SPECS:
        text = source.get(spec.env, "")
        if not text.strip():
            continue
        try:
            values[name] = parse(name, kind, spec, text)
        except ValueError as error:
            problems.append(f"{spec.env} {error}")
    settings = Settings(**values)
    if not settings.data_dir.is_absolute():
        problems.append("OMNARA_DATA_DIR is not set, and this user has no home directory to put it in")
    problems.extend(_unreadable_urls(settings))
    problems.extend(_unsendable(settings))
    problems.extend(_contradictions(settings))
    problems.extend(_origins(settings.cors_origins))
    if settings.public_url is not None and _PUBLIC_URL.fullmatch(settings.public_url) is None:
        problems.append("OMNARA_PUBLIC_URL must be a URL such as https://omnara.example.com, without a query")
    if problems:
        raise ConfigurationError("; ".join(problems))
    return settings


def load_daemon(
    environ: Mapping[str, str] | None = None, *, overrides: Mapping[str, str] | None = None
) -> DaemonSettings:
    """Read the variables of `omnara daemon`, as `load` does for a server. Raises ConfigurationError."""
    return read_daemon_settings({**(os.environ if environ is None else environ), **(overrides or {})})


def _unreadable_urls(settings: Settings) -> Iterator[str]:
    """Database URLs whose host cannot be told from the rest. The driver's words about them quote the password."""
    urls = {
        "OMNARA_DATABASE_URL": settings.database_url,
        "OMNARA_DATABASE_DIRECT_URL": settings.database_direct_url,
    }
    for variable, url in urls.items():
        hosts = "" if url is None else re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0].rpartition("@")[2]
        if not all(_HOST_PORT.fullmatch(host) for host in hosts.split(",")):
            yield f"{variable} has no readable host and port; write / ? # @ : in its password as %2F %3F %23 %40 %3A"


def _unsendable(settings: Settings) -> Iterator[str]:
    """Keys that no HTTP header carries: better told now than as a failure of every call."""
    for name, _, spec in SPECS:
        key = getattr(settings, name) if name in _HEADER_KEYS else None
        if key and not all("!" <= character <= "~" for character in key):
            yield f"{spec.env} must be printable ASCII without blanks or line breaks"


def _origins(origins: Sequence[str]) -> Iterator[str]:
    """Origins that no browser would ever send, so that their pages would be refused without a word."""
    sound = all(_ORIGIN.fullmatch(origin) is not None for origin in origins if origin != "*")
    if not sound or ("*" in origins and len(origins) > 1):
        yield (
            "OMNARA_CORS_ORIGINS must be * or a list of origins as browsers send them, such as "
            "https://app.example.com or http://localhost:3000: lower case, no path, no default port"
        )


def _contradictions(settings: Settings) -> Iterator[str]:
    if settings.worker_renew_s * 3 > settings.worker_lease_s:
        yield (
            f"OMNARA_WORKER_RENEW ({settings.worker_renew_s:g} s) must be at most a third of "
            f"OMNARA_WORKER_LEASE ({settings.worker_lease_s:g} s), or one late renewal looks like a death"
        )
    if settings.worker_probe_s * 10 > settings.worker_lease_s:
        yield (
            f"OMNARA_WORKER_PROBE ({settings.worker_probe_s:g} s) must be at most a tenth of "
            f"OMNARA_WORKER_LEASE ({settings.worker_lease_s:g} s), or a lease that ran out is noticed late"
        )
    if settings.model_retry_base_s > settings.model_retry_cap_s:
        yield "OMNARA_MODEL_RETRY_BASE must not be above OMNARA_MODEL_RETRY_CAP"
    if settings.database_direct_url and not settings.database_url:
        yield "OMNARA_DATABASE_DIRECT_URL needs OMNARA_DATABASE_URL; set both or neither"
    if bool(settings.secret_encryption_keys) != bool(settings.secret_encryption_active_key):
        yield "OMNARA_SECRET_ENCRYPTION_KEYS and OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY: set both or neither"


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a warning for each `OMNARA_` variable that is no setting, with the closest name that is one."""
    source = os.environ if environ is None else environ
    known = [*(spec.env for _, _, spec in SPECS), *DAEMON_VARIABLES]
    warnings: list[str] = []
    for name in sorted(source):
        if not name.startswith("OMNARA_") or name in known or name.startswith(_IGNORED_PREFIX):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "run `omnara settings` for the list"
        warnings.append(f"{name} is not a setting and has no effect; {hint}")
    return warnings


def child_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for a child: without any setting of ours, then with `overrides`.

    So a server started by the demo never reaches the operator's database or provider keys by accident.
    """
    ours = {spec.env for _, _, spec in SPECS}
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("OMNARA_")}
    return kept | dict(overrides)


def interpreter_environment() -> dict[str, str]:
    """Return what this Python may need to be started once more, and nothing else: where its own libraries are."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if name in os.environ else {}


def markdown_table() -> str:
    """Return the table of settings for the README: name, default, meaning. Ends without a line break."""
    lines = ["| Variable | Default | Meaning |", "|---|---|---|"]
    for name, _, spec in SPECS:
        default = default_text(getattr(_DEFAULTS, name))
        if name == "data_dir":  # differs between root and others, and the table must not depend on who prints it
            default = "~/.local/share/omnara"
        lines.append(f"| `{spec.env}` | {f'`{default}`' if default else ''} | {spec.meaning} |")
    return "\n".join(lines)
