"""`omnara machines`: the machines that agents run commands on, over HTTP against a running server."""

from __future__ import annotations

import click
import msgspec

from omnara.cli.calling import with_client
from omnara.cli.output import json_option, print_json, print_line, print_table
from omnara.client import Client, ConnectedMachine, DaemonToken, Machine, MachinePool, NewDaemonToken
from omnara.errors import ConfigurationError
from omnara.settings import load


@click.group("machines")
def command() -> None:
    """Connect, list and delete the machines of the key's organization, on a running server.

    Talks to the server at OMNARA_URL (default http://127.0.0.1:8080) with the key in OMNARA_API_KEY. MACHINE is a
    name or an id, as `list` prints them. What runs on the machine itself is `omnara daemon`.

    \b
    Examples:
      omnara machines connect laptop
      omnara machines list
      omnara machines tokens laptop
      omnara machines delete laptop
      omnara machines pools create cloud --provider docker
    """


@command.command("list")
@click.option("--source", type=click.Choice(("byo", "pool")), help="Only those that people connect, or those of pools.")
@json_option
def list_machines(source: str | None, as_json: bool) -> None:
    """List the machines that the key sees, newest first."""
    machines: list[Machine] = with_client(lambda client: client.machines.all(source_kind=source))
    if as_json:
        print_json(machines)
        return
    rows = [
        {
            "id": machine.id,
            "name": machine.display_name,
            "connection": machine.connection_state,
            "lifecycle": machine.lifecycle_state,
            "provider": machine.provider,
            "created_at": machine.created_at,
        }
        for machine in machines
    ]
    columns = ("id", "name", "connection", "lifecycle", "provider", "created_at")
    print_table(columns, rows, empty="no machines")


@command.command("connect")
@click.argument("name")
@click.option("--project", "projects", multiple=True, help="Project that may use it; may be repeated.")
@json_option
def connect(name: str, projects: tuple[str, ...], as_json: bool) -> None:
    """Make a machine and print the token for its daemon. It cannot be shown again: only its hash is stored.

    Without --project, the key's project may use it.

    \b
    Example:
      omnara machines connect laptop --project proj_…
    """
    made: ConnectedMachine = with_client(lambda client: client.machines.connect(name, projects=projects or None))
    if as_json:
        print_json(made)
        return
    print_line(made.machine.id, err=True)
    print_line("on that computer, with the token in place of …:", err=True)
    print_line(f"curl -fsS {load().url}/install/omnarad.sh | OMNARA_MACHINE_TOKEN=… sh", err=True)
    print_line(made.token)


@command.command("tokens")
@click.argument("machine")
@click.option("--new", "name", metavar="NAME", help="Make another token with this name, and print it.")
@click.option("--revoke", metavar="ID", help="Revoke this token; its daemon ends all commands and deletes its files.")
@json_option
def tokens(machine: str, name: str | None, revoke: str | None, as_json: bool) -> None:
    """List the tokens with which a machine's daemon can join, make another, or revoke one.

    \b
    Examples:
      omnara machines tokens laptop --new spare
      omnara machines tokens laptop --revoke mdt_…
    """
    if name is not None and revoke is not None:
        raise click.UsageError("--new and --revoke are two things to do")
    if name is not None:
        made = with_client(lambda client: _new_token(client, machine, name))
        print_json(made) if as_json else print_line(made.token)
        return

    async def work(client: Client) -> list[DaemonToken]:
        found = await _find(client, machine)
        if revoke is not None:
            return [await client.machines.revoke_token(found, revoke)]
        return await client.machines.tokens(found)

    found = with_client(work)
    if as_json:
        print_json(found)
        return
    rows = [msgspec.structs.asdict(token) for token in found]
    print_table(("id", "name", "created_at", "last_used_at", "revoked_at"), rows, empty="no tokens")


@command.command("delete")
@click.argument("machine")
@click.confirmation_option(prompt="End everything on this machine and delete it?")
def delete(machine: str) -> None:
    """End a machine that somebody connected: its daemon, its commands, its tokens."""

    async def work(client: Client) -> None:
        await client.machines.delete(await _find(client, machine))

    with_client(work)
    click.echo("deleted")


async def _new_token(client: Client, machine: str, name: str) -> NewDaemonToken:
    return await client.machines.create_token(await _find(client, machine), name=name)


async def _find(client: Client, machine: str) -> str:
    """Return a machine's id: as it was given, or of the one that has it as its name. Raises ConfigurationError."""
    if machine.startswith("mch_"):
        return machine
    found = [one.id for one in await client.machines.all() if one.display_name == machine]
    if len(found) == 1:
        return found[0]
    wrong = f"several machines are called {machine}; use an id" if found else f"there is no machine called {machine}"
    raise ConfigurationError(wrong)


@command.group("pools")
def pools() -> None:
    """Make, list and delete pools, from which agents get machines of their own.

    \b
    Examples:
      omnara machines pools create cloud --provider docker --network bridge
      omnara machines pools list
    """


@pools.command("create")
@click.argument("name")
@click.option("--provider", metavar="NAME", required=True, help="docker: containers, local: directories.")
@click.option("--image", help="Image of its containers. Default: omnara-sandbox.")
@click.option("--network", help="Network of its containers. Default: none.")
@click.option("--max-machines", type=click.IntRange(1), default=10, show_default=True, help="Most machines at once.")
@json_option
def create_pool(
    name: str, provider: str, image: str | None, network: str | None, max_machines: int, as_json: bool
) -> None:
    """Make a pool that the key's project may use, and print its id. The same again changes nothing.

    \b
    Example:
      omnara machines pools create cloud --provider docker --image python:3.13-slim
    """
    config = {key: value for key, value in (("image", image), ("network", network)) if value is not None}
    made: MachinePool = with_client(
        lambda client: client.machines.create_pool(name, provider=provider, config=config, max_machines=max_machines)
    )
    print_json(made) if as_json else print_line(made.id)


@pools.command("list")
@json_option
def list_pools(as_json: bool) -> None:
    """List the pools of the organization, newest first."""
    found: list[MachinePool] = with_client(lambda client: client.machines.pools())
    if as_json:
        print_json(found)
        return
    columns = ("id", "name", "provider", "max_total_machines", "created_at")
    print_table(columns, [msgspec.structs.asdict(pool) for pool in found], empty="no pools")


@pools.command("delete")
@click.argument("pool")
@click.confirmation_option(prompt="End all machines of this pool and delete it?")
def delete_pool(pool: str) -> None:
    """End a pool with all its machines and what runs on them. POOL is a name or an id, as `list` prints them."""

    async def work(client: Client) -> None:
        await client.machines.delete_pool(await _pool(client, pool))

    with_client(work)
    click.echo("deleted")


async def _pool(client: Client, pool: str) -> str:
    """Return a pool's id: as it was given, or of the one that has it as its name. Raises ConfigurationError."""
    if pool.startswith("mpo_"):
        return pool
    for one in await client.machines.pools():
        if one.name == pool:
            return one.id
    raise ConfigurationError(f"there is no pool called {pool}")
