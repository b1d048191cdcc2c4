"""Grants: which models of its organization a project may use, narrowed but never widened.

A grant is live policy. Agents read it with their model at each step, so a change or its end reaches their next call
within the catalogue's second. Source: api.md §3 (users only), §8, §14; contract (CreateProjectModelGrantRequest).
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal, PrincipalKind
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import model_configs, model_grants
from omnara.db.catalog import ModelFacts
from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.model_grants import GrantedModelRow, GrantLimits, ModelGrantRow
from omnara.engine.configured_models import check_reasoning
from omnara.engine.deps import Deps
from omnara.engine.scope import project_in_scope
from omnara.errors import Conflict, Forbidden, InvalidRequest, NotFound
from omnara.ids import new_uuid

_MODALITIES: Final = ("input_modalities", "output_modalities")


class CreatedGrant(msgspec.Struct, frozen=True):
    """A grant; not `created` when one with these limits was there."""

    created: bool
    row: ModelGrantRow


class ListedGrant(msgspec.Struct, frozen=True):
    """A grant with its model."""

    row: ModelGrantRow
    model: GrantedModelRow


async def create_grant(
    deps: Deps, p: Principal, project: ProjectScope, model_id: UUID, limits: GrantLimits
) -> CreatedGrant:
    """Let a project use a model of its organization. Own transaction.

    Raises NotFound, Forbidden (also for keys of organizations), InvalidRequest for limits that widen, Conflict for a
    grant with other limits.
    """
    if p.kind is not PrincipalKind.USER:
        raise Forbidden("organization keys grant no models")
    project_in_scope(p, project, ProjectAction.ACCESS)

    async def work(connection: Connection) -> CreatedGrant:
        check_limits(limits, await _locked_facts(connection, project.org_id, model_id))
        created = await model_grants.add(connection, new_uuid(), project.project_id, model_id, limits)
        row = await model_grants.find(connection, project.project_id, model_id=model_id)
        assert row is not None, "it was inserted or was there, and its model is locked"
        if not created and row.limits != limits:
            raise Conflict("the project has a grant with other limits")
        return CreatedGrant(created, row)

    return await deps.db.run(work)


async def list_grants(
    deps: Deps, p: Principal, project: ProjectScope, order: ListOrder
) -> list[tuple[str, ListedGrant]]:
    """Return a project's grants with sort values; one more than the page when there are more."""
    project_in_scope(p, project, ProjectAction.READ)
    async with deps.db.acquire() as connection:
        rows = await model_grants.list_grants(connection, project.project_id, order)
    return [(key, ListedGrant(row, model)) for key, row, model in rows]


async def update_grant(
    deps: Deps, p: Principal, project: ProjectScope, grant_id: UUID, changes: dict[str, Any]
) -> ModelGrantRow:
    """Change some limits of a grant. Own transaction. Raises NotFound, Forbidden, InvalidRequest."""
    project_in_scope(p, project, ProjectAction.ACCESS)

    async def work(connection: Connection) -> ModelGrantRow:
        before = await _found(connection, project, grant_id)
        facts = await _locked_facts(connection, project.org_id, before.configured_model_id)
        before = await _found(connection, project, grant_id)
        limits = msgspec.structs.replace(before.limits, **changes)
        check_limits(limits, facts)
        await model_grants.change(connection, grant_id, limits)
        return await _found(connection, project, grant_id)

    return await deps.db.run(work)


async def delete_grant(deps: Deps, p: Principal, project: ProjectScope, grant_id: UUID) -> None:
    """Take a model from a project; running agents lose it with their next call. Raises NotFound, Forbidden."""
    project_in_scope(p, project, ProjectAction.ACCESS)

    async def work(connection: Connection) -> None:
        if not await model_grants.drop(connection, project.project_id, grant_id):
            raise NotFound("model grant")

    await deps.db.run(work)


def check_limits(limits: GrantLimits, facts: ModelFacts) -> None:
    """Refuse limits that widen the model's or contradict each other. Raises InvalidRequest."""
    window = _narrowed("context_window_tokens", limits.context_window_tokens, facts.context_window_tokens)
    output = _narrowed("max_output_tokens", limits.max_output_tokens, facts.max_output_tokens)
    if limits.max_output_tokens is not None and output >= window:
        raise InvalidRequest("max_output_tokens must be smaller than context_window_tokens")
    if window < 2:
        raise InvalidRequest("context_window_tokens must be at least 2")
    _narrowed("default_max_output_tokens", limits.default_max_output_tokens, min(output, window - 1))
    for name in ("supports_tools", "supports_reasoning"):
        if getattr(limits, name) and not getattr(facts, name):
            raise InvalidRequest(f"{name} cannot be switched on: the model does not support it")
    for name in _MODALITIES:
        _subset(name, getattr(limits, name), getattr(facts, name))
    _check_reasoning(limits, facts)


def _check_reasoning(limits: GrantLimits, facts: ModelFacts) -> None:
    supported = facts.supports_reasoning and limits.supports_reasoning is not False
    if not supported:
        # What the model says of reasoning does not apply; what the grant says would never be used.
        check_reasoning(
            supported=False,
            effort=limits.default_reasoning_effort or "",
            efforts=limits.supported_reasoning_efforts,
        )
        return
    _subset("supported_reasoning_efforts", limits.supported_reasoning_efforts, facts.supported_reasoning_efforts)
    check_reasoning(
        supported=True,
        effort=limits.default_reasoning_effort or facts.default_reasoning_effort,
        efforts=limits.supported_reasoning_efforts or facts.supported_reasoning_efforts,
    )


def _narrowed(name: str, wanted: int | None, largest: int) -> int:
    if wanted is not None and wanted > largest:
        raise InvalidRequest(f"{name} must not be larger than {largest}")
    return largest if wanted is None else wanted


def _subset(name: str, wanted: tuple[str, ...], offered: tuple[str, ...]) -> None:
    if offered and not set(wanted) <= set(offered):
        raise InvalidRequest(f"{name} must be among those of the model")


async def _locked_facts(connection: Connection, org_id: UUID, model_id: UUID) -> ModelFacts:
    """Lock a model, so that it is neither deleted nor changed meanwhile; return its facts. Raises NotFound."""
    await model_configs.lock_model(connection, org_id, model_id)
    model = await model_configs.find_model(connection, org_id, model_id)
    if model is None:
        raise NotFound("configured model")
    return model.facts


async def _found(connection: Connection, project: ProjectScope, grant_id: UUID) -> ModelGrantRow:
    row = await model_grants.find(connection, project.project_id, grant_id=grant_id)
    if row is None:
        raise NotFound("model grant")
    return row
