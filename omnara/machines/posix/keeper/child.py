"""Starting the command itself: between the fork and the program there is only what is in this module."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import resource
import signal
import struct
import termios
from typing import Any, NamedTuple, NoReturn

from . import namespaces

__all__ = ["NotStarted", "Started", "Waiting", "prepare"]

_SCRIPT_FD = 9
_LONGEST_ARGUMENT = 120 * 1024
"""A kernel takes 128 KiB in one argument; a longer command goes in as a file that has no name."""
_MOST_PROCESSES = 4096
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ROWS, _COLUMNS = 24, 80
"""Source: machines.md §7."""


class NotStarted(Exception):
    """The program could not be started; the text is for the model."""


class Started(NamedTuple):
    """A running command: its process, its input (None: the output's other side) and its output."""

    pid: int
    stdin: int
    output: int


class Waiting:
    """A process that is about to become the command, and does so on a word. Without it, it ends.

    It is made before the word is there because a fork and what follows it take longer than all the rest.
    """

    def __init__(self, started: Started, go: int, told: int) -> None:
        """Keep what `prepare` made: to be ended by `begin` and `started`, or by `leave`, unless it is `gone`."""
        self.pid = started.pid
        self._started = started
        self._go = go
        self._told = told

    def gone(self) -> bool:
        """Tell whether it ended before the word; there is nothing to be left then."""
        if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            return False
        self._close()
        return True

    def begin(self) -> None:
        """Let it become the command."""
        with contextlib.suppress(OSError):
            os.write(self._go, b"!")
            os.kill(self.pid, signal.SIGCONT)  # those it is among may have stopped it
        os.close(self._go)

    def started(self) -> Started:
        """Wait until it is the command, after `begin`. What is returned never blocks. Raises NotStarted."""
        with open(self._told, "rb") as file:
            problem = file.read()
        if problem:
            os.waitpid(self.pid, 0)
            for fd in {*self._started[1:]}:
                os.close(fd)
            raise NotStarted(problem.decode(errors="replace"))
        return self._started

    def leave(self) -> None:
        """End it: no word will come."""
        self._close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def _close(self) -> None:
        for fd in {*self._started[1:], self._go, self._told}:
            os.close(fd)


def prepare(launch: dict[str, Any], sandbox: dict[str, Any] | None) -> Waiting:
    """Fork what will become the command, as the leader of a session of its own. Raises NotStarted, OSError.

    Nothing but the command's own ends of its input and output is inherited by it.
    """
    if launch.get("refusal"):
        raise NotStarted(launch["refusal"])
    if sandbox is not None or launch.get("uid") is not None:
        namespaces.hide()
    argv, script = _arguments(launch)
    entered = _open_sandbox(sandbox)
    theirs, ours = _terminal() if launch["io_mode"] == "pty" else _pipes()
    if launch.get("uid") is not None:
        for fd in {*theirs}:  # so that /dev/stdout and /dev/tty can be opened by the command's user
            os.fchown(fd, launch["uid"], -1)
    told, tell = os.pipe()
    wait, go = os.pipe()
    tell, wait = _high(tell), _high(wait)
    keeper = None if entered is not None else os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        _become(launch, argv, theirs, script, entered, wait, tell, keeper)
    for fd in {*theirs, tell, wait, *(() if script is None else (script,)), *(entered or {}).values()}:
        os.close(fd)
    for fd in ours:
        os.set_blocking(fd, False)
    return Waiting(Started(pid, *ours), go, told)


def _high(fd: int) -> int:
    """Move a descriptor out of the way of those that the command gets."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(fd)
    return moved


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    their_input, our_input = os.pipe()
    our_output, their_output = os.pipe()
    return (_high(their_input), _high(their_output)), (our_input, our_output)


def _terminal() -> tuple[tuple[int, int], tuple[int, int]]:
    try:
        ours, theirs = pty.openpty()
    except OSError as error:
        raise NotStarted(f"No terminal can be had on this machine: {error.strerror}.") from error
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    theirs = _high(theirs)
    return (theirs, theirs), (os.dup(ours), ours)


def _open_sandbox(sandbox: dict[str, Any] | None) -> dict[str, int] | None:
    if sandbox is None:
        return None
    try:
        descriptors = namespaces.sandbox_descriptors(sandbox["pid"])
        namespaces.enter_pid_namespace(descriptors)
    except OSError as error:
        raise NotStarted(f"The machine's sandbox cannot be entered: {error.strerror}.") from error
    return {name: _high(fd) for name, fd in descriptors.items()}


def _arguments(launch: dict[str, Any]) -> tuple[list[str], int | None]:
    program, *options = launch["shell"]
    command = launch["command"]
    data = command.encode("utf-8", "surrogateescape")
    if len(data) <= _LONGEST_ARGUMENT:
        return [program, *options, command], None
    if options != ["-c"]:
        raise NotStarted(f"The command is too long for {program}: at most {_LONGEST_ARGUMENT} bytes.")
    script = os.memfd_create("command") if hasattr(os, "memfd_create") else _nameless_file()
    with open(os.dup(script), "wb") as file:
        file.write(data)
    os.fchmod(script, 0o444)
    os.lseek(script, 0, os.SEEK_SET)
    return [program, "-c", f". /dev/fd/{_SCRIPT_FD}"], _high(script)


def _nameless_file() -> int:
    fd = os.open("script", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.unlink("script")
    return fd


def _become(
    launch: dict[str, Any],
    argv: list[str],
    theirs: tuple[int, int],
    script: int | None,
    entered: dict[str, int] | None,
    wait: int,
    tell: int,
    keeper: int | None,
) -> NoReturn:
    """Turn the forked process into the command, once the word is there, or say why not. Never returns.

    It waits as the keeper's user: whoever else lives in the sandbox has no business with it until it is one of them.
    """
    problem = "The command could not be started."
    try:
        _attach(theirs, script, terminal=launch["io_mode"] == "pty")
        if entered is not None:
            namespaces.enter_sandbox(entered)
        if entered is not None or launch.get("uid") is not None:
            namespaces.forbid_new_privileges()
            namespaces.leave_keyring()
            _limit_processes()
        if not os.read(wait, 1):
            os._exit(127)
        _change_user(launch)
        namespaces.die_with_parent(signal.SIGKILL)
        if keeper is not None and os.getppid() != keeper:
            os._exit(127)
        os.umask(launch["umask"])
        problem = _enter_directory(launch["cwd"]) or _execute(argv, launch["env"])
    except BaseException as error:  # noqa: BLE001 - whatever it is, this process must not go on as a second keeper
        problem = f"The command could not be started: {error}."
    finally:
        with contextlib.suppress(BaseException):
            os.write(tell, problem.encode(errors="replace")[:2000])
        os._exit(127)


def _attach(theirs: tuple[int, int], script: int | None, *, terminal: bool) -> None:
    os.setsid()
    # What is ignored stays ignored over exec: by Python itself, and by whoever started us with nohup or in the
    # background, where SIGINT and SIGQUIT are; a command that cannot be interrupted would be the result.
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.dup2(theirs[0], 0)
    os.dup2(theirs[1], 1)
    os.dup2(theirs[1], 2)
    if script is not None:
        os.dup2(script, _SCRIPT_FD)
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _change_user(launch: dict[str, Any]) -> None:
    if launch.get("uid") is None:
        return
    os.setgroups([])
    os.setresgid(launch["gid"], launch["gid"], launch["gid"])
    os.setresuid(launch["uid"], launch["uid"], launch["uid"])


def _limit_processes() -> None:
    """Keep a fork bomb of a confined user from using up the computer's process numbers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = _MOST_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, _MOST_PROCESSES)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _enter_directory(cwd: str) -> str:
    try:
        os.chdir(cwd)
    except FileNotFoundError:
        return f"The working directory does not exist on this machine: {cwd}"
    except OSError as error:
        return f"The working directory cannot be entered: {cwd}: {error.strerror}"
    return ""


def _execute(argv: list[str], env: dict[str, str]) -> str:
    """Become the program. Returns only when that failed, with the reason."""
    program = argv[0]
    places = [""] if "/" in program else (env.get("PATH") or _DEFAULT_PATH).split(":")
    for place in places:
        try:
            os.execve(os.path.join(place, program), argv, env)  # noqa: S606 - running commands is what this is for
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except OSError as error:
            return f"{program} could not be started: {_words(error)}"
    return f"There is no {program} on this machine."


def _words(error: OSError) -> str:
    if error.errno == errno.E2BIG:
        return "the command and its environment are too long for this machine."
    return f"{error.strerror}."
