"""The `machine_sources` of a config: which machines its agents get, and from which pools they may make more.

Names are still names here: only the database knows whether they are machines and pools that the project may use.
Source: machines.md §7 (environment), §12 (pools); features.md (machines); api.md §9.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from omnara.domain.config_values import Values
from omnara.ids import IdKind, InvalidPublicId, decode

__all__ = ["MAX_SOURCES", "DraftMachine", "DraftPool", "DraftSource", "read_sources"]

MAX_SOURCES: Final = 32
MAX_MACHINES: Final = 100
"""Of one pool, for one agent."""
MAX_ENV: Final = 1024
MAX_ENV_BYTES: Final = 256 * 1024
MAX_CWD_CHARS: Final = 4096
MIN_IDLE_MINUTES: Final = 5
MAX_TEXT_CHARS: Final = 1024
_REF: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_SHARED: Final = frozenset({"description", "cwd", "env_overlay", "secret_env_overlay"})
_MACHINE: Final = _SHARED | {"machine", "ref"}
_POOL: Final = _SHARED | {
    "pool",
    "initial_num_machines",
    "max_machines",
    "cpu",
    "memory_mb",
    "delete_after_idle_minutes",
    "provider_options",
}

Overlay = dict[str, str | None]


class _Shared(msgspec.Struct, frozen=True, kw_only=True):
    description: str = ""
    cwd: str = ""
    env_overlay: Overlay = {}
    secret_env_overlay: Overlay = {}


class DraftMachine(_Shared, frozen=True, kw_only=True):
    """A machine, by name or id. `ref` is what the model calls it; empty: it is given one."""

    machine: str
    ref: str = ""


class DraftPool(_Shared, frozen=True, kw_only=True):
    """A pool, by name or id. None: what the grant or the pool says."""

    pool: str
    initial_num_machines: int = 1
    max_machines: int = 1
    cpu: int | None = None
    memory_mb: int | None = None
    delete_after_idle_minutes: int | None = None
    provider_options: dict[str, Any] = {}


DraftSource = DraftMachine | DraftPool


def read_sources(values: Values, value: Any) -> tuple[DraftSource, ...]:
    """Return the sources of a document; faults go to `values`, and a source with one is left out."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_SOURCES:
        values.fault("machine_sources", f"must be a list of at most {MAX_SOURCES}")
        return ()
    found = [_source(values, entry, f"machine_sources.{number}") for number, entry in enumerate(value)]
    sources = tuple(source for source in found if source is not None)
    refs = [source.ref for source in sources if isinstance(source, DraftMachine) and source.ref]
    if len(refs) != len(set(refs)):
        values.fault("machine_sources", "a ref is there twice")
    return sources


def _source(values: Values, entry: Any, path: str) -> DraftSource | None:
    if not isinstance(entry, dict) or ("machine" in entry) == ("pool" in entry):
        values.fault(path, "must be a mapping with either machine or pool")
        return None
    return _machine(values, entry, path) if "machine" in entry else _pool(values, entry, path)


def _machine(values: Values, entry: dict[str, Any], path: str) -> DraftMachine | None:
    values.known_keys(entry, _MACHINE, path)
    machine = values.text(entry, "machine", path, MAX_TEXT_CHARS)
    ref = entry.get("ref")
    if ref is not None and not (isinstance(ref, str) and _REF.fullmatch(ref)):
        values.fault(f"{path}.ref", "must be up to 64 lower-case letters, digits and inner hyphens")
        return None
    shared = _shared(values, entry, path)
    return None if machine is None else DraftMachine(machine=machine, ref=ref or "", **shared)


def _pool(values: Values, entry: dict[str, Any], path: str) -> DraftPool | None:
    values.known_keys(entry, _POOL, path)
    pool = values.text(entry, "pool", path, MAX_TEXT_CHARS)
    most = _count(values, entry, "max_machines", path, 1)
    initial = _count(values, entry, "initial_num_machines", path, 0)
    if initial > most:
        values.fault(f"{path}.initial_num_machines", "must not be larger than max_machines")
    options = entry.get("provider_options")
    if options is not None and not isinstance(options, dict):
        values.fault(f"{path}.provider_options", "must be a mapping")
        options = None
    cpu, memory = values.positive(entry, "cpu", path), values.positive(entry, "memory_mb", path)
    idle = _idle(values, entry, path)
    shared = _shared(values, entry, path)
    if pool is None:
        return None
    return DraftPool(
        pool=pool,
        initial_num_machines=initial,
        max_machines=most,
        cpu=cpu,
        memory_mb=memory,
        delete_after_idle_minutes=idle,
        provider_options=options or {},
        **shared,
    )


def _count(values: Values, entry: Mapping[str, Any], key: str, path: str, least: int) -> int:
    value = entry.get(key)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_MACHINES:
        values.fault(f"{path}.{key}", f"must be a whole number from {least} to {MAX_MACHINES}")
        return 1
    return value


def _idle(values: Values, entry: Mapping[str, Any], path: str) -> int | None:
    value = entry.get("delete_after_idle_minutes")
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
    if not whole or 0 < value < MIN_IDLE_MINUTES:
        values.fault(f"{path}.delete_after_idle_minutes", f"must be 0 (never) or at least {MIN_IDLE_MINUTES}")
        return None
    return int(value)


def _shared(values: Values, entry: Mapping[str, Any], path: str) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    for key, longest in (("description", MAX_TEXT_CHARS), ("cwd", MAX_CWD_CHARS)):
        value = entry.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or len(value) > longest:
            values.fault(f"{path}.{key}", f"must be text of at most {longest} characters")
        else:
            shared[key] = value
    shared["env_overlay"] = _overlay(values, entry.get("env_overlay"), f"{path}.env_overlay", _is_text)
    shared["secret_env_overlay"] = _overlay(
        values, entry.get("secret_env_overlay"), f"{path}.secret_env_overlay", _is_secret_id
    )
    names = [name.upper() for overlay in ("env_overlay", "secret_env_overlay") for name in shared[overlay]]
    if len(names) != len(set(names)):
        values.fault(path, "a name is in env_overlay or secret_env_overlay twice (upper and lower case are the same)")
    return shared


def _overlay(values: Values, value: Any, path: str, fits: Callable[[Any], str | None]) -> Overlay:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_ENV:
        values.fault(path, f"must be a mapping of at most {MAX_ENV} names")
        return {}
    if len(msgspec.json.encode(value)) > MAX_ENV_BYTES:
        values.fault(path, f"must not be larger than {MAX_ENV_BYTES} bytes")
        return {}
    for name, item in value.items():
        if _ENV_NAME.fullmatch(name) is None:
            values.fault(path, "a name must be letters, digits and underscores, and must not start with a digit")
        elif name.upper().startswith("OMNARA_"):
            values.fault(f"{path}.{name}", "names that start with OMNARA_ are reserved")
        elif item is not None and (problem := fits(item)) is not None:
            values.fault(f"{path}.{name}", problem)
    return value


def _is_text(value: Any) -> str | None:
    return None if isinstance(value, str) and "\0" not in value else "must be text, or null to remove it"


def _is_secret_id(value: Any) -> str | None:
    try:
        decode(IdKind.SECRET, value if isinstance(value, str) else "")
    except InvalidPublicId:
        return "must be the id of a secret, or null to remove it"
    return None
