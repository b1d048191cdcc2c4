"""What a place must be able to do, so that machines of a pool can be made there.

It is kept small on purpose: somebody else's sandboxes are one module with these methods, and everything that needs care
(claims, retries, caps, deletion that is certain) is done by the callers. A provider keeps nothing of its own: after a
restart of the server, the machine's row and what `inspect` sees are all there is.

There are two ways. A `Provider` makes machines that run `omnara daemon` themselves: it starts something that does so
with `MachineSpec.daemon.environment()`, from an image that has omnara, or after the server's own `/install/omnarad.sh`.
A `HomeProvider` can also run things in its machines, so nothing of ours has to be there, and the server drives their
commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from omnara.machines.processes import Home

__all__ = [
    "Credential",
    "DaemonAccess",
    "HomeProvider",
    "InvalidOptions",
    "MachineSpec",
    "NotAdmitted",
    "Provider",
    "ProviderUnavailable",
    "ProvisionFailed",
    "Resource",
    "ResourceState",
]

ResourceState = Literal["running", "inactive", "transitional", "terminated", "unknown"]
"""What became of a resource. `inactive`: asleep, can be woken. `terminated`: gone for good, its work is lost.
`unknown`: could not be told, or it is not ours. Only `terminated` is a reason to give up on a machine."""


class InvalidOptions(ValueError):
    """The pool's configuration or the machine's options cannot be used; the text says which and why, for the caller."""


class ProviderUnavailable(Exception):
    """The place cannot be asked now. Nothing is known, so nothing is deleted; the same call may succeed later."""


class NotAdmitted(ProviderUnavailable):
    """The place answers, but not to this pool: its credential is missing, cannot be read, or is refused there.

    Nothing is known of the machine and nothing is deleted, as above; machines of other pools are not concerned.
    """


class ProvisionFailed(Exception):
    """The place answered and will not make this machine; the text says why, for whoever runs the pool.

    `resource` names what was made before it failed, so that the caller can store it and have it removed.
    """

    def __init__(self, text: str, *, resource: Resource | None = None) -> None:
        super().__init__(text)
        self.resource = resource


class Credential(msgspec.Struct, frozen=True):
    """By what a place knows who asks: the value of the secret that a pool names as `provider_auth_secret_id`.

    It goes to the place and nowhere else. Source: machines.md §12.
    """

    value: str

    def __repr__(self) -> str:
        """Show nothing: a credential in a log line is a leak."""
        return "Credential(<hidden>)"


class DaemonAccess(msgspec.Struct, frozen=True):
    """With what the daemon of one machine finds its server, and proves which machine it is. Worth as much as the
    machine: it goes into the machine and nowhere else. Source: machines.md §12."""

    api_url: str
    token: str

    def environment(self) -> dict[str, str]:
        """Return the variables that `omnara daemon run` reads."""
        return {"OMNARA_API_URL": self.api_url, "OMNARA_MACHINE_TOKEN": self.token}

    def __repr__(self) -> str:
        """Show the server only: a token in a log line is a leak."""
        return f"DaemonAccess(api_url={self.api_url!r}, token=<hidden>)"


class MachineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as it is to be made: everything resolved. The same values name the same machine for ever.

    `allocation_name` is unique in the place and therefore the fence: two attempts cannot both make it. `generation`
    counts the resources that were made for this machine, beginning at 1. The two ids prove ownership: whatever is made
    carries them, and they are compared before anything that exists is adopted or deleted. `options` passed the check.
    `daemon` is there in `provision` alone, for a provider that opens no homes, and is another in each attempt; what an
    earlier attempt was given stays good until one daemon has come, so a machine that is adopted needs no change.
    `credential` is there in each call if the pool names one, as it is at that call; the next may bring another.
    """

    machine_id: str
    installation_id: str
    allocation_name: str
    generation: int = 1
    config: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    cpu: int | None = None
    memory_mb: int | None = None
    cwd: str = ""
    credential: Credential | None = None
    daemon: DaemonAccess | None = None


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """What the place made. `host` says where it can be reached when not every replica can: a host id, an endpoint.

    `sandbox_url`: that it can be suspended and woken again, and where; without it a daemon does not go to sleep.
    """

    resource_id: str
    host: str | None = None
    sandbox_url: str | None = None
    details: Mapping[str, str] = {}


class Provider(Protocol):
    """One place, for all pools that name it; `MachineSpec.credential` tells who asks. Every method may be cancelled and
    called again; all raise ProviderUnavailable while the place cannot be asked, and NotAdmitted when it refuses the
    credential. Whoever inherits this needs neither `prepare` nor `wake` nor `close` if there is nothing to do."""

    @property
    def name(self) -> str:
        """What pools call it."""
        ...

    @property
    def provision_timeout_s(self) -> float:
        """How long one `provision` may take before it counts as failed."""
        ...

    async def prepare(self, machine: MachineSpec) -> None:
        """Do what may take long and can be repeated (fetching an image), outside the time for provisioning."""
        return

    async def provision(self, machine: MachineSpec) -> Resource:
        """Make the machine, or return the one that an earlier attempt of this generation made. Never two: what is left
        of earlier generations is removed first. Raises ProvisionFailed."""
        ...

    async def inspect(self, machine: MachineSpec, resource_id: str | None) -> tuple[ResourceState, Resource | None]:
        """Say how it is; without an id it is looked up by its allocation name. One that is not there is no error."""
        ...

    async def delete(self, machine: MachineSpec, resource_id: str | None) -> None:
        """Remove it with all its files. One that is not there is fine; one that belongs to others is left alone."""

    async def wake(self, machine: MachineSpec, resource_id: str) -> None:
        """Let a suspended machine go on. Awake already is fine."""
        return

    async def close(self) -> None:
        """Let go of connections. The machines stay as they are."""
        return


@runtime_checkable
class HomeProvider(Provider, Protocol):
    """A place whose machines have no daemon: the server drives their processes itself, and puts them to sleep."""

    async def sleep(self, machine: MachineSpec, resource_id: str) -> None:
        """Suspend it, so that it costs nothing and keeps its files. Asleep already is fine."""

    async def open_home(self, machine: MachineSpec, resource_id: str) -> Home:
        """Return the processes of a machine, for the one replica that has claimed it. Raises ProviderUnavailable."""
        ...
