"""How a connection to Postgres is made, so that every session runs under the rules the engine relies on.

A role, a database or a managed service may default to asynchronous commits, REPEATABLE READ, a statement limit or no
limits at all; and an unprotected connection keeps a row lock for hours after the network is cut. So each connection
states all of it itself. Source: DESIGN §3 (Postgres), coordination §11.2, §11.3, §11.6.
"""

from __future__ import annotations

import enum
import os
import socket
from typing import TYPE_CHECKING, Any, Final

import asyncpg
import msgspec
from asyncpg.connect_utils import SessionAttribute

from omnara.db.failures import ServerNotWritable

if TYPE_CHECKING:
    import asyncio

    _Base = asyncpg.Connection[asyncpg.Record]
else:
    _Base = asyncpg.Connection

Row = asyncpg.Record
"""One result row. Named here so that other modules need not import the driver."""

KEEPALIVE_IDLE_S: Final = 3
KEEPALIVE_INTERVAL_S: Final = 2
KEEPALIVE_COUNT: Final = 3
"""A cut network frees the server's locks after about 9 s. Source: coordination §11.2 (8.8 s measured)."""
TCP_USER_TIMEOUT_MS: Final = 8_000
CHECK_CLIENT_MS: Final = 2_000
IDLE_IN_TRANSACTION_MS: Final = 10_000


class ConnKind(enum.StrEnum):
    """What a connection is for; decides its limits and whether it may pass through a pooler.

    Nine per replica: session, listen, 2 savers, 1 claimer, 4 api. `ADMIN` is short-lived (migrations, doctor).
    Source: coordination §11.5.
    """

    SESSION = "session"
    LISTEN = "listen"
    SAVER = "saver"
    CLAIMER = "claimer"
    API = "api"
    ADMIN = "admin"


class Limits(msgspec.Struct, frozen=True):
    """Server-side limits of one kind, in milliseconds; 0 switches a limit off."""

    statement_ms: int
    lock_ms: int


LIMITS: Final[dict[ConnKind, Limits]] = {
    ConnKind.SESSION: Limits(statement_ms=5_000, lock_ms=1_000),
    ConnKind.LISTEN: Limits(statement_ms=5_000, lock_ms=1_000),
    ConnKind.SAVER: Limits(statement_ms=15_000, lock_ms=5_000),
    ConnKind.CLAIMER: Limits(statement_ms=10_000, lock_ms=2_000),
    ConnKind.API: Limits(statement_ms=15_000, lock_ms=2_000),
    ConnKind.ADMIN: Limits(statement_ms=0, lock_ms=0),
}
"""API waits for a lock at most 2 s, then 503. Source: coordination §9."""


class ConnectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the database is and how to reach it. Build once in `app`; `dsn` may hold a password, so never log it.

    `dsn`: for API connections; may lead through a pooler (then `pooled` is true, see `omnara.db.pooler.resolve`).
    `direct_dsn`: for everything that needs a session of its own; None when `dsn` is direct.
    `embedded`: the database came up with this process, so the grace after its start is short.
    """

    dsn: str
    direct_dsn: str | None = None
    pooled: bool = False
    embedded: bool = False
    application_name: str = "omnara"
    search_path: str = "public"
    connect_timeout_s: float = 5.0
    query_margin_s: float = 3.0
    limits: dict[ConnKind, Limits] = msgspec.field(default_factory=lambda: dict(LIMITS))

    @property
    def start_grace_s(self) -> float:
        """Seconds after a Postgres start in which nobody is declared dead. Source: coordination §1.4."""
        return 1.0 if self.embedded else 10.0

    def goes_through_pooler(self, kind: ConnKind) -> bool:
        """Whether connections of `kind` take the pooled URL."""
        return self.pooled and kind is ConnKind.API

    def url(self, kind: ConnKind) -> str:
        """Return the URL for connections of `kind`."""
        return self.dsn if kind is ConnKind.API or self.direct_dsn is None else self.direct_dsn

    def command_timeout_s(self, kind: ConnKind) -> float | None:
        """Client-side limit of one statement: the server's limit plus a margin, so it only fires when cut off."""
        statement_ms = self.limits[kind].statement_ms
        return statement_ms / 1000 + self.query_margin_s if statement_ms else None

    def session_settings(self, kind: ConnKind) -> dict[str, str]:
        """The settings that hold for the whole life of a direct connection.

        `transaction_timeout` is missing here, since a server before 17 refuses the name; `_greet` sets it.
        """
        limit = self.limits[kind]
        return {
            "application_name": f"{self.application_name}:{kind}"[:63],
            "search_path": self.search_path,
            "TimeZone": "UTC",
            "default_transaction_isolation": "read committed",
            "default_transaction_deferrable": "off",
            "synchronous_commit": "on",
            "statement_timeout": str(limit.statement_ms),
            "lock_timeout": str(limit.lock_ms),
            "idle_in_transaction_session_timeout": str(IDLE_IN_TRANSACTION_MS),
            "idle_session_timeout": "0",
            "tcp_keepalives_idle": str(KEEPALIVE_IDLE_S),
            "tcp_keepalives_interval": str(KEEPALIVE_INTERVAL_S),
            "tcp_keepalives_count": str(KEEPALIVE_COUNT),
            "tcp_user_timeout": str(TCP_USER_TIMEOUT_MS),
            "client_connection_check_interval": str(CHECK_CLIENT_MS),
            "plan_cache_mode": "auto",
            "jit": "off",
            # The hot path's plans are made when its tables are new and small, and kept while they grow.
            "enable_seqscan": "off" if kind in (ConnKind.SAVER, ConnKind.CLAIMER) else "on",
        }

    def transaction_settings(self) -> str:
        """`SET LOCAL` statements for the start of a transaction on a pooled API connection.

        A pooler refuses start-up parameters, and a plain SET would stay with a server connection that the next client
        gets. Only transactions are covered: operators set the rest with ALTER ROLE. Source: coordination §11.3.
        """
        limit = self.limits[ConnKind.API]
        return (
            f"set local synchronous_commit = on; set local statement_timeout = {limit.statement_ms}; "
            f"set local lock_timeout = {limit.lock_ms}; set local jit = off; "
            f"set local idle_in_transaction_session_timeout = {IDLE_IN_TRANSACTION_MS}; "
            f"select set_config('search_path', '{self.search_path.replace(chr(39), chr(39) * 2)}', true)"
        )


