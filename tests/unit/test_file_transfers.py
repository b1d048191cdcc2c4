"""How a file's way to a machine ends when the machine's side gives up before it has everything."""

from __future__ import annotations

from typing import Any

import pytest

from omnara.engine.machines import files
from omnara.engine.machines.transfer import Ended, TransferFailed
from omnara.tools.protocol import failed

NOT_WRITTEN = Ended("failed", 73, "nonzero_exit", "")


class Broken:
    """A transfer whose writes fail; its process ends when somebody waits for that."""

    def __init__(self, code: str, end: Ended | None) -> None:
        self._code = code
        self._end = end

    async def write(self, pieces: list[str]) -> None:
        raise TransferFailed(failed("It takes no more.", self._code))

    async def ended(self) -> Ended | None:
        return None

    async def finish(self) -> Ended:
        assert self._end is not None, "nobody waits for what will not end"
        return self._end


@pytest.mark.parametrize("code", ["process_terminal", "stdin_closed", "stdin_write_unknown"])
async def test_the_reason_of_the_end_is_told_and_not_what_the_write_met(code: str) -> None:
    transfer: Any = Broken(code, NOT_WRITTEN)
    with pytest.raises(TransferFailed, match="file_not_written"):
        await files._write_file(transfer, ["x"])


async def test_a_write_that_failed_for_another_reason_is_not_waited_for() -> None:
    transfer: Any = Broken("machine_unreachable", None)
    with pytest.raises(TransferFailed, match="machine_unreachable"):
        await files._write_file(transfer, ["x"])
