"""Everything a step needs to know about its agent's config, resolved: the model, the system text, the tools.

A plan is built once per config and model revision and then shared by all agents that use them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.domain.config import BuiltInTool, Definition
from omnara.engine.catalog import ModelCatalog, ResolvedConfig
from omnara.errors import NotFound
from omnara.providers.protocol import ModelTarget, ToolSpec
from omnara.tools.protocol import Effect, PermissionSelection, Tool
from omnara.tools.registry import BUILT_IN
from omnara.vault import SecretUnreadable

MAX_PLANS: Final = 10_000


class ToolPolicy(msgspec.Struct, frozen=True):
    """A tool of the config and the permission mode of its calls."""

    tool: Tool
    mode: str


class StepPlan(msgspec.Struct, frozen=True):
    """A config and a model revision, ready for steps. `secrets` names the secrets that a call uses, for the journal.

    With a `problem` (the model was revoked, its key is gone) a model step ends at once, with that text in the log.
    """

    config_id: UUID
    revision_id: UUID | None
    target: ModelTarget
    system: str
    tools: tuple[ToolSpec, ...]
    policies: Mapping[str, ToolPolicy]
    secrets: tuple[str, ...] = ()
    problem: str | None = None


class PlanSource:
    """Builds plans and keeps them for as long as the model's revision, grant and key stay the same."""

    def __init__(self, models: ModelCatalog) -> None:
        self._models = models
        self._plans: OrderedDict[UUID, tuple[Any, StepPlan]] = OrderedDict()

    async def get(self, config_id: UUID) -> StepPlan:
        """Return the plan of a config; what it says about the model is at most a second old.

        Raises NotFound when the config is not there, Unavailable. Call it while holding no connection.
        """
        config = await self._models.config(config_id)
        try:
            resolved = await self._models.resolve(config.configured_model_id, config.project_id)
        except NotFound:
            return _unusable(config, "the model of this agent is no longer available to its project")
        except SecretUnreadable:
            return _unusable(config, "the key of this agent's model provider cannot be read")
        known = self._plans.get(config_id)
        if known is not None and known[0] is resolved:
            return known[1]
        target = self._models.target(resolved, config.definition)
        plan = _plan(config, target, resolved.row.revision_id, resolved.secret_names)
        self._plans[config_id] = (resolved, plan)
        self._plans.move_to_end(config_id)
        while len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return plan


def _plan(config: ResolvedConfig, target: ModelTarget, revision_id: UUID, secrets: tuple[str, ...]) -> StepPlan:
    policies = policies_of(config.definition)
    return StepPlan(
        config_id=config.id,
        revision_id=revision_id,
        target=target,
        system=config.definition.instruction,
        tools=tuple(
            ToolSpec(policy.tool.name, policy.tool.description, dict(policy.tool.input_schema))
            for policy in policies.values()
        ),
        policies=policies,
        secrets=secrets,
    )


def policies_of(definition: Definition) -> dict[str, ToolPolicy]:
    """The tools of a definition by name. A built-in that this release no longer has is left out: calls to it fail."""
    policies = {}
    for name, entry in definition.tools.items():
        if isinstance(entry, BuiltInTool):
            tool = BUILT_IN.get(name)
        else:
            tool = Tool(
                name=name,
                description=entry.description,
                input_schema=entry.input_schema,
                type="custom",
                effect=Effect.WAIT,
                default_permission=PermissionSelection(entry.permission.mode),
            )
        if tool is not None:
            policies[name] = ToolPolicy(tool, entry.permission.mode)
    return policies


def _unusable(config: ResolvedConfig, problem: str) -> StepPlan:
    target = ModelTarget(revision_id="", provider="", api_format="", slug="")
    policies = policies_of(config.definition)
    return StepPlan(config.id, None, target, config.definition.instruction, (), policies, (), problem)
