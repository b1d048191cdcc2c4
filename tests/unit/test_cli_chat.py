"""The pure parts of the chat: Markdown cut in time, drafts that break off, forms, the log as parts, the live lines."""

from __future__ import annotations

import base64
import io
import random
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, Group

from omnara.cli.chat.attach import Attachment, CannotAttach, read_attachment
from omnara.cli.chat.blocks import whole_blocks
from omnara.cli.chat.commands import HELP, command_of
from omnara.cli.chat.desk import Desk
from omnara.cli.chat.draft import Draft, Piece, Restart
from omnara.cli.chat.forms import Answer, Option, Problem, Question, parse_answer
from omnara.cli.chat.live import Bar, live_view
from omnara.cli.chat.outbox import Message
from omnara.cli.chat.pick import matching
from omnara.cli.chat.piped import TurnFailed, _Turn
from omnara.cli.chat.screen import rendered, tail
from omnara.cli.chat.transcript import markdown
from omnara.cli.chat.view import View
from omnara.client import Agent, Delta, Event, Interaction, Links, file_block, turn_is_over
from omnara.client.files import MAX_FILE_BYTES

# --- Markdown that grows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("One.", ""),
        ("One.\n\n", ""),
        ("One.\n\nT", "One.\n\n"),
        ("- a\n\n  more of a\n- b", ""),
        ("- a\n- b\n\nText", "- a\n- b\n\n"),
        ("```py\na\n\nb", ""),
        ("```py\na\n\nb\n```\n", "```py\na\n\nb\n```\n"),
        ("````\n```\n\nx", ""),
        ("~~~\na\n```\n~~~\n\nx", "~~~\na\n```\n~~~\n\n"),
        ("Look:\n\n```", "Look:\n\n"),
        ("", ""),
        ("\n\n\n", ""),
    ],
)  # fmt: skip
def test_a_text_is_cut_after_whole_blocks_only(text: str, whole: str) -> None:
    assert text[: whole_blocks(text)] == whole


MARKDOWN = st.lists(
    st.sampled_from(["a", "b c", "- x", "  y", "```", "```py", "~~~", "", "", "\n", "# h", "1. z", "    code"])
).map("\n".join)


@given(MARKDOWN, st.integers(0, 2**31))
def test_cutting_does_not_depend_on_how_the_text_arrives(text: str, seed: int) -> None:
    rng = random.Random(seed)
    at, whole = 0, 0
    while at < len(text):
        at = min(len(text), at + rng.randint(1, 9))
        grown = whole_blocks(text[:at], whole)
        assert whole <= grown <= at
        whole = grown
    assert whole == whole_blocks(text)


# --- drafts -----------------------------------------------------------------------------------------------


def delta(seq: int, text: str, *, call: str = "mcc_1", block: int = 0) -> Delta:
    return Delta("trn_1", call, seq, {"kind": "text_delta", "block_index": block, "delta": text})


def start(seq: int, kind: str, *, call: str = "mcc_1", **fields: Any) -> Delta:
    return Delta("trn_1", call, seq, {"kind": "block_start", "block_index": 0, "block": {"kind": kind, **fields}})


def event(sequence: int = 2, kind: str = "model_output", **fields: Any) -> Event:
    given = {
        "id": "evt_1", "sequence": sequence, "event_kind": kind, "turn_id": "trn_1", "turn_sequence": 1,
        "created_at": "2026-01-01T00:00:00Z", **fields,
    }  # fmt: skip
    return msgspec.convert(given, Event)


def output(*texts: str, stop: str = "end_turn", calls: tuple[str, ...] = (), turn: str = "trn_1") -> Event:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    blocks += [{"type": "tool_call", "tool_call_id": f"tcl_{name}", "name": name, "input": {"a": 1}} for name in calls]
    return event(content_blocks=blocks, stop_reason=stop, turn_id=turn)


def said(pieces: list[Piece | Restart]) -> str:
    return "".join("<RESTART>" if isinstance(piece, Restart) else piece.source for piece in pieces)


def feed(draft: Draft, text: str, *, call: str = "mcc_1", size: int = 5) -> str:
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join(said(draft.delta(delta(seq, part, call=call))) for seq, part in enumerate(parts, 1))


TEXT = "One is one.\n\nTwo is two.\n\n```\nthree\n\nfour\n```\n\nEnd."


