"""New machines of pools: what each is made with, and whether there is room for it.

Pool, then grant, then the agent's config decide, each over the one before; the tighter cap of pool and grant holds. The
pool is locked, so two admissions cannot both take the last place. Source: machines.md §12.
"""

from __future__ import annotations

import secrets
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.db import bindings
from omnara.db.bindings import LockedPool, NewBinding, NewPoolMachine
from omnara.db.connection import Connection
from omnara.domain.config import MachineSource, PoolSource, Source
from omnara.engine.machines.sources import secret_uuids, source_key
from omnara.engine.machines.targets import overlaid
from omnara.errors import Conflict
from omnara.ids import IdKind, decode, new_uuid

__all__ = ["MachineCapacity", "Owner", "PoolUnavailable", "add_pool_machine", "attach", "new_ref"]

_REF_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"
_REF_CHARS: Final = 6
_REF_TRIES: Final = 10


class MachineCapacity(Conflict):
    """A cap of pool, grant or config leaves no room for another machine."""


class PoolUnavailable(Conflict):
    """The pool is gone, or no longer granted to the project."""


class Owner(msgspec.Struct, frozen=True):
    """The agent that gets machines. Its hot row is locked, or the agent is new."""

    org_id: UUID
    project_id: UUID
    agent_id: UUID


class Made(msgspec.Struct, frozen=True):
    """A machine that is to be provisioned."""

    machine_id: UUID
    machine_ref: str


def new_ref() -> str:
    """A name by which a model calls a machine. Source: engine.md §1.1."""
    return "mchr-" + "".join(secrets.choice(_REF_ALPHABET) for _ in range(_REF_CHARS))


async def add_pool_machine(connection: Connection, owner: Owner, source: PoolSource, key: str = "") -> Made:
    """Admit one machine of a locked pool and attach it to the agent, in the caller's transaction.

    `key` says where it comes from when that is no source of the agent's config. Raises MachineCapacity and
    PoolUnavailable; nothing is written then.
    """
    pool_id = decode(IdKind.MACHINE_POOL, source.pool_id)
    pool = await bindings.locked_pool(connection, pool_id, owner.project_id, owner.agent_id)
    if pool is None:
        raise PoolUnavailable("the machine pool is gone, or no longer granted to this project")
    cpu = _first(source.cpu, pool.grant_cpu, pool.cpu)
    memory = _first(source.memory_mb, pool.grant_memory_mb, pool.memory_mb)
    _check_size(pool, cpu, memory)
    _check_room(pool, source, cpu, memory)
    machine_id, ref = new_uuid(), new_ref()
    await bindings.insert_pool_machine(connection, _new_machine(owner, source, pool, machine_id, ref, cpu, memory))
    ref = await attach(connection, owner, source, machine_id, ref, key)
    return Made(machine_id, ref)


async def attach(
    connection: Connection, owner: Owner, source: Source, machine_id: UUID, ref: str = "", key: str = ""
) -> str:
    """Attach a machine under `ref`, or under a name that is free; return that name."""
    explicit = source.ref if isinstance(source, MachineSource) else ""
    if explicit:
        await bindings.free_ref(connection, owner.agent_id, explicit, new_ref())
    for _ in range(_REF_TRIES):
        new = NewBinding(
            id=new_uuid(),
            org_id=owner.org_id,
            project_id=owner.project_id,
            agent_id=owner.agent_id,
            machine_id=machine_id,
            machine_ref=explicit or ref or new_ref(),
            binding_kind="explicit" if isinstance(source, MachineSource) else "pool",
            source_key=key or source_key(source),
            description=source.description,
            cwd=source.cwd,
            env_overlay=_json(source.env_overlay),
            secret_env_overlay=_json(secret_uuids(source.secret_env_overlay)),
        )
        if await bindings.insert_binding(connection, new):
            return new.machine_ref
        explicit = ref = ""
    raise RuntimeError("no free machine_ref was found")


def _new_machine(
    owner: Owner,
    source: PoolSource,
    pool: LockedPool,
    machine_id: UUID,
    ref: str,
    cpu: int | None,
    memory: int | None,
) -> NewPoolMachine:
    env, secret_env = overlaid(
        (_object(pool.env), _object(pool.secret_env)),
        (_object(pool.grant_env), _object(pool.grant_secret_env)),
        (dict(source.env_overlay), dict(secret_uuids(source.secret_env_overlay))),
    )
    options = _object(pool.options) | _object(pool.grant_options) | source.provider_options
    idle = _first(source.delete_after_idle_minutes, pool.grant_idle_minutes, pool.idle_minutes)
    return NewPoolMachine(
        id=machine_id,
        org_id=owner.org_id,
        pool_id=pool.id,
        grant_id=pool.grant_id,
        project_id=owner.project_id,
        display_name=f"{pool.name[:200]}-{ref}",
        description=source.description,
        provider=pool.provider,
        cwd=pool.grant_cwd or pool.cwd,
        env=_json(env),
        secret_env=_json(secret_env),
        cpu=cpu,
        memory_mb=memory,
        options=_json({name: value for name, value in options.items() if value is not None}),
        idle_minutes=idle or None,  # 0: never
        machine_grant_id=new_uuid(),
    )


def _check_size(pool: LockedPool, cpu: int | None, memory: int | None) -> None:
    bounds = (
        (
            "cpu",
            cpu,
            (pool.min_machine_cpu, pool.grant_min_machine_cpu),
            (pool.max_machine_cpu, pool.grant_max_machine_cpu),
        ),
        (
            "memory_mb",
            memory,
            (pool.min_machine_memory_mb, pool.grant_min_machine_memory_mb),
            (pool.max_machine_memory_mb, pool.grant_max_machine_memory_mb),
        ),
    )
    for what, value, lows, highs in bounds:
        low, high = _tightest(lows, max), _tightest(highs, min)
        if value is None:
            continue
        if (low is not None and value < low) or (high is not None and value > high):
            raise MachineCapacity(f"machines of the pool {pool.name} may not have a {what} of {value}")


def _check_room(pool: LockedPool, source: PoolSource, cpu: int | None, memory: int | None) -> None:
    counted = (
        ("machines of this agent", pool.agent_machines, 1, source.max_machines),
        ("machines of the pool", pool.used_machines, 1, pool.max_machines),
        ("machines of the project", pool.project_machines, 1, pool.grant_max_machines),
        ("cpu of the pool", pool.used_cpu, cpu or 0, pool.max_cpu),
        ("cpu of the project", pool.project_cpu, cpu or 0, pool.grant_max_cpu),
        ("memory_mb of the pool", pool.used_memory_mb, memory or 0, pool.max_memory_mb),
        ("memory_mb of the project", pool.project_memory_mb, memory or 0, pool.grant_max_memory_mb),
    )
    for what, used, more, most in counted:
        if most is not None and used + more > most:
            raise MachineCapacity(f"the pool {pool.name} has no room: {used} of {most} {what} are taken")


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _tightest(values: tuple[int | None, ...], pick: Any) -> int | None:
    known = [value for value in values if value is not None]
    tightest: int | None = pick(known) if known else None
    return tightest


def _object(text: str) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.json.decode(text)
    return value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
