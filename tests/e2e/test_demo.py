"""The demo as a process, once for each point at which the server can die, and its pure parts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from omnara.cli.demo.folder import MAX_FILE_BYTES, Folder, shipped_documents
from omnara.cli.demo.plan import POINTS, draw, model_turns
from omnara.db.embedded.datadir import place_elsewhere
from omnara.engine.artifacts_overflow import MAX_RESULT_BYTES
from omnara.errors import ConfigurationError
from omnara.settings import child_environment
from omnara.testing.audit import file_bytes
from tests.support.waiting import until

SEEDS = {"mid_stream": 1, "tool_started": 7, "during_save": 5}


def environment() -> dict[str, str]:
    """The tests' choice of Postgres programs reaches the demo's server too."""
    chosen = os.environ.get("OMNARA_TEST_PG_BIN")
    return child_environment({"OMNARA_POSTGRES_BIN": chosen} if chosen else {})


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("first\n")
    (folder / "sub" / "b.txt").write_text("zweite: größer\n")
    (folder / "sub" / "binary").write_bytes(bytes(range(256)))
    (folder / "empty").write_bytes(b"")
    (folder / "last.md").write_text("# last\n")
    return folder


@pytest.mark.parametrize("point", POINTS)
async def test_the_demo_passes_wherever_the_server_dies(point: str, small_folder: Path) -> None:
    seed = next(seed for seed in range(SEEDS[point], 1000) if draw(seed, 5).point == point)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omnara", "demo", "--seed", str(seed), "--folder", str(small_folder), "--json",
        env=environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 110)
    assert process.returncode == 0, (out.decode(), err.decode())
    verdict = json.loads(out)
    assert verdict["ok"] is True
    assert (verdict["point"], verdict["seed"]) == (point, seed)
    assert (verdict["steps_repeated"], verdict["steps_lost"]) == (0, 0)
    assert verdict["page_hits"] == 1 or (verdict["page_hits"] == 0 and verdict["page_interrupted"])
    assert verdict["report_matches_disk"] is True
    assert verdict["page_interrupted"] is (point == "tool_started")
    assert (verdict["files"], verdict["log_gaps"], verdict["duplicate_results"]) == (5, 0, 0)


async def test_an_interrupted_demo_leaves_nothing_running(small_folder: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o755)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-m", "omnara", "demo", "--seed", "3", "--folder", str(small_folder),
        env=environment() | {"TMPDIR": str(scratch)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    async for line in process.stdout:
        if b"server ready" in line:
            break
    elsewhere = {place_elsewhere(Path(place).resolve()) for place, _, _ in os.walk(scratch)}
    process.send_signal(signal.SIGTERM)
    await process.stdout.read()
    assert await asyncio.wait_for(process.wait(), 60) == 130
    await until(lambda: not _processes_naming(str(scratch)), "server and database are gone")
    assert list(scratch.iterdir()) == []
    assert [place for place in elsewhere if place.exists()] == []


def _processes_naming(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            named = text.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if named and entry.name != str(os.getpid()):
            found.append(int(entry.name))
    return found


# --- parts ------------------------------------------------------------------------------------------------


def test_the_shipped_documents_are_many_real_and_all_different() -> None:
    folder = Folder(shipped_documents())
    report = folder.report()
    assert report["count"] >= 30
    assert len({entry["sha256"] for entry in report["files"]}) == report["count"]
    sizes = [entry["size"] for entry in report["files"]]
    assert min(sizes) == 0
    assert max(sizes) > 30_000
    assert folder.left_out == 0
    assert any("/" in path for path in folder.paths)
    assert any(not (shipped_documents() / path).read_bytes().isascii() for path in folder.paths)


def test_a_seed_always_draws_the_same_and_all_points_are_drawn() -> None:
    plans = [draw(seed, 38) for seed in range(200)]
    assert plans == [draw(seed, 38) for seed in range(200)]
    assert {plan.point for plan in plans} == set(POINTS)
    assert {plan.turn for plan in plans} == set(range(model_turns(38)))


def test_a_file_survives_the_way_through_a_tool_result(small_folder: Path) -> None:
    folder = Folder(small_folder)
    for path in folder.paths:
        text, failed = folder.answer("get_file", {"path": path})
        assert not failed
        assert file_bytes(text) == (small_folder / path).read_bytes()


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "missing", "", "sub"])
def test_the_folder_gives_nothing_from_outside(small_folder: Path, path: str) -> None:
    text, failed = Folder(small_folder).answer("get_file", {"path": path})
    assert failed
    assert "Error" in text


def test_the_report_is_recomputed_from_disk(small_folder: Path) -> None:
    folder = Folder(small_folder)
    before = folder.report()
    (small_folder / "a.txt").write_text("changed\n")
    changed = {entry["path"]: entry for entry in folder.report()["files"]}["a.txt"]
    assert changed == {"path": "a.txt", "size": 8, "sha256": hashlib.sha256(b"changed\n").hexdigest()}
    assert before != folder.report()


def test_a_folder_without_a_file_for_the_demo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no file"):
        Folder(tmp_path)
    (tmp_path / "huge").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigurationError, match="no readable file of at most"):
        Folder(tmp_path)


def test_what_a_model_could_not_see_whole_is_left_out(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}").write_bytes(b"\x01" * MAX_FILE_BYTES)
    (tmp_path / "0").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    (tmp_path / "99-small").write_bytes(b"y")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "a").write_bytes(b"z")
    folder = Folder(tmp_path)
    assert folder.paths == ["1", "2", "3", "4", "5", "6", "99-small"]
    assert folder.left_out == 5
    longest = max(len(folder.answer("get_file", {"path": path})[0]) for path in folder.paths)
    assert MAX_FILE_BYTES < longest < MAX_RESULT_BYTES


async def test_the_demo_passes_on_the_documents_that_it_ships() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omnara", "demo", "--seed", "2", "--json",
        env=environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 110)
    assert process.returncode == 0, (out.decode(), err.decode())
    assert json.loads(out)["files"] == Folder(shipped_documents()).report()["count"]
