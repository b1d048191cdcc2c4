"""The directory of an embedded database: who may use it, where its parts are, and how it is first made.

Layout of the given directory: `omnara.lock` (one server process at a time), `postgres-password` (0600), `postgres.log`
and `pgdata/`. When Postgres must run as another account that cannot enter the directory, `pgdata` is a link to a
place under `/var/lib/omnara`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from omnara.db.embedded.binaries import Account, Binaries, can_reach, run_as
from omnara.errors import ConfigurationError

_SHARED_HOME: Final = Path("/var/lib/omnara")
_SOCKET_PATH_LIMIT: Final = 90
"""Bytes; a Unix socket's path may have 107, and `/.s.PGSQL.<port>` comes on top."""
_INITDB_LIMIT_S: Final = 300.0
_REASON_LINES: Final = 5
_VISITING: Final = "visiting"
ROLE: Final = "omnara"
DATABASE: Final = "omnara"


class DirectoryInUse(ConfigurationError):
    """Another process has the directory. `visited`: a command does, for a moment, or it has not said yet who it is."""

    def __init__(self, directory: Path, pid: str, *, visited: bool) -> None:
        self.pid = pid
        self.visited = visited
        super().__init__(
            f"{directory} is in use by another omnara process (pid {pid}); "
            "stop it, or give this one a data directory of its own"
        )


def no_database(root: Path) -> ConfigurationError:
    """Return what is wrong with a directory in which a command finds nothing to work on."""
    return ConfigurationError(
        f"there is no database: OMNARA_DATABASE_URL is not set and {root} holds none; "
        "start `omnara serve` once, or set the variable"
    )


def place_elsewhere(root: Path) -> Path:
    """Return where Postgres's own files are when its account cannot enter `root`, which is absolute and resolved."""
    return _SHARED_HOME / hashlib.sha256(os.fsencode(root)).hexdigest()[:12]


