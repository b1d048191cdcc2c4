"""Runs agents: identity, claims, steps and saves of one process."""

from omnara.worker.identity import Identity, IdentityEvents
from omnara.worker.verdicts import IdentityTimes
from omnara.worker.worker import Worker

__all__ = ["Identity", "IdentityEvents", "IdentityTimes", "Worker"]
