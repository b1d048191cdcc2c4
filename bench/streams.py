"""`streams`: many agents speak at once and each has a reader. How late is a token, what does a stream cost?

A real `omnara serve`, a model process that writes into each token when it left, and one process with all readers. The
lag of a token is from the model's write to the reader's read: provider client, parser, feed, HTTP and two sockets.
Source: DESIGN §6, §9.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from bench.cluster import Cluster, open_cluster
from bench.options import Options
from bench.processes import Child, ChildFailed, start_child, work_directory
from bench.report import Run
from bench.servers import Server, server_environment
from bench.usage import cpu_s, rss_bytes
from bench.verify import look
from omnara.access.tokens import TokenKind, generate
from omnara.client import Client
from omnara.vault import generate_ring

__all__ = ["check_limits", "run"]

REQUESTS_AT_ONCE: Final = 8
SPARE: Final = 64
"""Connections and files beside those of streams and models."""
WARM_UP_S: Final = 2.0
SETTLE_S: Final = 1.0
DEFAULT_CAPACITY: Final = 512


async def run(options: Options) -> Run:
    """Measure each plan with a server and a database of its own. Raises ChildFailed, NotDurable."""
    for agents, _ in options.streams:
        check_limits(agents)
    figures: dict[str, float | int | None] = {}
    details: dict[str, Any] = {}
    wrong: list[str] = []
    async with work_directory() as directory, open_cluster(options.database_url) as cluster:
        for place, (agents, rate) in enumerate(options.streams):
            found = await _Plan(cluster, directory, agents, rate, options.seconds).run()
            ending = "" if place == 0 else f"_{agents}"
            figures |= {f"{name}{ending}": value for name, value in found["figures"].items()}
            details[f"{agents}x{rate}"] = found["details"]
            wrong += [f"{agents} streams: {text}" for text in found["wrong"]]
        facts = cluster.facts
    sizes = {"streams": [f"{agents}x{rate}" for agents, rate in options.streams], "seconds": options.seconds}
    return Run(sizes=sizes, figures=figures, details=details, postgres=facts, wrong=wrong)


def check_limits(streams: int, hard: int | None = None) -> None:
    """Raise ChildFailed when so many streams do not fit into the hard limit of open files of one process.

    The server gives clients at most half of its files; its connections to models take as many again.
    """
    if hard is None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = 2 * (streams + SPARE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ChildFailed(
            f"{streams} streams need {needed} open files in one process and the hard limit is {hard}: "
            f"raise it (`ulimit -Hn {needed}` as root, or LimitNOFILE), or measure fewer with --streams"
        )


class _Plan:
    """So many agents, each with one reader, speaking at the same rate."""

    def __init__(self, cluster: Cluster, directory: Path, agents: int, rate: int, seconds: float) -> None:
        self._cluster = cluster
        self._directory = directory
        self._agents = agents
        self._rate = rate
        self._seconds = seconds
        self._tokens = int(rate * (WARM_UP_S + seconds + 1.0))

    async def run(self) -> dict[str, Any]:
        """Start everything, measure, check, stop everything."""
        key, ring = generate(TokenKind.PERSONAL).text, generate_ring()
        async with contextlib.AsyncExitStack() as stack:
            database = await stack.enter_async_context(self._cluster.database(f"streams_{self._agents}"))
            model = await stack.enter_async_context(
                start_child("paced", self._directory, rate=self._rate, tokens=self._tokens)
            )
            url = str(model.hello["url"])
            environment = server_environment(database, ring, key, url) | {
                "ANTHROPIC_API_KEY": "bench",
                "ANTHROPIC_BASE_URL": url,
                "OMNARA_WORKER_CAPACITY": str(max(DEFAULT_CAPACITY, self._agents)),
                "OMNARA_MAX_CONNECTIONS": str(self._agents + SPARE),
            }
            server = Server(f"streams-{self._agents}", environment, self._directory)
            stack.push_async_callback(server.kill)
            await server.start()
            client = await stack.enter_async_context(Client(server.url, key, timeout_s=60.0))
            links = await self._launch(client)
            found = await self._measure(server, model, client, key, links)
            code = await server.stop()
            counted = await look(database.dsn)
        found["wrong"] += [*counted.broken, *([f"the server stopped with code {code}"] if code else [])]
        if counted.others or counted.succeeded != self._agents:
            found["wrong"].append(f"{counted.succeeded} steps of {self._agents} were saved, others: {counted.others}")
        return found

    async def _launch(self, client: Client) -> dict[str, str]:
        """Launch the agents without a word; returns the path of each one's stream."""

        async def one() -> tuple[str, str]:
            made = await client.launch(model="anthropic/paced", system_prompt="Speak.")
            return made.id, made.links.stream

        return dict(await _each(one for _ in range(self._agents)))

    async def _measure(
        self, server: Server, model: Child, client: Client, key: str, links: Mapping[str, str]
    ) -> dict[str, Any]:
        at = urlsplit(server.url)
        await asyncio.sleep(SETTLE_S)
        before = rss_bytes(server.pid)
        paths = [f"{path}?stream_deltas=true" for path in links.values()]
        async with start_child(
            "readers", self._directory, host=at.hostname, port=at.port, key=key, paths=paths
        ) as readers:
            await asyncio.sleep(SETTLE_S)
            opened = rss_bytes(server.pid)
            await _each((lambda agent=agent: client.send(agent, "Speak now.")) for agent in links)
            await model.ask("go", agents=self._agents)
            await asyncio.sleep(WARM_UP_S)
            used, since = await self._used(server, model, readers), time.monotonic_ns()
            await asyncio.sleep(self._seconds)
            now, until = await self._used(server, model, readers), time.monotonic_ns()
            speaking = rss_bytes(server.pid)
            written = int((await model.ask("finish"))["tokens"])
            read = await readers.ask("finish", since=since, until=until)
        took = (until - since) / 1e9
        shares = {name: round((now[name] - used[name]) / took, 3) for name in now}
        figures = {
            "lag_ms_p99": read["lag_ms"].get("p99"),
            "lag_ms_p50": read["lag_ms"].get("p50"),
            "bytes_per_stream": round((opened - before) / self._agents),
            "cpu_share": shares["server"],
            "tokens_per_s": round(read["measured"] / took, 1),
            "tokens_dropped": written - int(read["tokens"]),
        }
        details = {
            "lag_ms": {**read["lag_ms"], "max": round(read["lag_ms_max"], 3)},
            "cpu_shares": shares,
            "rss_bytes": {"before": before, "streams_open": opened, "speaking": speaking},
            "tokens": {"written": written, "read": read["tokens"], "measured": read["measured"]},
        }
        return {"figures": figures, "details": details, "wrong": self._wrong(written, read)}

    def _wrong(self, written: int, read: Mapping[str, Any]) -> list[str]:
        """What was promised: every saved answer is whole, no token is shown twice. That some are not is a figure."""
        wrong = []
        short = [count for count in read["answers"] if count != self._tokens]
        if short or len(read["answers"]) != self._agents:
            wrong.append(f"{len(read['answers'])} answers came, {len(short)} of them not whole")
        if written != self._tokens * self._agents:
            wrong.append(f"the model wrote {written} tokens of {self._tokens * self._agents}")
        if read["tokens"] > written:
            wrong.append(f"{read['tokens']} tokens were shown of {written}")
        return wrong

    async def _used(self, server: Server, model: Child, readers: Child) -> dict[str, float]:
        return {"server": cpu_s(server.pid), "model": cpu_s(model.pid), "readers": cpu_s(readers.pid)}


async def _each(calls: Any) -> list[Any]:
    """Await what the calls return, a few at a time."""
    found: list[Any] = []
    todo = iter(calls)

    async def work() -> None:
        found.extend([await call() for call in todo])

    async with asyncio.TaskGroup() as group:
        for _ in range(REQUESTS_AT_ONCE):
            group.create_task(work())
    return found