class Connection(_Base):
    """A connection whose socket notices a dead peer by itself, at both ends.

    json and jsonb are `str` both ways (callers use msgspec), uuid is `uuid.UUID` or `str` inwards: no codec is added.
    """

    __slots__ = ()

    def __init__(self, protocol: Any, transport: asyncio.Transport, *args: Any, **kwargs: Any) -> None:
        super().__init__(protocol, transport, *args, **kwargs)
        harden_socket(transport)


def harden_socket(transport: asyncio.BaseTransport) -> None:
    """Switch on keepalive and TCP_USER_TIMEOUT on the transport's socket; on a Unix socket do nothing.

    The driver sets only TCP_NODELAY: a query in flight on a cut network would hang for about 15 minutes.
    A dup of the descriptor is used because event loops hand out a socket object that may not be changed.
    Source: coordination §11.2.
    """
    lent = transport.get_extra_info("socket")
    if lent is None or lent.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with socket.socket(fileno=os.dup(lent.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = (
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
            ("TCP_KEEPALIVE", KEEPALIVE_IDLE_S),
            ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
            ("TCP_KEEPCNT", KEEPALIVE_COUNT),
            ("TCP_USER_TIMEOUT", TCP_USER_TIMEOUT_MS),
        )
        for name, value in options:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_GREETING: Final = """
select pg_is_in_recovery() as standby,
       case when current_setting('server_version_num')::int >= 170000
            then set_config('transaction_timeout', '0', false) end as transaction_timeout
"""


async def connect(settings: ConnectSettings, kind: ConnKind, *, timeout_s: float | None = None) -> Connection:
    """Open one connection of `kind`, ready for use; the caller owns and closes it.

    Raises what the driver raises when the server is away (see `failures.is_connection_loss`), `TimeoutError` after
    `timeout_s` (default `connect_timeout_s`) per address, `ServerNotWritable` on a standby. Cancellation closes the
    half-open connection.
    """
    pooled = settings.goes_through_pooler(kind)
    conn: Connection = await asyncpg.connect(
        settings.url(kind),
        timeout=settings.connect_timeout_s if timeout_s is None else timeout_s,
        command_timeout=settings.command_timeout_s(kind),
        server_settings=None if pooled else settings.session_settings(kind),
        statement_cache_size=0 if pooled else 500,
        max_cached_statement_lifetime=0,
        target_session_attrs=SessionAttribute.read_write,
        connection_class=Connection,
    )
    try:
        await _greet(conn, pooled=pooled)
    except BaseException:
        conn.terminate()
        raise
    return conn


async def _greet(conn: Connection, *, pooled: bool) -> None:
    """Check that the server is a primary, and set what cannot be set before the server's version is known."""
    if pooled:
        if await conn.fetchval("select pg_is_in_recovery()"):
            raise ServerNotWritable("the server is a standby")
        return
    row = await conn.fetchrow(_GREETING)
    if row is None or row["standby"]:
        raise ServerNotWritable("the server is a standby")
