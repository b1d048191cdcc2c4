"""What a person sees first of an organization."""

from __future__ import annotations

from omnara.api.omnara.types.account import VisibleProject
from omnara.api.omnara.types.agents import Agent, AgentConfig
from omnara.api.omnara.types.scalars import (
    AgentConfigID,
    AgentProfileID,
    Int32,
    OrganizationID,
    ProjectID,
    Timestamp,
    Wire,
)


class AgentProfile(Wire, frozen=True, kw_only=True):
    """A named config that agents are launched from."""

    id: AgentProfileID
    org_id: OrganizationID
    project_id: ProjectID
    name: str
    current_config_id: AgentConfigID
    current_generation: Int32
    current_config: AgentConfig
    created_at: Timestamp
    updated_at: Timestamp


class OrgOverviewResponse(Wire, frozen=True, kw_only=True):
    """Projects, newest first, and what changed last in them."""

    projects: list[VisibleProject]
    recent_agents: list[Agent]
    recent_agent_profiles: list[AgentProfile]
