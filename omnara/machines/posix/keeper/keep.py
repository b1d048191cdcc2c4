"""The keeper of one command: takes the execution bit, starts it once, stays until it is over, and writes down how.

It depends on nobody. Whoever opened the home may die and another may come; both speak to it through its socket, and
read from its files what it did. Its lock says that it is alive. Source: machines.md §4, §5, §7.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from . import child, ending, files, identity, namespaces
from .desk import Desk
from .leader import Leader
from .output import OutputWriter
from .stdin import AFTER_THE_END, UNRECOVERABLE, Outcome, Stdin, Write, outcome
from .talk import Connection

__all__ = ["Keeper"]

_CHUNK = 256 * 1024
_TAIL_BYTES = 1024 * 1024
"""What may still be in a pipe or a terminal when a command ends; more comes from those that outlive it."""
_TAIL_WAIT_S = 0.1
_LONGEST_REASON = 300
"""Characters: each may become twelve bytes of JSON, and all of an end has to fit into its block."""


def _text(moment: datetime) -> str:
    """Write a time as the protocol does: RFC 3339, UTC, microseconds."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _who(pid: int) -> dict[str, Any]:
    return {"boot": identity.boot_id(), "pid": pid, "start": identity.start_time(pid)}


class Keeper:
    """What is known about the command while it runs. `_reason`: why it was ended from outside, if it was.

    `children` can be read from once one of its children has died.
    """

    def __init__(self, directory: int, launch: dict[str, Any]) -> None:
        """Get everything ready; nothing has happened and nothing is held before `commit`. Raises OSError."""
        self._directory = directory
        self._launch = launch
        limits = launch["limits"]
        self._write_s: float = limits["write_s"]
        self._grace_s: float = limits["grace_s"]
        self._writer = OutputWriter(directory, limits["piece_bytes"], limits["pieces"])
        self._reason = ""
        self._selector = selectors.DefaultSelector()
        self._desk = Desk(self._selector, self._handle)
        self._waiting: child.Waiting | None = None
        self._who: dict[str, Any] = {}
        self._acting: dict[str, list[Connection]] = {}
        self._output: int | None = None
        self._watched_stdin: int | None = None
        namespaces.adopt_orphans()
        self.children, self._wake = self._wake_on_children()

    def fork_ahead(self, sandbox: dict[str, Any] | None) -> None:
        """Make the process that will be the command. What cannot be started is found out again when it is to begin."""
        with contextlib.suppress(child.NotStarted, OSError):
            self._waiting = child.prepare(self._launch, sandbox)
            self._who = _who(self._waiting.pid)

    def look_ahead(self) -> None:
        """Let what `fork_ahead` made be gone when it died, such as with its sandbox: that ends only without it."""
        if self._waiting is not None and self._waiting.gone():
            self._waiting = None

    def leave(self) -> None:
        """Go without having done anything. Not after a `commit` that went well."""
        if self._waiting is not None and not self._waiting.gone():
            self._waiting.leave()
        self._waiting = None
        self._desk.leave()

    def commit(self) -> None:
        """Be found, then take the execution bit: from here on the command counts as begun. The caller holds the lock.

        Raises OSError; FileExistsError when it was begun before.
        """
        self.look_ahead()
        files.check_room(self._directory)
        if files.read_bit(self._directory) is not None:
            raise FileExistsError("the command was begun")
        self._desk.open()
        self._started = datetime.now(UTC)
        self._began = time.monotonic()
        self._time_out_at = (
            self._began + self._launch["timeout_seconds"] if self._launch["timeout_seconds"] > 0 else None
        )
        who = None if self._waiting is None else self._who
        files.take_bit(self._directory, {"started_at": _text(self._started)}, who)

    def run(self, first: Connection, asked: dict[str, Any]) -> None:
        """Start the command and see it through, after `commit`."""
        self._desk.add(first)
        self._desk.watch(first, int(asked.get("end", 0)))
        sandbox = asked.get("sandbox")
        try:
            started = self._start(sandbox)
        except child.NotStarted as error:
            self._not_started(str(error))
            return
        except OSError as error:
            self._not_started(f"The command could not be started: {error.strerror}.")
            return
        self._take(started, None if sandbox is None else sandbox["pid"])
        self._loop()
        self._tail()
        self._stdin.end()
        self._finish(ending.of(self._reason, self._leader.ended), started_at=_text(self._started))
        os.close(self._wake)

    def _wake_on_children(self) -> tuple[int, int]:
        hear, wake = os.pipe()
        os.set_blocking(hear, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._selector.register(hear, selectors.EVENT_READ, lambda: os.read(hear, 4096))
        return hear, wake

    def _start(self, sandbox: dict[str, Any] | None) -> child.Started:
        if self._waiting is None:
            self._waiting = child.prepare(self._launch, sandbox)
            files.fill_bit(self._directory, _who(self._waiting.pid))
        self._waiting.begin()
        with contextlib.suppress(OSError):  # it is being the command by now; the end removes what is left
            self._remove_launch()
        return self._waiting.started()

    def _take(self, started: child.Started, sandbox: int | None) -> None:
        self._leader = Leader(started.pid, sandbox=sandbox, grace_s=self._grace_s)
        self._stdin = Stdin(started.stdin, terminal=self._launch["io_mode"] == "pty")
        self._output = started.output
        self._selector.register(started.output, selectors.EVENT_READ, self._pump)

    def _remove_launch(self) -> None:
        """The environment may hold secrets: it is kept no longer than it is needed."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(files.LAUNCH)

    def _loop(self) -> None:
        while True:
            now = time.monotonic()
            self._leader.look(now)
            if self._leader.over:
                return
            if self._time_out_at is not None and now >= self._time_out_at:
                self._time_out_at = None
                self._end("timeout")
            if self._stdin.expire(now) and self._stdin.terminal:
                self._end("stdin_write_unknown")
            self._watch_stdin()
            for key, _ in self._selector.select(self._pause(now)):
                key.data()

    def _pause(self, now: float) -> float | None:
        times = [self._leader.next_look(), self._time_out_at]
        times.extend(write.deadline for write in self._stdin.waiting[:1])
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - now) if known else None

    def _watch_stdin(self) -> None:
        """Wait for room in the input while a write needs it. Called whenever the input may have been closed."""
        wanted = self._stdin.fd if self._stdin.waiting else None
        if wanted == self._watched_stdin:
            return
        if self._watched_stdin is not None:
            self._selector.unregister(self._watched_stdin)
        if wanted is not None:
            self._selector.register(wanted, selectors.EVENT_WRITE, self._go_on_writing)
        self._watched_stdin = wanted

    def _go_on_writing(self) -> None:
        self._stdin.go_on()
        self._watch_stdin()

    def _pump(self) -> bool:
        """Keep what the command wrote; says whether there was something."""
        if self._output is None:
            return False
        try:
            data = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # a terminal whose other side is closed says so with an error
        if not data:
            self._selector.unregister(self._output)
            os.close(self._output)
            self._output = None
            return False
        try:
            self._writer.append(data)
        except OSError as error:
            if not files.is_full(error):
                raise
            self._end(ending.FULL)
        self._desk.tell_output(self._writer.end)
        return True

    def _tail(self) -> None:
        """Keep what was written before the end but not read yet. A terminal passes its last bytes on a moment later."""
        limit = self._writer.end + _TAIL_BYTES
        until = time.monotonic() + (_TAIL_WAIT_S if self._stdin.terminal else 0.0)
        while self._output is not None and self._writer.end < limit:
            if self._pump() or self._output is None:
                continue
            left = until - time.monotonic()
            if left <= 0:
                return
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._output, selectors.EVENT_READ)
                waiting.select(left)

    def _end(self, reason: str) -> None:
        """End the command for a reason; the first one counts, and none once the shell has ended by itself."""
        if not self._reason and self._leader.ended is None:
            self._reason = reason
            self._leader.terminate(time.monotonic())

    def _not_started(self, text: str) -> None:
        self._finish({"state": "failed", "reason_code": "start_failed", "reason_message": text[:_LONGEST_REASON]})

    def _finish(self, record: dict[str, Any], **times: str) -> None:
        """Write down how it ended, as the last thing done to any file, then tell those who wait, then make it durable.

        A computer that loses power in between loses what it would have lost a moment earlier: what the server heard by
        then is kept there.
        """
        lasted = timedelta(seconds=time.monotonic() - self._began)
        self._writer.close()
        self._remove_launch()
        self._desk.leave()
        ended = {**record, **times, "ended_at": _text(self._started + lasted)}
        files.write_exit(self._directory, ended, written=self._desk.close)

    def _handle(self, connection: Connection, request: dict[str, Any], data: bytes) -> None:
        kind = request["op"]
        if kind == "watch":
            self._desk.watch(connection, request["end"])
            self._desk.tell_output(self._writer.end)
        elif kind == "ready":
            self._desk.answer(connection, {"event": "begun"})
        elif kind == "stop":
            self._desk.watch(connection, None)
            self._end(request["reason"])
        else:
            self._act(connection, request, data)

    def _act(self, connection: Connection, request: dict[str, Any], data: bytes) -> None:
        """Mark the action, then do it. One that is known is answered from its record, when it is done."""
        action_id, kind = request["id"], request["op"]
        name = files.action_file(action_id)
        if action_id in self._acting:
            self._acting[action_id].append(connection)
            return
        try:
            files.create_pair(self._directory, name, {"kind": kind, "seq": request["seq"]})
        except FileExistsError:
            known = files.read_pair(self._directory, name)
            self._desk.answer(connection, {"outcome": (known and known[1]) or UNRECOVERABLE})
            return
        except OSError as error:
            if not files.is_full(error):
                raise
            self._desk.answer(connection, {"event": "full"})
            return
        self._acting[action_id] = [connection]
        self._perform(action_id, kind, data, close=bool(request.get("close")))

    def _perform(self, action_id: str, kind: str, data: bytes, *, close: bool) -> None:
        if kind == "write":
            deadline = time.monotonic() + self._write_s
            self._stdin.add(Write(data, close=close, deadline=deadline, done=partial(self._done, action_id)))
        elif self._leader.ended is not None:
            self._done(action_id, AFTER_THE_END[kind])
        elif kind == "interrupt":
            self._leader.interrupt()
            self._done(action_id, outcome("applied"))
        else:
            self._end("terminate_requested")
            self._done(action_id, outcome("applied"))

    def _done(self, action_id: str, result: Outcome) -> None:
        files.fill_pair(self._directory, files.action_file(action_id), result)
        for connection in self._acting.pop(action_id):
            self._desk.answer(connection, {"outcome": result})
