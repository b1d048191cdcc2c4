"""Scripts: plans, references to results, the ready scripts, and the audit against a real loop of tool calls."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from omnara.testing import (
    Answer,
    AuditTools,
    Call,
    ModelServer,
    Script,
    ScriptError,
    Text,
    audit,
    call,
    echo,
    embed,
    file_bytes,
    fixed,
    in_order,
    parse_script,
    plan,
    report_of,
    say,
    steps,
)
from tests.unit.test_model_server import ANTHROPIC, CHAT, PATHS, RESPONSES, body_for, send

Tool = Callable[[dict[str, Any]], str]


class Loop:
    """The smallest agent: asks, runs what it is told, asks again; one instance per wire format."""

    def __init__(self, server: ModelServer, path: str, tools: dict[str, Tool], schemas: dict[str, Any]) -> None:
        self.server = server
        self.path = path
        self.tools = tools
        self.schemas = schemas
        self.called: list[list[str]] = []

    async def run(self, text: str) -> str:
        """Return the last answer's text."""
        body = body_for(self.path, text=text, tools=[self._spec(name) for name in self.tools])
        history = body["input" if self.path == RESPONSES else "messages"]
        while True:
            status, answer, raw = await send(self.server, self.path, body)
            assert status == 200, raw
            said, calls, replay = self._read(answer)
            history.extend(replay)
            if not calls:
                return said
            self.called.append([name for _, name, _ in calls])
            results = [(call_id, self.tools[name](given)) for call_id, name, given in calls]
            history.extend(self._results(results))

    def _spec(self, name: str) -> dict[str, Any]:
        schema = self.schemas.get(name, {"type": "object"})
        if self.path == ANTHROPIC:
            return {"name": name, "input_schema": schema}
        function = {"name": name, "parameters": schema}
        return (
            {"type": "function", **function} if self.path == RESPONSES else {"type": "function", "function": function}
        )

    def _read(self, answer: Any) -> tuple[str, list[tuple[str, str, Any]], list[Any]]:
        if self.path == ANTHROPIC:
            blocks = answer["content"]
            calls = [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
            said = "".join(b["text"] for b in blocks if b["type"] == "text")
            return said, calls, [{"role": "assistant", "content": blocks}]
        if self.path == CHAT:
            message = answer["choices"][0]["message"]
            calls = [
                (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
                for c in message.get("tool_calls", [])
            ]
            kept = {key: value for key, value in message.items() if key in ("role", "content", "tool_calls")}
            return message["content"] or "", calls, [kept]
        items = answer["output"]
        calls = [(i["call_id"], i["name"], json.loads(i["arguments"])) for i in items if i["type"] == "function_call"]
        said = "".join(i["content"][0]["text"] for i in items if i["type"] == "message")
        return said, calls, items

    def _results(self, results: list[tuple[str, str]]) -> list[Any]:
        if self.path == ANTHROPIC:
            blocks = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results]
            return [{"role": "user", "content": blocks}]
        if self.path == CHAT:
            return [{"role": "tool", "tool_call_id": name, "content": text} for name, text in results]
        return [{"type": "function_call_output", "call_id": name, "output": text} for name, text in results]


FILES = {f"notes/{number:02d}.txt": (f"line {number}\n" * number).encode() for number in range(1, 10)} | {
    "logo.bin": bytes(range(256)),
    "empty.txt": b"",
    "data.json": b'{"content": "not an envelope"}',
}


def _get_file(given: dict[str, Any]) -> str:
    data = FILES[given["path"]]
    encoding, text = "utf-8", ""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        encoding, text = "base64", base64.b64encode(data).decode()
    return json.dumps({"path": given["path"], "encoding": encoding, "content": text})


def _audit_tools(**more: Tool) -> dict[str, Tool]:
    return {
        "list_files": lambda _: json.dumps(sorted(FILES)),
        "get_file": _get_file,
        "web_fetch": lambda given: f"page at {given['url']}",
        "ask_question": lambda given: "Yes: " + given["questions"][0]["prompt"],
        **more,
    }


@pytest.mark.parametrize("path", PATHS)
async def test_the_audit_reports_what_it_was_given(path: str) -> None:
    schemas = {"get_file": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}
    async with ModelServer(audit(parallel=5)) as server:
        loop = Loop(server, path, _audit_tools(), schemas)
        said = await loop.run("Audit the folder; see http://127.0.0.1:8/page?x=1, then report.")
    report = json.loads(said)
    expected = report_of({name: FILES[name] for name in sorted(FILES)})
    assert {key: report[key] for key in expected} == expected
    assert report["page"] == {"ok": True, "text": "page at http://127.0.0.1:8/page?x=1"}
    assert report["answer"] == "Yes: Shall the report list every file?"
    assert report["failed"] == []
    assert loop.called == [
        ["list_files"], ["get_file"] * 5, ["get_file"] * 5, ["get_file"] * 2, ["web_fetch"], ["ask_question"],
    ]  # fmt: skip


async def test_the_audit_follows_names_and_schemas_of_its_tools() -> None:
    names = AuditTools(list_files="ls", get_file="cat")
    asked: list[Any] = []

    def listing(given: dict[str, Any]) -> str:
        asked.append(given)
        return json.dumps({"files": [{"path": "a", "size": 1}, {"path": "b"}]})

    tools: dict[str, Tool] = {
        "ls": listing,
        "cat": lambda given: "text of " + given["file"],
        "ask_question": lambda given: repr(given["questions"][0]["options"]),
    }
    options = {"options": {"type": "array", "items": {"type": "string"}}}
    schemas = {
        "ls": {"type": "object", "properties": {"folder": {"type": "string"}}, "required": ["folder"]},
        "cat": {"type": "object", "properties": {"file": {"type": "string"}}, "required": ["file"]},
        "ask_question": {
            "type": "object",
            "properties": {"questions": {"type": "array", "items": {"type": "object", "properties": options}}},
        },
    }
    async with ModelServer(audit(tools=names, thinking=True)) as server:
        report = json.loads(await Loop(server, ANTHROPIC, tools, schemas).run("go"))
    assert asked == [{"folder": "."}]
    assert [entry["size"] for entry in report["files"]] == [9, 9]
    assert (report["page"], report["answer"]) == (None, "['Yes', 'No']")


async def test_the_audit_reads_again_what_failed_and_then_gives_up() -> None:
    tries = {"a": 0, "b": 0}

    def flaky(given: dict[str, Any]) -> str:
        tries[given["path"]] += 1
        if given["path"] == "b" or tries["a"] == 1:
            return "Tool call was interrupted; its external outcome is unknown."
        return "good"

    async with ModelServer(audit()) as server:
        tools: dict[str, Tool] = {"list_files": lambda _: "a\nb\n", "get_file": flaky}
        report = json.loads(await Loop(server, CHAT, tools, {}).run("go"))
    assert tries == {"a": 2, "b": 3}
    assert ([entry["path"] for entry in report["files"]], report["failed"]) == (["a"], ["b"])


async def test_the_audit_without_its_tools_is_an_error_of_the_script() -> None:
    async with ModelServer(audit()) as server:
        status, answer, _ = await send(server, ANTHROPIC, body_for(ANTHROPIC))
        assert status == 500
        assert "list_files" in answer["error"]["message"]
        assert server.log.last.outcome == "script_error"


def test_file_contents_survive_their_envelope() -> None:
    assert file_bytes("plain") == b"plain"
    assert file_bytes('{"content": "x"}') == b'{"content": "x"}'
    assert file_bytes('{"encoding": "utf-8", "content": "é"}') == "é".encode()
    assert file_bytes('{"encoding": "base64", "content": "AAE="}') == b"\0\1"
    with pytest.raises(ScriptError):
        file_bytes('{"encoding": "base64", "content": "A"}')


@pytest.mark.parametrize("path", PATHS)
async def test_a_plan_takes_arguments_from_results(path: str) -> None:
    script = plan(
        call("find", {"q": "x"}, text="Looking for {{user}}."),
        Answer(
            blocks=(
                Call("open", {"id": {"$result": 0, "path": ["items", 1, "id"]}, "all": [{"$result": -1}]}),
                Call("open", {"id": 9}),
            )
        ),
        say("First {{result 1}}, last {{result -1}}."),
    )
    seen: list[Any] = []

    def opened(given: dict[str, Any]) -> str:
        seen.append(given)
        return f"opened {given['id']}"

    found = '{"items": [{"id": 1}, {"id": 7}]}'
    async with ModelServer(script) as server:
        loop = Loop(server, path, {"find": lambda _: found, "open": opened}, {})
        assert await loop.run("it") == "First opened 7, last opened 9."
    assert seen == [{"id": 7, "all": [found]}, {"id": 9}]


async def test_a_plan_in_a_message_counts_from_there() -> None:
    async with ModelServer() as server:
        tools: dict[str, Tool] = {"f": lambda _: "result"}
        body = body_for(ANTHROPIC, text="hello")
        messages = body["messages"]

        async def answer() -> Any:
            _, document, _ = await send(server, ANTHROPIC, body)
            messages.append({"role": "assistant", "content": document["content"]})
            return document["content"]

        assert (await answer())[0]["text"] == "hello"
        messages.append({"role": "user", "content": embed(call("f"), say("got {{result 0}}"), text="Do this:")})
        name = (await answer())[0]["id"]
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": tools["f"]({})}]}
        )
        assert (await answer())[0]["text"] == "got result"
        messages.append({"role": "user", "content": "more"})
        assert (await answer())[0]["text"] == "Done."
        messages.append({"role": "user", "content": embed(say("again"), loop=True)})
        assert (await answer())[0]["text"] == "again"
        messages.append({"role": "user", "content": "and"})
        assert (await answer())[0]["text"] == "again"


