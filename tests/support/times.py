"""The time constants under which servers are broken: shrunk for every run, the defaults for `make chaos`."""

from __future__ import annotations

import msgspec


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The time constants of the servers, in seconds: `env` sets them, the others say what it sets."""

    name: str
    env: dict[str, str]
    short_lease: dict[str, str]
    """Variables without their prefix, for processes whose lease a test waits out. That of others is longer than a
    computer under load stands still."""
    lease_s: float
    """With `short_lease`."""
    grace_s: float
    drain_s: float
    patience_s: float
    """How long a test waits for something that takes moments when all is well."""


SHRUNK = Times(
    name="shrunk",
    env={
        "OMNARA_WORKER_LEASE": "12s",
        "OMNARA_WORKER_RENEW": "500ms",
        "OMNARA_DEATH_GRACE": "3s",
        "OMNARA_DEATH_GRACE_EMBEDDED": "500ms",
        "OMNARA_RECONCILE": "1s",
        "OMNARA_WORKER_DRAIN_TIMEOUT": "3s",
        "OMNARA_STREAM_SWEEP": "500ms",
        "OMNARA_HINT_HEARTBEAT": "1s",
        "OMNARA_MODEL_RETRY_BASE": "50ms",
        "OMNARA_MODEL_RETRY_CAP": "500ms",
    },
    short_lease={"WORKER_LEASE": "3s"},
    lease_s=3,
    grace_s=3,
    drain_s=3,
    patience_s=30,
)
DEFAULT = Times(name="default", env={}, short_lease={}, lease_s=30, grace_s=10, drain_s=20, patience_s=90)
