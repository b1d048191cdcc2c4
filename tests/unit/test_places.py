"""Which places a process reaches: a provider without homes needs a way back to this server, and is driven by nobody."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from omnara.db.process_ends import Unmade
from omnara.engine.machines.provisioning import Times
from omnara.engine.machines.unmade import about_unmade
from omnara.fleet.reached import Reached
from omnara.ids import new_uuid
from omnara.machines.providers.docker import DockerProvider
from omnara.machines.providers.local import LocalProvider
from omnara.machines.providers.places import PLACES
from omnara.machines.providers.protocol import Credential, DaemonAccess, HomeProvider, MachineSpec, Provider
from omnara.settings import Settings
from tests.support.cloud import DAEMON, Cloud


class Broken:
    """A module with a mistake."""

    name = "broken"

    async def open(self) -> tuple[Provider, str]:
        raise KeyError("endpoint")

    async def close(self) -> None:
        """Nothing is open."""


class Folders:
    """The place whose machines are directories."""

    name = "local"

    async def open(self) -> tuple[Provider, str]:
        return LocalProvider(Path(), host="here", confined="unsafe"), "here"

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://omnara.example.com/", None),
        ("http://127.0.0.1:8080", None),
        ("http://omnara.example.com", "https://"),
        (None, "is not set"),
    ],
)
async def test_daemons_must_find_the_server(url: str | None, problem: str | None, tmp_path: Path) -> None:
    deps: Any = SimpleNamespace(settings=Settings(public_url=url))
    reached = Reached(deps, [Broken(), Cloud(tmp_path, DAEMON), Folders()], uuid4, Times())
    await reached.refresh()
    assert reached.driven() == (("local", "here"),)
    if problem is None:
        assert reached.reach() == (("cloud", ""), ("local", "here"))
        assert reached.public_url() == (url or "").rstrip("/")
    else:
        assert reached.reach() == reached.driven()
        assert problem in reached._problems["cloud"]
    assert "endpoint" in reached._problems["broken"]


def test_both_kinds_of_providers_are_told_apart() -> None:
    assert isinstance(DockerProvider(), HomeProvider)
    assert not isinstance(Cloud(Path(), DAEMON), HomeProvider)
    assert [place.daemons for place in PLACES.values()] == [False, False]


def test_tokens_and_credentials_are_not_shown() -> None:
    access = DaemonAccess("https://omnara.example.com", "omnara_daemon_v1_secret")
    key = Credential("also a secret")
    spec = MachineSpec(machine_id="m", installation_id="i", allocation_name="a", daemon=access, credential=key)
    assert "secret" not in repr(spec) + str(spec) + f"{key}"
    assert access.environment() == {
        "OMNARA_API_URL": "https://omnara.example.com",
        "OMNARA_MACHINE_TOKEN": "omnara_daemon_v1_secret",
    }


def test_what_is_said_of_a_machine_whose_daemon_does_not_come() -> None:
    places = {"cloud": Cloud(Path(), DAEMON).place}
    made = about_unmade(Unmade(new_uuid(), "cloud", "active", "", ""), places)
    assert "its daemon has not connected" in made["error"]
    unmade = about_unmade(Unmade(new_uuid(), "cloud", "provisioning", "", ""), places)
    assert "OMNARA_PUBLIC_URL" in unmade["error"]
