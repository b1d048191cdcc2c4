"""The command line: `python -m bench SCENARIO`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from bench.options import Options
from bench.report import Result, Run, now_text, save, table, to_json

SCENARIOS: Final = {
    "steps": "durable steps/s against a bare saving loop, a peer (--peer dbos) and a model behind HTTP",
    "latency": "what claim, begin and save add to one step; from an accepted input to its first delta at a client",
    "recovery": "kill -9 of a replica until its agents' next step; restart of an only process",
    "history": "one more step of an agent with 10, 1,000 and 10,000 events, with and without its log in memory",
    "streams": "500 and 2,000 agents that speak at once, each with a reader: lag of a token, cost of a stream",
    "overload": "ten times as many agents as slots, more requests than connections: what is kept, who is turned away",
    "commands": "a command on a local machine, on a daemon's and in a container; what idle machines cost",
    "replicas": "one, two and four processes on one database; executions counted outside of Postgres",
}

LIMIT_S: Final = 3600.0
"""No run takes longer, beside its `--minutes`: it fails then, and stops what it started."""

EPILOG: Final = """\
Each run starts an embedded Postgres (fsync, synchronous_commit and full_page_writes on, read back and reported),
measures, prints a table, and stops everything that it started. The defaults are the sizes of DESIGN §9; a result
with other sizes says so. Run it on a machine that does nothing else: `load_before` in the result tells.

examples:
  python -m bench steps --json --peer dbos --save
  python -m bench steps --seconds 4                     a quick look
  python -m bench steps --minutes 10 --save             does anything grow or slow down?
  python -m bench history --events 10,1000 --rounds 50  a quick look
  python -m bench streams --streams 100x20 --seconds 5  needs 2 open files a stream (ulimit -Hn)
  python -m bench recovery --database-url postgresql://bench@db.example/postgres
  python -m bench latency --server-url http://127.0.0.1:8080 --key omnara_pat_v1_… --model openai/gpt-5-mini

exit codes: 0 measured; 1 something is wrong (a lost or doubled step, a broken invariant), or with --check a bar
was missed; 2 wrong usage or it could not run.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one scenario and return the exit code."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.minutes is not None and chosen.scenario != "steps":
        parser.error("--minutes is for the scenario steps")
    options = _options(chosen)
    try:
        result = asyncio.run(_measure(chosen.scenario, options))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except _refusals() as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(result))
    if chosen.save:
        print(f"\nsaved as bench/results/{save(result).name}")
    if chosen.json:
        print(to_json(result))
    return 1 if result.run.wrong or (chosen.check and not result.passed) else 0


def _parser() -> argparse.ArgumentParser:
    scenarios = "\n".join(f"  {name:<10}{text}" for name, text in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Measures Omnara against the bars of DESIGN §9.\n\nscenarios:\n{scenarios}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plain = Options()
    add = parser.add_argument
    add("scenario", choices=list(SCENARIOS), metavar="SCENARIO", help="one of those above")
    add("--json", action="store_true", help="print the result as JSON on the last line")
    add("--save", action="store_true", help="write it to bench/results/<scenario>-<commit>.json")
    add("--check", action="store_true", help="exit with 1 when a bar is missed")
    add("--database-url", metavar="URL", help="a Postgres whose role may create databases, instead of an embedded one")
    add("--server-url", metavar="URL", help="latency: a running replica set, for first_delta_ms only")
    add("--key", metavar="KEY", help="latency: a key of that server")
    add("--model", metavar="PROVIDER/SLUG", help="latency: a model that the key's project may use on that server")
    add("--agents", type=_positive(int), default=plain.agents, help="agents at once (%(default)s)")
    add("--seconds", type=_positive(float), default=plain.seconds, help="per contestant (%(default)s)")
    add("--minutes", type=_positive(float), metavar="N", help="steps: the engine alone, for so long: is it flat?")
    add("--slots", type=_positive(int), default=plain.slots, help="overload: agents that run at once (%(default)s)")
    add("--kills", type=_positive(int), default=plain.kills, help="recovery: kill -9 so often (%(default)s)")
    add("--restarts", type=_positive(int), default=plain.restarts, help="recovery: restarts (%(default)s)")
    add("--rounds", type=_positive(int), default=plain.rounds, help="latency, history, commands (%(default)s)")
    add("--processes", type=_counts, default=plain.processes, metavar="N,N", help="replicas: counts (1,2,4)")
    add("--events", type=_lengths, default=plain.events, metavar="N,N", help="history: lengths (10,1000,10000)")
    plans = ",".join(f"{agents}x{rate}" for agents, rate in plain.streams)
    add(
        "--streams", type=_plans, default=plain.streams, metavar="NxR,NxR", help=f"streams: agents x tokens/s ({plans})"
    )
    add("--peer", choices=["dbos"], help="steps: also measure this peer (pip install 'omnara[bench]')")
    add("--peer-pool", type=_positive(int), metavar="N", help="steps: connections and threads of the peer")
    return parser


def _options(chosen: argparse.Namespace) -> Options:
    return Options(**{name: getattr(chosen, name) for name in Options.__struct_fields__})


def _positive(kind: Any) -> Any:
    def read(text: str) -> Any:
        value = kind(text)
        if not 0 < value <= 10_000:
            raise argparse.ArgumentTypeError("must be above 0 and at most 10000")
        return value

    return read


def _counts(text: str) -> tuple[int, ...]:
    return _numbers(text, 1, 16, "1,2,4")


def _lengths(text: str) -> tuple[int, ...]:
    return _numbers(text, 10, 100_000, "10,1000,10000")


def _plans(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [part.partition("x") for part in text.split(",")]
    plans = tuple((int(agents), int(rate)) for agents, _, rate in pairs)
    if any(not (1 <= agents <= 10_000 and 1 <= rate <= 1000) for agents, rate in plans):
        raise argparse.ArgumentTypeError("must be agents (up to 10000) x tokens a second (up to 1000), such as 500x20")
    return plans


def _numbers(text: str, least: int, most: int, example: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if not found or any(not least <= number <= most for number in found):
        raise argparse.ArgumentTypeError(f"must be numbers between {least} and {most}, such as {example}")
    return found


async def _measure(scenario: str, options: Options) -> Result:
    # Imported here: git and /proc are nothing that `--help` needs.
    from bench.machine import commit, machine
    from bench.processes import ChildFailed

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _interrupt)
    module = importlib.import_module(f"bench.{scenario}")
    host, at, started, begun = machine(), commit(), now_text(), time.monotonic()
    limit_s = LIMIT_S + 60 * (options.minutes or 0)
    try:
        async with asyncio.timeout(limit_s):
            found: Run = await module.run(options)
    except TimeoutError as error:
        raise ChildFailed(f"the run did not end: {error or f'{limit_s:g} s have passed'}") from error
    return Result(
        scenario=scenario if options.minutes is None else f"{scenario}-minutes",
        commit=at,
        started_at=started,
        took_s=round(time.monotonic() - begun, 1),
        machine=host,
        default_sizes=options.default_sizes,
        run=found,
    )


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def _refusals() -> tuple[type[Exception], ...]:
    import asyncpg

    from bench.cluster import NotDurable
    from bench.processes import ChildFailed
    from omnara.client import ClientError
    from omnara.errors import ConfigurationError

    return (NotDurable, ChildFailed, ConfigurationError, ClientError, asyncpg.PostgresError, OSError)


if __name__ == "__main__":
    sys.exit(main())
