"""The settings of machines: a part of the table, whose other part is `setting_table`.

Source: DESIGN §3; machines.md §3, §4, with the shorter times that keep a pulled cable below 45 s.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from omnara.setting_types import Spec

__all__ = ["MachineSettings"]


class MachineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What can be set about machines; all of it is part of `Settings`."""

    machine_heartbeat_s: Annotated[
        float, Spec("OMNARA_MACHINE_HEARTBEAT", "Time between two heartbeats of a daemon", 0.05, 20)
    ] = 10.0
    machine_lease_s: Annotated[
        float, Spec("OMNARA_MACHINE_LEASE", "A machine that was not heard of for so long is offline", 0.1, 600)
    ] = 12.0
    machine_grace_s: Annotated[
        float,
        Spec("OMNARA_MACHINE_GRACE", "How long the tools of an agent wait for a machine that is offline", 0, 3600),
    ] = 30.0
    machine_accept_limit_s: Annotated[
        float,
        Spec(
            "OMNARA_MACHINE_ACCEPT_LIMIT",
            "A command that no machine takes, or of which it then says nothing, for so long fails",
            0.1,
            86_400,
        ),
    ] = 300.0
    machine_silence_s: Annotated[
        float, Spec("OMNARA_MACHINE_SILENCE", "A daemon's socket without a message for so long is closed", 0.2, 600)
    ] = 70.0
    machine_sweep_s: Annotated[
        float, Spec("OMNARA_MACHINE_SWEEP", "Time between two looks for machines that ran out of time", 0.02, 60)
    ] = 1.0
    machine_drain_s: Annotated[
        float, Spec("OMNARA_MACHINE_DRAIN", "Time between two looks for commands that no hint announced", 0.05, 60)
    ] = 2.0
    local_machines: Annotated[
        Literal["auto", "unsafe", "off"],
        Spec(
            "OMNARA_LOCAL_MACHINES",
            "Machines of the provider `local`; `auto`: where commands can be confined, `unsafe`: everywhere",
        ),
    ] = "auto"
    docker_host: Annotated[
        str | None,
        Spec(
            "OMNARA_DOCKER_HOST",
            "Engine of the provider `docker`, as `unix:///run/docker.sock` or `tcp://…` (with `DOCKER_TLS_VERIFY=1` "
            "and `DOCKER_CERT_PATH`), or `off`; default: where `docker` finds one",
        ),
    ] = None
    sandbox: Annotated[
        Literal["docker", "local", "off"],
        Spec("OMNARA_SANDBOX", "Provider of the machine that an agent without machines gets at its first command"),
    ] = "docker"
    public_url: Annotated[
        str | None,
        Spec(
            "OMNARA_PUBLIC_URL",
            "How others reach this server, `https://omnara.example.com`: for the installer of the daemon (default: as "
            "the request for it did), and for machines of pools that run a daemon themselves",
        ),
    ] = None
