"""The demo from start to end: everything that is started here is stopped here, also when something fails."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

from omnara.access.tokens import TokenKind, generate
from omnara.cli.demo.audits import Audit, ByCommands, ByTools
from omnara.cli.demo.blow import Stage, Striker
from omnara.cli.demo.database import look_into_database
from omnara.cli.demo.folder import MAX_FILE_BYTES, Folder
from omnara.cli.demo.hands import Hands
from omnara.cli.demo.page import Page
from omnara.cli.demo.plan import MachineKind
from omnara.cli.demo.server import ServerProcess
from omnara.cli.demo.show import Show
from omnara.cli.demo.verdict import Requests, Verdict, judge
from omnara.cli.demo.workplace import workplace
from omnara.client import Client
from omnara.clock import monotonic
from omnara.db.embedded import EmbeddedPostgres
from omnara.db.embedded.binaries import drop_account
from omnara.db.embedded.datadir import DataDir
from omnara.settings import Settings
from omnara.testing.answer import Timing
from omnara.testing.script import Script
from omnara.testing.server import ModelServer
from omnara.testing.strict import Strictness

__all__ = ["Options", "tell"]

LIMIT_S: Final = 600.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. `model` is PROVIDER/SLUG for a real provider; None for the scripted one.

    `machine`: where the audit's commands run; None for the audit by tools of the client. `image`: for containers.
    """

    folder: Path
    seed: int
    model: str | None
    keep: bool
    machine: MachineKind | None = None
    image: str | None = None


async def tell(options: Options, settings: Settings, show: Show) -> Verdict:
    """Run the demo and return its verdict. Raises ConfigurationError, ServerFailed, TimeoutError after 10 minutes.

    Nothing stays running afterwards, and nothing on disk unless `keep`. Cancellation cleans up as well.
    """
    folder = Folder(options.folder, with_digest=options.model is not None)
    if options.machine is None:
        return await _tell(options, settings, show, ByTools(folder, options.seed, options.model))
    place = workplace(options.machine, settings, options.image)
    try:
        await place.check()
        return await _tell(options, settings, show, ByCommands(folder, options.seed, place))
    finally:
        await place.close()


async def _tell(options: Options, settings: Settings, show: Show, audit: Audit) -> Verdict:
    folder, plan = audit.folder, audit.plan
    if folder.left_out:
        show.say(f"left out {folder.left_out} files: hidden, unreadable, over {MAX_FILE_BYTES} bytes, or too many")
    show.say(f"seed {plan.seed}: the server will be killed {plan.description}", "bold")
    async with contextlib.AsyncExitStack() as stack:
        data_dir = await stack.enter_async_context(_data_dir(settings.postgres_bin, keep=options.keep))
        page = await stack.enter_async_context(Page(hold_first=plan.point == "tool_started"))
        model = None
        if audit.script is not None:
            model = await stack.enter_async_context(_scripted_model(audit.script))
        stack.push_async_callback(audit.clean)
        key = generate(TokenKind.PERSONAL).text
        environment = _environment(settings, data_dir, key, page, model) | audit.environment()
        server = ServerProcess(environment, data_dir / "server.log")
        stack.callback(server.kill)
        async with asyncio.timeout(LIMIT_S):
            return await _audit(audit, Stage(folder, page, model, server, show, audit.site), key, data_dir)


async def _audit(audit: Audit, stage: Stage, key: str, data_dir: Path) -> Verdict:
    show, server, model, page = stage.show, stage.server, stage.model, stage.page
    begun = monotonic()
    show.say("starting Postgres and the server")
    show.say(f"server ready after {await server.start():.2f} s, pid {server.pid}")
    async with Client(server.url, key, retry_for_s=math.inf) as client:
        agent = await audit.launch(client, page.url, data_dir)
        show.say(f"launched {agent}")
        hands = Hands(client, agent, stage.folder, ask=show.ask, show=show.event)
        striker = Striker(audit.plan, stage, hands)
        async with asyncio.TaskGroup() as group:
            strike = group.create_task(striker.strike())
            await hands.follow()
            # A real model may take fewer turns than planned; then the blow never falls, and that is a failure.
            striker.too_late()
        blow = strike.result()
        requests = None
        if model is not None:
            after = tuple(entry.turn for entry in model.log.entries if entry.number > blow.requests)
            requests = Requests(model.log.counts.requests, after)
        database = await look_into_database(data_dir, agent)
        commands = await audit.commands(client, agent, hands.events)
    stop_code = await server.stop()
    show.say(f"server stopped with code {stop_code}")
    return judge(
        audit.plan,
        blow,
        hands,
        expected=audit.expected(),
        requests=requests,
        page_hits=page.hits,
        database=database,
        stop_code=stop_code,
        total_s=monotonic() - begun,
        commands=commands,
    )


@contextlib.asynccontextmanager
async def _scripted_model(script: Script) -> AsyncIterator[ModelServer]:
    async with ModelServer(script, strict=Strictness(models=None), timing=Timing(token_ms=4)) as server:
        yield server


@contextlib.asynccontextmanager
async def _data_dir(bin_dir: Path | None, *, keep: bool) -> AsyncIterator[Path]:
    """A private directory whose database is stopped, whoever left it running, before the directory goes."""
    path = Path(tempfile.mkdtemp(prefix="omnara-demo-"))
    try:
        yield path
    finally:
        if await EmbeddedPostgres.running_dsn(path) is not None:
            async with EmbeddedPostgres(path, bin_dir=bin_dir):
                pass
        if not keep:
            await asyncio.to_thread(_erase, path)


def _erase(path: Path) -> None:
    """Remove the directory and, if Postgres had to live elsewhere (as another account), that place too."""
    home = DataDir.prepare(path, drop_account()).home
    for directory in {path, home}:
        shutil.rmtree(directory, ignore_errors=True)


def _environment(settings: Settings, data_dir: Path, key: str, page: Page, model: ModelServer | None) -> dict[str, str]:
    """The server's settings: nothing of the operator's own, but a provider key when a real model was asked for."""
    values = {
        "OMNARA_DATA_DIR": str(data_dir),
        "OMNARA_BOOTSTRAP_API_KEY": key,
        "OMNARA_LOG_FORMAT": "json",
        "OMNARA_ALLOWED_PRIVATE_HOSTS": page.authority,
    }
    if settings.postgres_bin is not None:
        values["OMNARA_POSTGRES_BIN"] = str(settings.postgres_bin)
    if model is not None:
        values["ANTHROPIC_API_KEY"] = "scripted"
        values["ANTHROPIC_BASE_URL"] = f"{model.url}/v1"
        values["OMNARA_ALLOWED_PRIVATE_HOSTS"] += f",{model.url.removeprefix('http://')}"
        return values
    real = {
        "ANTHROPIC_API_KEY": settings.anthropic_api_key,
        "ANTHROPIC_BASE_URL": settings.anthropic_base_url,
        "OPENAI_API_KEY": settings.openai_api_key,
        "OPENAI_BASE_URL": settings.openai_base_url,
    }
    values["OMNARA_ALLOWED_PRIVATE_HOSTS"] = ",".join((page.authority, *settings.allowed_private_hosts))
    return values | {name: value for name, value in real.items() if value is not None}
