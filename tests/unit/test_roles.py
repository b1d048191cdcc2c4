"""Who may do what: the whole table of roles, and what is hidden rather than denied."""

from __future__ import annotations

from uuid import UUID

import pytest

from omnara.access.principals import Credential, OrgRole, Principal, PrincipalKind, ProjectGrant, ProjectRole
from omnara.access.roles import CallerRule, Decision, OrgAction, ProjectAction, ProjectScope, can, can_call, require
from omnara.errors import Forbidden, NotFound

ORG, OTHER_ORG, PROJECT, OTHER_PROJECT = (UUID(int=n) for n in (1, 2, 3, 4))
USER_ID = UUID("019535d9-3df7-79fb-b466-fa907fa17f9e")
SCOPE = ProjectScope(ORG, PROJECT)
ALLOWED, HIDDEN, DENIED = Decision.ALLOWED, Decision.HIDDEN, Decision.DENIED


def principal(
    org_role: OrgRole | None = OrgRole.MEMBER,
    project_role: ProjectRole | None = None,
    credential: Credential = Credential.PERSONAL_TOKEN,
) -> Principal:
    kind = PrincipalKind.ORG_KEY if credential is Credential.ORG_KEY else PrincipalKind.USER
    return Principal(
        kind=kind,
        credential=credential,
        id=USER_ID,
        org_roles={} if org_role is None else {ORG: org_role},
        project_grants={} if project_role is None else {PROJECT: ProjectGrant(ORG, project_role)},
    )


@pytest.mark.parametrize(
    ("role", "read", "manage", "own"),
    [
        (OrgRole.OWNER, ALLOWED, ALLOWED, ALLOWED),
        (OrgRole.ADMIN, ALLOWED, ALLOWED, DENIED),
        (OrgRole.MEMBER, ALLOWED, DENIED, DENIED),
        (None, HIDDEN, HIDDEN, HIDDEN),
    ],
)
def test_org_roles(role: OrgRole | None, read: Decision, manage: Decision, own: Decision) -> None:
    caller = principal(role)
    assert can(caller, OrgAction.READ, ORG) is read
    assert can(caller, OrgAction.MANAGE, ORG) is manage
    assert can(caller, OrgAction.OWN, ORG) is own
    assert can(caller, OrgAction.READ, OTHER_ORG) is HIDDEN


@pytest.mark.parametrize("org_role", [OrgRole.OWNER, OrgRole.ADMIN, OrgRole.MEMBER])
@pytest.mark.parametrize(
    ("role", "read", "operate", "manage", "access"),
    [
        (ProjectRole.ADMIN, ALLOWED, ALLOWED, ALLOWED, ALLOWED),
        (ProjectRole.DEVELOPER, ALLOWED, ALLOWED, ALLOWED, DENIED),
        (ProjectRole.OPERATOR, ALLOWED, ALLOWED, DENIED, DENIED),
        (ProjectRole.VIEWER, ALLOWED, DENIED, DENIED, DENIED),
        (None, HIDDEN, HIDDEN, HIDDEN, HIDDEN),
    ],
)
def test_project_roles_alone_decide_in_a_project(
    org_role: OrgRole,
    role: ProjectRole | None,
    read: Decision,
    operate: Decision,
    manage: Decision,
    access: Decision,
) -> None:
    caller = principal(org_role, role)
    assert can(caller, ProjectAction.READ, SCOPE) is read
    assert can(caller, ProjectAction.OPERATE, SCOPE) is operate
    assert can(caller, ProjectAction.MANAGE, SCOPE) is manage
    assert can(caller, ProjectAction.ACCESS, SCOPE) is access


def test_a_project_is_hidden_under_a_foreign_organization_and_after_membership_ended() -> None:
    caller = principal(OrgRole.OWNER, ProjectRole.ADMIN)
    assert can(caller, ProjectAction.READ, ProjectScope(OTHER_ORG, PROJECT)) is HIDDEN
    assert can(caller, ProjectAction.READ, ProjectScope(ORG, OTHER_PROJECT)) is HIDDEN
    assert can(principal(None, ProjectRole.ADMIN), ProjectAction.READ, SCOPE) is HIDDEN


def test_actions_and_scopes_must_fit() -> None:
    with pytest.raises(TypeError):
        can(principal(), OrgAction.READ, SCOPE)
    with pytest.raises(TypeError):
        can(principal(), ProjectAction.READ, ORG)


@pytest.mark.parametrize(
    ("credential", "user", "session"),
    [
        (Credential.SESSION, ALLOWED, ALLOWED),
        (Credential.PERSONAL_TOKEN, ALLOWED, DENIED),
        (Credential.ORG_KEY, DENIED, DENIED),
    ],
)
def test_which_callers_an_operation_takes(credential: Credential, user: Decision, session: Decision) -> None:
    caller = principal(OrgRole.ADMIN, credential=credential)
    assert can_call(caller, CallerRule.ANYONE) is ALLOWED
    assert can_call(caller, CallerRule.USER) is user
    assert can_call(caller, CallerRule.SESSION) is session


def test_require_turns_decisions_into_the_errors_of_the_api() -> None:
    require(principal(OrgRole.MEMBER, ProjectRole.OPERATOR), ProjectAction.OPERATE, SCOPE)
    with pytest.raises(NotFound):
        require(principal(OrgRole.OWNER), ProjectAction.READ, SCOPE)
    with pytest.raises(Forbidden):
        require(principal(OrgRole.OWNER, ProjectRole.VIEWER), ProjectAction.OPERATE, SCOPE)


def test_org_keys_are_never_owners_and_kinds_match_credentials() -> None:
    with pytest.raises(ValueError, match="never an owner"):
        principal(OrgRole.OWNER, credential=Credential.ORG_KEY)
    with pytest.raises(ValueError, match="authenticates only itself"):
        Principal(kind=PrincipalKind.USER, credential=Credential.ORG_KEY, id=USER_ID, org_roles={}, project_grants={})


@pytest.mark.parametrize(("credential", "prefix"), [(Credential.SESSION, "usr"), (Credential.ORG_KEY, "oak")])
def test_actor_identity(credential: Credential, prefix: str) -> None:
    caller = principal(OrgRole.MEMBER, credential=credential)
    actor = caller.actor(ORG)
    assert actor.provider == "omnara"
    assert actor.provider_tenant_id == "org_aaaaaaaaaaaaaaaaaaaaaaaaae"
    assert actor.provider_user_id == f"{prefix}_agktlwj56547xndg7kih7il7ty"
    assert caller.may_name_actor is (credential is Credential.ORG_KEY)
