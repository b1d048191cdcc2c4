"""From the names in a config's `machine_sources` to machines and pools that its project may use.

Asked when a config is compiled and again when an agent gets it, since grants come and go. Source: features.md (grants);
api.md §9 (path-message pairs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from omnara.access.roles import ProjectScope
from omnara.db import bindings, machines
from omnara.db.bindings import SourceMachine, SourcePool
from omnara.db.connection import Connection
from omnara.domain.config import MachineSource, PoolSource, Source
from omnara.domain.config_check import Problem, describe
from omnara.domain.config_machines import DraftMachine, DraftPool, DraftSource
from omnara.engine.machines.pool_providers import check_provider
from omnara.errors import InvalidRequest, Unprocessable
from omnara.ids import IdKind, InvalidPublicId, decode, encode
from omnara.machines.providers.places import Place

__all__ = ["SANDBOX", "check_sources", "pool_ids", "resolve_sources", "secret_uuids", "source_key"]

SANDBOX: Final = "sandbox"
"""Stands in bindings for a source of the config: the machine was made because the config names none."""


async def resolve_sources(
    connection: Connection, project: ProjectScope, drafts: Sequence[DraftSource], places: Mapping[str, Place]
) -> tuple[Source, ...]:
    """Return the sources with ids for names, in the caller's transaction.

    Raises InvalidRequest with everything that the project has not got, or that is there twice.
    """
    if not drafts:
        return ()
    found: list[Source] = []
    problems: list[Problem] = []
    for number, draft in enumerate(drafts):
        path = f"machine_sources.{number}"
        source = await _resolve(connection, project, draft, places, path, problems)
        if source is None:
            continue
        if source_key(source) in {source_key(other) for other in found}:
            problems.append(Problem(path, "is named before"))
        found.append(source)
    problems += await _secret_problems(connection, project, drafts)
    if problems:
        raise InvalidRequest(describe(problems))
    return tuple(found)


async def check_sources(connection: Connection, project: ProjectScope, sources: Sequence[Source]) -> None:
    """Check that the project may still use what a compiled config names. Raises InvalidRequest."""
    drafts: list[DraftSource] = [
        DraftMachine(machine=source.machine_id, secret_env_overlay=source.secret_env_overlay)
        if isinstance(source, MachineSource)
        else DraftPool(pool=source.pool_id, secret_env_overlay=source.secret_env_overlay)
        for source in sources
    ]
    await resolve_sources(connection, project, drafts, {})  # no options, so no provider is asked about them


def pool_ids(sources: Iterable[Source]) -> list[UUID]:
    """The pools among compiled sources, in order of id."""
    return sorted(decode(IdKind.MACHINE_POOL, source.pool_id) for source in sources if isinstance(source, PoolSource))


def secret_uuids(overlay: dict[str, str | None]) -> dict[str, UUID | None]:
    """A config's overlay of secrets as it is stored with bindings and machines."""
    return {name: None if value is None else decode(IdKind.SECRET, value) for name, value in overlay.items()}


def source_key(source: Source) -> str:
    """What tells a config's sources apart, and is noted with the bindings that come from one."""
    return source.machine_id if isinstance(source, MachineSource) else source.pool_id


async def _resolve(
    connection: Connection,
    project: ProjectScope,
    draft: DraftSource,
    places: Mapping[str, Place],
    path: str,
    problems: list[Problem],
) -> Source | None:
    if isinstance(draft, DraftMachine):
        rows = await bindings.source_machines(
            connection, project.org_id, project.project_id, *_named(IdKind.MACHINE, draft.machine)
        )
        problem = _machine_problem(rows)
        if problem is not None:
            problems.append(Problem(f"{path}.machine", problem))
            return None
        shared = {name: getattr(draft, name) for name in _SHARED}
        return MachineSource(machine_id=encode(IdKind.MACHINE, rows[0].id), ref=draft.ref, **shared)
    pool = await bindings.source_pool(
        connection, project.org_id, project.project_id, *_named(IdKind.MACHINE_POOL, draft.pool)
    )
    if pool is None or not pool.granted:
        problems.append(Problem(f"{path}.pool", _UNKNOWN_POOL if pool is None else _NOT_GRANTED))
        return None
    problem = _options_problem(places, pool, draft)
    if problem is not None:
        problems.append(Problem(f"{path}.provider_options", problem))
        return None
    values = {name: value for name, value in msgspec.structs.asdict(draft).items() if name != "pool"}
    return PoolSource(pool_id=encode(IdKind.MACHINE_POOL, pool.id), **values)


def _options_problem(places: Mapping[str, Place], pool: SourcePool, draft: DraftPool) -> str | None:
    """Why the provider could not make machines with these options."""
    if not draft.provider_options:
        return None
    options = msgspec.json.decode(pool.options) | draft.provider_options
    given = {name: value for name, value in options.items() if value is not None}
    try:
        check_provider(places, pool.provider, pool.provider_config, msgspec.json.encode(given).decode())
    except (InvalidRequest, Unprocessable) as error:
        return error.detail
    return None


_SHARED = ("description", "cwd", "env_overlay", "secret_env_overlay")
_UNKNOWN_POOL = "is not the name or id of a machine pool"
_NOT_GRANTED = "is not granted to this project"


def _machine_problem(rows: Sequence[SourceMachine]) -> str | None:
    if not rows:
        return "is not the name or id of a machine"
    if len(rows) > 1:
        return "is the name of several machines; use its id"
    if rows[0].source_kind != "byo":
        return "belongs to a pool; name the pool instead"
    return None if rows[0].granted else _NOT_GRANTED


def _named(kind: IdKind, text: str) -> tuple[UUID | None, str]:
    try:
        return decode(kind, text), ""
    except InvalidPublicId:
        return None, text


async def _secret_problems(
    connection: Connection, project: ProjectScope, drafts: Sequence[DraftSource]
) -> list[Problem]:
    named = [
        (f"machine_sources.{number}.secret_env_overlay.{name}", value)
        for number, draft in enumerate(drafts)
        for name, value in secret_uuids(draft.secret_env_overlay).items()
        if value is not None
    ]
    if not named:
        return []
    usable = await machines.keep_env_secrets(
        connection, project.org_id, {value for _, value in named}, project.project_id
    )
    return [
        Problem(path, "is not a generic secret that this project may use")
        for path, value in named
        if value not in usable
    ]
