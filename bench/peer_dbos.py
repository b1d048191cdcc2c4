"""DBOS as a contestant: the same pair of steps, the same texts, the same number of agents at once, the same Postgres.

An agent is an async workflow that runs a model step and a tool step in turn, for ever; each step is durable when its
awaited call returns, and counts then. Its fastest documented way is used: async workflows and steps (plain threaded
ones starve each other for connections at 256 agents, until its pool times out), no telemetry, warnings only. Pool and
thread limits are the best of those tried on two cores; its JSON serializer makes no difference. `--peer-pool` tries
another size.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from bench.workload import ARGUMENTS, RESULT, TEXT, TOOL, Gate
from omnara.clock import poll_until

__all__ = ["POOL", "THREADS", "DbosContestant"]

POOL: Final = 10
"""Connections. Its default is 20; 10 were some 10 % faster on two cores, 5 and 40 slower."""
THREADS: Final = 10
"""Threads that carry its database calls: more than connections only wait for one."""

MODEL_OUTPUT: Final = msgspec.json.encode(
    {
        "model_call_context_id": "mcc_" + "0" * 26,
        "stop_reason": "tool_use",
        "content_blocks": [
            {"type": "text", "text": TEXT},
            {"type": "tool_call", "tool_call_id": "tcl_" + "0" * 26, "name": TOOL.name, "input": ARGUMENTS},
        ],
    }
).decode()
TOOL_OUTPUT: Final = msgspec.json.encode({"outcome": "succeeded", "content_blocks": [{"text": RESULT}]}).decode()


class DbosContestant:
    """Its own process: DBOS keeps one instance per process, with threads."""

    def __init__(self) -> None:
        self._gate = Gate()
        self._steps = 0
        self._handles: list[Any] = []
        self._dbos: Any = None
        self._over = False

    async def start(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Launch DBOS and start the workflows. `spec`: dsn, agents, pool, threads, serializer."""
        # Imported here: only a run with this peer needs it installed.
        from importlib.metadata import version

        from dbos import DBOS, DBOSConfig

        config: DBOSConfig = {
            "name": "omnara-bench",
            "system_database_url": _with_driver(spec["dsn"]),
            "sys_db_pool_size": int(spec.get("pool", POOL)),
            "max_executor_threads": int(spec.get("threads", THREADS)),
            "log_level": "WARNING",
            "enable_otlp": False,
        }
        if spec.get("serializer") == "json":
            from dbos import DBOSPortableJSONSerializer

            config["serializer"] = DBOSPortableJSONSerializer()
        self._dbos = DBOS(config=config)
        model, tool = DBOS.step()(_model), DBOS.step()(_tool)

        @DBOS.workflow()
        async def agent(_number: int) -> None:
            while not self._over:
                await self._gate.passed()
                await model()
                self._steps += 1
                await tool()
                self._steps += 1

        DBOS.launch()
        for number in range(int(spec["agents"])):
            self._handles.append(await DBOS.start_workflow_async(agent, number))
        await self._gathered()
        return {"version": version("dbos")}

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """`run` for some seconds, or `finish`."""
        if what == "finish":
            self._over = True
            self._gate.open()
            for handle in self._handles:
                await handle.get_result()
            return {"saved": self._steps}
        if what != "run":
            raise ValueError(f"unknown request {what!r}")
        steps, cpu, begun = self._steps, time.process_time(), time.monotonic()
        self._gate.open()
        await asyncio.sleep(float(values["seconds"]))
        steps, took = self._steps - steps, time.monotonic() - begun
        cpu = time.process_time() - cpu
        self._gate.close()
        await self._gathered()
        return {"steps": steps, "seconds": took, "cpu_s": cpu}

    async def stop(self) -> None:
        """End DBOS; workflows that still run are cut off with the process."""
        if self._dbos is not None:
            await asyncio.to_thread(self._dbos.destroy)

    async def _gathered(self) -> None:
        async def gathered() -> bool:
            return self._gate.waiting >= len(self._handles)

        if not await poll_until(gathered, within_s=60.0, every_s=0.01):
            raise TimeoutError(f"{self._gate.waiting} of {len(self._handles)} workflows wait at the gate")


async def _model() -> str:
    return MODEL_OUTPUT


async def _tool() -> str:
    return TOOL_OUTPUT


def _with_driver(dsn: str) -> str:
    return urlunsplit(urlsplit(dsn)._replace(scheme="postgresql+psycopg"))
