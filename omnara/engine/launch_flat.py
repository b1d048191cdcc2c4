"""Launching from a prompt, a model's name and a list of tools: the flat API's shorthand for config and launch.

It writes the same config that a source text would, so the two APIs share agents, hashes and limits.
Source: DESIGN §1 (flat routes); api.md §9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import catalog
from omnara.db.catalog import GrantedName
from omnara.db.connection import Connection
from omnara.domain.config import canonical_json
from omnara.engine.configs import draft_of, store_draft
from omnara.engine.deps import Deps
from omnara.engine.known_models import facts_of
from omnara.engine.launch import Launched, announce_launch, find_launched, launch, new_agent
from omnara.engine.model_admin import add_models
from omnara.engine.scope import project_in_scope
from omnara.errors import InvalidRequest

DEFAULT_INSTRUCTION: Final = "You are a helpful assistant."
_MAX_SLUG_CHARS: Final = 200


class FlatTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A custom tool. `permission` is a mode."""

    name: str
    description: str
    input_schema: dict[str, Any]
    permission: str = "always_allow"


class FlatLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """An agent in one request. `model` is a configured name or `provider/slug`; a tool's name is a built-in one.

    `machine_sources` are those of a config.
    """

    model: str
    system_prompt: str | None = None
    tools: Sequence[str | FlatTool] = ()
    machine_sources: Sequence[dict[str, Any]] = ()
    temperature: float | None = None
    message: str | None = None
    name: str | None = None
    key: str | None = None


async def launch_flat(deps: Deps, p: Principal, project: ProjectScope, request: FlatLaunch) -> Launched:
    """Launch an agent, making its config, and the configured model of an environment provider if it is new.

    Two transactions, since checking a config is work that no connection should wait for: a model, then all the rest.
    Needs the right to manage the project, since it makes a config. Raises NotFound, Forbidden, InvalidRequest (with
    what is wrong), RequestTooLarge.
    """
    project_in_scope(p, project, ProjectAction.MANAGE)
    existing = await find_launched(deps, project, request.key)
    if existing is not None:
        return existing
    new = new_agent(request.name, request.message, request.key)
    tools = _tools(request.tools)

    async def find_model(connection: Connection) -> tuple[str, str]:
        return await _model(connection, project, request.model)

    source = _source(request, tools, *await deps.db.run(find_model))
    draft = draft_of(deps, source, "json", shown_as=_SHOWN_AS)

    async def work(connection: Connection) -> Launched:
        config = (await store_draft(deps, connection, project, draft, source, "json")).config
        return await launch(connection, p, project, config, new)

    return announce_launch(deps, await deps.db.run(work))


_SHOWN_AS: Final = {"instruction": "system_prompt"}
"""Faults are reported under the names that the caller used."""


def _source(request: FlatLaunch, tools: dict[str, Any], provider: str, model: str) -> str:
    prompt = request.system_prompt
    document: dict[str, Any] = {
        "version": "v1",
        "instruction": DEFAULT_INSTRUCTION if prompt is None else prompt,
        "model": {"provider_config": provider, "name": model},
    }
    if tools:
        document["tools"] = tools
    if request.machine_sources:
        document["machine_sources"] = list(request.machine_sources)
    if request.temperature is not None:
        document["temperature"] = request.temperature
    return canonical_json(document)


def _tools(tools: Sequence[str | FlatTool]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for tool in tools:
        name = tool if isinstance(tool, str) else tool.name
        if name in entries:
            raise InvalidRequest("tools: a name is there twice")
        if isinstance(tool, str):
            entries[name] = {}
            continue
        entries[name] = {
            "type": "custom",
            "description": tool.description,
            "input_schema": tool.input_schema,
            "permission": {"mode": tool.permission},
        }
    return entries


async def _model(connection: Connection, project: ProjectScope, wanted: str) -> tuple[str, str]:
    """Return the provider's and the model's name for what the caller calls a model."""
    names = await catalog.granted_names(connection, project.project_id)
    matches = _matches(names, wanted)
    if len(matches) == 1:
        return matches[0].provider_config, matches[0].name
    if matches:
        shown = ", ".join(f"{match.provider_config}/{match.name}" for match in matches)
        raise InvalidRequest(f"model: is the name of several models; use one of {shown}")
    return await _new_model(connection, project, wanted)


def _matches(names: Sequence[GrantedName], wanted: str) -> list[GrantedName]:
    """Match by name, then `provider/name`, then `provider/slug`: the first way that finds any."""
    ways = (
        [n for n in names if n.name == wanted],
        [n for n in names if f"{n.provider_config}/{n.name}" == wanted],
        [n for n in names if f"{n.provider_config}/{n.slug}" == wanted],
    )
    return next((found for found in ways if found), [])


async def _new_model(connection: Connection, project: ProjectScope, wanted: str) -> tuple[str, str]:
    """Take any slug of a provider that the environment set up; every other provider's models must be configured."""
    provider_name, separator, slug = wanted.partition("/")
    provider = await catalog.find_provider(connection, project.org_id, provider_name) if separator else None
    if provider is None or provider.origin != "environment" or not slug or len(slug) > _MAX_SLUG_CHARS:
        raise InvalidRequest("model: is neither a model of this project nor provider/slug of a known provider")
    if any(character.isspace() or not character.isprintable() for character in slug):
        raise InvalidRequest("model: a slug has no blanks")
    await add_models(connection, project.org_id, provider.id, [(slug, facts_of(slug))], keep=True)
    return provider.name, slug
