"""Providers know secrets, and what they say is logged, stored and shown: the secrets are not in it."""

from __future__ import annotations

import traceback

import pytest

from omnara.fleet.confidence import ProviderMistake, confidential
from omnara.machines.providers.protocol import (
    Credential,
    DaemonAccess,
    InvalidOptions,
    MachineSpec,
    NotAdmitted,
    ProviderUnavailable,
    ProvisionFailed,
    Resource,
)

KEY, TOKEN = "key-of/the cloud", "omnara_daemon_v1_secret"
PLAIN = MachineSpec(machine_id="m", installation_id="i", allocation_name="a")
SPEC = MachineSpec(
    machine_id="m",
    installation_id="i",
    allocation_name="a",
    credential=Credential(KEY),
    daemon=DaemonAccess("https://omnara.example.com", TOKEN),
)


def raised(error: Exception, spec: MachineSpec = SPEC, cause: Exception | None = None) -> tuple[Exception, str]:
    """What comes of a call that raises this, and all that a log would tell of it."""
    with pytest.raises(Exception) as caught, confidential(spec):
        raise error from cause
    return caught.value, "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("kind", [InvalidOptions, NotAdmitted, ProviderUnavailable, ProvisionFailed])
def test_what_providers_may_raise_keeps_its_kind(kind: type[Exception]) -> None:
    error, told = raised(kind(f"401 for {KEY} and {TOKEN}"), cause=OSError("GET /?key=key-of%2Fthe%20cloud"))
    assert type(error) is kind
    assert str(error) == "401 for [redacted] and [redacted]"
    assert not any(part in told for part in (KEY, TOKEN, "key-of"))


def test_what_a_provider_made_before_it_failed_is_still_told() -> None:
    made = Resource(resource_id="box")
    error, _ = raised(ProvisionFailed(f"no disk for {KEY}", resource=made))
    assert isinstance(error, ProvisionFailed)
    assert error.resource is made


def test_a_mistake_is_told_without_what_it_quotes() -> None:
    error, told = raised(ValueError(f"bad header: {KEY}"))
    assert (type(error), str(error)) == (ProviderMistake, "ValueError: bad header: [redacted]")
    hidden, told_of_cause = raised(KeyError("id"), cause=OSError(f"Authorization: Bearer {KEY}"))
    assert (type(hidden), str(hidden)) == (ProviderMistake, "KeyError: 'id'")
    assert KEY not in told + told_of_cause


def test_what_tells_no_secret_passes_as_it_is() -> None:
    mistake, cause = KeyError("id"), OSError("reset")
    found, told = raised(mistake, cause=cause)
    assert found is mistake
    assert "reset" in told
    unavailable = ProviderUnavailable("away")
    assert raised(unavailable, PLAIN, cause)[0].__cause__ is cause
