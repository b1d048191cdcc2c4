"""What is said about a machine that nobody makes: what is missing, and where to set it right."""

from __future__ import annotations

import pytest

from omnara.db.process_ends import Unmade
from omnara.engine.machines.unmade import about_unmade
from omnara.ids import new_uuid


@pytest.mark.parametrize(
    ("provider", "state", "code", "message", "said"),
    [
        ("docker", "provisioning", "", "", ("no server is making it", "OMNARA_DOCKER_HOST")),
        ("local", "provisioning", "", "", ("no server is making it", "OMNARA_LOCAL_MACHINES")),
        ("elsewhere", "provisioning", "", "", ("the provider elsewhere",)),
        ("docker", "provisioning", "provider_unavailable", "not ready.", ("now: not ready. ", "OMNARA_DOCKER_HOST")),
        ("docker", "provision_failed", "provision_failed", "no room", ("not there: no room. ", "made again")),
        ("docker", "provisioning", "container_lost", "its container ended", ("not there: its container ended. ",)),
        ("docker", "active", "", "", ("was made, but no server reaches it",)),
    ],
)
def test_what_is_missing(provider: str, state: str, code: str, message: str, said: tuple[str, ...]) -> None:
    about = about_unmade(Unmade(new_uuid(), provider, state, code, message))
    assert about["machine_state"] == state
    assert all(part in about["error"] for part in said), about["error"]
    assert "try again" in about["error"].lower()
