"""Files of agents."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.scalars import AgentID, ArtifactID, OrganizationID, ProjectID, Timestamp, Wire


class Artifact(Wire, frozen=True, kw_only=True):
    """A stored file. `digest` is the SHA-256 of its content."""

    id: ArtifactID
    org_id: OrganizationID
    project_id: ProjectID
    agent_id: AgentID
    content_type: str | UnsetType = UNSET
    filename: str | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    size_bytes: Annotated[int, Meta(extra_json_schema={"format": "int64"})] | UnsetType = UNSET
    created_at: Timestamp