@pytest.mark.parametrize("text", ["```script\nnope\n```", '```script\n{"answers": 5}\n```'])
async def test_an_unreadable_plan_says_so(text: str) -> None:
    async with ModelServer() as server:
        status, answer, _ = await send(server, ANTHROPIC, body_for(ANTHROPIC, text=text))
    assert status == 500
    assert "cannot be read" in answer["error"]["message"]


async def test_a_reference_to_nothing_says_so() -> None:
    async with ModelServer(plan(say("{{result 3}}"))) as server:
        status, answer, _ = await send(server, ANTHROPIC, body_for(ANTHROPIC))
    assert status == 500
    assert "no tool result number 3" in answer["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("count", "passes"), [(0, 0), (1, 0), (3, 1), (7, 3)])
async def test_steps_call_a_tool_every_second_step(path: str, count: int, passes: int) -> None:
    seen: list[Any] = []
    async with ModelServer(steps(count, tool="note")) as server:
        tools: dict[str, Tool] = {"note": lambda given: str(seen.append(given))}
        assert await Loop(server, path, tools, {}).run("go") == "All steps are done."
        assert server.log.counts.requests == passes + 1
    assert seen == [{"step": number} for number in range(passes)]


async def test_steps_work_the_same_in_fast_mode() -> None:
    async with ModelServer(steps(9, tool="note"), fast=True) as server:
        for path in PATHS:
            loop = Loop(server, path, {"note": lambda _: "ok"}, {})
            assert await loop.run("go") == "All steps are done."
            assert loop.called == [["note"]] * 4


async def test_echo_repeats_the_newest() -> None:
    async with ModelServer(echo) as server:
        loop = Loop(server, CHAT, {"f": lambda _: "from the tool"}, {})
        assert await loop.run("say this") == "say this"
        body = body_for(ANTHROPIC)
        asked = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "from the tool"}
        body["messages"] += [{"role": "assistant", "content": [asked]}, {"role": "user", "content": [result]}]
        assert (await send(server, ANTHROPIC, body))[1]["content"][0]["text"] == "from the tool"


