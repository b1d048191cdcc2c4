"""Somebody's cloud, as the module for it would be written: a machine is something that runs `omnara daemon` there.

The cloud itself is faked by processes and directories of this computer, and it loses or suspends what a test wants.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnara.machines.providers.places import Place
from omnara.machines.providers.protocol import (
    InvalidOptions,
    MachineSpec,
    NotAdmitted,
    Provider,
    ProviderUnavailable,
    ProvisionFailed,
    Resource,
    ResourceState,
)
from omnara.settings import child_environment
from tests.support.daemon_process import end_all_below
from tests.support.processes import ROOT

DAEMON = f"exec {sys.executable} -m omnara daemon run --home .omnara"
"""What runs in a box."""


def check(config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Take a region and nothing else."""
    if options or not set(config) <= {"region"}:
        raise InvalidOptions("a pool of the cloud has a region; its machines have no options")


class Cloud(Provider):
    """The provider, and the site that leads to it. What is below the line is only there to fake a cloud."""

    name = "cloud"
    provision_timeout_s = 20.0

    def admit(self, machine: MachineSpec, what: str) -> None:
        key = "" if machine.credential is None else machine.credential.value
        if key != self.key:
            raise NotAdmitted(f"the cloud does not know {key}")
        self.admitted.add((what, key))

    async def provision(self, machine: MachineSpec) -> Resource:
        self.admit(machine, "provision")
        assert machine.daemon is not None
        name = f"{machine.allocation_name}.{machine.generation}"
        if name not in self.boxes:
            await self.delete(machine, None)
            self.start(name, machine.daemon.environment())
        resource = Resource(resource_id=name, sandbox_url=f"cloud:{name}")
        if self.fails:
            raise ProvisionFailed(self.fails.pop().format(token=machine.daemon.token), resource=resource)
        return resource

    async def inspect(self, machine: MachineSpec, resource_id: str | None) -> tuple[ResourceState, Resource | None]:
        self.asked += 1
        if self.away:
            raise ProviderUnavailable("the cloud is away")
        self.admit(machine, "inspect")
        name = f"{machine.allocation_name}.{machine.generation}"
        if name not in self.boxes or self.boxes[name].poll() is not None:
            return "terminated", None
        return "inactive" if name in self.suspended else "running", Resource(resource_id=name)

    async def delete(self, machine: MachineSpec, resource_id: str | None) -> None:
        self.admit(machine, "delete")
        for name in [name for name in self.boxes if name.startswith(machine.allocation_name)]:
            self.destroy(name)

    async def wake(self, machine: MachineSpec, resource_id: str) -> None:
        self.admit(machine, "wake")
        self.woken.append(resource_id)
        if not self.slow:
            self.resume(resource_id)

    async def open(self) -> tuple[Provider, str]:
        return self, ""

    # --- the cloud's side -----------------------------------------------------------------------------------

    def __init__(self, root: Path, command: str, key: str = "") -> None:
        self.root = root
        self.command = command
        self.key = key
        self.admitted: set[tuple[str, str]] = set()
        self.boxes: dict[str, subprocess.Popen[bytes]] = {}
        self.given: dict[str, str] = {}
        self.suspended: set[str] = set()
        self.fails: list[str] = []
        self.woken: list[str] = []
        self.away, self.slow, self.asked = False, False, 0

    @property
    def place(self) -> Place:
        """The entry of the table."""
        return Place(name="cloud", daemons=True, credential=bool(self.key), check=check, site=lambda settings: self)

    def start(self, name: str, environment: dict[str, str]) -> None:
        """Start a box."""
        (self.root / name).mkdir(parents=True)
        self.given[name] = environment["OMNARA_MACHINE_TOKEN"]
        with (self.root / f"{name}.log").open("ab") as log:
            self.boxes[name] = subprocess.Popen(
                ["sh", "-c", self.command], env=child_environment({**environment, "PYTHONPATH": str(ROOT)}),
                cwd=self.root / name, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def lose(self, name: str) -> None:
        """A box ends by itself, with all that is in it."""
        self.boxes[name].kill()
        self.boxes[name].wait(30)
        end_all_below(self.root / name)

    def suspend(self, name: str) -> None:
        """A box stands still."""
        self.suspended.add(name)
        self.boxes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """A box goes on."""
        self.suspended.discard(name)
        self.boxes[name].send_signal(signal.SIGCONT)

    def destroy(self, name: str) -> None:
        """A box is removed with its disk."""
        self.lose(name)
        shutil.rmtree(self.root / name)
        del self.boxes[name]
