"""Whether this database really does what the engine relies on, tried out rather than read from a manual.

Used by `omnara doctor`, and by the start of a server for the parts that would otherwise fail without an error.
Source: DESIGN §3 (Postgres), coordination §11; field reports B09, B48, B51.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.failures import CONNECT_ERRORS, sqlstate
from omnara.db.locks import free_keys, lock_key, try_hold_shared
from omnara.db.pooler import is_transaction_pooler
from omnara.db.sqlfiles import Queries
from omnara.errors import ConfigurationError

_SQL: Final = Queries("selftest")

CONNECTIONS_PER_REPLICA: Final = 9
"""Source: coordination §11.5."""
_NOTIFY_LIMIT_S: Final = 2.0
_OLD_TRANSACTION_S: Final = 300.0


class CheckResult(msgspec.Struct, frozen=True):
    """One finding. `fix` says what to do and is empty when all is well."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


async def run_selftest(settings: ConnectSettings) -> list[CheckResult]:
    """Try everything out and return the findings in order; the first one is about reaching the server at all.

    Opens at most three connections at a time and closes them. Never raises for a bad database: that is a finding.
    """
    try:
        conn = await connect(settings, ConnKind.SESSION)
    except CONNECT_ERRORS as exc:
        fix = "check the URL, the network and that the server is a primary"
        return [CheckResult("connection", False, f"{type(exc).__name__} ({sqlstate(exc) or 'no answer'})", fix)]
    try:
        findings = [CheckResult("connection", True, "a primary answers")]
        findings += await check_session(conn, settings)
        findings.append(await _tried("pooler", lambda: check_pooler(settings)))
        findings.append(await _tried("advisory locks", lambda: check_locks(settings)))
        findings.append(await _tried("notifications", lambda: check_notifications(settings)))
        return findings
    finally:
        conn.terminate()


async def check_session(conn: Connection, settings: ConnectSettings) -> list[CheckResult]:
    """Read back what the server says about itself and this session. Two statements, no transaction."""
    row = await conn.fetchrow(_SQL["server"])
    assert row is not None
    findings = [
        _finding("version", row["version"] >= 150000, row["version_text"], "use Postgres 15 or later"),
        _finding("encoding", row["encoding"] == "UTF8", row["encoding"], "make the database with encoding UTF8"),
        _finding(
            "durability",
            row["fsync"] == "on" and row["full_page_writes"] == "on",
            f"fsync {row['fsync']}, full_page_writes {row['full_page_writes']}",
            "switch both on: without them a crash loses acknowledged steps",
        ),
        _finding("schema", row["may_create"], row["schema_name"] or "none", "grant CREATE on the schema to this role"),
        _room(row),
        _finding(
            "oldest snapshot",
            row["oldest_s"] < _OLD_TRANSACTION_S,
            f"{row['oldest_s']:.0f} s",
            "end the session that holds it: it stops vacuum for everyone",
        ),
        _finding("notify queue", row["queue"] < 0.5, f"{row['queue']:.0%} full", "find the listener in a transaction"),
    ]
    actual = {row["name"]: row["setting"] for row in await conn.fetch(_SQL["settings"])}
    findings.append(_settings_hold(settings, actual))
    return findings


async def check_pooler(settings: ConnectSettings) -> CheckResult:
    """Whether the URL for session work reaches Postgres itself."""
    url = settings.url(ConnKind.SESSION)
    try:
        pooled = await is_transaction_pooler(url, timeout_s=settings.connect_timeout_s)
    except ConfigurationError as error:  # statement mode
        return _finding("pooler", False, error.detail, "set OMNARA_DATABASE_DIRECT_URL")
    detail = "leads through a transaction pooler" if pooled else "reaches Postgres itself"
    return _finding("pooler", not pooled, detail, "set OMNARA_DATABASE_DIRECT_URL")


async def check_locks(settings: ConnectSettings) -> CheckResult:
    """Whether a shared lock is seen as held from elsewhere, and as free once its last holder is gone."""
    key = lock_key("selftest", secrets.token_hex(8))
    prober = await connect(settings, ConnKind.SESSION)
    holder = await connect(settings, ConnKind.SESSION)
    try:
        taken = await try_hold_shared(holder, key)
        free_while_held = await free_keys(prober, {"lock": key})
        await holder.close(timeout=2.0)
        freed = await _becomes_free(prober, key)
    finally:
        holder.terminate()
        prober.terminate()
    ok = taken and not free_while_held and freed
    detail = "held, seen from elsewhere, free after its holder" if ok else "a lock does not follow its connection"
    return _finding("advisory locks", ok, detail, "set OMNARA_DATABASE_DIRECT_URL to a URL without a pooler")


async def check_notifications(settings: ConnectSettings) -> CheckResult:
    """Whether one connection hears what another one sends."""
    channel, heard = f"omnara_selftest_{secrets.token_hex(6)}", asyncio.Event()
    listener = await connect(settings, ConnKind.LISTEN)
    sender = await connect(settings, ConnKind.SESSION)
    try:

        def on_notify(*_args: Any) -> None:
            heard.set()

        await listener.add_listener(channel, on_notify)
        await sender.execute(_SQL["notify"], channel)
        try:
            await asyncio.wait_for(heard.wait(), _NOTIFY_LIMIT_S)
        except TimeoutError:
            return _finding("notifications", False, "nothing arrived", "set OMNARA_DATABASE_DIRECT_URL")
        return _finding("notifications", True, "arrive", "")
    finally:
        listener.terminate()
        sender.terminate()


async def connection_room(conn: Connection) -> tuple[int, int]:
    """Return how many connections this role may still open, and how many the server allows in all."""
    row = await conn.fetchrow(_SQL["server"])
    assert row is not None
    return row["free_connections"], row["max_connections"]


async def _becomes_free(conn: Connection, key: int) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 2.0
    while not await free_keys(conn, {"lock": key}):
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def _tried(name: str, check: Callable[[], Awaitable[CheckResult]]) -> CheckResult:
    try:
        return await check()
    except CONNECT_ERRORS as exc:
        return CheckResult(
            name, False, f"{type(exc).__name__} ({sqlstate(exc) or 'no answer'})", "see the server's log"
        )


def _finding(name: str, ok: bool, detail: str, fix: str) -> CheckResult:
    return CheckResult(name, ok, detail, "" if ok else fix)


def _room(row: Any) -> CheckResult:
    free, limit = row["free_connections"], row["max_connections"]
    detail = f"{free} of {limit} free, a replica needs {CONNECTIONS_PER_REPLICA}"
    return _finding(
        "connections", free >= CONNECTIONS_PER_REPLICA, detail, "raise max_connections or run fewer replicas"
    )


def _settings_hold(settings: ConnectSettings, actual: dict[str, str]) -> CheckResult:
    """Compare what was asked for at connect with what the session has, in the server's own units."""
    wanted = settings.session_settings(ConnKind.SESSION) | {"transaction_timeout": "0"}
    off = [
        name
        for name, value in wanted.items()
        if name in actual and not name.startswith("tcp_") and actual[name].lower() != value.lower()
    ]
    detail = "as set" if not off else f"not taken over: {', '.join(sorted(off))}"
    return _finding("session settings", not off, detail, "something between here and Postgres changes them")
