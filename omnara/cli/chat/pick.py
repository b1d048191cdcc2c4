"""Which agent is meant: by id, by name, or by the beginning of either; and the same for the shell's completion."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final

import click
from click.shell_completion import CompletionItem

from omnara.client import Agent, Client, ClientError
from omnara.errors import OmnaraError
from omnara.settings import load
from omnara.visible import visible

__all__ = ["complete_agent", "find", "latest", "matching"]

_ID: Final = re.compile(r"agt_[a-z2-7]{26}")
COMPLETION_LIMIT_S: Final = 2.0


def matching(agents: Sequence[Agent], wanted: str) -> list[Agent]:
    """Return the agents that `wanted` may mean: those of that id or name, else those that begin with it."""
    exact = [agent for agent in agents if wanted in (agent.id, agent.name)]
    if exact:
        return exact
    folded = wanted.casefold()
    same = [agent for agent in agents if agent.name.casefold() == folded]
    return same or [
        agent for agent in agents if agent.id.startswith(wanted) or agent.name.casefold().startswith(folded)
    ]


async def find(client: Client, wanted: str) -> str:
    """Return the id of the one agent that `wanted` means. Raises ClickException if there is none or several."""
    if _ID.fullmatch(wanted):
        return wanted
    found = matching(await client.agents(), wanted)
    if not found:
        raise click.ClickException(f"no active agent has an id or a name that begins with {wanted!r}")
    if len(found) > 1:
        listed = "\n".join(f"  {agent.id}  {visible(agent.name)}" for agent in found[:10])
        raise click.ClickException(f"{wanted!r} may mean {len(found)} agents; take an id:\n{listed}")
    return found[0].id


async def latest(client: Client) -> str:
    """Return the id of the agent that was launched last. Raises ClickException when there is none."""
    async for agent in client.each_agent():
        return agent.id
    raise click.ClickException("there is no active agent; launch one with --model PROVIDER/SLUG")


def complete_agent(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return names and ids for the shell. A server that is away completes nothing: a prompt is no place for errors."""

    async def ask() -> list[Agent]:
        settings = load()
        async with (
            asyncio.timeout(COMPLETION_LIMIT_S),
            Client(settings.url, settings.api_key or "", retry_for_s=0) as it,
        ):
            return await it.agents()

    try:
        agents = asyncio.run(ask())
    except (ClientError, OmnaraError, TimeoutError):
        return []
    by_id = incomplete.startswith("agt_")
    found = [agent for agent in agents if (agent.id if by_id else agent.name).startswith(incomplete)]
    return [CompletionItem(agent.id, help=agent.name) if by_id else CompletionItem(agent.name) for agent in found]
