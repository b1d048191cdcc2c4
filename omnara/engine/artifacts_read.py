"""What the API shows of files: of the agent in the path, to whoever may read that agent.

Knowing an artifact's id is not enough: it is looked up under its agent, whose place and readers are checked first.
Source: DESIGN §2, invariant 8; field-reports B19.
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction
from omnara.db import artifacts
from omnara.db.agents import AgentRef
from omnara.db.artifacts import ArtifactRow
from omnara.engine.deps import Deps
from omnara.engine.scope import AgentPath, locate
from omnara.errors import NotFound


class FoundArtifact(msgspec.Struct, frozen=True):
    """A file and where its agent belongs."""

    agent: AgentRef
    row: ArtifactRow


async def get_artifact(deps: Deps, p: Principal, path: AgentPath, artifact_id: UUID) -> FoundArtifact:
    """Return what is known of a file. Takes no lock. Raises NotFound, Forbidden."""
    async with deps.db.acquire() as connection:
        agent = await locate(connection, p, path, ProjectAction.READ)
        found = await artifacts.find_artifacts(connection, agent.id, [artifact_id])
    if not found:
        raise NotFound
    return FoundArtifact(agent, found[0])


async def read_content(deps: Deps, row: ArtifactRow, start: int, stop: int) -> bytes:
    """Return the bytes of a file from `start` up to `stop`. Own short transaction; keep the span small, since it is
    held in memory. Raises DatabaseUnavailable, Unavailable.
    """
    return await deps.blobs.read(deps.db, row, start, stop)
