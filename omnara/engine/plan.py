"""Everything a step needs to know about its agent's config, resolved: the model, the system text, the tools.

A plan is built once per config and model revision and then shared by all agents that use them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Final
from uuid import UUID

import msgspec

from omnara.domain.compaction import ModelRoom
from omnara.domain.config import BuiltInTool, Definition
from omnara.domain.context_size import text_bytes, tokens
from omnara.engine.catalog import ModelCatalog, ResolvedConfig, ResolvedModel
from omnara.errors import NotFound
from omnara.ids import IdKind, decode
from omnara.log import get_logger
from omnara.providers.protocol import ModelTarget, ToolSpec
from omnara.tools.protocol import Effect, PermissionSelection, Tool
from omnara.tools.registry import BUILT_IN, FILE_TOOLS
from omnara.vault import SecretUnreadable

log = get_logger(__name__)

MAX_PLANS: Final = 10_000


class ToolPolicy(msgspec.Struct, frozen=True):
    """A tool of the config and the permission mode of its calls."""

    tool: Tool
    mode: str


class ModelOption(msgspec.Struct, frozen=True):
    """A model that takes over when those before it in the list have failed."""

    revision_id: UUID
    target: ModelTarget
    secrets: tuple[str, ...]


class StepPlan(msgspec.Struct, frozen=True):
    """A config and a model revision, ready for steps. `secrets` names the secrets that a call uses, for the journal.

    `fixed_tokens` is an estimate of what instructions and tools take of each request. `fallbacks` are in their order.
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
    fixed_tokens: int = 0
    fallbacks: tuple[ModelOption, ...] = ()

    @property
    def room(self) -> ModelRoom:
        """How much the model takes, and how much of that instructions and tools take."""
        target = self.target
        return ModelRoom(target.context_window_tokens, target.max_output_tokens, self.fixed_tokens)

    def at(self, attempt: int, per_model: int) -> StepPlan:
        """The plan of an attempt: each model has `per_model` attempts, then the next one of the list has its own."""
        index = min((attempt - 1) // per_model, len(self.fallbacks))
        if index <= 0:
            return self
        option = self.fallbacks[index - 1]
        return msgspec.structs.replace(
            self, target=option.target, revision_id=option.revision_id, secrets=option.secrets
        )


class PlanSource:
    """Builds plans and keeps them for as long as the model's revision, grant and key stay the same."""

    def __init__(self, models: ModelCatalog) -> None:
        self._models = models
        self._plans: OrderedDict[UUID, tuple[tuple[ResolvedModel, ...], StepPlan]] = OrderedDict()

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
        models = (resolved, *await self._fallbacks(config))
        known = self._plans.get(config_id)
        if known is not None and len(known[0]) == len(models) and all(map(is_, known[0], models)):
            return known[1]
        first, *others = (self._option(model, config.definition) for model in models)
        plan = _plan(config, first, tuple(others))
        self._plans[config_id] = (models, plan)
        self._plans.move_to_end(config_id)
        while len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    async def _fallbacks(self, config: ResolvedConfig) -> list[ResolvedModel]:
        """The further models that can be used now: one that was revoked, or whose key is gone, is passed over."""
        models = []
        for public_id in config.definition.model.fallback_model_ids:
            try:
                models.append(await self._models.resolve(decode(IdKind.CONFIGURED_MODEL, public_id), config.project_id))
            except (NotFound, SecretUnreadable) as error:
                log.warning("fallback_model_unusable", model=public_id, config_id=str(config.id), error=str(error))
        return models

    def _option(self, model: ResolvedModel, definition: Definition) -> ModelOption:
        choice, efforts = definition.model, model.row.supported_reasoning_efforts
        if choice.reasoning is not None and efforts and choice.reasoning.effort not in efforts:
            # Meant for another model of the list; this one thinks as much as it does by itself.
            definition = msgspec.structs.replace(definition, model=msgspec.structs.replace(choice, reasoning=None))
        return ModelOption(model.row.revision_id, self._models.target(model, definition), model.secret_names)


def _plan(config: ResolvedConfig, first: ModelOption, others: tuple[ModelOption, ...]) -> StepPlan:
    policies = policies_of(config.definition)
    tools = tuple(_spec(policy.tool) for name, policy in policies.items() if name in config.definition.tools)
    return StepPlan(
        config_id=config.id,
        revision_id=first.revision_id,
        target=first.target,
        system=config.definition.instruction,
        tools=tools,
        policies=policies,
        secrets=first.secrets,
        fixed_tokens=tokens(text_bytes(config.definition.instruction) + len(msgspec.json.encode(tools))),
        fallbacks=others,
    )


def _spec(tool: Tool) -> ToolSpec:
    return ToolSpec(tool.name, tool.description, dict(tool.input_schema))


_FILE_SPECS: Final = tuple(_spec(BUILT_IN[name]) for name in FILE_TOOLS)


def policies_of(definition: Definition) -> dict[str, ToolPolicy]:
    """The tools of a definition by name, and those that read files, which every agent may call. A built-in that this
    release no longer has is left out: calls to it fail.
    """
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
    for name in FILE_TOOLS:
        policies.setdefault(name, ToolPolicy(BUILT_IN[name], BUILT_IN[name].default_permission.mode))
    return policies


def with_file_tools(offered: Sequence[ToolSpec]) -> Sequence[ToolSpec]:
    """Add the tools that read files, to be offered once a conversation has a file that is only shown in part."""
    names = {tool.name for tool in offered}
    return (*offered, *(spec for spec in _FILE_SPECS if spec.name not in names))


def _unusable(config: ResolvedConfig, problem: str) -> StepPlan:
    target = ModelTarget(revision_id="", provider="", api_format="", slug="")
    policies = policies_of(config.definition)
    return StepPlan(config.id, None, target, config.definition.instruction, (), policies, (), problem)
