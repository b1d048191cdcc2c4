"""What a machine's container is made of: limits, what it may not do, and how it is known again.

Source: machines.md §13 (mapping); the issue (pids, no new privileges, dropped capabilities, read-only root, network).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omnara.machines.docker.home import DIRECTORY
from omnara.machines.docker.launchscript import TRANSIENT
from omnara.machines.providers.protocol import InvalidOptions, MachineSpec

__all__ = [
    "DEFAULT_IMAGE",
    "HOME_VOLUME",
    "DockerConfig",
    "DockerOptions",
    "config_of",
    "container_config",
    "image_of",
    "labels_of",
    "owner_of",
    "route_guard_config",
]

HOME_VOLUME: Final = "/home"
"""Where the machine's one volume is: the agent's directory, and beside it what is kept of processes."""
DEFAULT_CPU: Final = 1
DEFAULT_MEMORY_MB: Final = 1024
DEFAULT_IMAGE: Final = "omnara-sandbox"
_MIB: Final = 1024 * 1024
_SECOND: Final = 1_000_000_000
_PREFIX: Final = "omnara"
_PART: Final = "[a-zA-Z0-9][a-zA-Z0-9._:@-]*"
"""Between the slashes of an image's name. It becomes part of an address: `//` or `/..` would lead elsewhere there."""

_IDLE: Final = "trap 'exit 0' TERM; while :; do sleep 86400 & wait $!; done"
_HEALTH: Final = f"[ -w {DIRECTORY} ] && [ -w {TRANSIENT} ]"
_GUARD: Final = (
    "ip route replace blackhole 169.254.0.0/16 || ip route add blackhole 169.254.0.0/16 "
    "|| route add -net 169.254.0.0 netmask 255.255.0.0 reject || exit 9; "
    "for a in 100.100.100.200/32 fd00:ec2::254/128 fd20:ce::254/128 fd00:c1::a9fe:a9fe/128; do "
    "ip route replace blackhole $a || ip -6 route replace blackhole $a; done 2>/dev/null; exit 0"
)
"""Clouds serve credentials to every machine at link-local addresses, and some at these others."""


class DockerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool's configuration. `allowed_images`: what options may ask for beside `image`.

    `network`: `none`, or one that exists. `guard_link_local`: with a network, make link-local addresses unreachable;
    off only where the network does that itself.
    """

    image: str = DEFAULT_IMAGE
    allowed_images: list[str] = []
    network: str = "none"
    user: str = "1000:1000"
    pids_limit: int = 512
    tmp_mb: int = 256
    guard_link_local: bool = True


class DockerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine's options. `sleep_after_ms`: pause it when nothing ran for so long; 0: never."""

    image: str = ""
    sleep_after_ms: int = 0


def config_of(config: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[DockerConfig, DockerOptions]:
    """Return a pool's configuration and a machine's options, checked. Raises InvalidOptions."""
    try:
        pool = msgspec.convert(dict(config), DockerConfig)
        machine = msgspec.convert(dict(options), DockerOptions)
    except msgspec.ValidationError as error:
        raise InvalidOptions(str(error)) from error
    _check_pool(pool)
    image_of(pool, machine)
    if machine.sleep_after_ms and machine.sleep_after_ms < 30_000:
        raise InvalidOptions("sleep_after_ms must be 0 or at least 30000")
    return pool, machine


def _check_pool(pool: DockerConfig) -> None:
    for image in (pool.image, *pool.allowed_images):
        if len(image) > 255 or re.fullmatch(rf"{_PART}(?:/{_PART})*", image) is None:
            raise InvalidOptions(f"{image[:80]!r} cannot be the name of an image")
    if re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}", pool.network) is None or pool.network == "host":
        raise InvalidOptions("network must be `none` or the name of a network of the engine, and not the host's")
    found = re.fullmatch(r"([1-9][0-9]{0,9}):([0-9]{1,10})", pool.user)
    if found is None:
        raise InvalidOptions("user must be the numbers of a user and a group, `1000:1000`, and not root")
    for name, value, low, high in (
        ("pids_limit", pool.pids_limit, 32, 32_768),
        ("tmp_mb", pool.tmp_mb, 1, 1_048_576),
    ):
        if not low <= value <= high:
            raise InvalidOptions(f"{name} must be from {low} to {high}")


