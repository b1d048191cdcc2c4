"""Migrations: together, killed in the middle, against other releases. Source: field report B57, DESIGN §7."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import asyncpg
import pytest

from omnara.db.connection import ConnectSettings
from omnara.db.migrate import (
    Migration,
    MigrationRefused,
    Progress,
    check_schema,
    load_migrations,
    migrate,
)
from omnara.db.sqlfiles import SqlFileError, sql_root
from tests.support.waiting import until

FILES = {
    "0001_first.expand.sql": "create table a (id int primary key);\ninsert into a select generate_series(1, 100);\n",
    "0002_index.expand.sql": "-- no-transaction\n-- one; comment\n"
    "create index concurrently if not exists a_id on a (id);\ninsert into a values (0) on conflict do nothing;\n",
    "0003_more.expand.sql": "alter table a add column v text;\n",
}


def make(root: Path, files: dict[str, str]) -> tuple[Migration, ...]:
    directory = root / "migrations"
    directory.mkdir(exist_ok=True)
    for old in directory.glob("*.sql"):
        old.unlink()
    for name, text in files.items():
        (directory / name).write_text(text)
    return load_migrations(root)


async def fetchval(dsn: str, sql: str, *args: object) -> object:
    conn = await asyncpg.connect(dsn)
    try:
        return await conn.fetchval(sql, *args)
    finally:
        await conn.close()


async def test_the_shipped_schema_applies_once(empty_database: str) -> None:
    settings = ConnectSettings(dsn=empty_database)
    seen: list[Progress] = []
    known = load_migrations()
    report = await migrate(settings, on_progress=seen.append)
    assert report.applied == tuple(migration.version for migration in known)
    assert [p.what for p in seen] == ["applying", "applied"] * len(known)
    assert seen[-1].done == seen[-1].total == len(known)
    again = await migrate(settings)
    assert (again.applied, again.version) == ((), known[-1].version)


async def test_eight_at_once_on_an_empty_database(empty_database: str, tmp_path: Path) -> None:
    settings = ConnectSettings(dsn=empty_database)
    known = make(tmp_path, FILES)
    reports = await asyncio.gather(*(migrate(settings, migrations=known) for _ in range(8)))
    assert sorted(report.applied for report in reports) == [()] * 7 + [(1, 2, 3)]
    assert {report.version for report in reports} == {3}
    assert await fetchval(empty_database, "select count(*) from pg_index where not indisvalid") == 0
    assert await fetchval(empty_database, "select count(*) from a") == 101


_CHILD = """
import asyncio, sys
from pathlib import Path
from omnara.db.connection import ConnectSettings
from omnara.db.migrate import load_migrations, migrate
asyncio.run(migrate(ConnectSettings(dsn=sys.argv[1]), migrations=load_migrations(Path(sys.argv[2]))))
"""


async def is_running(dsn: str, marker: str) -> bool:
    sql = (
        "select exists (select from pg_stat_activity where datname = current_database() and query like $1"
        " and state = 'active' and pid <> pg_backend_pid())"
    )
    return bool(await fetchval(dsn, sql, f"%{marker}%"))


async def killed_in(dsn: str, root: Path, marker: str) -> None:
    """Run a migrating process and kill -9 it while a statement containing `marker` runs."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _CHILD, dsn, str(root), cwd=sql_root().parent)
    await until(lambda: is_running(dsn, marker), f"{marker} runs", limit_s=30)
    child.send_signal(signal.SIGKILL)
    await child.wait()


async def test_a_process_killed_in_a_transaction_leaves_nothing_behind(empty_database: str, tmp_path: Path) -> None:
    slow = "create table half (id int);\nselect pg_sleep(60) /* slow-part */;\n"
    make(tmp_path, {"0001_first.expand.sql": FILES["0001_first.expand.sql"], "0002_slow.expand.sql": slow})
    await killed_in(empty_database, tmp_path, "slow-part")
    mended = make(
        tmp_path,
        {
            "0001_first.expand.sql": FILES["0001_first.expand.sql"],
            "0002_slow.expand.sql": "create table half (id int);\n",
        },
    )
    report = await migrate(ConnectSettings(dsn=empty_database), migrations=mended, lock_timeout_s=20)
    assert report.applied == (2,)


async def test_a_process_killed_in_an_index_build_is_repaired(empty_database: str, tmp_path: Path) -> None:
    known = make(tmp_path, FILES)
    await migrate(ConnectSettings(dsn=empty_database), migrations=known[:1])
    blocker = await asyncpg.connect(empty_database)
    await blocker.execute("begin; insert into a values (1000)")
    await killed_in(empty_database, tmp_path, "index concurrently")

    async def given_up() -> bool:
        return not await is_running(empty_database, "index concurrently")

    await until(given_up, "the server notices that the builder is gone")
    invalid = "select count(*) from pg_index where not indisvalid"
    assert await fetchval(empty_database, invalid) == 1
    await blocker.execute("commit")
    await blocker.close()
    report = await migrate(ConnectSettings(dsn=empty_database), migrations=known, lock_timeout_s=20)
    assert report.applied == (2, 3)
    assert await fetchval(empty_database, invalid) == 0


