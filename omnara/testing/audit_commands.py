"""The audit by commands: the demo's model, which inventories a folder on a machine by running programs there.

Each command writes a line before and a line after its work into a ledger on the machine, under a name that is never
used again: whoever reads that file knows what ran, how often, and whether it came to its end.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Final

import msgspec

from omnara.testing.answer import Answer, Block, Call, Text, Thinking
from omnara.testing.audit import asked, fetched, finished
from omnara.testing.conversation import Conversation, ToolResult
from omnara.testing.script import ScriptError

__all__ = ["ARCHIVE", "LEDGER", "CommandAudit", "file_command", "ledger_name", "name_in"]

ARCHIVE: Final = "folder.tar.gz.b64"
LEDGER: Final = "ledger"
"""Both beside the unpacked folder `audit`, in the directory where commands start."""
TRIES: Final = 3
_ATTACHMENT: Final = re.compile(r"\[Attachment (art_[a-z2-7]+)")
_NAME: Final = re.compile(rf"^echo begin (\S+) >>{LEDGER}$", re.MULTILINE)
_UNPACK: Final = f"mkdir -p audit && base64 -d <{ARCHIVE} | tar -C audit -xzf -"
_LIST: Final = "find . -type f | LC_ALL=C sort"
_TOTAL: Final = "find . -type f | wc -l && find . -type f -exec cat {} + | wc -c"
_MEASURE: Final = "wc -c <{file}; sha256sum <{file}; LC_ALL=C grep -ac '' <{file}"


def ledger_name(number: int) -> str:
    """Return the name under which the command for the n-th file is in the ledger when it is run first."""
    return f"file-{number}"


def name_in(command: str) -> str | None:
    """Return the name under which a command is in the ledger; None for one that is not of this script."""
    found = _NAME.search(command)
    return None if found is None else found[1]


def file_command(name: str, path: str, *, slow_s: float = 0.0, speak: bool = False) -> str:
    """Return the command that measures a file: bytes, SHA-256, lines. `slow_s`: it takes its time; `speak`: at first
    it says something, so that its call returns while it runs.
    """
    begin = [*(["echo measuring"] if speak else []), *([f"sleep {slow_s:g}"] if slow_s else [])]
    # The digest of nothing has no lines that grep could count: it prints 0 and ends with 1.
    measure = _MEASURE.format(file=shlex.quote(f"./{path}"))
    return _noted(name, "\n".join((*begin, _within(f"{measure}; true"))))


def _within(work: str) -> str:
    """Do it in the folder, and be outside of it again afterwards."""
    return f"(cd audit && {{ {work}; }})"


def _noted(name: str, work: str) -> str:
    return f"echo begin {name} >>{LEDGER}\n{work}\ncode=$?\necho end {name} >>{LEDGER}\nexit $code"


class _Run(msgspec.Struct):
    """What the conversation says of one attempt of a command."""

    process_id: str = ""
    output: str = ""
    cursor: int = 0
    over: bool = False
    failed: bool = False


class CommandAudit(msgspec.Struct, frozen=True, kw_only=True):
    """The script: a pure function of the conversation. `slow` is the number of the file whose command takes `slow_s`.

    It puts the attachment of the first message on its machine, unpacks it, lists it, measures each file, `parallel` at
    a time, and counts all; then as the other audit. What runs on is read with `read_process` until it is over. A
    command that did not succeed is run again under another name, at most twice.
    """

    parallel: int = 4
    thinking: bool = False
    slow: int = -1
    slow_s: float = 2.0

    def answer(self, conversation: Conversation) -> Answer:
        """Return the next answer. Raises ScriptError when something does not succeed in three attempts."""
        runs = _runs(conversation)
        if not any(_good(result) for result in conversation.results_of("download_file")):
            return self._download(conversation)
        for name, work in (("unpack", _UNPACK), ("list", _within(_LIST))):
            if not _done(runs, name):
                return self._calling(f"Now {name}.", [_next(runs, name, lambda tried, work=work: _noted(tried, work))])
        paths = [line.removeprefix("./") for line in _output(runs, "list").splitlines()]
        open_files = [number for number in range(len(paths)) if not _done(runs, ledger_name(number))]
        if open_files:
            said = f"{len(paths) - len(open_files)} of {len(paths)} files measured."
            return self._calling(said, [self._measure(runs, paths, number) for number in open_files[: self.parallel]])
        if not _done(runs, "total"):
            return self._calling("Counting all.", [_next(runs, "total", lambda tried: _noted(tried, _within(_TOTAL)))])
        page = fetched(conversation)
        if page is not None:
            return self._calling("Fetching the page.", [page])
        question = asked(conversation)
        if question is not None:
            return self._calling("One question before the report.", [question])
        return _report(conversation, runs, paths)

    __call__ = answer

    def _download(self, conversation: Conversation) -> Answer:
        found = _ATTACHMENT.search(conversation.first_user_text)
        if found is None:
            raise ScriptError(f"no attachment is named in {conversation.first_user_text[:200]!r}")
        tried = conversation.results_of("download_file")
        if len(tried) >= TRIES:
            raise ScriptError(f"the archive did not reach the machine: {tried[-1].text[:300]!r}")
        call = Call("download_file", {"artifact": found[1], "path": ARCHIVE})
        return self._calling("Putting the folder on the machine.", [call])

    def _measure(self, runs: dict[str, _Run], paths: list[str], number: int) -> Call:
        slow_s = self.slow_s if number == self.slow else 0.0

        def command(name: str) -> str:
            return file_command(name, paths[number], slow_s=slow_s, speak=bool(slow_s) and number % 2 == 1)

        return _next(runs, ledger_name(number), command)

    def _calling(self, text: str, calls: list[Call]) -> Answer:
        thoughts: tuple[Block, ...] = (Thinking(f"Next: {calls[0].name}."),) if self.thinking else ()
        return Answer(blocks=(*thoughts, Text(text), *calls))


def _next(runs: dict[str, _Run], name: str, command: Any) -> Call:
    """Read on in what runs, else run it under a name that was not used yet."""
    names = [name, *(f"{name}.{number}" for number in range(1, TRIES))]
    for tried in names:
        run = runs.get(tried)
        if run is None:
            return Call("run_command", {"command": command(tried)})
        if not run.over:
            arguments = {"process_id": run.process_id, "cursor": run.cursor, "wait_ms": 10_000, "max_bytes": 65_536}
            return Call("read_process", arguments)
    raise ScriptError(f"the command {name} did not succeed: {runs[names[-1]].output[:300]!r}")


def _runs(conversation: Conversation) -> dict[str, _Run]:
    """What is known of each attempt, by its name in the ledger."""
    runs: dict[str, _Run] = {}
    by_process: dict[str, _Run] = {}
    for result in conversation.results:
        arguments = result.arguments if isinstance(result.arguments, dict) else {}
        if result.name == "run_command":
            name = name_in(str(arguments.get("command", "")))
            if name is None:
                raise ScriptError("a command is there that this script did not ask for")
            run = runs[name] = _Run()
        elif result.name == "read_process" and arguments.get("process_id") in by_process:
            run = by_process[arguments["process_id"]]
        else:
            continue
        _note(run, result)
        if run.process_id:
            by_process[run.process_id] = run
    return runs


def _note(run: _Run, result: ToolResult) -> None:
    """Add one result to what is known. A read that failed says nothing: it is asked again."""
    try:
        value = result.json()
    except msgspec.DecodeError:
        value = {}
    if "state" not in value or "output" not in value:
        if result.name == "run_command":
            run.over = run.failed = True
            run.output = result.text
        return
    run.process_id = value["process_id"]
    if value["cursor"] == run.cursor:
        run.output += value["output"]
        run.cursor = value["next_cursor"]
    # `done` may come with output that is still to be read.
    run.over = bool(value["done"]) and not value["truncated"]
    run.failed = run.over and value["exit_code"] != 0


def _attempts(runs: dict[str, _Run], name: str) -> list[_Run]:
    return [runs[tried] for tried in (name, *(f"{name}.{number}" for number in range(1, TRIES))) if tried in runs]


def _done(runs: dict[str, _Run], name: str) -> bool:
    return any(run.over and not run.failed for run in _attempts(runs, name))


def _output(runs: dict[str, _Run], name: str) -> str:
    return next(run.output for run in _attempts(runs, name) if run.over and not run.failed)


def _good(result: ToolResult) -> bool:
    try:
        return not result.is_error and "size" in result.json()
    except msgspec.DecodeError:
        return False


def _report(conversation: Conversation, runs: dict[str, _Run], paths: list[str]) -> Answer:
    files = []
    for number, path in enumerate(paths):
        size, digest, lines = _output(runs, ledger_name(number)).removeprefix("measuring\n").splitlines()
        files.append({"path": path, "size": int(size), "sha256": digest.split()[0], "lines": int(lines)})
    count, total = (int(line) for line in _output(runs, "total").split())
    report: dict[str, Any] = {"count": count, "bytes": total, "files": files}
    return Answer(blocks=(Text(msgspec.json.encode(report | finished(conversation)).decode()),))
