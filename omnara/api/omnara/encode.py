"""From rows to the contract's objects: ids become public, absent stays absent, stored JSON is passed on as it is.

Source: api.md §1, §10, §15.
"""

from __future__ import annotations

from typing import Any, TypeVar
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType

from omnara.access.principals import Principal
from omnara.access.roles import Decision, ProjectAction, ProjectScope, can
from omnara.api.event_json import Owner, stored_event
from omnara.api.omnara.types.account import CurrentUser, CurrentUserIdentity, CurrentUserOrg, ProjectAccess
from omnara.api.omnara.types.account import VisibleProject as Project
from omnara.api.omnara.types.agents import Agent, AgentInput, AgentMachineBinding, AgentModel
from omnara.api.omnara.types.tools import AgentInteraction, ToolCall
from omnara.db.accounts import MembershipRow, ProjectRow, UserRow
from omnara.db.agents import AgentRow
from omnara.db.bindings import BindingRow
from omnara.db.calls import CallRow
from omnara.db.inputs import InputRow
from omnara.db.interactions import InteractionRow
from omnara.db.reads import EventRow
from omnara.ids import IdKind, encode

T = TypeVar("T")


def raw(text: str) -> Any:
    """Stored JSON text in the place of the value that it encodes; the encoder copies it unread."""
    return msgspec.Raw(text.encode())


def some(value: T | None) -> T | UnsetType:
    """Absent instead of null."""
    return UNSET if value is None else value


def public(kind: IdKind, value: UUID | None) -> str | UnsetType:
    """The public id, or absent."""
    return UNSET if value is None else encode(kind, value)


def agent(row: AgentRow) -> Agent:
    """An agent."""
    return Agent(
        id=encode(IdKind.AGENT, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        project_id=encode(IdKind.PROJECT, row.project_id),
        state="active" if row.archived_at is None else "archived",
        name=row.name,
        current_config_id=encode(IdKind.AGENT_CONFIG, row.current_config_id),
        model=AgentModel(provider_config=row.provider_config, name=row.model),
        created_at=row.created_at,
        updated_at=row.updated_at,
        archived_at=some(row.archived_at),
    )


def machine_binding(row: BindingRow) -> AgentMachineBinding:
    """A machine attached to an agent. Overlays of secrets name them by their public ids."""
    kind: Any = row.binding_kind
    state: Any = row.state
    secrets = msgspec.json.decode(row.secret_env_overlay, type=dict[str, UUID | None])
    return AgentMachineBinding(
        id=encode(IdKind.MACHINE_BINDING, row.id),
        project_id=encode(IdKind.PROJECT, row.project_id),
        agent_id=encode(IdKind.AGENT, row.agent_id),
        machine_id=encode(IdKind.MACHINE, row.machine_id),
        machine_ref=row.machine_ref,
        binding_kind=kind,
        state=state,
        description=row.description,
        cwd=row.cwd,
        env_overlay=msgspec.json.decode(row.env_overlay),
        secret_env_overlay={
            name: None if value is None else encode(IdKind.SECRET, value) for name, value in secrets.items()
        },
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def agent_input(row: InputRow) -> AgentInput:
    """An input; only messages have content."""
    kind: Any = row.kind
    mode: Any = row.delivery_mode
    return AgentInput(
        id=encode(IdKind.AGENT_INPUT, row.id),
        agent_id=encode(IdKind.AGENT, row.agent_id),
        state=row.state,
        delivery_mode=mode,
        input_kind=kind,
        actor_id=public(IdKind.ACTOR, row.actor_id),
        content_blocks=raw(row.content) if row.kind == "content" else UNSET,
        queued_at=row.queued_at,
    )


def tool_call(row: CallRow) -> ToolCall:
    """A tool call."""
    kind: Any = row.type
    state: Any = row.state
    outcome: Any = some(row.outcome)
    return ToolCall(
        id=encode(IdKind.TOOL_CALL, row.id),
        turn_id=encode(IdKind.TURN, row.turn_id),
        provider_call_id=row.provider_call_id,
        name=row.name,
        input=raw(row.input),
        type=kind,
        state=state,
        outcome=outcome,
        completed_at=some(row.completed_at),
        created_at=row.created_at,
    )


def interaction(row: InteractionRow, org_id: UUID, project_id: UUID) -> AgentInteraction:
    """A form, with its answers once it has them."""
    kind: Any = row.kind
    state: Any = row.state
    return AgentInteraction(
        id=encode(IdKind.INTERACTION, row.id),
        org_id=encode(IdKind.ORG, org_id),
        project_id=encode(IdKind.PROJECT, project_id),
        agent_id=encode(IdKind.AGENT, row.agent_id),
        interaction_kind=kind,
        state=state,
        request=raw(row.request),
        resolution=UNSET if row.resolution is None else raw(row.resolution),
        resolved_by_input_id=public(IdKind.AGENT_INPUT, row.resolved_by_input_id),
        created_at=row.created_at,
        resolved_at=some(row.resolved_at),
    )


def event(owner: Owner, row: EventRow) -> Any:
    """An event, as ready-made JSON."""
    return raw(stored_event(owner, row)[1])


def current_user(user: UserRow, orgs: list[MembershipRow]) -> CurrentUser:
    """The caller as a person."""
    return CurrentUser(
        user=CurrentUserIdentity(id=encode(IdKind.USER, user.id), email=user.email, display_name=user.display_name),
        orgs=[
            CurrentUserOrg(id=encode(IdKind.ORG, org.id), name=org.name, role=org.role, created_at=org.created_at)
            for org in orgs
        ],
    )


def project(row: ProjectRow, p: Principal) -> Project:
    """A project with what the caller may do in it."""
    scope = ProjectScope(row.org_id, row.id)
    allowed = {action: can(p, action, scope) is Decision.ALLOWED for action in ProjectAction}
    return Project(
        id=encode(IdKind.PROJECT, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        name=row.name,
        created_at=row.created_at,
        updated_at=row.updated_at,
        access=ProjectAccess(
            can_read=allowed[ProjectAction.READ],
            can_manage=allowed[ProjectAction.MANAGE],
            can_manage_access=allowed[ProjectAction.ACCESS],
            can_operate=allowed[ProjectAction.OPERATE],
        ),
    )
