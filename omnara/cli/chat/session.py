"""A chat on a terminal: the stream, the user's lines, the forms and the watch over the agent, in one task group."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from prompt_toolkit.formatted_text import StyleAndTextTuples
from rich.console import RenderableType
from rich.text import Text

from omnara.cli.chat.activity import HELD
from omnara.cli.chat.attach import Attachment, CannotAttach, read_attachment
from omnara.cli.chat.commands import COMPLETER, HELP, command_of
from omnara.cli.chat.desk import Desk
from omnara.cli.chat.live import Bar, live_view
from omnara.cli.chat.outbox import Item, Message, Outbox, is_away
from omnara.cli.chat.screen import Screen
from omnara.cli.chat.transcript import notice
from omnara.cli.chat.view import Kind, Part, View
from omnara.client import AgentStatus, ApiError, Client, ClientError, Event, ServerUnreachable, ToolCallUpdate
from omnara.clock import monotonic

__all__ = ["Chat"]

SHOWN_MESSAGES: Final = 2
"""Messages, with what followed them, that are shown at the start."""
PAST_EVENTS: Final = 100
LEAVE_S: Final = 2.0
"""Two Ctrl-C within this time leave."""
LOOK_S: Final = 5.0
LOOK_FORMS_S: Final = 1.0
"""How often the agent is looked at without a hint; while calls are open, a form may be there."""
RECONNECT_CAP_S: Final = 3.0
FULL: Final = notice("too much waits for the server already; not sent", "red")


class Chat:
    """One agent, one terminal. Run it once; cancellation restores the terminal and leaves the agent to itself."""

    def __init__(self, client: Client, agent: str) -> None:
        self._client = client
        self._agent = agent
        self._view = View()
        self._desk = Desk()
        self._outbox = Outbox(client, agent, self._taken, self._refused)
        self._screen = Screen(self._live, self._line, self._interrupt, COMPLETER)
        self._status = "idle"
        self._attached: list[Attachment] = []
        self._away_since: float | None = None
        self._stopping = False
        self._interrupted = -LEAVE_S
        self._last_kind: Kind | None = None
        self._look = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> int:
        """Talk until the user leaves or the agent is archived; return the exit code.

        Raises ClientError for what no repetition cures, in the first requests also ServerUnreachable.
        """
        after = await self._open()
        async with asyncio.TaskGroup() as group:
            self._group = group
            for work in (self._read(after), self._outbox.run(), self._watch()):
                self._spawn(work)
            try:
                await self._screen.run()
            finally:
                for task in self._tasks:
                    task.cancel()
        return self._close()

    # --- begin and end --------------------------------------------------------------------------------------

    async def _open(self) -> int:
        status = await self._client.status(self._agent)
        events = await self._client.latest_events(self._agent, limit=PAST_EVENTS)
        name = f"{status.name} " if status.name else ""
        self._print("notice", notice(f"{name}{status.id}"))
        self._show(self._view.past(events, SHOWN_MESSAGES))
        self._note_status(status)
        self._look.set()
        return events[-1].sequence if events else 0

    def _close(self) -> int:
        if self._outbox.unsent:
            self._print("notice", notice(f"{self._outbox.unsent} messages or answers were not sent", "red"))
            return 1
        if self._view.working or self._view.waiting:
            self._print("notice", notice(f"the agent goes on; come back with: omnara chat {self._agent}"))
        return 0

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._group is not None
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- what comes from the server -------------------------------------------------------------------------

    async def _read(self, after: int) -> None:
        async with self._client.stream(
            self._agent, after=after, deltas=True, on_connection=self._connection, max_wait_s=RECONNECT_CAP_S
        ) as items:
            async for item in items:
                self._show(self._view.take(item))
                if isinstance(item, Event | ToolCallUpdate):
                    self._look.set()
                if not self._view.working:
                    self._stopping = False
                self._screen.refresh()

    def _connection(self, lost: str | None) -> None:
        if lost is not None and self._away_since is None:
            self._away_since = monotonic()
        elif lost is None and self._away_since is not None:
            away_s = monotonic() - self._away_since
            self._away_since = None
            self._print("notice", notice(f"connected again after {away_s:.1f} s"))
        self._look.set()
        self._screen.refresh()

    async def _watch(self) -> None:
        """Look for forms and for an agent that is held, when there is a hint and from time to time."""
        while True:
            pause_s = LOOK_FORMS_S if self._view.activity.open_calls and not self._desk.question else LOOK_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._look.wait()
            except TimeoutError:
                pass
            self._look.clear()
            try:
                await self._look_once()
            except (ApiError, ServerUnreachable) as error:
                if not is_away(error):
                    raise

    async def _look_once(self) -> None:
        if self._view.activity.open_calls or self._desk.question is not None:
            forms = await self._client.interactions(self._agent)
            self._print("form", *self._desk.update(forms))
        self._note_status(await self._client.status(self._agent))
        self._screen.refresh()

    def _note_status(self, status: AgentStatus) -> None:
        held = HELD.get(status.status) if status.status != self._status else None
        self._status = status.status
        if held is not None:
            self._print("notice", notice(held, "yellow"))
        if status.status == "archived":
            self._screen.close()

    # --- what comes from the user ---------------------------------------------------------------------------

    def _line(self, text: str, steer: bool) -> None:
        command = command_of(text)
        if command is not None:
            self._command(*command)
        elif self._desk.question is not None and not steer:
            parts, resolution = self._desk.answer(text)
            self._print("form", *parts)
            if resolution is not None and not self._outbox.put(resolution):
                self._print("notice", FULL)
        elif text.strip() or self._attached:
            self._say(text.strip(), steer=steer)
        self._screen.refresh()

    def _command(self, name: str, rest: str) -> None:
        match name:
            case "/help":
                self._print("notice", Text(HELP))
            case "/quit":
                self._screen.close()
            case "/stop":
                self._stop()
            case "/steer" if rest:
                self._say(rest, steer=True)
            case "/attach" if rest:
                self._attach(rest)
            case "/detach":
                self._attached.clear()
            case "/status":
                self._spawn(self._reported(self._show_status()))
            case "/history" if not rest or (rest.isdigit() and int(rest) > 0):
                self._spawn(self._reported(self._show_history(int(rest or "20"))))
            case _:
                self._print("notice", notice(f"{name} {rest}".strip() + ": see /help", "yellow"))

    def _say(self, text: str, *, steer: bool) -> None:
        files = tuple(attachment.block for attachment in self._attached)
        steering = steer and self._view.working
        cancels = steering and self._desk.question is not None
        said = Message(uuid.uuid4().hex, text, files, steering, cancels)
        if not self._outbox.put(said):
            self._print("notice", FULL)
            return
        self._attached.clear()
        self._view.waiting[said.key] = said

    def _taken(self, item: Item) -> None:
        # Its event may have come before the answer to its request.
        if isinstance(item, Message) and item.key in self._view.waiting:
            self._view.taken.add(item.key)
            self._screen.refresh()

    def _refused(self, item: Item, why: str) -> None:
        if isinstance(item, Message):
            self._view.forget(item.key)
            self._print("notice", notice(f"not sent: {why}", "red"), Text(f"  {item.text}", "dim"))
        else:
            self._print("notice", notice(f"the answer was not taken: {why}", "red"))
        self._look.set()

    def _attach(self, path: str) -> None:
        try:
            self._attached.append(read_attachment(path, self._attached))
        except CannotAttach as error:
            self._print("notice", notice(str(error), "red"))

    def _interrupt(self, text: str) -> bool:
        now = monotonic()
        if now - self._interrupted < LEAVE_S:
            self._screen.close()
            return False
        if self._view.working:
            self._interrupted = now
            self._stop()
            return False
        if text:
            return True
        self._interrupted = now
        self._print("notice", notice("Ctrl-C again leaves"))
        return False

    def _stop(self) -> None:
        self._stopping = True
        self._spawn(self._reported(self._cancel()))

    async def _cancel(self) -> None:
        try:
            if not await self._client.cancel(self._agent):
                self._print("notice", notice("nothing was running"))
        finally:
            self._stopping = False

    async def _show_status(self) -> None:
        status = await self._client.status(self._agent)
        lines = [f"{status.name or 'agent'} {status.id}", f"{status.status}, next: {status.next_action}"]
        if status.usage:
            lines.append(", ".join(f"{name} {count}" for name, count in status.usage.items()))
        if status.diagnosis:
            lines.append(str(status.diagnosis))
        self._print("notice", *(notice(line) for line in lines))

    async def _show_history(self, count: int) -> None:
        past = View()
        self._show(past.past(await self._client.latest_events(self._agent, limit=min(count, 500)), count))
        self._print("notice", notice("that was the history; here the conversation goes on"))

    async def _reported(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what a command asked for; a failure is told, and the chat goes on."""
        try:
            await work
        except ClientError as error:
            self._print("notice", notice(str(error), "red"))
        self._screen.refresh()

    # --- what is shown --------------------------------------------------------------------------------------

    def _print(self, kind: Kind, *bodies: RenderableType) -> None:
        self._show([Part(kind, body) for body in bodies])

    def _show(self, parts: Sequence[Part]) -> None:
        bodies: list[RenderableType] = []
        for part in parts:
            if part.kind != self._last_kind or part.kind in ("message", "answer"):
                bodies.append(Text(""))
            self._last_kind = part.kind
            bodies.append(part.body)
        self._screen.show(bodies)

    def _live(self, width: int) -> StyleAndTextTuples:
        bar = Bar(
            working=self._view.working,
            status=self._status,
            stopping=self._stopping,
            away=self._away_since is not None,
            taken=frozenset(self._view.taken),
            hint=self._desk.hint,
            doing=self._view.draft.doing,
        )
        return live_view(bar, self._view.draft.open_text, list(self._view.waiting.values()), self._attached, width)
