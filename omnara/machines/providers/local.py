"""Machines of a pool as directories on the server's own computer: for development, without an engine.

A model's commands must not reach what the server can: they run in a sandbox (bubblewrap), or, when the server is root,
as a user of their own for each machine. Where neither can be had, no machine is made, unless whoever runs the server
says that its commands may do what the server may (OMNARA_LOCAL_MACHINES=unsafe).

A machine is bound to the computer that has its directory (`Resource.host`). CPU and memory are not limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from omnara.machines.posix import Launcher, Limits, PosixHome, User
from omnara.machines.posix.environment import DEFAULT_PATH
from omnara.machines.posix.sandbox import HOME_INSIDE, Bubblewrap, bubblewrap_problem
from omnara.machines.processes import HomeFull, HomeLost
from omnara.machines.providers import local_files
from omnara.machines.providers.local_files import About
from omnara.machines.providers.protocol import (
    InvalidOptions,
    MachineSpec,
    ProviderUnavailable,
    ProvisionFailed,
    Resource,
    ResourceState,
)

__all__ = ["Confinement", "LocalProvider", "Unconfined", "confinement", "host_id"]

Confinement = Literal["bubblewrap", "user", "unsafe"]

_FIRST_UID, _UIDS = 1_879_048_192, 2**24
"""Users without a name, far from those that systems give out (and that containers are mapped to)."""
_GONE = ".gone-"
_OPTIONS = frozenset({"network"})


class Unconfined(Exception):
    """Nothing here can keep commands away from the server; the text says what would."""


def confinement(*, unsafe: bool = False) -> Confinement:
    """Find out what keeps commands away from the server here. Blocks for some milliseconds. Raises Unconfined."""
    problem = bubblewrap_problem() if sys.platform == "linux" else "there is no bubblewrap for this system"
    if problem is None:
        return "bubblewrap"
    if os.geteuid() == 0 and sys.platform == "linux":
        return "user"
    if unsafe:
        return "unsafe"
    raise Unconfined(
        f"local machines are off: {problem}, and only root can run commands as another user; install bubblewrap, use "
        "docker, or set OMNARA_LOCAL_MACHINES=unsafe to let commands do whatever the server may"
    )


def host_id(data_dir: Path) -> str:
    """Return the id of this computer's data directory, made at the first call and the same ever after. Blocks."""
    path = data_dir / "host-id"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    data_dir.mkdir(parents=True, exist_ok=True)
    aside = data_dir / f".host-id.{secrets.token_hex(8)}"
    aside.write_text(f"host_{secrets.token_hex(16)}\n")
    aside.chmod(0o644)  # nobody else's to change, whatever the umask is
    try:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink()
    return path.read_text().strip()