def test_blocks_are_printed_when_they_are_whole_and_the_rest_at_the_end() -> None:
    draft = Draft()
    early = feed(draft, TEXT)
    assert early == TEXT[: whole_blocks(TEXT)]
    assert draft.open_text == "End."
    assert early + said(draft.saved(output(TEXT))) == TEXT
    assert draft.open_text == ""


@given(st.integers(0, len(TEXT)), st.integers(0, len(TEXT)), st.integers(1, 9))
def test_an_attempt_that_breaks_off_is_never_printed_twice(first: int, second: int, size: int) -> None:
    draft = Draft()
    printed = feed(draft, TEXT[:first], call="mcc_1", size=size)
    printed += feed(draft, TEXT[:second], call="mcc_2", size=size)
    assert printed + said(draft.saved(output(TEXT))) == TEXT


@given(st.lists(st.booleans(), min_size=11, max_size=11))
def test_lost_deltas_cost_the_preview_and_nothing_else(kept: list[bool]) -> None:
    draft = Draft()
    parts = [TEXT[at : at + 5] for at in range(0, len(TEXT), 5)]
    printed = ""
    for seq, (part, keep) in enumerate(zip(parts, kept, strict=False), 1):
        if keep:
            printed += said(draft.delta(delta(seq, part)))
    assert printed + said(draft.saved(output(TEXT))) == TEXT


def test_another_answer_of_a_second_attempt_says_that_it_begins_again() -> None:
    draft = Draft()
    assert feed(draft, "One.\n\nTwo.\n\nThree") == "One.\n\nTwo.\n\n"
    assert feed(draft, "One.\n\n", call="mcc_2") == ""
    assert said(draft.delta(delta(3, "Zwei.\n\nD", call="mcc_2"))) == "<RESTART>One.\n\nZwei.\n\n"
    assert said(draft.saved(output("One.\n\nZwei.\n\nDrei"))) == "Drei"


def test_a_saved_answer_that_is_shorter_than_what_was_printed_replaces_it() -> None:
    draft = Draft()
    feed(draft, "One.\n\nTwo.\n\nT")
    assert said(draft.saved(output("One."))) == "<RESTART>One."


def test_blanks_at_the_end_are_no_difference() -> None:
    draft = Draft()
    feed(draft, "```\nx\n```\n\n\n")
    assert said(draft.saved(output("```\nx\n```"))) == ""


def test_blocks_of_an_output_are_paragraphs_streamed_or_saved() -> None:
    draft = Draft()
    draft.delta(delta(1, "One", block=0))
    printed = said(draft.delta(delta(2, "Two", block=2)))
    assert printed + said(draft.saved(output("One", "", "Two"))) == "One\n\nTwo"


def test_what_the_model_does_is_named_and_late_deltas_count_for_nothing() -> None:
    draft = Draft()
    draft.delta(start(1, "thinking"))
    assert draft.doing == "thinking"
    draft.delta(start(2, "tool_use", tool_name="note", tool_call_id="tcl_1"))
    assert draft.doing == "calling note"
    draft.saved(output(calls=("note",)))
    assert draft.delta(delta(3, "late")) == []
    assert (draft.doing, draft.open_text) == ("", "")


# --- the log as parts -------------------------------------------------------------------------------------


def printed(view: View, *items: Any) -> str:
    return plain([part.body for item in items for part in view.take(item)])


