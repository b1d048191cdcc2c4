"""The engine as a contestant: the parts that `omnara serve --roles worker,maintenance` builds, around the bench's work.

Nothing of the path from claim to save is replaced. A step counts when the worker counts it, which is after the
statement that saved it has committed; at the end Postgres is asked whether it agrees.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.workload import TOOL, Gate, Ledger, Work
from omnara.app.parts import Parts, build, build_gateway
from omnara.clock import poll_until
from omnara.db.connection import ConnectSettings
from omnara.ids import new_uuid
from omnara.metrics import Metrics
from omnara.providers.in_process import InProcessAdapter
from omnara.service import Shutdown, Stopped, Supervisor
from omnara.settings import Settings
from omnara.tools.registry import offered
from omnara.vault import parse_ring

__all__ = ["EngineContestant", "engine_settings"]

FORMAT: Final = "openai_chat_completions"


def engine_settings(capacity: int | None = None, **changes: Any) -> Settings:
    """The defaults of `serve`, without its API, and with loopback allowed for the scripted model server."""
    if capacity is not None:
        changes["worker_capacity"] = capacity
    return Settings(roles=frozenset({"worker", "maintenance"}), allowed_private_hosts=("127.0.0.1",), **changes)


class EngineContestant:
    """Agents run as soon as the database has some; between two slices all of them wait in their tool call."""

    def __init__(self) -> None:
        self._gate = Gate()
        self._shutdown = Shutdown()
        self._running: asyncio.Task[object] | None = None
        self._ledger: Ledger | None = None
        self._offers = ExitStack()

    async def start(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Start the services. `spec`: dsn, embedded, ring, http (use the real adapter), capacity, ledger, settings."""
        if spec.get("ledger"):
            self._ledger = Ledger(Path(spec["ledger"]))
        self.work = self.make_work(spec)
        self._offers.enter_context(offered(TOOL, self.work.tool))
        self._metrics = Metrics.create()
        database = ConnectSettings(dsn=spec["dsn"], embedded=spec["embedded"])
        settings = engine_settings(spec.get("capacity"), **spec.get("settings", {}))
        gateway = build_gateway(settings)
        if not spec.get("http"):
            gateway.register(FORMAT, InProcessAdapter(self.work.model))
        self.parts: Parts = build(settings, database, parse_ring(spec["ring"]), self._metrics, gateway)
        supervisor = Supervisor(self.parts.services, drain_timeout_s=20.0, metrics=self._metrics)
        self._running = asyncio.create_task(supervisor.run(self._shutdown))
        await self._until(lambda: supervisor.ready, 60.0, "the engine did not start")
        return {"pid": os.getpid()}

    def make_work(self, _spec: dict[str, Any]) -> Work:
        """The model and the tool of this contestant."""
        return Work(self._gate, self._ledger)

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """`run` for some seconds, count who is `waiting`, `poke` the claimer, or `finish`."""
        match what:
            case "run":
                return await self._run(float(values["seconds"]), alone=values.get("alone", True))
            case "waiting":
                return {"waiting": self._gate.waiting}
            case "gathered":
                await self._until(lambda: self._gate.waiting >= values["agents"], 60.0, "agents did not gather")
                return {"waiting": self._gate.waiting}
            case "poke":
                self.parts.deps.hints.ready((new_uuid(),))
                return {}
            case "finish":
                return await self._finish()
        raise ValueError(f"unknown request {what!r}")

    async def stop(self) -> None:
        """Drain and stop the services."""
        self.work.finish()
        self._shutdown.request()
        if self._running is not None:
            ended = await self._running
            if not isinstance(ended, Stopped):
                raise RuntimeError(f"the engine ended: {ended}")
            await self.parts.deps.gateway.close()
        self._offers.close()
        if self._ledger is not None:
            self._ledger.close()

    async def _run(self, seconds: float, *, alone: bool) -> dict[str, Any]:
        """Open the gate for a while; count what was saved while it was open.

        When this process is `alone` with its database, wait until all of its agents have gathered again.
        """
        expected = self._gate.waiting
        cpu, steps, begun = time.process_time(), self._saved(), time.monotonic()
        self._gate.open()
        await asyncio.sleep(seconds)
        steps, took = self._saved() - steps, time.monotonic() - begun
        cpu = time.process_time() - cpu
        self._gate.close()
        if alone:
            await self._until(lambda: self._gate.waiting >= expected, 60.0, "agents did not gather after a slice")
        return {"steps": steps, "seconds": took, "cpu_s": cpu, "agents": expected}

    async def _finish(self) -> dict[str, Any]:
        """End all turns; the answer has the number of steps that this process counted as saved."""
        self.work.finish()
        worker = next(service for service in self.parts.services if service.name == "worker")
        await self._until(lambda: not getattr(worker, "running", 0), 60.0, "turns did not end")
        sizes = {
            name: self._metrics.registry.get_sample_value(f"omnara_save_group_size_{name}") or 0.0
            for name in ("sum", "count")
        }
        return {
            "saved": self._saved(),
            "retries": self._sample("model", "retry"),
            "failed": self._sample("model", "failed"),
            "lost": self._sample("model", "lost") + self._sample("tools", "lost"),
            "mean_group": sizes["sum"] / max(1.0, sizes["count"]),
        }

    def _saved(self) -> int:
        return self._sample("model", "saved") + self._sample("tools", "saved")

    def _sample(self, kind: str, outcome: str) -> int:
        labels = {"kind": kind, "outcome": outcome}
        return int(self._metrics.registry.get_sample_value("omnara_steps_total", labels) or 0)

    async def _until(self, reached: Any, within_s: float, otherwise: str) -> None:
        async def check() -> bool:
            if self._running is not None and self._running.done():
                raise RuntimeError(f"the engine ended: {self._running.result()}")
            return bool(reached())

        if not await poll_until(check, within_s=within_s, every_s=0.01):
            raise TimeoutError(f"{otherwise} in {within_s:g} s ({self._gate.waiting} wait at the gate)")
