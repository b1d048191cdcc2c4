"""All routes of the scoped contract."""

from __future__ import annotations

from typing import Final

from omnara.api.omnara import (
    account,
    agents,
    artifacts,
    backlog,
    configs,
    configured_models,
    credentials,
    daemon_tokens,
    events,
    inputs,
    machine_grants,
    machine_pool_grants,
    machine_pools,
    machines,
    members,
    model_grants,
    model_providers,
    orgs,
    project_events,
    secret_access,
    secrets,
    tools,
)
from omnara.api.routing import Route

ROUTES: Final[tuple[Route, ...]] = (
    *account.ROUTES,
    *orgs.ROUTES,
    *secrets.ROUTES,
    *secret_access.ROUTES,
    *model_providers.ROUTES,
    *configured_models.ROUTES,
    *model_grants.ROUTES,
    *machines.ROUTES,
    *daemon_tokens.ROUTES,
    *machine_pools.ROUTES,
    *machine_grants.ROUTES,
    *machine_pool_grants.ROUTES,
    *members.ROUTES,
    *credentials.ROUTES,
    *configs.ROUTES,
    *agents.ROUTES,
    *inputs.ROUTES,
    *backlog.ROUTES,
    *tools.ROUTES,
    *events.ROUTES,
    *project_events.ROUTES,
    *artifacts.ROUTES,
)
