"""The table of failures names tests that exist, and leaves out no row of the specification of machines."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "README.md").read_text()
ROWS = 25


def test_every_row_has_a_test_and_every_test_is_there() -> None:
    lines = [line for line in TABLE.splitlines() if line.startswith("|")]
    numbers = [int(line.split("|")[1]) for line in lines if line.split("|")[1].strip().isdigit()]
    assert numbers == list(range(1, ROWS + 1))
    for line in lines:
        if not line.startswith(("|---", "| # ", "| What happens")):
            assert "::" in line, line
    named = re.findall(r"`([a-z_/0-9]+\.py)::(\w+)`", TABLE)
    assert len(named) > 3 * ROWS
    gone = [
        (file, test)
        for file, test in named
        if not re.search(rf"^(async )?def {test}\(", (HERE.parent / file).read_text(), re.MULTILINE)
    ]
    assert not gone
