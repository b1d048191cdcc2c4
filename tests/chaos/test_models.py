"""Everything that a model endpoint does wrong, at once: what is tried again, when, and what ends the turn."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate, parsedate_to_datetime

import msgspec

from omnara.client import Client
from omnara.testing import (
    Cut,
    Drip,
    Fault,
    HttpError,
    NoHeaders,
    Silence,
    StreamError,
    call,
    embed,
    overloaded,
    rate_limited,
    say,
)
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.waiting import until

LIMITS = {
    "MODEL_FIRST_BYTE_TIMEOUT": "3s",
    "MODEL_IDLE_TIMEOUT": "3s",
    "MODEL_TOTAL_TIMEOUT": "6s",
}
YEAR_99999 = "Fri, 01 Jan 99999 00:00:00 GMT"


def in_seconds(seconds: int) -> str:
    """An HTTP date that lies ahead."""
    return formatdate(time.time() + seconds, usegmt=True)


class Case(msgspec.Struct, frozen=True):
    """A fault that strikes once, and the least pause in seconds until the next attempt, or the date it waits for."""

    name: str
    fault: Fault
    wait_s: float = 0.0
    date: str = ""


def dated(date: str) -> Case:
    """A rate limit that names a moment: how long that is depends on when the call is made."""
    return Case("date", rate_limited(date), date=date)


def passing() -> list[Case]:
    """Faults after which the call is made again and succeeds. Long waits would show as attempts that never come."""
    return [
        Case("seconds", rate_limited("2"), 2.0),
        Case("fraction", rate_limited("1.5"), 1.5),
        dated(in_seconds(8)),
        Case("past", rate_limited(in_seconds(-100))),
        Case("milliseconds", rate_limited(retry_after_ms="1200"), 1.2),
        Case("both", rate_limited("3000", "800"), 0.8),
        Case("no header", rate_limited()),
        Case("nonsense", rate_limited("soon")),
        Case("negative", rate_limited("-5")),
        Case("not a number", rate_limited("nan")),
        Case("endless", rate_limited("inf")),
        Case("year 99999", rate_limited(YEAR_99999)),
        Case("500", HttpError(500)),
        Case("529", overloaded(529)),
        Case("html", HttpError(502, body="<html>Bad gateway</html>")),
        Case("error before text", StreamError("first_delta")),
        Case("error in text", StreamError("mid_text")),
        Case("cut", Cut("mid_text")),
        Case("ended early", Cut("mid_text", clean=True)),
        Case("hung up", NoHeaders(drop=True)),
        Case("silence", Silence("mid_text")),
        Case("no headers", NoHeaders()),
        Case("drip", Drip(interval_ms=300)),
    ]


TERMINAL = (
    Case("401", HttpError(401)),
    Case("402", HttpError(402)),
    Case("400", HttpError(400)),
)


async def test_every_trouble_of_a_model(cluster: Cluster, client: Client) -> None:
    """All in parallel on one worker: nobody's wait keeps another waiting, and no partial answer is left."""
    limits = LIMITS if cluster.times.name == "shrunk" else {}
    (worker,) = await cluster.start(settings=limits)
    await (await cluster.agent(client)).settled()  # the first call loads the provider's client; dates run from now on
    cases = passing()
    troubled = [await struck(cluster, client, case) for case in cases]
    refused = [await struck(cluster, client, case) for case in TERMINAL]
    exhausted = await struck(cluster, client, Case("always 500", HttpError(500)), times=-1)
    arguments = await cut_in_a_call(cluster, client)
    parked = await struck(cluster, client, Case("3600", rate_limited("3600")))
    await asyncio.gather(
        *(tried_again(agent, case) for agent, case in zip(troubled, cases, strict=True)),
        *(ended(agent) for agent in refused),
        gave_up(exhausted),
        *(never_half_called(agent, fault) for agent, fault in arguments),
        waits_without_a_slot(parked, client),
    )
    assert cluster.page.hits["arguments-once"] == len(arguments)
    assert worker.alive
    await cluster.end(worker)