def image_of(pool: DockerConfig, machine: DockerOptions) -> str:
    """Return the image of a machine. Raises InvalidOptions for one that the pool does not allow."""
    if machine.image and machine.image not in (pool.image, *pool.allowed_images):
        raise InvalidOptions(f"the pool does not allow the image {machine.image}")
    return machine.image or pool.image


def owner_of(pool: DockerConfig) -> tuple[int, int]:
    """Return the numbers of the user and group that everything in the container runs as."""
    user, _, group = pool.user.partition(":")
    return int(user), int(group)


def labels_of(machine: MachineSpec) -> dict[str, str]:
    """Return the labels of whatever is made for a machine; the first two prove that it is ours."""
    return {
        f"{_PREFIX}.installation": machine.installation_id,
        f"{_PREFIX}.machine": machine.machine_id,
        f"{_PREFIX}.generation": str(machine.generation),
    }


def container_config(machine: MachineSpec, pool: DockerConfig, image: str) -> dict[str, Any]:
    """Return the engine's configuration of a machine's container. No environment of the machine is in it."""
    return {
        "Image": image,
        "User": pool.user,
        "WorkingDir": "/",
        "Hostname": "machine",
        "Env": [f"HOME={DIRECTORY}"],
        "Entrypoint": ["/bin/sh", "-c", _IDLE],
        "Cmd": [],
        # The image's own labels are there as well: without this one it could say that its containers are guards.
        "Labels": labels_of(machine) | {f"{_PREFIX}.role": ""},
        "StopTimeout": 5,
        "Healthcheck": {
            "Test": ["CMD", "/bin/sh", "-c", _HEALTH],
            "Interval": 300 * _SECOND,
            "Timeout": 10 * _SECOND,
            "Retries": 3,
        },
        "HostConfig": _host_config(machine, pool),
    }


def _host_config(machine: MachineSpec, pool: DockerConfig) -> dict[str, Any]:
    """Return what the container may take of its host, and what it may not do."""
    memory = (machine.memory_mb or DEFAULT_MEMORY_MB) * _MIB
    user, group = owner_of(pool)
    return {
        "Init": True,
        "RestartPolicy": {"Name": "no"},
        "NanoCpus": (machine.cpu or DEFAULT_CPU) * _SECOND,
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": pool.pids_limit,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": True,
        "NetworkMode": pool.network,
        "IpcMode": "private",
        "LogConfig": {"Type": "none"},
        "Mounts": [{"Type": "volume", "Source": machine.allocation_name, "Target": HOME_VOLUME}],
        "Tmpfs": {
            "/tmp": f"rw,exec,nosuid,nodev,size={pool.tmp_mb}m,mode=1777",  # noqa: S108 - the container's own
            TRANSIENT: f"rw,noexec,nosuid,nodev,size=64m,mode=0700,uid={user},gid={group}",
        },
    }


def route_guard_config(machine: MachineSpec, container_id: str, image: str) -> dict[str, Any]:
    """Return the configuration of a moment's container in the network of another one, that closes routes there."""
    return {
        "Image": image,
        "User": "0:0",
        "Entrypoint": ["/bin/sh", "-c", _GUARD],
        "Cmd": [],
        "Labels": labels_of(machine) | {f"{_PREFIX}.role": "guard"},
        "HostConfig": {
            "NetworkMode": f"container:{container_id}",
            "CapDrop": ["ALL"],
            "CapAdd": ["NET_ADMIN"],
            "SecurityOpt": ["no-new-privileges"],
            "ReadonlyRootfs": True,
            "LogConfig": {"Type": "none"},
            "PidsLimit": 32,
            "Memory": 64 * _MIB,
        },
    }
