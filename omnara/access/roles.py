"""What a caller may do: the one place that turns roles into permitted, hidden or denied.

`HIDDEN` becomes 404 and `DENIED` 403: a resource that the caller may not see must not be told apart from one
that does not exist. Pure functions over a loaded `Principal`. Source: api.md §3; DESIGN §2, invariant 8.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Final, assert_never
from uuid import UUID

import msgspec

from omnara.access.principals import Credential, OrgRole, Principal, PrincipalKind, ProjectRole
from omnara.errors import Forbidden, NotFound

__all__ = ["CallerRule", "Decision", "OrgAction", "ProjectAction", "ProjectScope", "can", "can_call", "require"]


class Decision(Enum):
    """The answer to "may this caller?"."""

    ALLOWED = "allowed"
    HIDDEN = "hidden"
    DENIED = "denied"


class OrgAction(StrEnum):
    """Actions on an organization. Source: api.md §3."""

    READ = "org_read"
    MANAGE = "org_manage"
    OWN = "org_own"


class ProjectAction(StrEnum):
    """Actions in a project. Source: api.md §3.

    READ: everything that only looks. OPERATE: launch, inputs, backlog, cancel, tool results, interactions.
    MANAGE: configs, profiles, crons, archive, config change, actor upsert. ACCESS: grants and roles.
    """

    READ = "project_read"
    OPERATE = "project_operate"
    MANAGE = "project_manage"
    ACCESS = "project_access"


class CallerRule(StrEnum):
    """Which kinds of caller an operation takes at all. Source: api.md §3."""

    ANYONE = "anyone"
    USER = "user"
    SESSION = "session"


class ProjectScope(msgspec.Struct, frozen=True):
    """A project as a request names it: the organization in the path must be the project's own."""

    org_id: UUID
    project_id: UUID


_ORG_RIGHTS: Final = {
    OrgRole.OWNER: frozenset(OrgAction),
    OrgRole.ADMIN: frozenset({OrgAction.READ, OrgAction.MANAGE}),
    OrgRole.MEMBER: frozenset({OrgAction.READ}),
}

_PROJECT_RIGHTS: Final = {
    ProjectRole.ADMIN: frozenset(ProjectAction),
    ProjectRole.DEVELOPER: frozenset({ProjectAction.READ, ProjectAction.OPERATE, ProjectAction.MANAGE}),
    ProjectRole.OPERATOR: frozenset({ProjectAction.READ, ProjectAction.OPERATE}),
    ProjectRole.VIEWER: frozenset({ProjectAction.READ}),
}


def can(principal: Principal, action: OrgAction | ProjectAction, scope: UUID | ProjectScope) -> Decision:
    """Decide `action` in an organization (its UUID) or in a project (its scope).

    In a project only the grant counts; owners and admins of its organization have one for each of its projects without
    having been given it (see `load`; the OpenAPI file says so, over api.md §3).
    HIDDEN when the caller cannot even read, DENIED when it can read but not do this. Source: api.md §3.
    Raises TypeError when the scope is not of the action's kind, which is a bug of the caller.
    """
    match action, scope:
        case OrgAction(), UUID():
            return _in_org(principal, action, scope)
        case ProjectAction(), ProjectScope():
            return _in_project(principal, action, scope)
        case _:
            raise TypeError(f"{action.value} does not apply to a {type(scope).__name__}")


def _in_org(principal: Principal, action: OrgAction, org_id: UUID) -> Decision:
    role = principal.org_roles.get(org_id)
    if role is None:
        return Decision.HIDDEN
    return Decision.ALLOWED if action in _ORG_RIGHTS[role] else Decision.DENIED


def _in_project(principal: Principal, action: ProjectAction, scope: ProjectScope) -> Decision:
    grant = principal.project_grants.get(scope.project_id)
    # A grant outlives nobody's membership: without an organization role the project is out of sight.
    if grant is None or grant.org_id != scope.org_id or scope.org_id not in principal.org_roles:
        return Decision.HIDDEN
    return Decision.ALLOWED if action in _PROJECT_RIGHTS[grant.role] else Decision.DENIED


def can_call(principal: Principal, rule: CallerRule) -> Decision:
    """Decide whether this kind of caller may use an operation at all; the resource plays no part.

    Never HIDDEN: which operations exist is public. Source: api.md §3 (a token where a session is needed is 403).
    """
    match rule:
        case CallerRule.ANYONE:
            fits = True
        case CallerRule.USER:
            fits = principal.kind is PrincipalKind.USER
        case CallerRule.SESSION:
            fits = principal.credential is Credential.SESSION
        case _:
            assert_never(rule)
    return Decision.ALLOWED if fits else Decision.DENIED


def require(principal: Principal, action: OrgAction | ProjectAction, scope: UUID | ProjectScope) -> None:
    """Return when `can` allows. Raises NotFound when hidden and Forbidden when denied."""
    decision = can(principal, action, scope)
    match decision:
        case Decision.ALLOWED:
            return
        case Decision.HIDDEN:
            raise NotFound
        case Decision.DENIED:
            raise Forbidden
        case _:
            assert_never(decision)