async def struck(cluster: Cluster, client: Client, case: Case, *, times: int = 1) -> Handle:
    """An agent whose model call meets the case's fault."""
    answer = say("answer {{attempt}} which is long enough to be cut")
    return await cluster.agent(client, answer, text=case.name, fault=case.fault, fault_times=times)


async def tried_again(agent: Handle, case: Case) -> None:
    """Two requests, the pause between them, one answer in the log."""
    await agent.settled(within_s=700)
    assert await agent.texts() == ["answer 2 which is long enough to be cut"], case.name
    first, second = agent.requests
    paused_s = second.at - (first.at + first.seconds if first.outcome != "open" else first.at)
    assert case.wait_s - 0.1 <= paused_s <= max(case.wait_s * 2, 5) + 20, (case.name, paused_s)
    if case.date:
        assert second.at >= parsedate_to_datetime(case.date).timestamp() - 0.1, (case.name, paused_s)
    steps = await agent.steps()
    assert [(row["state"], row["attempt"]) for row in steps] == [("failed", 1), ("succeeded", 2)], case.name
    assert msgspec.json.decode(steps[0]["error"])["kind"] != "invalid_request"


async def cut_in_a_call(cluster: Cluster, client: Client) -> list[tuple[Handle, Fault]]:
    """Agents whose first answer breaks off inside the arguments of a call."""
    faults: tuple[Fault, ...] = (Cut("mid_arguments"), StreamError("mid_arguments"), Silence("mid_arguments"))
    asked = call("web_fetch", cluster.fetch("arguments-once"), text="{{attempt}}")
    return [(await cluster.agent(client, asked, say("done"), fault=fault), fault) for fault in faults]


async def never_half_called(agent: Handle, fault: Fault) -> None:
    """The call runs once, with whole arguments, out of the second answer."""
    await agent.settled(within_s=700)
    assert await agent.texts() == ["2", "done"], fault
    assert [state for _, state in await agent.step_states()] == ["failed", "succeeded", "succeeded", "succeeded"]


async def ended(agent: Handle) -> None:
    """One request; the reason is in the log; the next message goes on as if nothing had been."""
    await agent.settled()
    assert len(agent.requests) == 1, agent.key
    (last,) = [event for event in await agent.events() if event.kind == "model_output"]
    assert (last.stop_reason, [block["type"] for block in last.content_blocks]) == ("error", ["error"])
    assert [row["state"] for row in await agent.steps()] == ["failed"]
    await agent.client.send(agent.id, embed(say("recovered")))
    await agent.asked(2)
    await agent.settled()
    assert (await agent.texts())[-1] == "recovered"


async def gave_up(agent: Handle) -> None:
    """Nine attempts, then the turn ends with the error."""
    await agent.settled(within_s=400)
    assert len(agent.requests) == 9
    assert [(row["state"], row["attempt"]) for row in await agent.steps()] == [("failed", n) for n in range(1, 10)]
    assert (await agent.events())[-1].stop_reason == "error"


async def waits_without_a_slot(agent: Handle, client: Client) -> None:
    """An hour is waited for in the database: nobody holds the agent, and a cancel ends the wait."""

    async def parked() -> bool:
        return (await agent.hot())["retry_at"] is not None

    await until(parked, "the retry is parked", limit_s=30)
    hot = await agent.hot()
    now = await agent.cluster.sql.fetchval("select clock_timestamp()")
    assert 3500 < (hot["retry_at"] - now).total_seconds() <= 3600
    assert hot["worker_id"] is None
    assert (await client.status(agent.id)).status == "running"
    assert await client.cancel(agent.id)
    await client.send(agent.id, embed(say("after the wait")))
    await agent.asked(2)
    await agent.settled()
    assert (await agent.texts())[-1] == "after the wait"
