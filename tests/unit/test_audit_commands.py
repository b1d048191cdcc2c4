"""The audit by commands, run by a real shell in a directory; and what is counted from its ledger."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from omnara.cli.demo.commands import count_commands
from omnara.cli.demo.folder import Folder
from omnara.cli.demo.plan import COMMAND_POINTS, CommandPlan, draw_command
from omnara.client import Event
from omnara.testing import ModelServer, Script
from omnara.testing.audit_commands import ARCHIVE, LEDGER, CommandAudit, ledger_name, name_in
from tests.unit.test_model_server import PATHS, body_for, send
from tests.unit.test_model_server_scripts import Loop

FILES = {
    "a.txt": b"first\nsecond",
    "empty": b"",
    'sub/it\'s a "file" $HOME': b"x\n",
    "sub/bytes": bytes(range(256)) * 4,
    "-n": "größer\n".encode(),
}
TEXT = "[Attachment art_abcdefgh234567: folder, text/plain] Audit it; the notice is at http://127.0.0.1:8/page."


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    root = tmp_path / "folder"
    for path, data in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return Folder(root)


class Machine:
    """The tools of a machine, over a directory. `fates` says what becomes of the next commands instead of success."""

    def __init__(self, directory: Path, folder: Folder) -> None:
        self.directory = directory
        self.folder = folder
        self.fates: list[Callable[[dict[str, Any]], dict[str, Any]]] = []
        self.commands: list[str] = []
        self.outputs: dict[str, str] = {}

    @property
    def tools(self) -> dict[str, Callable[[dict[str, Any]], str]]:
        return {
            "download_file": self.download,
            "run_command": self.run,
            "read_process": self.read,
            "web_fetch": lambda given: f"page at {given['url']}",
            "ask_question": lambda given: "Yes: " + given["questions"][0]["prompt"],
        }

    @property
    def ledger(self) -> list[str]:
        return (self.directory / LEDGER).read_text().splitlines()

    def download(self, given: dict[str, Any]) -> str:
        assert given == {"artifact": "art_abcdefgh234567", "path": ARCHIVE}
        (self.directory / ARCHIVE).write_bytes(self.folder.archive())
        return json.dumps({"path": ARCHIVE, "size": 1})

    def run(self, given: dict[str, Any]) -> str:
        self.commands.append(given["command"])
        if self.fates:
            return json.dumps(self.fates.pop(0)(given))
        return json.dumps(self.really(given))

    def really(self, given: dict[str, Any]) -> dict[str, Any]:
        done = subprocess.run(["/bin/sh", "-c", given["command"]], cwd=self.directory, capture_output=True, check=True)
        return self.result(done.stdout.decode())

    def result(self, output: str, **more: Any) -> dict[str, Any]:
        value = {"process_id": f"prc_{len(self.commands)}", "state": "exited", "output": output, "cursor": 0}
        value |= {"next_cursor": len(output.encode()), "truncated": False, "done": True, "exit_code": 0, "error": ""}
        return value | more

    def in_pieces(self, given: dict[str, Any]) -> dict[str, Any]:
        """It runs on; its output has to be read, from the cursor on."""
        whole = self.really(given)
        self.outputs[whole["process_id"]] = whole["output"]
        return whole | {"state": "running", "output": whole["output"][:3], "next_cursor": 3, "done": False}

    def read(self, given: dict[str, Any]) -> str:
        output, cursor = self.outputs[given["process_id"]], given["cursor"]
        piece = output[cursor : cursor + 40]
        more = cursor + len(piece) < len(output)
        value = self.result(piece, process_id=given["process_id"], cursor=cursor, next_cursor=cursor + len(piece))
        return json.dumps(value | {"truncated": more})

    @staticmethod
    def not_started(_: dict[str, Any]) -> dict[str, Any]:
        return {"error": "It did not begin.", "error_code": "execution_not_started", "retryable": True}


async def audited(script: Script, machine: Machine, path: str = PATHS[0]) -> dict[str, Any]:
    async with ModelServer(script) as server:
        found: dict[str, Any] = json.loads(await Loop(server, path, machine.tools, {}).run(TEXT))
        return found


@pytest.mark.parametrize("path", PATHS)
async def test_a_shell_finds_what_is_on_disk(path: str, folder: Folder, tmp_path: Path) -> None:
    machine = Machine(tmp_path, folder)
    report = await audited(CommandAudit(parallel=2), machine, path)
    expected = folder.report(lines=True)
    assert {key: report[key] for key in expected} == expected
    digests = {entry["path"]: entry["sha256"] for entry in expected["files"]}
    assert digests == {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
    assert {entry["path"]: entry["lines"] for entry in expected["files"]}["a.txt"] == 2
    assert report["page"] == {"ok": True, "text": "page at http://127.0.0.1:8/page"}
    assert report["answer"].startswith("Yes")
    names = ["unpack", "list", *map(ledger_name, range(len(FILES))), "total"]
    assert Counter(machine.ledger) == Counter([f"{word} {name}" for name in names for word in ("begin", "end")])
    assert [name_in(command) for command in machine.commands] == names


async def test_what_runs_on_is_read_to_its_end(folder: Folder, tmp_path: Path) -> None:
    machine = Machine(tmp_path, folder)
    machine.fates = [machine.really, machine.in_pieces, machine.in_pieces, machine.in_pieces]
    report = await audited(CommandAudit(parallel=3), machine)
    assert report["files"] == folder.report(lines=True)["files"]
    assert len(machine.commands) == len(FILES) + 3


async def test_the_slow_command_may_speak_first(folder: Folder, tmp_path: Path) -> None:
    machine = Machine(tmp_path, folder)
    report = await audited(CommandAudit(slow=1, slow_s=0.01), machine)
    assert report["files"] == folder.report(lines=True)["files"]
    assert ["sleep 0.01" in command for command in machine.commands].count(True) == 1
    assert any("echo measuring" in command for command in machine.commands)


async def test_what_did_not_begin_is_run_under_another_name(folder: Folder, tmp_path: Path) -> None:
    machine = Machine(tmp_path, folder)
    machine.fates = [machine.really, machine.really, machine.not_started, machine.not_started]
    report = await audited(CommandAudit(parallel=2), machine)
    assert report["files"] == folder.report(lines=True)["files"]
    assert {"begin file-0.1", "begin file-1.1"} < set(machine.ledger)
    assert "begin file-0" not in machine.ledger


async def test_after_three_attempts_the_script_gives_up(folder: Folder, tmp_path: Path) -> None:
    machine = Machine(tmp_path, folder)
    machine.fates = [machine.not_started] * 3
    async with ModelServer(CommandAudit()) as server:
        with pytest.raises(AssertionError, match="the command unpack did not succeed"):
            await Loop(server, PATHS[0], machine.tools, {}).run(TEXT)
        status, _, raw = await send(server, PATHS[0], body_for(PATHS[0], text="no attachment"))
        assert status == 500
        assert "no attachment is named" in str(raw)


def test_the_archive_is_text_that_a_server_takes(folder: Folder) -> None:
    text = folder.archive()
    assert text.isascii()
    assert base64.decodebytes(text)[:2] == b"\x1f\x8b"
    assert text == folder.archive()


# --- counting ---------------------------------------------------------------------------------------------

PLAN = CommandPlan(1, "command_running", 0, 1.0)


def event(kind: str, *blocks: dict[str, Any], **more: Any) -> Event:
    return Event(
        id="evt_x", sequence=1, kind=kind, turn_id="trn_x", turn_sequence=1, created_at=datetime.now(UTC),
        content_blocks=list(blocks), **more,
    )  # fmt: skip


def asked(*names: str) -> Event:
    calls = [
        {
            "type": "tool_call",
            "tool_call_id": f"tcl_{name}",
            "name": "run_command",
            "input": {"command": f"echo begin {name} >>{LEDGER}\ntrue"},
        }
        for name in names
    ]
    return event("model_output", *calls)


def told(name: str, **value: Any) -> Event:
    return event("tool_result", {"type": "structured_data", "value": value}, tool_call_id=f"tcl_{name}")


def lines(*names: str) -> list[str]:
    return [f"{word} {name}" for name in names for word in ("begin", "end")]


def test_every_command_once_is_right() -> None:
    found = count_commands(PLAN, [asked("file-0", "b")], lines("file-0", "b"), "local")
    assert (found.asked, found.repeated, found.lost, found.not_started, found.unknown) == (2, 0, 0, 0, 0)
    assert list(found.problems()) == []


@pytest.mark.parametrize(
    ("ledger", "repeated", "lost"),
    [
        ([*lines("file-0", "b"), "begin b"], 1, 0),
        ([*lines("file-0", "b"), *lines("b")], 2, 0),
        ([*lines("file-0"), "begin b"], 0, 1),
        (lines("file-0"), 0, 1),
        ([*lines("file-0", "b"), "begin stranger"], 1, 0),
        ([], 0, 2),
    ],
)
def test_what_ran_again_or_was_lost_is_counted(ledger: list[str], repeated: int, lost: int) -> None:
    found = count_commands(PLAN, [asked("file-0", "b")], ledger, "local")
    assert (found.repeated, found.lost) == (repeated, lost)
    assert len(list(found.problems())) == bool(repeated) + bool(lost)


def test_what_was_told_not_to_have_begun_must_not_have_begun() -> None:
    events = [asked("file-0"), told("file-0", error_code="execution_not_started"), asked("file-0.1")]
    right = count_commands(PLAN, events, lines("file-0.1"), "docker")
    assert (right.lost, right.repeated, right.not_started) == (0, 0, 1)
    wrong = count_commands(PLAN, events, [*lines("file-0.1"), "begin file-0"], "docker")
    assert wrong.lost == 1


def test_unknown_outcomes_and_leftovers_are_problems() -> None:
    events = [asked("file-0"), told("file-0", process_id="prc_1", state="unknown", error="process_state_unknown")]
    found = count_commands(PLAN, events, lines("file-0"), "docker").but_left(["container abc"])
    assert found.unknown == 1
    assert [text[:12] for text in found.problems()] == ["of 1 command", "the machine "]


def test_the_blow_must_have_met_a_command() -> None:
    plan = CommandPlan(1, "command_running", 7, 1.0)
    assert count_commands(plan, [asked("file-0")], lines("file-0"), "local").lost == 1


def test_a_seed_always_draws_the_same_command_and_all_points_are_drawn() -> None:
    plans = [draw_command(seed, 38) for seed in range(300)]
    assert plans == [draw_command(seed, 38) for seed in range(300)]
    assert {plan.point for plan in plans} == set(COMMAND_POINTS)
    assert {plan.file for plan in plans} == set(range(38))
    assert len({plan.description for plan in plans}) > 100
