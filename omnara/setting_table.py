"""The table of settings: one typed field each, with its variable, meaning and bounds.

Every time constant of the engine is here, so that tests shrink what production leaves alone. `settings` reads the
environment into it. Source: DESIGN §3, §5, §6 for the numbers.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from omnara.setting_machines import MachineSettings
from omnara.setting_types import ROLES, Address, Role, Spec

__all__ = ["SPECS", "Settings"]

_DATA_DIR: Final = Path("/var/lib/omnara" if os.geteuid() == 0 else os.path.expanduser("~/.local/share/omnara"))
"""With `~` in it for a user who has no home directory, as those of containers may: `Path.expanduser` would raise."""


class Settings(MachineSettings, frozen=True, kw_only=True):
    """Everything that can be set. Fields ending in `_s` are seconds, in `_bytes` bytes. `repr` shows no secret."""

    # Where things are
    database_url: Annotated[
        str | None,
        Spec(
            "OMNARA_DATABASE_URL",
            "Postgres 15 to 18, as `postgresql://…`; without it an embedded server is started",
            secret=True,
        ),
    ] = None
    database_direct_url: Annotated[
        str | None,
        Spec(
            "OMNARA_DATABASE_DIRECT_URL",
            "The same database past a transaction pooler, for locks and LISTEN",
            secret=True,
        ),
    ] = None
    data_dir: Annotated[
        Path,
        Spec("OMNARA_DATA_DIR", "Embedded database, generated key ring and first API key (root: `/var/lib/omnara`)"),
    ] = _DATA_DIR
    postgres_bin: Annotated[
        Path | None,
        Spec(
            "OMNARA_POSTGRES_BIN",
            "Directory of `initdb` and `postgres` for the embedded server; default: those of the `embedded` extra",
        ),
    ] = None
    listen: Annotated[Address, Spec("OMNARA_LISTEN", "Address of the API; `:8080` means every interface")] = Address(
        "127.0.0.1", 8080
    )
    ops_listen: Annotated[Address, Spec("OMNARA_OPS_LISTEN", "Address of `/healthz`, `/readyz` and `/metrics`")] = (
        Address("127.0.0.1", 8081)
    )
    roles: Annotated[frozenset[Role], Spec("OMNARA_ROLES", "Parts that this process runs")] = frozenset(ROLES)

    # Keys and models
    bootstrap_api_key: Annotated[
        str | None,
        Spec(
            "OMNARA_BOOTSTRAP_API_KEY",
            "Personal key that the first start creates, instead of a random one",
            secret=True,
        ),
    ] = None
    secret_encryption_keys: Annotated[
        str | None,
        Spec(
            "OMNARA_SECRET_ENCRYPTION_KEYS",
            "Key ring for stored secrets, `id:base64,id:base64` with 32 bytes each; required with your own database",
            secret=True,
        ),
    ] = None
    secret_encryption_active_key: Annotated[
        str | None, Spec("OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY", "Id of the ring's key for new secrets")
    ] = None
    anthropic_api_key: Annotated[
        str | None,
        Spec("ANTHROPIC_API_KEY", "Makes the provider `anthropic` with its models at each start", secret=True),
    ] = None
    anthropic_base_url: Annotated[str | None, Spec("ANTHROPIC_BASE_URL", "Endpoint of that provider")] = None
    openai_api_key: Annotated[
        str | None, Spec("OPENAI_API_KEY", "Makes the provider `openai` with its models at each start", secret=True)
    ] = None
    openai_base_url: Annotated[str | None, Spec("OPENAI_BASE_URL", "Endpoint of that provider")] = None
    openai_api_format: Annotated[
        Literal["auto", "responses", "chat-completions"],
        Spec("OPENAI_API_FORMAT", "What it speaks; `auto`: Responses, but Chat Completions at any other endpoint"),
    ] = "auto"
    allowed_private_hosts: Annotated[
        tuple[str, ...],
        Spec(
            "OMNARA_ALLOWED_PRIVATE_HOSTS", "Private hosts, `host` or `host:port`, that tools and model calls may reach"
        ),
    ] = ()

    # Files
    artifact_store: Annotated[
        str | None,
        Spec(
            "OMNARA_ARTIFACT_STORE",
            "Object store for new files instead of Postgres, `s3://bucket/prefix`, `gs://…` or `az://…`; "
            "needs the extra `objects`",
        ),
    ] = None

    # Logs
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Spec("OMNARA_LOG_LEVEL", "Least severe line that is written")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "console"],
        Spec("OMNARA_LOG_FORMAT", "`auto`: for people on a terminal, JSON elsewhere"),
    ] = "auto"

    # Connections of clients
    max_connections: Annotated[
        int,
        Spec("OMNARA_MAX_CONNECTIONS", "Open connections of the API; at most half the limit of open files", 1, 2**20),
    ] = 4096
    request_head_timeout_s: Annotated[
        float, Spec("OMNARA_REQUEST_HEAD_TIMEOUT", "Limit for a request line with all its headers", 0.05, 600)
    ] = 10.0
    request_body_timeout_s: Annotated[
        float, Spec("OMNARA_REQUEST_BODY_TIMEOUT", "Limit for a body, and a second more for each 64 KiB", 0.05, 3600)
    ] = 30.0
    large_bodies_bytes: Annotated[
        int,
        Spec(
            "OMNARA_LARGE_BODIES_BYTES",
            "Request bodies over 1 MiB in work at once; beyond it they get 503. Their copies take four times as much",
            48 * 2**20,
            2**40,
        ),
    ] = 2**27

    cors_origins: Annotated[
        tuple[str, ...],
        Spec(
            "OMNARA_CORS_ORIGINS",
            "Origins, `https://app.example.com`, whose web pages may call the API from a browser; `*` for all",
        ),
    ] = ()

    # Worker
    worker_capacity: Annotated[
        int, Spec("OMNARA_WORKER_CAPACITY", "Agents that run at once in this process", 1, 100_000)
    ] = 512
    worker_drain_timeout_s: Annotated[
        float, Spec("OMNARA_WORKER_DRAIN_TIMEOUT", "How long running steps may finish after SIGTERM", 0, 3600)
    ] = 20.0
    worker_lease_s: Annotated[
        float, Spec("OMNARA_WORKER_LEASE", "A worker that has not renewed for so long is dead", 0.3, 3600)
    ] = 30.0
    worker_renew_s: Annotated[
        float, Spec("OMNARA_WORKER_RENEW", "Time between two renewals; at most a third of the lease", 0.05, 600)
    ] = 5.0
    worker_probe_s: Annotated[
        float,
        Spec("OMNARA_WORKER_PROBE", "Time between two looks for dead workers; at most a tenth of the lease", 0.01, 60),
    ] = 0.1
    death_grace_s: Annotated[
        float, Spec("OMNARA_DEATH_GRACE", "After a Postgres start nobody is declared dead for so long", 0, 600)
    ] = 10.0
    death_grace_embedded_s: Annotated[
        float, Spec("OMNARA_DEATH_GRACE_EMBEDDED", "The same with the embedded server", 0, 600)
    ] = 1.0
    death_limit: Annotated[
        int, Spec("OMNARA_DEATH_LIMIT", "Worker deaths in a row, without a saved step, that crash an agent", 1, 1000)
    ] = 5
    reconcile_s: Annotated[
        float, Spec("OMNARA_RECONCILE", "Time between two comparisons of claims and running agents", 0.05, 600)
    ] = 10.0
    claim_sweep_s: Annotated[
        float, Spec("OMNARA_CLAIM_SWEEP", "Time between two looks for work that no hint announced", 0.05, 60)
    ] = 1.0
    claim_max_steps: Annotated[
        int, Spec("OMNARA_CLAIM_MAX_STEPS", "Steps of one agent before its claim is given back", 1, 100_000)
    ] = 64
    claim_yield_s: Annotated[
        float,
        Spec("OMNARA_CLAIM_YIELD", "Claims are given back while the oldest waiting agent is older than this", 0.01, 60),
    ] = 0.25
    unsaved_results_bytes: Annotated[
        int,
        Spec("OMNARA_UNSAVED_RESULTS_BYTES", "Finished results held in memory while Postgres is away", 2**16, 2**34),
    ] = 2**26
    context_cache_bytes: Annotated[
        int, Spec("OMNARA_CONTEXT_CACHE_BYTES", "Memory for rendered conversations", 0, 2**38)
    ] = 2**28

    # Models
    model_connect_timeout_s: Annotated[
        float, Spec("OMNARA_MODEL_CONNECT_TIMEOUT", "Limit for a connection to a model endpoint", 0.05, 600)
    ] = 5.0
    model_first_byte_timeout_s: Annotated[
        float, Spec("OMNARA_MODEL_FIRST_BYTE_TIMEOUT", "Limit for the first byte of an answer", 0.05, 3600)
    ] = 120.0
    model_idle_timeout_s: Annotated[
        float, Spec("OMNARA_MODEL_IDLE_TIMEOUT", "Limit for silence in an answer", 0.05, 3600)
    ] = 300.0
    model_total_timeout_s: Annotated[
        float, Spec("OMNARA_MODEL_TOTAL_TIMEOUT", "Limit for a whole answer", 0.05, 86_400)
    ] = 600.0
    model_retries: Annotated[int, Spec("OMNARA_MODEL_RETRIES", "Further attempts of a failed model call", 0, 100)] = 8
    model_retry_base_s: Annotated[
        float, Spec("OMNARA_MODEL_RETRY_BASE", "First wait before another attempt; doubles each time", 0.001, 600)
    ] = 1.0
    model_retry_cap_s: Annotated[
        float, Spec("OMNARA_MODEL_RETRY_CAP", "Longest such wait, unless the provider asks for more", 0.001, 3600)
    ] = 30.0

    turn_max_model_calls: Annotated[
        int, Spec("OMNARA_TURN_MAX_MODEL_CALLS", "Answers of the model in one turn, which then ends", 1, 10**6)
    ] = 1000
    model_answers_bytes: Annotated[
        int,
        Spec("OMNARA_MODEL_ANSWERS_BYTES", "Answers being received; beyond it the largest are retried", 2**20, 2**40),
    ] = 2**28

    # Streams, maintenance and tests
    stream_heartbeat_s: Annotated[
        float, Spec("OMNARA_STREAM_HEARTBEAT", "Time between two heartbeats of an event stream", 0.05, 60)
    ] = 15.0
    stream_sweep_s: Annotated[
        float, Spec("OMNARA_STREAM_SWEEP", "Time between two looks for events that no hint announced", 0.05, 60)
    ] = 2.0
    hint_heartbeat_s: Annotated[
        float, Spec("OMNARA_HINT_HEARTBEAT", "Time between two checks of the connection that hears hints", 0.05, 60)
    ] = 5.0
    vacuum_s: Annotated[float, Spec("OMNARA_VACUUM", "Time between two vacuums of the scheduling table", 0.1, 3600)] = (
        10.0
    )
    test_probes: Annotated[
        Path | None,
        Spec("OMNARA_TEST_PROBES", "File or pipe that gets a JSON line at named points; changes nothing else"),
    ] = None

    # Commands that talk to a running server
    url: Annotated[str, Spec("OMNARA_URL", "Server that `agents` and `chat` talk to")] = "http://127.0.0.1:8080"
    api_key: Annotated[str | None, Spec("OMNARA_API_KEY", "Key that `agents` and `chat` use", secret=True)] = None

    def __repr__(self) -> str:
        shown = (
            f"{name}={'…' if spec.secret and getattr(self, name) else repr(getattr(self, name))}"
            for name, _, spec in SPECS
        )
        return f"Settings({', '.join(shown)})"


def _specs() -> Iterator[tuple[str, Any, Spec]]:
    hints = typing.get_type_hints(Settings, include_extras=True)
    for name in (*Settings.__annotations__, *MachineSettings.__annotations__):
        kind, spec = typing.get_args(hints[name])
        yield name, kind, spec


SPECS: Final = tuple(_specs())
"""Field name, type and `Spec` of every setting, in the order of the table."""
