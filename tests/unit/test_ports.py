"""Ports for servers: nobody who asks is given what somebody else was given a moment ago."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omnara.testing import ports


def test_what_was_given_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ports.free_ports()
    assert len(set(given)) == 2
    monkeypatch.setattr(ports, "_PORTS", given)
    monkeypatch.setattr(ports.random, "sample", lambda found, _: list(found))
    with pytest.raises(OSError, match="free"):
        ports.free_ports()
    asked = f"from omnara.testing import ports; print([ports._mark(port) for port in {given}])"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True).stdout == b"[False, False]\n"


def test_a_process_holds_no_more_than_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_REMEMBERED", len(ports._marks) + 2)
    for _ in range(4):
        ports.free_ports()
    assert len(ports._marks) == ports._REMEMBERED
