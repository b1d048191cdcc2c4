"""`omnara chat` on a real terminal against a real server: what a person sees, types, and finds after a kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from omnara.client import Client, Event
from omnara.settings import child_environment
from omnara.testing import Answer, Call, Conversation, HttpError, Match, ModelServer, Strictness, Text, call, echo, say
from tests.e2e.served import Served, served
from tests.e2e.test_cli import Done, omnara
from tests.support.pictures import png
from tests.support.postgres import PostgresForTests
from tests.support.terminal import Terminal
from tests.support.waiting import until

PARAGRAPHS = [f"Paragraph {word} is **bold** and has some more words." for word in ("one", "two", "three", "four")]
STORY = "\n\n".join(PARAGRAPHS)
SHOWN = [text.replace("**", "") for text in PARAGRAPHS]
QUESTIONS = {
    "questions": [
        {"prompt": "Which colour?", "options": ["red", "green"]},
        {"prompt": "Which sizes?", "options": ["S", "M", "L"], "multiple": True},
    ]
}
CODE = "Look:\n\n```python\nfor x in range(3):\n\n    print(x)\n```\n\nThat is all."
PLANS: Mapping[str, tuple[Answer, ...]] = {
    "story": (say(STORY),),
    "story again": (say(STORY),),
    "code": (say(CODE),),
    "ask me": (call("ask_question", QUESTIONS, text="I have to ask."), say("You said: {{result}}")),
    "take a note": (call("note", {"step": 1}), say("The note says: {{result}}")),
    "work": (call("note", {"step": 1}, text="Working on it."), say("Heard: {{user}}")),
    "cut": (say("The first half and ", stop="max_tokens"), say("the second half.")),
    "hostile": (Answer(blocks=(Text("a\x1b]0;owned\x07b\x1b[2Jc"), Call("note", {"step": "\x1b[31m"}))),),
}
IDLE = "Enter sends"
WORKING = "Enter queues · Alt-Enter steers · Ctrl-C stops"


def by_message(conversation: Conversation) -> Answer:
    """Follow the plan that the newest known message names, and repeat any other message."""
    for at in range(len(conversation.messages) - 1, -1, -1):
        message = conversation.messages[at]
        # A turn that was stopped or failed leaves its message in front of the next one.
        last = message.text.strip().split("\n")[-1]
        answers = PLANS.get(last) if message.role == "user" else None
        if answers is not None:
            turn = sum(1 for later in conversation.messages[at:] if later.role == "assistant")
            return plan_at(answers, turn, conversation)
    return echo(conversation)


def plan_at(answers: tuple[Answer, ...], turn: int, conversation: Conversation) -> Answer:
    if turn >= len(answers):
        return echo(conversation)
    result = conversation.results[-1].text if conversation.results else ""
    texts = {"{{result}}": result, "{{user}}": conversation.last_user_text}
    answer = answers[turn]
    blocks = []
    for block in answer.blocks:
        if isinstance(block, Text):
            text = block.text
            for slot, value in texts.items():
                text = text.replace(slot, value)
            block = Text(text)
        blocks.append(block)
    return msgspec.structs.replace(answer, blocks=tuple(blocks))


NOTE = {
    "name": "note",
    "description": "Takes a note.",
    "input_schema": {"type": "object", "properties": {"step": {"type": "integer"}}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer(by_message, strict=Strictness(models=None)) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(
    postgres: PostgresForTests, model: ModelServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    async with postgres.fresh() as dsn, served(dsn, tmp_path_factory.mktemp("chat"), model) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def client(server: Served) -> AsyncIterator[Client]:
    async with Client(server.url, server.key) as made:
        yield made


def environment(server: Served) -> dict[str, str]:
    return {"OMNARA_URL": server.url, "OMNARA_API_KEY": server.key}


async def piped(server: Served, *arguments: str, stdin: str) -> Done:
    return await omnara("chat", *arguments, environment=environment(server), stdin=stdin)


@contextlib.asynccontextmanager
async def chat(server: Served, *arguments: str, columns: int = 80, rows: int = 24) -> AsyncIterator[Terminal]:
    command = [sys.executable, "-m", "omnara", "chat", *arguments]
    values = child_environment({**environment(server), "PYTHONPATH": str(Path(__file__).parents[2])})
    async with Terminal(command, values, columns=columns, rows=rows) as terminal:
        await terminal.shows("/help")
        yield terminal


async def launch(client: Client, name: str | None = None, *, permission: str = "allow") -> str:
    tools: list[Any] = ["ask_question", {**NOTE, "permission": permission}]
    return (await client.launch(model="anthropic/scripted", system_prompt="x", name=name, tools=tools)).id


async def log(client: Client, agent: str) -> list[Event]:
    return [event async for event in client.events(agent)]


async def open_call(client: Client, agent: str) -> str:
    """The id of the custom call that waits for its result, once there is one."""
    found: list[str] = []

    async def there() -> bool:
        found[:] = [one.id for one in await client.tool_calls(agent) if one.state == "ready"]
        return bool(found)

    await until(there, "a call is ready")
    return found[0]


# --- on a terminal ----------------------------------------------------------------------------------------


async def test_an_answer_is_shown_as_it_is_written_and_printed_once(
    server: Served, client: Client, model: ModelServer
) -> None:
    agent = await launch(client, "teller")
    gate = model.gate("mid_text", match=Match(contains="story"))
    async with chat(server, "teller") as terminal:
        terminal.type("story\r")
        await gate.reached()
        await terminal.shows("> story", SHOWN[0], WORKING)
        assert WORKING + " · /help" in terminal.visible
        assert SHOWN[-1] not in terminal.text
        gate.release()
        await terminal.shows(SHOWN[-1], IDLE)
        assert [terminal.text.count(text) for text in SHOWN] == [1] * 4
        assert "**" not in terminal.text
        assert terminal.text.count("> story") == 1
        terminal.type("code\r")
        await terminal.shows("for x in range(3):", "    print(x)", "That is all.", IDLE)
        assert "```" not in terminal.text
        terminal.type("\x04")
        assert await terminal.ended() == 0
    assert [event.kind for event in await log(client, agent)][-1] == "model_output"


async def test_a_question_is_answered_in_place(server: Served, client: Client) -> None:
    agent = await launch(client)
    async with chat(server, agent) as terminal:
        terminal.type("ask me\r")
        await terminal.shows("I have to ask.", "? Questions", "Which colour?", "2  green", "your own words")
        terminal.type("7\r")
        await terminal.shows("there is no option 7")
        terminal.type("rather a dark blue\r")
        await terminal.shows("answered: Other (rather a dark blue)", "Which sizes?", "numbers, such as 1,3")
        terminal.type("1, 3\r")
        await terminal.shows("answered: S, L", "You said:", IDLE)
    (resolved,) = await client.interactions(agent, state=None)
    assert resolved.resolution is not None
    assert resolved.state == "resolved"
    said = (await log(client, agent))[-1].text
    assert "rather a dark blue" in said
    assert "green" not in said


async def test_a_form_that_was_answered_elsewhere_is_withdrawn(server: Served, client: Client) -> None:
    agent = await launch(client)
    async with chat(server, agent) as terminal:
        terminal.type("ask me\r")
        await terminal.shows("1  red")
        (form,) = await client.interactions(agent)
        await client.resolve(agent, form.id, [{"option_indices": [0]}, {"option_indices": [1]}])
        await terminal.shows("You said:", "answered elsewhere", IDLE)
        assert terminal.text.count("Which colour?\n") == 1


async def test_a_permission_is_denied_with_a_reason_and_allowed(server: Served, client: Client) -> None:
    agent = await launch(client, permission="ask")
    async with chat(server, agent) as terminal:
        terminal.type("take a note\r")
        await terminal.shows("● note step=1", "? Allow note?", 'Input: {"step":1}', "y allows, n denies")
        terminal.type("maybe\r")
        await terminal.shows("please answer y or n")
        terminal.type("n not today\r")
        await terminal.shows("answered: Deny (not today)", "↳ note denied", "The note says:", IDLE)
        terminal.type("take a note\r")
        await terminal.shows("y allows, n denies")
        terminal.type("y\r")
        await terminal.shows("answered: Allow")
        await client.answer_call(agent, await open_call(client, agent), "noted!\nand a second line")
        await terminal.shows("↳ note succeeded: noted! (+1 lines)", "The note says: noted!", IDLE)
    outcomes = [event.outcome for event in await log(client, agent) if event.kind == "tool_result"]
    assert outcomes == ["denied", "succeeded"]


async def test_alt_enter_steers_and_enter_queues(server: Served, client: Client) -> None:
    agent = await launch(client)
    async with chat(server, agent) as terminal:
        terminal.type("work\r")
        await terminal.shows("● note step=1", WORKING)
        call_id = await open_call(client, agent)
        terminal.type("after that, this\r")
        await terminal.shows("queued: after that, this")
        terminal.type("faster, please\x1b\r")
        await terminal.shows("steering: faster, please", "queued: after that, this")
        await client.answer_call(agent, call_id, "done")
        await terminal.shows("Heard: faster, please", "> after that, this", IDLE)
        assert terminal.text.count("> faster, please") == 1
        await terminal.gone("queued:")
    inputs = [event for event in await log(client, agent) if event.input_kind == "content"]
    assert [event.text for event in inputs] == ["work", "faster, please", "after that, this"]
    assert [event.text for event in await log(client, agent) if event.kind == "model_output"][1:] == [
        "Heard: faster, please",
        "after that, this",
    ]


async def test_steering_takes_the_place_of_a_form(server: Served, client: Client) -> None:
    agent = await launch(client)
    async with chat(server, agent) as terminal:
        terminal.type("ask me\r")
        await terminal.shows("1  red", "a number, or your own words")
        terminal.type("/steer decide yourself\r")
        await terminal.shows("> decide yourself", "You said:", IDLE)
    assert [event.outcome for event in await log(client, agent) if event.kind == "tool_result"] == ["canceled"]


async def test_ctrl_c_stops_and_twice_leaves(server: Served, client: Client, model: ModelServer) -> None:
    agent = await launch(client)
    gate = model.gate("mid_text", match=Match(contains="story"))
    async with chat(server, agent) as terminal:
        terminal.type("story\r")
        await gate.reached()
        await terminal.shows(SHOWN[0])
        terminal.type("half a line\x03")
        await terminal.shows("· stopped", IDLE, "> half a line")
        gate.release()
        assert terminal.text.count(SHOWN[0]) == 1
        terminal.type("\x15and on\r")
        await terminal.shows("> and on")
        await until(lambda: terminal.text.count("and on") >= 2, "answered")
        terminal.type("\x03\x03")
        assert await terminal.ended() == 0
    assert [event.control_type for event in await log(client, agent)].count("cancel_current") == 1


async def test_stop_by_command_and_leaving_a_working_agent(server: Served, client: Client, model: ModelServer) -> None:
    agent = await launch(client)
    async with chat(server, agent) as terminal:
        terminal.type("work\r")
        await terminal.shows("● note step=1")
        terminal.type("never heard\x1b\r")
        await terminal.shows("steering: never heard")
        terminal.type("/stop\r")
        await terminal.shows("· stopped", "not delivered: never heard", IDLE)
        terminal.type("work\r")
        await terminal.shows(WORKING)
        terminal.type("/quit\r")
        assert await terminal.ended() == 0
        assert f"come back with: omnara chat {agent}" in terminal.text.replace("\n", " ")


async def test_a_killed_server_loses_nothing_and_prints_nothing_twice(
    server: Served, client: Client, model: ModelServer
) -> None:
    agent = await launch(client)
    gate = model.gate("mid_text", times=-1, match=Match(contains="story"))
    async with chat(server, agent) as terminal:
        terminal.type("story\r")
        await gate.reached()
        await terminal.shows(SHOWN[0])
        server.process.kill()
        await terminal.shows("no connection")
        terminal.type("and then?\r")
        await terminal.shows("waits for the server: and then?")
        await server.process.start()
        await terminal.shows("connected again", within_s=30)
        gate.release()
        await terminal.shows(SHOWN[-1], "> and then?", IDLE, within_s=30)
        await until(lambda: terminal.text.count("and then?") == 2, "answered once")
        assert [terminal.text.count(text) for text in SHOWN] == [1] * 4
        assert terminal.text.count("> story") == terminal.text.count("> and then?") == 1
    inputs = [event.text for event in await log(client, agent) if event.input_kind == "content"]
    assert inputs == ["story", "and then?"]


async def test_a_server_restarted_between_messages(server: Served, client: Client) -> None:
    agent = await launch(client)
    async with chat(server, agent) as terminal:
        terminal.type("before\r")
        await until(lambda: terminal.text.count("before") == 2, "answered")
        assert await server.process.stop() == 0
        await server.process.start()
        terminal.type("after\r")
        await until(lambda: "> after\n\nafter\n" in terminal.text, "answered", limit_s=30)
        await terminal.shows("connected again")
        assert (terminal.text.count("before"), terminal.text.count("> after")) == (2, 1)


@pytest.mark.parametrize("columns", [40, 24])
async def test_a_narrow_terminal(server: Served, client: Client, model: ModelServer, columns: int) -> None:
    agent = await launch(client)
    gate = model.gate("mid_text", match=Match(contains="story"))
    async with chat(server, agent, columns=columns, rows=16) as terminal:
        terminal.type("story\r")
        await gate.reached()
        await terminal.shows("Paragraph one")
        gate.release()
        await terminal.shows("Paragraph four")
        await terminal.shows("Enter sends")
        words = " ".join(terminal.text.split())
        assert [words.count(text) for text in SHOWN] == [1] * 4
        assert words.count("Enter sends") == 1
        terminal.type("take a note\r")
        await terminal.shows("● note step=1")


async def test_a_window_that_changes_its_size(server: Served, client: Client) -> None:
    agent = await launch(client)
    async with chat(server, agent, columns=100) as terminal:
        terminal.type("story\r")
        await terminal.shows(SHOWN[-1], IDLE)
        terminal.resize(30, 60)
        terminal.type("code\r")
        await terminal.shows("That is all.", IDLE)


async def test_what_others_write_is_never_obeyed(server: Served, client: Client) -> None:
    agent = await launch(client)
    async with chat(server, agent) as terminal:
        terminal.type("hostile\r")
        await terminal.shows("a\\x1b]0;owned\\x07b\\x1b[2Jc", "● note step=\\x1b[31m")
        assert b"\x1b]0;owned" not in terminal.raw


async def test_history_status_files_and_wrong_commands(server: Served, client: Client, tmp_path: Path) -> None:
    agent = await launch(client, "archivist")
    for word in ("first", "second", "third"):
        done = await piped(server, agent, stdin=word)
        assert (done.code, done.out) == (0, f"{word}\n")
    (tmp_path / "notes.txt").write_text("remember the milk")
    (tmp_path / "dot.png").write_bytes(png())
    (tmp_path / "blob.bin").write_bytes(b"\xff\x00")
    async with chat(server, agent) as terminal:
        await terminal.shows("> second", "> third", "archivist")
        assert "first" not in terminal.text
        terminal.type("/history 9\r")
        await terminal.shows("> first", "that was the history")
        terminal.type("/status\r")
        await terminal.shows("idle, next: input")
        terminal.type("/etc/passwd?\r")
        await terminal.shows("/etc/passwd?: see /help")
        terminal.type(f"/attach {tmp_path}/blob.bin\r")
        await terminal.shows("blob.bin")
        terminal.type(f"/attach {tmp_path}/notes.txt\r")
        terminal.type(f"/attach {tmp_path}/dot.png\r")
        await terminal.shows("attached: notes.txt (17 bytes), dot.png (")
        terminal.type("what does it say?\r")
        await terminal.shows("[notes.txt]", "[dot.png]", "remember the milk", "what does it say?", IDLE)
        await terminal.gone("attached:")
    sent = next(event for event in reversed(await log(client, agent)) if event.input_kind == "content")
    assert [block["type"] for block in sent.content_blocks] == ["media_ref", "media_ref", "text"]


async def test_an_agent_is_launched_and_found_again(server: Served, client: Client) -> None:
    async with chat(server, "--model", "anthropic/scripted", "--name", "fresh one") as terminal:
        terminal.type("hello\r")
        await until(lambda: terminal.text.count("hello") == 2, "answered")
    async with chat(server, "--last") as terminal:
        await terminal.shows("fresh one", "> hello")
        (newest, *_) = await client.agents()
        await client.delete(newest.id)
        assert await terminal.ended() == 0
        assert "archived" in terminal.text


async def test_a_failed_turn_is_told_and_the_chat_goes_on(server: Served, client: Client, model: ModelServer) -> None:
    agent = await launch(client)
    model.faults.push(HttpError(400), match=Match(contains="breaks"))
    async with chat(server, agent) as terminal:
        terminal.type("this breaks\r")
        await terminal.shows("✗ ", IDLE)
        terminal.type("hello\r")
        await until(lambda: terminal.text.count("hello") == 2, "answered")


async def test_a_terminal_is_left_as_it_was_found(server: Served, client: Client) -> None:
    agent = await launch(client)
    async with chat(server, agent) as terminal:
        assert not terminal.echoes
        assert terminal.process is not None
        terminal.process.terminate()
        assert await terminal.ended() == 130
        assert terminal.echoes
    key = (await omnara("keys", "create", "for a moment", environment=server.environment)).out.strip()
    async with chat(msgspec.structs.replace(server, key=key), agent) as terminal:
        listed = (await omnara("keys", "list", "--json", environment=server.environment)).json()
        (row,) = [row for row in listed if row["name"] == "for a moment"]
        assert (await omnara("keys", "revoke", row["id"], environment=server.environment)).code == 0
        assert await terminal.ended() == 1
        assert "OMNARA_API_KEY" in terminal.text
        assert terminal.echoes


async def test_a_terminal_that_cannot_draw_is_told_so(server: Served, client: Client) -> None:
    agent = await launch(client)
    command = [sys.executable, "-m", "omnara", "chat", agent]
    async with Terminal(command, child_environment({**environment(server), "TERM": "dumb"})) as terminal:
        assert await terminal.ended() == 2
        assert "use a pipe" in " ".join(terminal.text.split())


async def test_another_answer_after_a_cut_says_that_it_begins_again(
    server: Served, client: Client, model: ModelServer
) -> None:
    agent = await launch(client)
    gate = model.gate("mid_text", match=Match(contains="changes its mind"))
    texts = iter([STORY, "Something else.\n\nEntirely."])
    model.script, before = lambda _: say(next(texts)), model.script
    try:
        async with chat(server, agent) as terminal:
            terminal.type("changes its mind\r")
            await gate.reached()
            await terminal.shows(SHOWN[0])
            server.process.kill()
            await server.process.start()
            await terminal.shows("begins again", "Something else.", "Entirely.", IDLE, within_s=30)
            assert [terminal.text.count(text) for text in (SHOWN[0], "Something else.", SHOWN[-1])] == [1, 1, 0]
    finally:
        model.script = before


# --- through a pipe ---------------------------------------------------------------------------------------


async def test_a_pipe_gets_the_answer_and_nothing_else(server: Served, client: Client) -> None:
    agent = await launch(client, "piper")
    done = await piped(server, "pip", stdin="two lines\nin one message\n")
    assert (done.code, done.out, done.err) == (0, "two lines\nin one message\n", "")
    done = await piped(server, agent, stdin="story")
    assert (done.code, done.out) == (0, f"{STORY}\n")
    assert "\x1b" not in done.out
    assert (await piped(server, agent, stdin="cut")).out == "The first half and the second half.\n"
    exact = await piped(server, agent, stdin="a \x1b[1m\u202e b")
    assert exact.out == "a \x1b[1m\u202e b\n"
    launched = await piped(server, "--model", "anthropic/scripted", stdin="hello")
    assert (launched.code, launched.out, launched.err.split()[0]) == (0, "hello\n", "launched")


async def test_a_pipe_tells_by_its_exit_code(server: Served, client: Client, model: ModelServer) -> None:
    agent = await launch(client)
    model.faults.push(HttpError(400), match=Match(contains="breaks"))
    failed = await piped(server, agent, stdin="this breaks")
    assert (failed.code, failed.out) == (1, "")
    assert failed.err
    asked = await piped(server, agent, stdin="ask me")
    assert (asked.code, asked.out) == (1, "")
    assert f"omnara chat {agent}" in asked.err
    for arguments, code, says in (
        (("nobody",), 1, "no active agent"),
        ((), 2, "--model"),
        ((agent, "--last"), 2, "--model"),
    ):
        refused = await piped(server, *arguments, stdin="x")
        assert (refused.code, says in refused.err) == (code, True), refused.err
    assert (await piped(server, agent, stdin=" \n")).code == 2


async def test_a_pipe_survives_a_killed_server(server: Served, client: Client, model: ModelServer) -> None:
    agent = await launch(client)
    gate = model.gate("mid_text", times=-1, match=Match(contains="story"))
    asking = asyncio.create_task(piped(server, agent, stdin="story"))
    await gate.reached()
    server.process.kill()
    await server.process.start()
    gate.release()
    done = await asking
    assert (done.code, done.out) == (0, f"{STORY}\n")


async def test_the_shell_completes_names_and_ids(server: Served, client: Client) -> None:
    agent = await launch(client, "completable")

    async def completed(words: str) -> str:
        values = {**environment(server), "_OMNARA_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "2"}
        return (await completing(values)).out

    assert "completable" in await completed("omnara chat comp")
    assert agent in await completed(f"omnara chat {agent[:12]}")
    away = {**environment(server), "OMNARA_URL": "http://127.0.0.1:1"}
    values = {"_OMNARA_COMPLETE": "bash_complete", "COMP_WORDS": "omnara chat c", "COMP_CWORD": "2"}
    done = await completing({**away, **values})
    assert (done.code, done.out.strip(), done.err) == (0, "", "")


async def completing(values: Mapping[str, str]) -> Done:
    """Run the program as the shell does: under the name of its script."""
    code = "import sys; sys.argv[0] = 'omnara'; from omnara.cli import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code,
        env=child_environment(values), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return Done(process.returncode or 0, out.decode(), err.decode())
