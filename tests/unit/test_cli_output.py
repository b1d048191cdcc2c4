"""What commands print of others' text: readable, and nothing that a terminal would obey."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from omnara.cli.agents import describe
from omnara.cli.demo.show import Show
from omnara.cli.output import print_json, print_line, print_table
from omnara.client import Event
from omnara.visible import visible

CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
FORGED = "harmless\nagt_forged\tidle"
HOSTILE = [CLIPBOARD, "\x9b2J", "a\rb", "\x7f", "\x00", "x\u202ey", "\u2028", "\ud800", FORGED]


def obeyed(text: str) -> bool:
    """Whether anything but printable characters and the line breaks between rows is left."""
    return any(not character.isprintable() for character in text.replace("\n", "").replace("\t", ""))


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_is_left_to_obey(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    assert shown == visible(shown)
    assert not obeyed(visible(text, lines=True))


@pytest.mark.parametrize(
    "hidden", ["\u200b", "\u200d", "\u200c", "\u2060", "\ufeff", "\xad", "\u034f", "\u3164", "\ufe0f", "\U000e0041"]
)
def test_names_that_look_the_same_and_are_not_are_told_apart(hidden: str) -> None:
    for name in (f"pay{hidden}pal", f"{hidden}paypal", f"paypal{hidden}", f"пей{hidden}пал"):
        shown = visible(name)
        assert hidden not in shown
        assert f"{ord(hidden):x}" in shown.lower()


def test_what_is_harmless_stays() -> None:
    for text in ("Grüße, 世界 👩\u200d💻", "a [bold]b[/] \\x1b", "❤\ufe0f", "می\u200cخواهم", "क्\u200dष"):
        assert visible(text) == text
    assert visible("a\n\tb", lines=True) == "a\n\tb"
    assert visible("a\u200bb", lines=True) == "a\u200bb", "a text is no name"
    assert visible("a\n\tb") == "a\\n\\tb"


def test_a_piped_table_has_one_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": "1", "name": name, "text": "wide " * 60} for name in HOSTILE]
    print_table(("id", "name", "text"), rows, empty="none")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "id\tname\ttext"
    assert [line.split("\t") for line in lines[1:]] == [["1", visible(name), "wide " * 60] for name in HOSTILE]


def test_a_drawn_table_takes_no_markup_and_no_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")
    print_table(("id", "name"), [{"id": "1", "name": f"[red]x[/] [/nope] {CLIPBOARD}"}], empty="none")
    shown = capsys.readouterr().out
    assert "[red]x[/] [/nope] \\x1b]52;c;ZXZpbA==\\x07" in shown
    assert "\x07" not in shown


def test_json_keeps_the_value_and_loses_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text for text in HOSTILE if text != "\ud800"]  # half a character cannot come out of JSON
    print_json({"names": texts})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"names": texts}
    assert not obeyed(shown)


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(f"output: a\nb{CLIPBOARD}", lines=True)
    print_line("name: a\nstatus: idle", err=True)
    shown = capsys.readouterr()
    assert shown.out == "output: a\nb\\x1b]52;c;ZXZpbA==\\x07\n"
    assert shown.err == "name: a\\nstatus: idle\n"


def event(**fields: Any) -> Event:
    base = {"id": "evt_1", "sequence": 3, "event_kind": "model_output", "turn_id": "trn_1", "turn_sequence": 1}
    return msgspec.convert({**base, "created_at": datetime.now(UTC), **fields}, Event)


def test_the_demo_shows_events_without_obeying_them(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [
        {"type": "text", "text": f"[red]said[/] {CLIPBOARD}"},
        {"type": "tool_call", "tool_call_id": "tlc_1", "name": "\x1b[8m[/]", "input": {}},
    ]
    hostile = event(content_blocks=blocks)
    assert "[red]said[/]" in describe(hostile)
    Show(silent=False).event(hostile)
    Show(silent=False).say("a\nb [/]", "bold")
    shown = capsys.readouterr().out
    assert "[red]said[/] \\x1b]52;c;ZXZpbA==\\x07" in shown
    assert "\\x1b[8m[/]" in shown
    assert "a\\nb [/]" in shown
    assert not obeyed(shown)
