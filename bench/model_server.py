"""The scripted model server in a process of its own, in its fast mode: what it costs is not the engine's."""

from __future__ import annotations

from typing import Any

from bench.workload import ARGUMENTS, FINAL, TEXT, TOOL
from omnara.testing import Answer, Call, ModelServer, Script, Text, Timing, fixed, plan, say

__all__ = ["ModelServerContestant", "commands", "endless"]


def endless(tool: str = TOOL.name) -> Script:
    """The script that asks for one tool call in every answer, for ever, with the bench's texts."""
    return plan(Answer(blocks=(Text(TEXT), Call(tool, ARGUMENTS))), loop=True)


def commands() -> Script:
    """The script of two models: `once` runs a command in every second answer, so once in a turn; others in each."""
    call, done = Answer(blocks=(Call("run_command", {"command": "true"}),)), say(FINAL)
    return lambda asked: done if asked.model == "once" and asked.turn % 2 else call


class ModelServerContestant:
    """Serves until its parent goes. `start` answers with the `url`; scripts: `endless`, `fixed` or `commands`."""

    def __init__(self) -> None:
        self._server: ModelServer | None = None

    async def start(self, spec: dict[str, Any]) -> dict[str, Any]:
        """`spec`: script, fast, delay_ms, tool."""
        scripts = {"fixed": fixed(TEXT), "commands": commands()}
        script = scripts.get(spec.get("script", ""), endless(spec.get("tool", TOOL.name)))
        self._server = ModelServer(
            script,
            lenient=True,
            fast=bool(spec.get("fast", True)),
            timing=Timing(delay_ms=float(spec.get("delay_ms", 0.0))),
        )
        await self._server.start()
        return {"url": self._server.url}

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """`end`: from now on say that all is done. `finish`: how many requests were answered. `log`: time of arrival
        and duration of the requests since a number.
        """
        assert self._server is not None
        log = self._server.log
        if what == "end":
            self._server.script = fixed(FINAL)
            return {}
        if what == "finish":
            return {"requests": log.counts.requests, "answered": log.counts.answered, "refused": log.counts.refused}
        if what == "log":
            since = int(values.get("since", 0))
            return {"entries": [[e.number, e.at, e.seconds] for e in log.entries if e.number > since]}
        raise ValueError(f"unknown request {what!r}")

    async def stop(self) -> None:
        """Close listener and connections."""
        if self._server is not None:
            await self._server.stop()
