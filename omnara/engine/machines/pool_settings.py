"""What may be said of a pool and of a grant of one: changes applied to settings, and which of them make sense together.

Sizes narrow on the way from pool to grant: the tighter bound holds. Source: machines.md §12; contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec

from omnara.db.machine_pools import PoolOverrides, PoolSettings, Sizes
from omnara.engine.machines.environment import (
    check_env,
    checked_cwd,
    checked_description,
    stored_env,
    stored_metadata,
    stored_object,
    stored_secret_env,
)
from omnara.engine.naming import checked_name
from omnara.errors import InvalidRequest

S = TypeVar("S", PoolSettings, PoolOverrides)

_CHECKED: Final[Mapping[str, Callable[[Any], Any]]] = {
    "name": checked_name,
    "description": checked_description,
    "default_cwd": checked_cwd,
    "metadata": stored_metadata,
    "default_machine_env": stored_env,
    "default_machine_env_overlay": stored_env,
    "default_machine_secret_env": stored_secret_env,
    "default_machine_secret_env_overlay": stored_secret_env,
    "provider_config": lambda value: stored_object(value, "provider_config"),
    "default_machine_provider_options": lambda value: stored_object(value, "default_machine_provider_options"),
    "default_machine_provider_options_overlay": lambda value: stored_object(
        value, "default_machine_provider_options_overlay"
    ),
}
_OBJECTS: Final = frozenset(_CHECKED) - {"name", "description", "default_cwd"}
_SIZES: Final = frozenset(Sizes.__struct_fields__)


def applied(settings: S, changes: Mapping[str, Any]) -> S:
    """Return settings with some fields replaced, objects stored as JSON text. Raises InvalidRequest."""
    sizes = {name: value for name, value in changes.items() if name in _SIZES}
    others = {
        name: _CHECKED[name](value) if name in _CHECKED else value
        for name, value in changes.items()
        if name not in _SIZES
    }
    changed = msgspec.structs.replace(settings, **others, sizes=msgspec.structs.replace(settings.sizes, **sizes))
    check_env(*environment(changed))
    return changed


def environment(settings: PoolSettings | PoolOverrides) -> tuple[dict[str, str | None], dict[str, UUID | None]]:
    """Return the variables and the secrets of settings; None takes away what a pool has."""
    if isinstance(settings, PoolSettings):
        env, secrets = settings.default_machine_env, settings.default_machine_secret_env
    else:
        env, secrets = settings.default_machine_env_overlay, settings.default_machine_secret_env_overlay
    return (
        msgspec.json.decode(env, type=dict[str, str | None]),
        msgspec.json.decode(secrets, type=dict[str, UUID | None]),
    )


def differing(one: S, other: S) -> set[str]:
    """Return the names of the fields in which settings differ; JSON is compared by its meaning."""
    return {name for name, value in _values(one).items() if value != _values(other)[name]}


def narrowed(pool: Sizes, grant: Sizes) -> Sizes:
    """Return the sizes that hold for machines of a pool that are made through a grant."""
    found: dict[str, int | None] = {}
    for name in Sizes.__struct_fields__:
        theirs, ours = getattr(pool, name), getattr(grant, name)
        if theirs is None or ours is None or name.startswith("default_"):
            found[name] = theirs if ours is None else ours
        else:
            found[name] = max(theirs, ours) if name.startswith("min_") else min(theirs, ours)
    return Sizes(**found)


def check_sizes(sizes: Sizes) -> None:
    """Refuse bounds that leave no size, or a default outside of them. Raises InvalidRequest."""
    for what in ("cpu", "memory_mb"):
        low, high = getattr(sizes, f"min_machine_{what}"), getattr(sizes, f"max_machine_{what}")
        usual, total = getattr(sizes, f"default_machine_{what}"), getattr(sizes, f"max_total_{what}")
        _ordered(low, high, f"min_machine_{what} must not be larger than max_machine_{what}")
        _ordered(low, usual, f"default_machine_{what} must not be smaller than min_machine_{what}")
        _ordered(usual, high, f"default_machine_{what} must not be larger than max_machine_{what}")
        if total:  # 0 closes the pool
            _ordered(usual, total, f"default_machine_{what} must not be larger than max_total_{what}")
            _ordered(low, total, f"min_machine_{what} must not be larger than max_total_{what}")


def _ordered(smaller: int | None, larger: int | None, text: str) -> None:
    if smaller is not None and larger is not None and smaller > larger:
        raise InvalidRequest(text)


def _values(settings: PoolSettings | PoolOverrides) -> dict[str, Any]:
    found = msgspec.structs.asdict(settings)
    found |= msgspec.structs.asdict(found.pop("sizes"))
    return {name: msgspec.json.decode(value) if name in _OBJECTS else value for name, value in found.items()}
