"""The two ways to audit: by tools that the demo answers, or by commands on a machine. What differs is here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from omnara.cli.demo.blow import Site
from omnara.cli.demo.command_blow import SLOW_S, NotingScript
from omnara.cli.demo.commands import Commands, count_commands
from omnara.cli.demo.folder import TOOLS, Folder
from omnara.cli.demo.plan import PARALLEL_READS, CommandPlan, KillPlan, draw, draw_command
from omnara.cli.demo.workplace import Workplace, removed_in_time
from omnara.client import Client, Event, file_block
from omnara.testing.audit import audit
from omnara.testing.audit_commands import ARCHIVE, CommandAudit
from omnara.testing.script import Script

__all__ = ["Audit", "ByCommands", "ByTools"]

SCRIPTED_MODEL: Final = "anthropic/scripted"
NAME: Final = "demo audit"
POOL: Final = "demo"
PROMPT: Final = """You audit a folder. Call list_files once. Call get_file for every path, a few at a time. Call
web_fetch once for the URL in the user's message. Then ask the user with ask_question whether the report shall list
every file. Then answer with nothing but a JSON object: count (number of files), bytes (sum of sizes) and files (a
list of path, size in bytes and sha256 in hex for each). If a tool call was interrupted, go on without it."""
COMMAND_PROMPT: Final = "You audit a folder with commands on your machine, and report."


class Audit(Protocol):
    """What the story asks of a way to audit. `script` is None when a real provider answers."""

    folder: Folder
    plan: KillPlan | CommandPlan
    script: Script | None
    site: Site | None

    def environment(self) -> dict[str, str]:
        """Return further settings of the server."""
        ...

    async def launch(self, client: Client, page_url: str, data_dir: Path) -> str:
        """Start the agent on the running server, and return its id."""
        ...

    async def commands(self, client: Client, agent: str, events: Sequence[Event]) -> Commands | None:
        """Say what became of its commands, if it had any; the server runs, and the agent is done."""
        ...

    def expected(self) -> dict[str, Any]:
        """Return the right report, from the files on disk."""
        ...

    async def clean(self) -> None:
        """Remove what the server may have left. It is gone, its database is not."""


class ByTools:
    """Through two tools of the client. `model`: PROVIDER/SLUG of a real provider."""

    site: Site | None = None

    def __init__(self, folder: Folder, seed: int, model: str | None) -> None:
        self.folder = folder
        self.plan: KillPlan | CommandPlan = draw(seed, len(folder.paths))
        self.script = None if model is not None else audit(parallel=PARALLEL_READS, thinking=True)
        self._model = model or SCRIPTED_MODEL

    def environment(self) -> dict[str, str]:
        """See `Audit`."""
        return {}

    async def launch(self, client: Client, page_url: str, data_dir: Path) -> str:
        """See `Audit`."""
        launched = await client.launch(
            model=self._model,
            system_prompt=PROMPT,
            tools=[*TOOLS, "web_fetch", "ask_question"],
            message=f"Please audit the folder. The notice to mention is at {page_url}",
            name=NAME,
        )
        return launched.id

    async def commands(self, client: Client, agent: str, events: Sequence[Event]) -> Commands | None:
        """See `Audit`."""
        return None

    def expected(self) -> dict[str, Any]:
        """See `Audit`."""
        return self.folder.report()

    async def clean(self) -> None:
        """See `Audit`."""


class ByCommands:
    """With programs on a machine of a pool, to which the folder goes as an attachment of the first message."""

    def __init__(self, folder: Folder, seed: int, place: Workplace) -> None:
        self.folder = folder
        plan = draw_command(seed, len(folder.paths))
        self.plan: KillPlan | CommandPlan = plan
        noting = NotingScript(CommandAudit(parallel=PARALLEL_READS, thinking=True, slow=plan.file, slow_s=SLOW_S))
        self.script: Script | None = noting
        self.site: Site | None = Site(place, noting)
        self._plan = plan
        self._place = place

    def environment(self) -> dict[str, str]:
        """See `Audit`."""
        return self._place.environment()

    async def launch(self, client: Client, page_url: str, data_dir: Path) -> str:
        """See `Audit`."""
        self._place.begin(data_dir)
        pool = await client.machines.create_pool(
            POOL, provider=self._place.kind, config=self._place.pool_config, max_machines=1
        )
        launched = await client.launch(
            model=SCRIPTED_MODEL,
            system_prompt=COMMAND_PROMPT,
            tools=["download_file", "web_fetch", "ask_question"],
            machine_sources=[{"pool": pool.name}],
            name=NAME,
        )
        message = f"Please audit the folder in the attachment. The notice to mention is at {page_url}"
        await client.send(launched.id, message, attachments=[file_block(self.folder.archive(), f"{ARCHIVE}.txt")])
        return launched.id

    async def commands(self, client: Client, agent: str, events: Sequence[Event]) -> Commands | None:
        """See `Audit`. Ends the agent, with which its machine has to go."""
        found = count_commands(self._plan, events, await self._place.ledger(), self._place.kind)
        await client.delete(agent)
        return found.but_left(await removed_in_time(self._place))

    def expected(self) -> dict[str, Any]:
        """See `Audit`."""
        return self.folder.report(lines=True)

    async def clean(self) -> None:
        """See `Audit`."""
        await self._place.clean()