def plain(bodies: list[Any], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(Group(*bodies))
    return captured.get()


def content(text: str, key: str | None = None, **fields: Any) -> Event:
    return event(
        kind="agent_input", input_kind="content", content_blocks=[{"type": "text", "text": text}],
        input_idempotency_key=key, **fields,
    )  # fmt: skip


CONTROL = {"kind": "agent_input", "input_kind": "control", "control_type": "cancel_current"}


def test_own_messages_wait_until_they_are_in_the_log() -> None:
    view = View()
    view.waiting["k"] = Message("k", "hi")
    assert "> hi" in printed(view, content("hi", "k"))
    assert not view.waiting
    assert view.working
    printed(view, output("Hello."))
    assert not view.working


def test_stopping_keeps_what_was_read_and_returns_what_the_server_dropped() -> None:
    view = View()
    printed(view, content("hi"))
    printed(view, delta(1, "Half a sen"))
    for key, steering in (("a", True), ("b", True), ("c", False)):
        view.waiting[key] = Message(key, f"text {key}", steering=steering)
    view.taken |= {"a", "c"}
    shown = printed(view, event(**CONTROL))
    assert "Half a sen" in shown
    assert "stopped" in shown
    assert "not delivered: text a" in shown
    assert list(view.waiting) == ["b", "c"]
    assert not view.working


def test_calls_and_results_take_a_line_each_whatever_is_in_them() -> None:
    view = View()
    text = "\n".join(f"line {number} " + "x" * 300 for number in range(40))
    result = event(
        kind="tool_result", tool_call_id="tcl_note", outcome="failed", content_blocks=[{"type": "text", "text": text}]
    )
    shown = printed(view, output("Now.", calls=("note",)), result)
    assert "● note a=1" in shown
    assert "↳ note failed: line 0" in shown
    assert len(shown.splitlines()) == 3


def test_ends_without_an_answer_are_named() -> None:
    failed = event(content_blocks=[{"type": "error", "text": "no credit"}], stop_reason="error")
    assert "✗ no credit" in printed(View(), failed)
    cut = View()
    assert "cut at the length limit and goes on" in printed(cut, output("Half", stop="max_tokens"))
    assert cut.working
    assert "refused" in printed(View(), output(stop="refusal"))
    assert "summarised" in printed(View(), event(kind="context_checkpoint", summary="s"))


def test_the_past_begins_with_a_message_and_hidden_blocks_stay_hidden() -> None:
    hidden = {"type": "text", "text": "secret", "metadata": {"omnara_hidden": "true"}}
    first, second = content("one"), event(
        kind="agent_input", input_kind="content",
        content_blocks=[hidden, {"type": "text", "text": "two"}, {"type": "media_ref", "artifact_id": "art_1"}],
    )  # fmt: skip
    view = View()
    shown = plain([part.body for part in view.past([first, output("1"), second, output("2", calls=("note",))], 1)])
    assert "one" not in shown
    assert "> two\n  [art_1]" in shown
    assert "secret" not in shown
    assert view.activity.open_calls == {"tcl_note": "note"}


def test_nothing_that_others_write_reaches_the_terminal_as_a_command() -> None:
    evil = "a\x1b[2J\x07\x9b1m\u202eb"
    result = event(kind="tool_result", tool_call_id="x", outcome=evil, content_blocks=[{"type": "text", "text": evil}])
    view = View()
    items = (content(evil), delta(1, f"{evil}\n\nb"), output(f"`{evil}`\n\n[x]({evil})", calls=(evil,)), result)
    text = rendered([part.body for item in items for part in view.take(item)], 80)
    for bad in ("\x1b[2J", "\x07", "\x9b", "\u202e", "\x1b]"):
        assert bad not in text
    assert all("\x1b" not in row for row in tail(evil, 20))


def test_answers_are_printed_without_blanks_around_them() -> None:
    text = rendered([markdown("Some *words*.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"), markdown("```\ncode\n```")], 60)
    lines = re.sub("\x1b\\[[0-9;]*m", "", text).split("\n")
    assert lines[0] == "Some words."
    assert lines[-1] == ""
    assert lines[-2].strip() == "code"
    assert all(line == line.rstrip() for line in lines)


# --- forms ------------------------------------------------------------------------------------------------

ONE = Question("Which?", [Option("red"), Option("green"), Option("Other", True)])
MANY = Question("Which?", [Option("S"), Option("M"), Option("Other", True)], True)
MAY = Question("May it?", [Option("Allow"), Option("Deny", True)])


@pytest.mark.parametrize(
    ("question", "line", "answer"),
    [
        (ONE, "2", Answer([1])),
        (ONE, " 2. ", Answer([1])),
        (ONE, "GREEN", Answer([1])),
        (ONE, "3 dark blue", Answer([2], "dark blue")),
        (ONE, "dark blue", Answer([2], "dark blue")),
        (ONE, "3 2 apples", Answer([2], "2 apples")),
        (ONE, "other", Answer([2], "other")),
        (MANY, "2,1", Answer([0, 1])),
        (MANY, "1 , 3 and XL", Answer([0, 2], "and XL")),
        (MANY, "2,2", Answer([1])),
    ],
)  # fmt: skip
def test_a_line_answers_a_question(question: Question, line: str, answer: Answer) -> None:
    assert parse_answer(question, line, permission=False) == answer


@pytest.mark.parametrize(
    ("question", "line", "says"),
    [
        (ONE, "", "a number, or your own words"),
        (ONE, "4", "no option 4"),
        (ONE, "0", "no option 0"),
        (ONE, "1,2", "choose one"),
        (ONE, "3", "add your words"),
        (ONE, "2 apples", "begin with 3"),
        (Question("x", [Option("a")]), "b", "by its number"),
    ],
)
def test_a_line_that_is_no_answer_says_why(question: Question, line: str, says: str) -> None:
    problem = parse_answer(question, line, permission=False)
    assert isinstance(problem, Problem)
    assert says in problem.text


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("y", Answer([0])),
        ("Yes", Answer([0])),
        ("1", Answer([0])),
        ("n", Answer([1])),
        ("no, too dangerous", Answer([1], "too dangerous")),
        ("2 later", Answer([1], "later")),
    ],
)
def test_a_permission_is_given_by_y_and_refused_by_n(line: str, answer: Answer) -> None:
    assert parse_answer(MAY, line, permission=True) == answer


