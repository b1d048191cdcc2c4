"""The few system calls that Python has no function for.

They are looked up when the fork server starts, so that a forked process only calls them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys

__all__ = [
    "adopt_orphans",
    "die_with_parent",
    "enter_pid_namespace",
    "enter_sandbox",
    "forbid_new_privileges",
    "leave_keyring",
    "sandbox_descriptors",
]

_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 4, 36, 38
_NS_GET_USERNS = 0xB701
_NEWNS, _NEWUSER, _NEWPID = 0x00020000, 0x10000000, 0x20000000
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "loongarch64": 219, "ppc64le": 271, "s390x": 280}
"""Its number, of 64 bits: the C library has no function for it. Source: the kernel's tables of system calls."""
_JOIN_SESSION_KEYRING, _SETPERM = 1, 5  # source: linux/keyctl.h
_NO_KEYS = (errno.ENOSYS, errno.EPERM)
_left: list[int] = []
"""The keyring that this process, or the one that it was forked from, has instead of its login's."""
_OTHERS = {"ipc": 0x08000000, "uts": 0x04000000, "net": 0x40000000, "cgroup": 0x02000000}


def _prctl(option: int, value: int) -> None:
    if _LINUX and _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def adopt_orphans() -> None:
    """Become the parent of what one's descendants leave behind (Linux)."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int) -> None:
    """Have the kernel send this signal when the parent dies (Linux). Forgotten at a change of user."""
    _prctl(_SET_PDEATHSIG, number)


def hide() -> None:
    """Let nobody of the same user look into this process, or into what it forks until that becomes another program.

    A child on its way into a sandbox still has the keeper's memory, directories and namespaces open; those inside could
    follow them out (Linux).
    """
    _prctl(_SET_DUMPABLE, 0)


def forbid_new_privileges() -> None:
    """Make programs that would give another user's rights not give them (Linux). For good, and for all children."""
    _prctl(_SET_NO_NEW_PRIVS, 1)


def leave_keyring() -> None:
    """Have an empty session keyring (Linux): a login's is inherited over every change of user, and its keys with it.

    Nobody may do anything with it, for it is inherited too: one is enough for all that a fork server starts, and has to
    be, for a user who is not root has at most 200 (kernel.keys.maxkeys). Does nothing where that was done already.
    One that cannot be shut is nobody else's: whoever is forked gets another.
    Where the kernel, or a filter, allows nothing to be done with keys, the command can do nothing with them either.
    Raises OSError: there are no more keys to be had.
    """
    number = _KEYCTL.get(os.uname().machine) if _LINUX and sys.maxsize > 1 << 32 else None
    if number is None or _left:
        return
    key = _libc.syscall(number, _JOIN_SESSION_KEYRING, None)
    if key < 0:
        problem = ctypes.get_errno()
        if problem not in _NO_KEYS:
            raise OSError(problem, "an empty session keyring cannot be had; see kernel.keys.maxkeys")
    elif _libc.syscall(number, _SETPERM, key, 0) == 0:
        _left.append(key)


def _setns(fd: int, kind: int) -> None:
    if _libc.setns(fd, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def sandbox_descriptors(pid: int) -> dict[str, int]:
    """Open the namespaces of a sandbox's first process: `owner`, `user`, `pid`, `mnt` and the others it has.

    `owner` is the user namespace that the mounts belong to, which may be an outer one of `user`.
    """
    found = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("user", "pid", "mnt", *_OTHERS)}
    found["root"] = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY)
    found["owner"] = fcntl.ioctl(found["mnt"], _NS_GET_USERNS)
    return found


def _same(one: int, path: str) -> bool:
    mine, theirs = os.stat(path), os.fstat(one)
    return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)


def enter_pid_namespace(descriptors: dict[str, int]) -> None:
    """Have the next child be born among the processes of the sandbox. For the keeper, which itself stays outside."""
    if not _same(descriptors["owner"], "/proc/self/ns/user"):
        _setns(descriptors["owner"], _NEWUSER)
    _setns(descriptors["pid"], _NEWPID)


def enter_sandbox(descriptors: dict[str, int]) -> None:
    """Move into the sandbox for good, without the way back: its files, its view of everything. For the child."""
    for name, kind in _OTHERS.items():
        if not _same(descriptors[name], f"/proc/self/ns/{name}"):
            _setns(descriptors[name], kind)
    inner = descriptors["user"] if not _same(descriptors["user"], "/proc/self/ns/user") else None
    _setns(descriptors["mnt"], _NEWNS)
    os.fchdir(descriptors["root"])
    os.chroot(".")
    if inner is not None:
        _setns(inner, _NEWUSER)
