"""Who the caller is, what it can see, and which tools exist."""

from __future__ import annotations

from omnara.api.omnara.types.scalars import JSONObject, OrganizationID, ProjectID, Timestamp, UserID, Wire


class CurrentUserIdentity(Wire, frozen=True, kw_only=True):
    """The signed-in person."""

    id: UserID
    email: str
    display_name: str


class CurrentUserOrg(Wire, frozen=True, kw_only=True):
    """An organization that the person belongs to."""

    id: OrganizationID
    name: str
    role: str
    created_at: Timestamp


class CurrentUser(Wire, frozen=True, kw_only=True):
    """The person and their organizations, by name."""

    user: CurrentUserIdentity
    orgs: list[CurrentUserOrg]


class ProjectAccess(Wire, frozen=True, kw_only=True):
    """What the caller may do in a project."""

    can_read: bool
    can_manage: bool
    can_manage_access: bool
    can_operate: bool


class VisibleProject(Wire, frozen=True, kw_only=True):
    """A project that the caller can see."""

    id: ProjectID
    org_id: OrganizationID
    name: str
    created_at: Timestamp
    updated_at: Timestamp
    access: ProjectAccess


class ListProjectsResponse(Wire, frozen=True, kw_only=True):
    """A page of projects, newest first."""

    data: list[VisibleProject]
    next_cursor: str | None


class ToolPermissionSelection(Wire, frozen=True, kw_only=True):
    """A permission mode and its parameters."""

    mode: str
    parameters: JSONObject


class ToolPermissionMode(Wire, frozen=True, kw_only=True):
    """A permission mode that a tool offers."""

    name: str
    label: str
    description: str
    parameters_schema: JSONObject


class ToolPermissionProfile(Wire, frozen=True, kw_only=True):
    """The permission modes of a kind of tool."""

    default_permission: ToolPermissionSelection
    permission_modes: list[ToolPermissionMode]


class ToolCatalogEntry(Wire, frozen=True, kw_only=True):
    """A built-in tool."""

    name: str
    description: str
    default_permission: ToolPermissionSelection
    permission_modes: list[ToolPermissionMode]


class ToolCatalog(Wire, frozen=True, kw_only=True):
    """Everything that a config may switch on."""

    built_in_tools: list[ToolCatalogEntry]
    custom_tool_permissions: ToolPermissionProfile
    mcp_tool_permissions: ToolPermissionProfile