@pytest.mark.parametrize("line", ["", "maybe", "yes but carefully", "okay", "3"])
def test_a_permission_is_never_given_by_accident(line: str) -> None:
    assert isinstance(parse_answer(MAY, line, permission=True), Problem)


def interaction(name: str, *, kind: str = "question", questions: int = 1) -> Interaction:
    form = {
        "title": f"Form {name}",
        "questions": [
            {"prompt": f"Q{number}", "options": [{"label": "a"}, {"label": "b"}]} for number in range(questions)
        ],
    }
    return Interaction(name, kind, "open", form)


def test_forms_are_answered_one_after_the_other_and_only_once() -> None:
    desk = Desk()
    first, second = interaction("int_1", questions=2), interaction("int_2")
    assert "Form int_1" in plain(desk.update([first, second]))
    assert desk.update([first, second]) == []
    shown, resolution = desk.answer("1")
    assert resolution is None
    assert "Q1" in plain(shown)
    shown, resolution = desk.answer("b")
    assert resolution is not None
    assert (resolution.interaction, resolution.answers) == ("int_1", ({"option_indices": [0]}, {"option_indices": [1]}))
    assert "Form int_2" in plain(shown)
    # The server may still show the answered one for a moment.
    assert desk.update([first, second]) == []
    assert "closed" in plain(desk.update([]))
    assert (desk.question, desk.hint) == (None, "")


def test_a_form_of_another_version_is_told_and_passed_over() -> None:
    desk = Desk()
    shown = plain(desk.update([Interaction("int_1", "question", "open", {"pages": []}), interaction("int_2")]))
    assert "cannot show" in shown
    assert "Form int_2" in shown


# --- lines, commands, files -------------------------------------------------------------------------------

BARS = [
    Bar(working=False, status="idle", stopping=False, away=False, hint="", doing=""),
    Bar(working=True, status="running", stopping=False, away=False, hint="", doing="calling a_tool_with_a_long_name"),
    Bar(working=True, status="paused", stopping=False, away=False, hint="", doing=""),
    Bar(working=True, status="running", stopping=True, away=False, hint="", doing=""),
    Bar(working=True, status="running", stopping=False, away=True, hint="", doing=""),
    Bar(working=True, status="waiting", stopping=False, away=False, hint="numbers, such as 1,3", doing=""),
]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("bar", BARS)
def test_no_live_line_is_wider_than_the_terminal(bar: Bar, width: int) -> None:
    messages = [Message(str(number), "漢字" * 60 + "\nsecond\tline", steering=number == 1) for number in range(5)]
    files = [Attachment("a" * 90, 12, {})]
    rows = live_view(bar, "word " * 90 + "\n漢字" * 50, messages, files, width)
    text = "".join(row[1] for row in rows)
    assert text.endswith("\n")
    assert max(cell_len(line) for line in text.splitlines()) < width
    assert len(text.splitlines()) <= 8 + 4 + 1 + 1
    if width >= 40:
        assert "/help" in text


