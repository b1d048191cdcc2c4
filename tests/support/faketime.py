"""A process whose wall clock is wrong while its monotonic clock is right, by Debian's libfaketime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


def wrong_clock(seconds: float) -> dict[str, str]:
    """The environment of a process whose wall clock is ahead by so much; tries it first, on both clocks.

    Skips the test where the library is missing, except in CI, which installs it.
    """
    if not LIBRARIES:
        assert not os.environ.get("CI"), "libfaketime is missing: apt-get install faketime"
        pytest.skip("libfaketime is missing (Debian's package faketime)")
    environment = {
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME": f"{seconds:+g}s",
        # Its name before and since release 0.9.10.
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    wall, monotonic = (_clocks(environment)[at] - _clocks({})[at] for at in (0, 1))
    assert abs(wall - seconds) < 10, wall
    assert abs(monotonic) < 10, monotonic
    return environment


def _clocks(environment: dict[str, str]) -> tuple[float, float]:
    code = "import time; print(time.time(), time.monotonic())"
    done = subprocess.run([sys.executable, "-SEc", code], env=environment, capture_output=True, text=True, check=True)
    wall, monotonic = done.stdout.split()
    return float(wall), float(monotonic)