async def test_in_order_gives_each_conversation_its_own_sequence() -> None:
    async with ModelServer(in_order(say("one"), say("two"))) as server:

        async def text(said: str) -> str:
            return str((await send(server, ANTHROPIC, body_for(ANTHROPIC, text=said)))[1]["content"][0]["text"])

        assert [await text("a"), await text("a"), await text("b"), await text("a")] == ["one", "two", "one", "Done."]


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("echo", "hi"),
        ("embedded", "hi"),
        ('fixed:{"text": "so"}', "so"),
        ('steps:{"count": 0}', "All steps are done."),
        ('{"name": "fixed", "options": {"text": "as JSON"}}', "as JSON"),
        ('{"plan": {"answers": [{"blocks": [{"type": "text", "text": "planned"}]}]}}', "planned"),
    ],
)
async def test_scripts_by_name(source: str, first: str) -> None:
    async with ModelServer(parse_script(source)) as server:
        assert (await send(server, ANTHROPIC, body_for(ANTHROPIC)))[1]["content"][0]["text"] == first


@pytest.mark.parametrize("source", ["nobody", "echo:{", 'echo:{"a": 1}', "plan", '{"name": "plan"}'])
def test_scripts_that_do_not_exist(source: str) -> None:
    with pytest.raises(ScriptError):
        parse_script(source)


async def test_the_conversation_is_the_same_in_every_format() -> None:
    seen: list[Any] = []

    def look(conversation: Any) -> Answer:
        if conversation.turn:
            seen.append(
                (
                    conversation.system,
                    conversation.user_texts,
                    [(m.role, m.text, len(m.calls), len(m.results)) for m in conversation.messages],
                    [(r.name, r.arguments, r.text) for r in conversation.results],
                    [(t.name, t.schema) for t in conversation.tools],
                )
            )
            return say("end")
        return Answer(blocks=(Text("ok"), Call("f", {"a": 1}), Call("f", {"a": 2})))

    script: Script = look
    async with ModelServer(script) as server:
        for path in PATHS:
            await Loop(server, path, {"f": lambda given: f"r{given['a']}"}, {}).run("go")
    assert seen[0] == (
        "",
        ("go",),
        [("user", "go", 0, 0), ("assistant", "ok", 2, 0), ("user", "", 0, 2)],
        [("f", {"a": 1}, "r1"), ("f", {"a": 2}, "r2")],
        [("f", {"type": "object"})],
    )
    assert seen == [seen[0]] * 3


async def test_system_prompts_are_read() -> None:
    seen: list[str] = []

    def look(conversation: Any) -> Answer:
        seen.append(conversation.system)
        return say("ok")

    async with ModelServer(look) as server:
        await send(server, ANTHROPIC, body_for(ANTHROPIC, system="S"))
        chat = body_for(CHAT)
        chat["messages"].insert(0, {"role": "system", "content": "S"})
        await send(server, CHAT, chat)
        await send(server, RESPONSES, body_for(RESPONSES, instructions="S"))
    assert seen == ["S", "S", "S"]


async def test_fixed_is_fixed() -> None:
    async with ModelServer(fixed()) as server:
        assert (await send(server, CHAT, body_for(CHAT)))[1]["choices"][0]["message"]["content"].startswith("Hello")