def test_the_keys_are_in_the_help_line_of_eighty_columns() -> None:
    texts = ["".join(row[1] for row in live_view(bar, "", [], [], 80)) for bar in BARS]
    assert "Enter sends" in texts[0]
    assert "Enter queues · Alt-Enter steers" in texts[2]
    assert "paused" in texts[2]
    assert max(len(line) for line in HELP.splitlines()) <= 79


def test_a_slash_begins_a_command_and_a_blank_a_message() -> None:
    assert command_of("/steer  do it ") == ("/steer", "do it")
    assert command_of("/q") == ("/quit", "")
    assert command_of(" /etc/hosts") is None
    assert command_of("hello /quit") is None


def test_files_are_checked_before_anything_is_sent(tmp_path: Path) -> None:
    note = tmp_path / "my note.txt"
    note.write_text("remember")
    made = read_attachment(f"'{note}'")
    assert (made.name, made.size) == ("my note.txt", 8)
    assert base64.b64decode(made.block["data"]) == b"remember"
    (tmp_path / "large").write_bytes(b"a" * (MAX_FILE_BYTES + 1))
    (tmp_path / "half").write_bytes(b"a" * (MAX_FILE_BYTES - 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "nul").write_bytes(b"a\0b")
    (tmp_path / "empty").write_bytes(b"")
    for name, says in (
        ("missing", "No such file"),
        (".", "no file"),
        ("large", "too large"),
        ("binary", "neither text"),
        ("nul", "neither text"),
        ("empty", "empty"),
    ):
        with pytest.raises(CannotAttach, match=says):
            read_attachment(str(tmp_path / name))
    half = read_attachment(str(tmp_path / "half"))
    with pytest.raises(CannotAttach, match="together"):
        read_attachment(str(tmp_path / "half"), [half, half])
    with pytest.raises(CannotAttach, match="20 files"):
        read_attachment(str(note), [made] * 20)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.PNG", "image/png"),
        ("a.jpeg", "image/jpeg"),
        ("a.md", "text/markdown"),
        ("a.py", "text/plain"),
        ("Makefile", "text/plain"),
        ("a.pdf", "application/pdf"),
    ],
)
def test_the_name_of_a_file_tells_its_type(name: str, kind: str) -> None:
    block = file_block(b"x", f"/some/where/{name}")
    assert (block["media_type"], block["filename"], block["metadata"]) == (kind, name, {"filename": name})
    assert file_block(b"x", name, "text/csv")["media_type"] == "text/csv"


def test_an_agent_is_meant_by_id_name_or_beginning() -> None:
    agents = [
        Agent(f"agt_{name}", name, "idle", "m", Links("", "", "", "", ""), datetime(2026, 1, 1, tzinfo=UTC))
        for name in ("review", "reviewer", "Bob")
    ]
    for wanted, found in (
        ("review", ["review"]),
        ("rev", ["review", "reviewer"]),
        ("bob", ["Bob"]),
        ("agt_reviewe", ["reviewer"]),
        ("agt_Bob", ["Bob"]),
        ("nobody", []),
    ):
        assert [agent.name for agent in matching(agents, wanted)] == found


# --- through a pipe ---------------------------------------------------------------------------------------


def test_a_pipe_waits_for_the_answer_to_its_own_message() -> None:
    turn = _Turn("mine")
    for item in (content("earlier", "other"), output("earlier answer"), content("hi", "mine", turn_id="trn_2")):
        turn.take(item)
        assert not turn.over
    turn.take(output("Let me see.", calls=("note",), turn="trn_2"))
    turn.take(content("be quick", "steering", turn_id="trn_3"))
    assert not turn.over
    turn.take(output("He", stop="max_tokens", turn="trn_3"))
    assert not turn.over
    turn.take(output("re.", turn="trn_3"))
    assert (turn.over, turn.answer) == (True, "Here.")
    assert not turn_is_over([output("He", stop="max_tokens")])


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (event(content_blocks=[{"type": "error", "text": "no credit"}], stop_reason="error"), "no credit"),
        (output("I will not.", stop="refusal"), "refusal"),
        (event(**CONTROL), "stopped"),
    ],
)
def test_a_pipe_fails_with_its_turn(last: Event, says: str) -> None:
    turn = _Turn("mine")
    turn.take(content("hi", "mine"))
    with pytest.raises(TurnFailed, match=says):
        turn.take(last)
    assert issubclass(TurnFailed, click.ClickException)
