"""A second real server that follows the first one by streaming, to fail over to."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from omnara.db.embedded import EmbeddedPostgres
from omnara.db.embedded.binaries import drop_account, find_binaries, run_as
from omnara.db.embedded.datadir import DataDir, child_environment
from tests.support.waiting import until

SETTINGS = {"synchronous_commit": "on", "wal_receiver_status_interval": "1s"}


def primary_in(directory: Path, bin_dir: Path | None) -> EmbeddedPostgres:
    """A server on TCP that may have standbys."""
    return EmbeddedPostgres(directory, bin_dir=bin_dir, tcp=True, durable=False, extra_settings=SETTINGS)


async def standby_of(primary_dsn: str, directory: Path, bin_dir: Path | None) -> EmbeddedPostgres:
    """Copy the server behind this URL, start the copy as its standby, and wait until it follows."""
    parts = urlsplit(primary_dsn)
    assert parts.password is not None
    account = drop_account()
    data = DataDir.prepare(directory, account)
    data.password_file.write_text(parts.password, encoding="ascii")
    data.password_file.chmod(0o600)
    binaries = find_binaries(bin_dir, account, data.home)
    data.pgdata.mkdir(mode=0o700)
    if account is not None:
        os.chown(data.pgdata, account.uid, account.gid)
    command = [binaries.program("pg_basebackup"), "-D", str(data.pgdata), "-h", str(parts.hostname)]
    command += ["-p", str(parts.port), "-U", str(parts.username), "-R", "-X", "stream", "-c", "fast", "--no-sync"]
    environment = child_environment() | {"PGPASSWORD": parts.password, "PGSSLMODE": "disable"}
    # In a thread: the way to the primary may lead through a proxy of this event loop.
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env=environment,
        **run_as(account),
    )
    assert done.returncode == 0, done.stderr
    standby = primary_in(directory, bin_dir)
    await standby.start()
    await until(lambda: follows(primary_dsn, "async"), "the standby follows", limit_s=30)
    return standby


async def follows(primary_dsn: str, state: str) -> bool:
    """Whether a standby streams from this server, and is waited for as `state` says (async, sync)."""
    connection = await asyncpg.connect(primary_dsn)
    try:
        query = "select exists (select from pg_stat_replication where state = 'streaming' and sync_state = $1)"
        return bool(await connection.fetchval(query, state))
    finally:
        await connection.close()


async def wait_for_standby(primary_dsn: str) -> None:
    """Let every commit wait from now on until the standby has it."""
    connection = await asyncpg.connect(primary_dsn)
    try:
        await connection.execute("alter system set synchronous_standby_names = '*'")
        await connection.execute("select pg_reload_conf()")
    finally:
        await connection.close()
    await until(lambda: follows(primary_dsn, "sync"), "commits wait for the standby")


async def caught_up(primary_dsn: str, standby_dsn: str) -> None:
    """Wait until the standby has everything that is committed now."""
    primary, standby = await asyncpg.connect(primary_dsn), await asyncpg.connect(standby_dsn)
    try:
        position = await primary.fetchval("select pg_current_wal_lsn()::text")

        async def there() -> bool:
            return bool(await standby.fetchval("select pg_last_wal_receive_lsn() >= $1::text::pg_lsn", position))

        await until(there, "the standby has it all", limit_s=30)
    finally:
        await primary.close()
        await standby.close()


async def promote(standby_dsn: str) -> None:
    """Make the standby the primary."""
    connection = await asyncpg.connect(standby_dsn)
    try:
        assert await connection.fetchval("select pg_promote(true, 30)")
    finally:
        await connection.close()


def with_both(first: str, second: str) -> str:
    """One URL that names both servers and asks for the one that takes writes."""
    one, two = urlsplit(first), urlsplit(second)
    credentials = one.netloc.rpartition("@")[0]
    hosts = f"{one.hostname}:{one.port},{two.hostname}:{two.port}"
    return f"postgresql://{credentials}@{hosts}{one.path}?sslmode=disable&target_session_attrs=read-write"
