"""What is said of a key ring that cannot be used, or that too many can read."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from omnara.app.keyring import RING_FILE, load_ring
from omnara.errors import ConfigurationError
from omnara.settings import load
from omnara.vault import generate_ring


@pytest.mark.parametrize(("content", "says"), [(b"k1", "entry 1"), (b"k1:YWJj", "entry 1"), ("k1:ü".encode(), "ASCII")])
def test_a_broken_ring_names_its_file(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / RING_FILE
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=rf"{path}.*{says}"):
        load_ring(load({"OMNARA_DATA_DIR": str(tmp_path)}), embedded=True)


@pytest.mark.parametrize(("ring", "active", "says"), [("k1:YWJj", "k1", "entry 1"), ("", "k2", "active")])
def test_a_broken_ring_names_its_variables(ring: str, active: str, says: str) -> None:
    values = {
        "OMNARA_SECRET_ENCRYPTION_KEYS": ring or generate_ring("k1").serialise(),
        "OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY": active,
    }
    for embedded in (True, False):
        with pytest.raises(ConfigurationError, match=f"OMNARA_SECRET_ENCRYPTION_KEYS.*{says}"):
            load_ring(load(values), embedded=embedded)


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o400, 0), (0o640, 1), (0o604, 1)])
def test_a_ring_that_others_may_read_is_pointed_out(tmp_path: Path, mode: int, warnings: int) -> None:
    settings = load({"OMNARA_DATA_DIR": str(tmp_path)})
    load_ring(settings, embedded=True)
    (tmp_path / RING_FILE).chmod(mode)
    with structlog.testing.capture_logs() as logged:
        load_ring(settings, embedded=True)
    assert [line["log_level"] for line in logged] == ["warning"] * warnings
