"""The audit script: the demo's model, which inventories a folder through the tools that it is offered.

It hashes what the tool results gave it and nothing else, so a lost, doubled or mixed-up result shows up as
a wrong report.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Any

import msgspec

from omnara.testing.answer import Answer, Block, Call, Text, Thinking
from omnara.testing.conversation import Conversation, ToolResult, ToolSpec
from omnara.testing.script import Script, ScriptError

_URL = re.compile(r"https?://[^\s<>\"'`)\]]+")
_TRIES = 3
DEFAULT_QUESTION = "Shall the report list every file?"


class AuditTools(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the tools that the audit uses."""

    list_files: str = "list_files"
    get_file: str = "get_file"
    web_fetch: str = "web_fetch"
    ask_question: str = "ask_question"


def audit(
    *, parallel: int = 4, thinking: bool = False, question: str = DEFAULT_QUESTION, tools: AuditTools | None = None
) -> Script:
    """Return the audit script.

    Order of its calls: `list_files` once; `get_file` for each file, `parallel` at a time, again (at most
    twice) for a file whose result was an error; `web_fetch` once, of the first URL in the user's first
    message; `ask_question` once; then the report as JSON text. A tool that is not offered is left out.

    A list result is a JSON array of paths (or of objects with `path`), an object with such an array under
    `files`, or lines. A file's result is its text, or a JSON object with exactly the keys `encoding` (`utf-8`
    or `base64`) and `content`, beside an optional `path`.
    """
    return _Audit(parallel, thinking, question, tools or AuditTools()).answer


class _Audit(msgspec.Struct, frozen=True):
    parallel: int
    thinking: bool
    question: str
    tools: AuditTools

    def answer(self, conversation: Conversation) -> Answer:
        """Return the next answer. Raises `ScriptError` when the folder cannot be listed."""
        listing = _last_good(conversation.results_of(self.tools.list_files))
        if listing is None:
            return self._list(conversation)
        paths = _paths(listing)
        reads = self._reads(conversation)
        open_paths = [path for path in paths if _last_good(reads.get(path, ())) is None]
        failed = [path for path in open_paths if len(reads.get(path, ())) >= _TRIES]
        due = [path for path in open_paths if path not in failed]
        if due:
            return self._read(due[: self.parallel], len(paths) - len(open_paths), len(paths), conversation)
        page = fetched(conversation, self.tools.web_fetch)
        if page is not None:
            return self._calling("Fetching the page.", [page])
        question = asked(conversation, self.question, self.tools.ask_question)
        if question is not None:
            return self._calling("One question before the report.", [question])
        return self._report(conversation, paths, reads, failed)

    def _list(self, conversation: Conversation) -> Answer:
        tried = conversation.results_of(self.tools.list_files)
        if len(tried) >= _TRIES:
            raise ScriptError(f"the folder could not be listed: {tried[-1].text[:200]!r}")
        tool = conversation.tool(self.tools.list_files)
        if tool is None:
            raise ScriptError(f"the request offers no tool named {self.tools.list_files}")
        return self._calling("Listing the folder.", [Call(tool.name, _required(tool, "."))])

    def _read(self, paths: list[str], done: int, total: int, conversation: Conversation) -> Answer:
        tool = conversation.tool(self.tools.get_file)
        if tool is None:
            raise ScriptError(f"the request offers no tool named {self.tools.get_file}")
        field = _path_field(tool)
        calls = [Call(tool.name, {field: path}) for path in paths]
        return self._calling(f"{done} of {total} files read.", calls)

    def _report(
        self, conversation: Conversation, paths: list[str], reads: dict[str, list[ToolResult]], failed: list[str]
    ) -> Answer:
        contents = {path: _last_good(reads.get(path, ())) for path in paths}
        files = [_entry(path, result) for path, result in contents.items() if result is not None]
        report = {
            "count": len(files),
            "bytes": sum(entry["size"] for entry in files),
            "files": files,
            "failed": failed,
            **finished(conversation, self.tools),
        }
        return Answer(blocks=(Text(msgspec.json.encode(report).decode()),))

    def _calling(self, text: str, calls: list[Call]) -> Answer:
        thoughts: tuple[Block, ...] = (Thinking(f"Next: {calls[0].name}."),) if self.thinking else ()
        return Answer(blocks=(*thoughts, Text(text), *calls))

    def _reads(self, conversation: Conversation) -> dict[str, list[ToolResult]]:
        """The results of reading, by path: the paths are those of the calls that the results answer."""
        tool = conversation.tool(self.tools.get_file)
        field = _path_field(tool) if tool else "path"
        reads: dict[str, list[ToolResult]] = {}
        for result in conversation.results_of(self.tools.get_file):
            if isinstance(result.arguments, dict) and field in result.arguments:
                reads.setdefault(result.arguments[field], []).append(result)
        return reads