async def test_a_schema_change_never_queues_for_long_before_the_readers(empty_database: str, tmp_path: Path) -> None:
    known = make(tmp_path, FILES)
    settings = ConnectSettings(dsn=empty_database)
    await migrate(settings, migrations=known[:2])
    reader = await asyncpg.connect(empty_database)
    await reader.execute("begin; select * from a")
    altering = asyncio.create_task(migrate(settings, migrations=known))

    async def waits() -> bool:
        sql = "select exists (select from pg_locks where relation = 'a'::regclass and not granted)"
        return bool(await fetchval(empty_database, sql))

    async def gave_up() -> bool:
        return not await waits()

    await until(waits, "the change waits for the reader")
    await until(gave_up, "the change stands back")
    await reader.execute("commit")
    await reader.close()
    assert (await altering).applied == (3,)


async def test_a_changed_file_is_refused(empty_database: str, tmp_path: Path) -> None:
    settings = ConnectSettings(dsn=empty_database)
    await migrate(settings, migrations=make(tmp_path, FILES))
    changed = make(tmp_path, FILES | {"0001_first.expand.sql": "create table b (id int);\n"})
    with pytest.raises(MigrationRefused, match="0001"):
        await migrate(settings, migrations=changed)


async def test_line_ends_do_not_change_a_file(empty_database: str, tmp_path: Path) -> None:
    settings = ConnectSettings(dsn=empty_database)
    await migrate(settings, migrations=make(tmp_path, FILES))
    (tmp_path / "migrations" / "0003_more.expand.sql").write_bytes(b"alter table a add column v text;\r\n")
    assert (await migrate(settings, migrations=load_migrations(tmp_path))).applied == ()


async def test_an_older_release_lives_with_newer_expansions_but_not_contractions(
    empty_database: str, tmp_path: Path
) -> None:
    settings = ConnectSettings(dsn=empty_database)
    newer = make(tmp_path, FILES | {"0004_drop.contract.sql": "alter table a drop column v;\n"})
    await migrate(settings, migrations=newer[:3])
    report = await migrate(settings, migrations=newer[:2])
    assert (report.applied, report.version) == ((), 3)
    await migrate(settings, migrations=newer)
    with pytest.raises(MigrationRefused, match="newer omnara"):
        await migrate(settings, migrations=newer[:3])


async def test_contractions_can_wait_but_not_on_an_empty_database(empty_database: str, tmp_path: Path) -> None:
    settings = ConnectSettings(dsn=empty_database)
    known = make(
        tmp_path,
        FILES
        | {"0004_drop.contract.sql": "alter table a drop column v;\n", "0005_x.expand.sql": "create table x ();\n"},
    )
    await migrate(settings, migrations=known[:2])
    report = await migrate(settings, migrations=known, include_contract=False)
    assert (report.applied, report.deferred, report.version) == ((3,), (4, 5), 3)
    await fetchval(empty_database, "drop table a, schema_migrations")
    assert (await migrate(settings, migrations=known, include_contract=False)).applied == (1, 2, 3, 4, 5)


async def test_looking_changes_nothing(empty_database: str, tmp_path: Path) -> None:
    known = make(tmp_path, FILES)
    conn = await asyncpg.connect(empty_database)
    try:
        assert await check_schema(conn, known) == (1, 2, 3)
        assert await conn.fetchval("select to_regclass('schema_migrations')") is None
        await migrate(ConnectSettings(dsn=empty_database), migrations=known[:2])
        assert await check_schema(conn, known) == (3,)
    finally:
        await conn.close()


async def test_a_failing_migration_is_not_recorded(empty_database: str, tmp_path: Path) -> None:
    settings = ConnectSettings(dsn=empty_database)
    with pytest.raises(asyncpg.UndefinedTableError):
        await migrate(
            settings, migrations=make(tmp_path, {"0001_bad.expand.sql": "create table z (); drop table none_;"})
        )
    assert await fetchval(empty_database, "select to_regclass('z')") is None
    assert (await migrate(settings, migrations=make(tmp_path, FILES))).applied == (1, 2, 3)


@pytest.mark.parametrize(
    "files",
    [
        {"0001_a.sql": "select 1"},
        {"1_a.expand.sql": "select 1"},
        {"0002_a.expand.sql": "select 1"},
        {"0001_a.expand.sql": "select 1", "0001_b.expand.sql": "select 1"},
        {"0001_a.expand.sql": "create index concurrently if not exists i on a (id);"},
        {"0001_a.expand.sql": "-- no-transaction\ncreate index concurrently i on a (id);"},
    ],
)
def test_odd_files_are_refused_when_read(tmp_path: Path, files: dict[str, str]) -> None:
    with pytest.raises(SqlFileError):
        make(tmp_path, files)