class DirectoryLock:
    """An exclusive claim on a data directory for the life of this process; `kill -9` gives it up."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "omnara.lock"
        self._file: int | None = None

    def take(self, *, visiting: bool = False) -> None:
        """Take the lock or raise at once: `DirectoryInUse` naming who has it, `ConfigurationError` naming what the disk
        refuses. `visiting` tells others that it is for the length of a command.
        """
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigurationError(
                f"the data directory {self._path.parent} cannot be written: {exc.strerror}; set OMNARA_DATA_DIR"
            ) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            owner, _, why = os.read(fd, 32).decode("ascii", "replace").strip().partition(" ")
            os.close(fd)
            raise DirectoryInUse(self._path.parent, owner or "unknown", visited=not owner or why == _VISITING) from exc
        os.ftruncate(fd, 0)
        os.pwrite(fd, (f"{os.getpid()} {_VISITING}\n" if visiting else f"{os.getpid()}\n").encode("ascii"), 0)
        self._file = fd

    def give_up(self) -> None:
        """Release the lock; safe to call twice."""
        fd, self._file = self._file, None
        if fd is not None:
            os.close(fd)


class DataDir:
    """Paths of one embedded database and the blocking work of making it. Create it through `prepare`."""

    def __init__(self, root: Path, home: Path, account: Account | None) -> None:
        self.root = root
        self.home = home
        self.account = account
        self.lock = DirectoryLock(root)
        self.log_file = root / "postgres.log"
        self.password_file = root / "postgres-password"

    @classmethod
    def prepare(cls, root: Path, account: Account | None) -> DataDir:
        """Make `root` if needed and decide where Postgres's own files go. Raises `ConfigurationError`."""
        root = root.absolute()
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as exc:
            raise ConfigurationError(
                f"the data directory {root} cannot be made: {exc.strerror}; set OMNARA_DATA_DIR"
            ) from exc
        root = root.resolve()
        _close_to_others(root)
        if account is None:
            return cls(root, root, None)
        if can_reach(root, account):
            root.chmod(root.stat().st_mode | 0o011)
        if can_reach(root / "omnara.lock", account):
            return cls(root, root, account)
        home = place_elsewhere(root)
        home.mkdir(parents=True, exist_ok=True, mode=0o711)
        return cls(root, home, account)

    @property
    def pgdata(self) -> Path:
        """The directory Postgres itself works in."""
        return self.home / "pgdata"

    @property
    def initialized(self) -> bool:
        """Whether a complete cluster is there (a half-made one never has this name)."""
        return (self.pgdata / "PG_VERSION").is_file()

    def password(self) -> str:
        """Return the superuser's password, made on first use and readable by the owner alone."""
        with contextlib.suppress(FileNotFoundError):
            return self.password_file.read_text(encoding="ascii").strip()
        password = secrets.token_urlsafe(32)
        fd, name = tempfile.mkstemp(dir=self.root, prefix=".password-")
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(password)
            file.flush()
            os.fsync(file.fileno())
        Path(name).rename(self.password_file)
        return password

    def socket_dir(self) -> Path:
        """Return a directory for the Unix socket that only this user (or the dropped account) may enter.

        It lies in `home` when the path is short enough, else under the temporary directory. Raises
        `ConfigurationError` when somebody else owns that name.
        """
        owner = os.geteuid() if self.account is None else self.account.uid
        path = self.home / "socket"
        if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
            digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
            path = Path(tempfile.gettempdir()) / f"omnara-{owner}-{digest}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            self._own(path)
        info = path.lstat()
        if path.is_symlink() or not path.is_dir() or info.st_uid != owner:
            raise ConfigurationError(f"{path} belongs to somebody else; remove it or set TMPDIR")
        return path

    def check_version(self, binaries: Binaries) -> None:
        """Raise `ConfigurationError` when the cluster was made by another major version of Postgres."""
        found = (self.pgdata / "PG_VERSION").read_text(encoding="ascii").strip()
        if found != str(binaries.major):
            raise ConfigurationError(
                f"the embedded database in {self.root} was made by Postgres {found}, and this is {binaries.major}: "
                f"dump it with the old version, or use another data directory"
            )

    def initialize(self, binaries: Binaries, *, durable: bool) -> None:
        """Make the cluster, whole or not at all: a crash in between leaves a name that is swept next time. Blocking."""
        for leftover in self.home.glob("pgdata.new-*"):
            shutil.rmtree(leftover)
        link = self.root / "pgdata"
        if self.home != self.root and link.is_dir() and not link.is_symlink():
            raise ConfigurationError(f"{link} is there, but the user Postgres runs as may not enter {self.root}")
        if link.is_symlink() and not link.exists():
            raise ConfigurationError(f"the database files of {self.root} are gone: {os.readlink(link)} is missing")
        target = Path(tempfile.mkdtemp(dir=self.home, prefix="pgdata.new-"))
        self._own(target)
        with self._password_for_initdb() as pwfile:
            self._run_initdb(binaries, target, pwfile, durable=durable)
        target.rename(self.pgdata)
        _fsync_directory(self.home)
        if self.home != self.root and not link.is_symlink():
            link.symlink_to(self.pgdata)

    def _run_initdb(self, binaries: Binaries, target: Path, pwfile: Path, *, durable: bool) -> None:
        command = [binaries.program("initdb"), "-D", str(target), "-U", ROLE, f"--pwfile={pwfile}"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-instructions"]
        if binaries.major >= 16:
            # The password is 256 random bits: stretching it only makes each connection 10 ms slower.
            command += ["--set", "scram_iterations=1"]
        if not durable:
            command.append("--no-sync")
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_INITDB_LIMIT_S,
            check=False,
            cwd=target,
            env=child_environment(),
            **run_as(self.account),
        )
        if done.returncode != 0:
            shutil.rmtree(target, ignore_errors=True)
            raise ConfigurationError(f"the embedded database cannot be made in {self.root}: {_why(done.stderr)}")

    @contextlib.contextmanager
    def _password_for_initdb(self) -> Iterator[Path]:
        fd, name = tempfile.mkstemp(dir=self.home, prefix=".initdb-")
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(self.password())
            self._own(Path(name))
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    def _own(self, path: Path) -> None:
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid)


def _why(stderr: str) -> str:
    """Return what initdb said last, as one line: the reason stands before what it says about giving up."""
    lines = [line.strip() for line in stderr.splitlines()]
    told = [line for line in lines if line and not line.startswith(("initdb: removing", "initdb: data directory"))]
    return "; ".join(told[-_REASON_LINES:]) or "no message"


def _close_to_others(root: Path) -> None:
    """Keep others out of a directory that is still empty; one with contents may be shared, and they are private."""
    if not any(root.iterdir()):
        with contextlib.suppress(PermissionError):  # somebody else's, who lets us in
            root.chmod(root.stat().st_mode & ~0o077)


def child_environment() -> dict[str, str]:
    """The environment of Postgres's programs: nothing of ours, since PG* variables and locales would change them."""
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
