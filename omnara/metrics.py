"""What the process counts, for Prometheus: one frozen Struct with a registry of its own.

A registry per instance (never the global one) lets tests and benches run several servers in one process. Label values
come from closed sets only; an agent's id is never a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

_FAST: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_GROUP: Final = (1, 2, 4, 8, 16, 32, 64)
_STEP: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Every metric of the process. Gauges that describe the whole database are set by the maintenance service."""

    registry: CollectorRegistry
    ready_agents: Gauge
    ready_oldest_s: Gauge
    orphaned_agents: Gauge
    orphaned_oldest_s: Gauge
    claims: Counter
    steps: Counter
    step_s: Histogram
    saves: Histogram
    model_attempts: Counter
    hint_lag_s: Histogram
    loop_lag_s: Histogram
    open_streams: Gauge
    machine_channels: Gauge
    machine_requests_refused: Counter
    pool_connections: Gauge
    pool_wait_s: Histogram
    workers_alive: Gauge
    agents: Gauge
    oldest_xmin_s: Gauge
    notify_queue_ratio: Gauge
    http_requests: Counter
    http_s: Histogram
    large_body_bytes: Gauge
    large_bodies_refused: Counter
    service_up: Gauge

    @classmethod
    def create(cls) -> Self:
        """Return a fresh set, all at zero, in its own registry."""
        made = _Maker(CollectorRegistry())
        return cls(
            registry=made.registry,
            ready_agents=made.gauge("ready_agents", "Agents that wait for a worker"),
            ready_oldest_s=made.gauge("ready_oldest_seconds", "Age of the oldest waiting agent"),
            orphaned_agents=made.gauge("orphaned_agents", "Agents that a worker holds which is gone"),
            orphaned_oldest_s=made.gauge("orphaned_oldest_seconds", "Time since the first of those workers was gone"),
            claims=made.counter("claims", "Agents claimed by this process"),
            steps=made.counter("steps", "Steps by kind and outcome", "kind", "outcome"),
            step_s=made.histogram("step_seconds", "Time of a step from begin to save", _STEP, "kind"),
            saves=made.histogram("save_group_size", "Steps per saving statement", _GROUP),
            model_attempts=made.counter("model_attempts", "Attempts of model calls; error `none`: it worked", "error"),
            hint_lag_s=made.histogram("hint_lag_seconds", "Time from a hint's sending to its arrival", _FAST),
            loop_lag_s=made.histogram("event_loop_lag_seconds", "How late the event loop ran a timer", _FAST),
            open_streams=made.gauge("open_streams", "Event streams open in this process"),
            machine_channels=made.gauge("machine_channels", "Machines served by this process, by kind of line", "kind"),
            machine_requests_refused=made.counter(
                "machine_requests_refused", "Requests of machines refused, by the bound that they met", "bound"
            ),
            pool_connections=made.gauge("pool_connections", "API connections by state (idle, used)", "state"),
            pool_wait_s=made.histogram("pool_wait_seconds", "Time that a request waited for a connection", _FAST),
            workers_alive=made.gauge("workers_alive", "Workers that are alive in the whole installation"),
            agents=made.gauge("agents", "Agents by status", "status"),
            oldest_xmin_s=made.gauge("oldest_xmin_seconds", "Age of the oldest transaction that holds vacuum back"),
            notify_queue_ratio=made.gauge("notify_queue_ratio", "Use of the NOTIFY queue, 0 to 1"),
            http_requests=made.counter("http_requests", "Requests answered", "method", "route", "status"),
            http_s=made.histogram("http_seconds", "Time to answer a request, streams excluded", _FAST, "route"),
            large_body_bytes=made.gauge("large_body_bytes", "Bytes of request bodies over 1 MiB that are in work"),
            large_bodies_refused=made.counter("large_bodies_refused", "Such bodies refused because there was no room"),
            service_up=made.gauge("service_up", "1 while this part of the process is ready", "service"),
        )

    def expose(self) -> bytes:
        """Return the text that a Prometheus server reads; its content type is `CONTENT_TYPE`."""
        return generate_latest(self.registry)


class _Maker:
    """Makes metrics with the common prefix in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"omnara_{name}", text, labels, registry=self.registry)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"omnara_{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"omnara_{name}", text, labels, buckets=buckets, registry=self.registry)
