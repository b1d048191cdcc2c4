"""The worker's counters with their labels looked up once: a look-up costs more than the count."""

from __future__ import annotations

from functools import cached_property

from prometheus_client import Counter, Histogram

from omnara.metrics import Metrics


class StepCounters:
    """Counts steps and model attempts of one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._steps: dict[tuple[str, str], Counter] = {}
        self._attempts: dict[str, Counter] = {}

    def step(self, kind: str, outcome: str) -> None:
        """A step of `kind` ended as `outcome`."""
        counter = self._steps.get((kind, outcome))
        if counter is None:
            counter = self._steps[kind, outcome] = self._metrics.steps.labels(kind, outcome)
        counter.inc()

    def took(self, kind: str, seconds: float) -> None:
        """Time of a step from its begin to its save."""
        self._seconds[kind].observe(seconds)

    def attempt(self, error: str) -> None:
        """A model attempt ended with this class of error, or `none`."""
        counter = self._attempts.get(error)
        if counter is None:
            counter = self._attempts[error] = self._metrics.model_attempts.labels(error)
        counter.inc()

    @cached_property
    def _seconds(self) -> dict[str, Histogram]:
        return {kind: self._metrics.step_s.labels(kind) for kind in ("model", "tools", "compaction")}
