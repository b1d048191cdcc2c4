"""Fixtures of the integration tests."""

from __future__ import annotations

from tests.support.engine_case import engine

__all__ = ["engine"]
