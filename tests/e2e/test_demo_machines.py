"""The demo's audit by commands as a process, on local machines; the containers are in tests/docker."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from omnara.cli.demo.command import command
from omnara.cli.demo.folder import Folder
from omnara.cli.demo.plan import COMMAND_POINTS, draw_command
from omnara.cli.demo.workplace import workplace
from omnara.errors import ConfigurationError
from omnara.machines.providers.local import Unconfined, confinement
from omnara.settings import load
from tests.e2e.test_demo import _processes_naming, environment, small_folder
from tests.support.waiting import until

__all__ = ["small_folder"]


def seed_of(point: str, files: int = 5) -> int:
    """The first seed whose server dies there."""
    return next(seed for seed in range(1000) if draw_command(seed, files).point == point)


async def audited(machine: str, *options: str, scratch: Path) -> dict[str, object]:
    """Run the demo to its verdict, which must be good, and see that its directory is empty afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omnara", "demo", "--machine", machine, "--json", *options,
        env=environment() | {"TMPDIR": str(scratch)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 170)
    assert process.returncode == 0, (out.decode(), err.decode())
    assert list(scratch.iterdir()) == []
    verdict: dict[str, object] = json.loads(out)
    return verdict


async def nothing() -> None:
    """Look at nothing."""


async def interrupted(
    machine: str, *options: str, scratch: Path, meanwhile: Callable[[], Awaitable[None]] = nothing
) -> None:
    """Stop the demo while a command runs, and wait until none of its processes is left. `meanwhile`: before that."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-m", "omnara", "demo", "--machine", machine, "--seed", str(seed_of("command_outlives")),
        *options,
        env=environment() | {"TMPDIR": str(scratch)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    async for line in process.stdout:
        if b"kill -9" in line:  # the server is dead, and the command runs on
            break
    await meanwhile()
    process.send_signal(signal.SIGTERM)
    await process.stdout.read()
    assert await asyncio.wait_for(process.wait(), 90) == 130
    await until(lambda: not _processes_naming(str(scratch)), "nothing of it runs any more")
    assert list(scratch.iterdir()) == []


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    made = tmp_path / "scratch"
    made.mkdir(mode=0o755)
    return made


@pytest.fixture
def confined() -> None:
    try:
        confinement()
    except Unconfined as error:
        pytest.skip(str(error))


def check(verdict: dict[str, object], machine: str, point: str) -> None:
    """What every run has to show."""
    assert (verdict["ok"], verdict["point"], verdict["problems"]) == (True, point, [])
    assert verdict["report_matches_disk"] is True
    found = verdict["commands"]
    assert isinstance(found, dict)
    assert (found["machine"], found["repeated"], found["lost"], found["left"]) == (machine, 0, 0, [])
    assert found["asked"] == 8 + found["not_started"]


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("confined")
async def test_commands_outlive_the_server(small_folder: Path, scratch: Path) -> None:
    seed = seed_of("command_outlives")
    verdict = await audited("local", "--seed", str(seed), "--folder", str(small_folder), scratch=scratch)
    check(verdict, "local", "command_outlives")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("confined")
async def test_the_other_points_and_the_shipped_documents(small_folder: Path, scratch: Path) -> None:
    seed = seed_of("command_handed_over")
    verdict = await audited("local", "--seed", str(seed), "--folder", str(small_folder), scratch=scratch)
    check(verdict, "local", "command_handed_over")
    verdict = await audited("local", "--seed", str(seed_of("command_running", 38)), scratch=scratch)
    assert (verdict["ok"], verdict["files"], verdict["point"]) == (True, 38, "command_running")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("confined")
async def test_an_interrupted_demo_leaves_no_command(small_folder: Path, scratch: Path) -> None:
    await interrupted("local", "--folder", str(small_folder), scratch=scratch)


# --- parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--image", "x"], "--image is for --machine docker"),
        (["--machine", "local", "--model", "anthropic/x"], "leave --model out"),
        (["--machine", "cloud"], "'cloud' is not one of"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], said: str) -> None:
    done = CliRunner().invoke(command, options)
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.parametrize(
    ("machine", "image", "settings", "said"),
    [
        ("docker", None, {"OMNARA_DOCKER_HOST": "off"}, "OMNARA_DOCKER_HOST is `off`"),
        ("docker", None, {"OMNARA_DOCKER_HOST": "unix:///nowhere.sock"}, "use --machine local"),
        ("docker", "no such image", {"OMNARA_DOCKER_HOST": "unix:///nowhere.sock"}, "cannot be the name of an image"),
        ("local", None, {"OMNARA_LOCAL_MACHINES": "off"}, "OMNARA_LOCAL_MACHINES is `off`"),
    ],
)
async def test_a_place_that_cannot_serve_says_so_first(
    machine: str, image: str | None, settings: dict[str, str], said: str
) -> None:
    place = workplace("docker" if machine == "docker" else "local", load(settings), image)
    try:
        with pytest.raises(ConfigurationError, match=said):
            await place.check()
    finally:
        await place.close()


async def test_without_confinement_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(*, unsafe: bool) -> None:
        raise Unconfined("local machines are off: … set OMNARA_LOCAL_MACHINES=unsafe")

    monkeypatch.setattr("omnara.cli.demo.workplace_local.confinement", none_here)
    with pytest.raises(ConfigurationError, match="OMNARA_LOCAL_MACHINES=unsafe"):
        await workplace("local", load({}), None).check()
    with pytest.raises(ConfigurationError, match="--image is for --machine docker"):
        workplace("local", load({}), "image")


def test_lines_are_counted_as_programs_count_them(small_folder: Path) -> None:
    (small_folder / "open").write_text("one\ntwo")
    lines = {entry["path"]: entry["lines"] for entry in Folder(small_folder).report(lines=True)["files"]}
    assert (lines["open"], lines["empty"], lines["a.txt"]) == (2, 0, 1)


def test_all_points_have_a_seed() -> None:
    assert len({seed_of(point) for point in COMMAND_POINTS}) == len(COMMAND_POINTS)
