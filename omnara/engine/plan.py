"""Everything a step needs to know about its agent's config, resolved: the model, the system text, the tools.

A plan is built once per config and model revision and then shared by all agents that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import msgspec

from omnara.providers.protocol import ModelTarget, ToolSpec


class ToolPolicy(msgspec.Struct, frozen=True):
    """How calls of one tool are treated. `check` returns why an input does not fit the schema, or None."""

    name: str
    type: str
    permission: str
    check: Callable[[dict[str, Any]], str | None]


class StepPlan(msgspec.Struct, frozen=True):
    """A config and a model revision, ready for steps. `secrets` names the secrets that a call uses, for the journal.
    With a `problem` (the model was revoked, its key is gone) a model step ends at once, with that text in the log."""

    config_id: UUID
    revision_id: UUID
    target: ModelTarget
    system: str
    tools: tuple[ToolSpec, ...]
    policies: Mapping[str, ToolPolicy]
    secrets: tuple[str, ...] = ()
    problem: str | None = None