class LocalProvider:
    """Makes machines below `root`. Implements `protocol.HomeProvider`; see there for what the methods promise.

    Options: `network`, "host" (as the server's computer) or "none" (only with bubblewrap).
    """

    def __init__(self, root: Path, *, host: str, confined: Confinement, limits: Limits | None = None) -> None:
        """Start nothing. `host` from `host_id`, `confined` from `confinement`."""
        self._root = root
        self._host = host
        self._confined = confined
        self._limits = limits
        self._launcher = Launcher(login_keys=False)

    @property
    def name(self) -> str:
        """What pools call it."""
        return "local"

    @property
    def provision_timeout_s(self) -> float:
        """Making a directory takes milliseconds."""
        return 30.0

    def validate(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Check both. Raises InvalidOptions."""
        if config:
            raise InvalidOptions(f"a local pool has no configuration, but was given: {', '.join(sorted(config))}")
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise InvalidOptions(f"unknown options of a local machine: {', '.join(unknown)}")
        network = options.get("network", "host")
        if network not in ("host", "none"):
            raise InvalidOptions("network must be host or none")
        if network == "none" and self._confined != "bubblewrap":
            raise InvalidOptions("network none needs bubblewrap, which this server cannot use")

    async def prepare(self, machine: MachineSpec) -> None:
        """There is nothing to fetch."""

    async def provision(self, machine: MachineSpec) -> Resource:
        """Make the directories. Raises ProvisionFailed, ProviderUnavailable."""
        try:
            await asyncio.to_thread(self._provision, machine)
        except OSError as error:
            raise ProviderUnavailable(f"the machine's directory cannot be made: {error}") from error
        return self._resource(machine)

    def _resource(self, machine: MachineSpec) -> Resource:
        place = str(self._place(machine))
        return Resource(resource_id=machine.allocation_name, host=self._host, details={"directory": place})

    def _place(self, machine: MachineSpec) -> Path:
        name = machine.allocation_name
        if not name or "/" in name or name.startswith("."):
            raise InvalidOptions(f"not a name for a machine: {name!r}")
        return self._root / "machines" / name

    def _provision(self, machine: MachineSpec) -> None:
        place = self._place(machine)
        about = self._about(machine)
        if about is not None:
            self._check_owner(machine, about)
            return
        for directory in (self._root, place.parent):
            with contextlib.suppress(FileExistsError):
                directory.mkdir(parents=True)
                directory.chmod(0o711)  # whatever the umask is
        if self._confined == "user":
            self._check_way()
        uid = self._uid(machine) if os.geteuid() == 0 and self._confined != "unsafe" else None
        about = About(
            machine_id=machine.machine_id,
            installation_id=machine.installation_id,
            uid=uid,
            network=machine.options.get("network", "host") == "host",
        )
        aside = self._root / f".new-{secrets.token_hex(8)}"
        try:
            local_files.fill(aside, about)
            aside.rename(place)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _about(self, machine: MachineSpec) -> About | None:
        try:
            return msgspec.json.decode((self._place(machine) / local_files.ABOUT).read_bytes(), type=About)
        except FileNotFoundError:
            return None

    @staticmethod
    def _check_owner(machine: MachineSpec, about: About) -> None:
        if (about.machine_id, about.installation_id) != (machine.machine_id, machine.installation_id):
            raise ProvisionFailed(f"{machine.allocation_name} belongs to another installation")

    def _check_way(self) -> None:
        """A user of its own must be able to get to its directory."""
        for directory in (self._root, *self._root.parents):
            if not directory.stat().st_mode & stat.S_IXOTH:
                raise ProvisionFailed(
                    f"other users cannot enter {directory}, and without bubblewrap each local machine has a user of "
                    "its own: install bubblewrap, or choose a data directory that others may enter"
                )

    def _uid(self, machine: MachineSpec) -> int:
        """Take a user that no other machine has, or had where it may have left files outside its directory."""
        taken = self._root / "users"
        taken.mkdir(mode=0o700, exist_ok=True)
        for _ in range(1000):
            uid = _FIRST_UID + secrets.randbelow(_UIDS)
            with contextlib.suppress(FileExistsError):
                (taken / str(uid)).symlink_to(machine.allocation_name)
                return uid
        raise ProvisionFailed("no user is left for another local machine")

    async def inspect(self, machine: MachineSpec, resource_id: str | None) -> tuple[ResourceState, Resource | None]:
        """A directory that is there counts as running."""
        about = await asyncio.to_thread(self._about, machine)
        if about is None:
            return "terminated", None
        if (about.machine_id, about.installation_id) != (machine.machine_id, machine.installation_id):
            return "unknown", None
        return "running", self._resource(machine)

    async def delete(self, machine: MachineSpec, resource_id: str | None) -> None:
        """End everything that runs there, then remove the files. Raises ProviderUnavailable."""
        about = await asyncio.to_thread(self._about, machine)
        if about is None:
            await self._off_the_loop(self._remove_rest)
            return
        if (about.machine_id, about.installation_id) != (machine.machine_id, machine.installation_id):
            return
        sandbox = self._sandbox(machine, about)
        if sandbox is not None:
            await sandbox.destroy()
        if about.uid is not None:
            await asyncio.to_thread(local_files.kill_all_of, about.uid)
        home = self._home(machine, about)
        try:
            left = [record.process_id for record in await home.processes() if record.exit is None]
            await asyncio.gather(*(home.stop(process_id, "machine_deleted") for process_id in left))
        except (HomeFull, HomeLost) as error:
            raise ProviderUnavailable(f"the machine's processes cannot be ended: {error}") from error
        await self._off_the_loop(self._remove, machine, about)

    @staticmethod
    async def _off_the_loop(work: Callable[..., None], *arguments: Any) -> None:
        try:
            await asyncio.to_thread(work, *arguments)
        except OSError as error:
            raise ProviderUnavailable(f"the machine's directory cannot be removed: {error}") from error

    def _remove_rest(self) -> None:
        """Remove what an attempt that was cut off has moved away already; whose it was is not known any more."""
        for gone in self._root.glob(f"{_GONE}*"):
            local_files.remove_tree(gone)

    def _remove(self, machine: MachineSpec, about: About) -> None:
        if about.uid is not None:
            local_files.kill_all_of(about.uid)
        gone = self._root / f"{_GONE}{secrets.token_hex(8)}"
        self._place(machine).rename(gone)
        local_files.remove_tree(gone)
        if about.uid is not None and self._confined == "bubblewrap":
            (self._root / "users" / str(about.uid)).unlink(missing_ok=True)

    async def sleep(self, machine: MachineSpec, resource_id: str) -> None:
        """An idle directory costs nothing."""

    async def wake(self, machine: MachineSpec, resource_id: str) -> None:
        """It was never asleep."""

    async def open_home(self, machine: MachineSpec, resource_id: str) -> PosixHome:
        """Return its processes. Raises ProviderUnavailable when the directory is not here."""
        about = await asyncio.to_thread(self._about, machine)
        if about is None:
            raise ProviderUnavailable(f"{machine.allocation_name} is not on this computer")
        self._check_owner(machine, about)
        return self._home(machine, about)

    def _home(self, machine: MachineSpec, about: About) -> PosixHome:
        place = self._place(machine)
        sandbox = self._sandbox(machine, about)
        inside = HOME_INSIDE if sandbox is not None else str(place / "workspace")
        tmp = {} if sandbox is not None else {"TMPDIR": str(place / "tmp")}
        names = {"HOME": inside, "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/sh"}
        return PosixHome(
            place / "state",
            base_env={"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", "TERM": "xterm", **names, **tmp},
            default_cwd=inside,
            launcher=self._launcher,
            user=None if about.uid is None else User(uid=about.uid, gid=about.uid),
            sandbox=sandbox,
            limits=self._limits,
        )

    def _sandbox(self, machine: MachineSpec, about: About) -> Bubblewrap | None:
        if self._confined != "bubblewrap":
            return None
        place = self._place(machine)
        return Bubblewrap(
            place / "state",
            workspace=place / "workspace",
            tmp=place / "tmp",
            etc=place / "etc",
            network=about.network,
        )

    async def close(self) -> None:
        """Let go of the fork server. What runs goes on."""
        await asyncio.to_thread(self._launcher.close)