def fetched(conversation: Conversation, tool: str = "web_fetch") -> Call | None:
    """Return the call that fetches the URL of the first message; None when there is none, or it was made."""
    url = _URL.search(conversation.first_user_text)
    offered = conversation.tool(tool)
    if url is None or offered is None or conversation.results_of(tool):
        return None
    return Call(offered.name, {"url": url[0].rstrip(".,;:!?")})


def asked(conversation: Conversation, question: str = DEFAULT_QUESTION, tool: str = "ask_question") -> Call | None:
    """Return the call that asks the user; None when it cannot be made, or was made."""
    offered = conversation.tool(tool)
    if offered is None or conversation.results_of(tool):
        return None
    asks = {"prompt": question, "options": _options(offered, "Yes", "No"), "multiple": False}
    return Call(offered.name, {"questions": [asks]})


def finished(conversation: Conversation, tools: AuditTools | None = None) -> dict[str, Any]:
    """Return what a report says of the page and of the user's answer."""
    names = tools or AuditTools()
    pages = conversation.results_of(names.web_fetch)
    answers = conversation.results_of(names.ask_question)
    return {
        "page": {"ok": not pages[0].is_error, "text": pages[0].text} if pages else None,
        "answer": answers[0].text if answers else None,
    }


def report_of(contents: dict[str, bytes]) -> dict[str, Any]:
    """Return the count, bytes and files that a right report has for these contents; for whoever checks it."""
    files = [_measured(path, data) for path, data in contents.items()]
    return {"count": len(files), "bytes": sum(entry["size"] for entry in files), "files": files}


def _entry(path: str, result: ToolResult) -> dict[str, Any]:
    return _measured(path, file_bytes(result.text))


def _measured(path: str, data: bytes) -> dict[str, Any]:
    return {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def file_bytes(text: str) -> bytes:
    """Return the file that a read result holds. Raises `ScriptError` when its base64 is damaged."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text.encode()
    if not isinstance(found, dict) or set(found) - {"path"} != {"encoding", "content"}:
        return text.encode()
    if found["encoding"] != "base64":
        return str(found["content"]).encode()
    try:
        return base64.b64decode(found["content"], validate=True)
    except binascii.Error as error:
        raise ScriptError(f"a file's base64 is damaged: {error}") from error


def _last_good(results: tuple[ToolResult, ...] | list[ToolResult]) -> ToolResult | None:
    """The newest result that is no error. Chat and Responses carry no error flag; the text has to tell."""
    good = [result for result in results if not result.is_error and not _sounds_failed(result.text)]
    return good[-1] if good else None


def _sounds_failed(text: str) -> bool:
    return text.startswith(("Tool call was interrupted", "Error:"))


def _paths(listing: ToolResult) -> list[str]:
    try:
        found = listing.json()
    except msgspec.DecodeError:
        return [line.strip() for line in listing.text.splitlines() if line.strip()]
    if isinstance(found, dict):
        found = found.get("files", [])
    if not isinstance(found, list):
        raise ScriptError(f"the folder's listing is no list: {listing.text[:200]!r}")
    paths = [item["path"] if isinstance(item, dict) else str(item) for item in found]
    return list(dict.fromkeys(paths))


def _required(tool: ToolSpec, value: str) -> dict[str, str]:
    properties = tool.schema.get("properties") or {}
    wanted = [name for name in tool.schema.get("required") or () if name in properties]
    return {name: value for name in wanted if properties[name].get("type") == "string"}


def _options(tool: ToolSpec, *labels: str) -> list[Any]:
    """Return options as the tool's schema wants them: plain strings, or objects with a `label`."""
    place: Any = tool.schema
    for name in ("properties", "questions", "items", "properties", "options", "items"):
        place = place.get(name) if isinstance(place, dict) else None
    if isinstance(place, dict) and place.get("type") == "string":
        return list(labels)
    return [{"label": label} for label in labels]


def _path_field(tool: ToolSpec) -> str:
    return next(iter(_required(tool, "")), "path")
