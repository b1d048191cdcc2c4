"""The directory of a home, seen while somebody else is at work in it."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from selectors import DefaultSelector
from typing import Any

import pytest

from omnara.machines.posix import store as store_module
from omnara.machines.posix.keeper import files
from omnara.machines.posix.keeper.desk import Desk
from omnara.machines.posix.keeper.talk import CONTROL
from omnara.machines.posix.store import Store
from omnara.machines.processes import ExitRecord

LAUNCH: dict[str, Any] = {"limits": {"piece_bytes": 1024}}
ENDED = ExitRecord(state="exited", exit_code=0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "home")
    found.create("prc_1", LAUNCH)
    return found


def lock_in(directory: Path) -> int | None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return files.try_lock(fd)
    finally:
        os.close(fd)


def test_a_keeper_that_is_told_to_begin_while_its_process_is_removed_does_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks: list[int | None] = []

    def removing(path: Path, **options: Any) -> None:
        locks.append(lock_in(path))
        shutil.rmtree(path, **options)

    monkeypatch.setattr(store_module, "shutil", type("Removing", (), {"rmtree": staticmethod(removing)}))
    store.remove("prc_1")
    assert locks == [None]
    assert store.record("prc_1") is None


def test_what_is_over_is_removed_though_its_keeper_still_waits_for_the_disk(store: Store) -> None:
    keeper = lock_in(store.path("prc_1"))
    assert keeper is not None
    try:
        with pytest.raises(ValueError, match="still running"):
            store.remove("prc_1")
        with store.opened("prc_1") as fd:
            assert fd is not None
            files.write_exit(fd, {"state": "exited"})
        store.remove("prc_1")
    finally:
        os.close(keeper)
    assert store.records() == []


def test_an_end_that_was_lost_with_the_power_is_found_when_it_is_written_again(store: Store) -> None:
    with store.opened("prc_1") as fd:
        assert fd is not None
        files.take_bit(fd, {"started_at": "2026-01-01T00:00:00Z"})
    store.acknowledge("prc_1", "exit")
    [record] = store.records()
    assert (record.exit_acknowledged, record.exit) == (True, None)
    assert store.finish("prc_1", ENDED)
    [record] = store.records()
    assert record.exit is not None
    assert record.exit.state == "exited"


def test_whoever_comes_as_a_keeper_goes_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as late:
        desk = Desk(selector, lambda *_: None)
        desk.open()
        late.settimeout(5)
        late.connect(CONTROL)
        desk.leave()
        desk.close()
        with pytest.raises(ConnectionResetError):
            late.recv(1)
