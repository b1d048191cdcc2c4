"""`omnara agents`: what a person does with agents, over HTTP against a running server."""

from __future__ import annotations

from typing import Final

import click
import msgspec

from omnara.cli.calling import with_client
from omnara.cli.output import json_option, print_json, print_line, print_table
from omnara.client import Client, Event, turn_is_over

_STATUSES: Final = ("running", "waiting", "idle", "pausing", "paused", "crashed", "archived")
"""Archived agents are listed only when asked for. Source: the view `agents_overview`."""


@click.group("agents")
def command() -> None:
    """Launch, list and steer agents on a running server.

    Talks to the server at OMNARA_URL (default http://127.0.0.1:8080) with the key in OMNARA_API_KEY. On the machine of
    `omnara serve` the first key is in `<data dir>/initial-api-key`. AGENT is an id, as `launch` and `list` print it.

    \b
    Examples:
      omnara agents launch --model anthropic/claude-sonnet-4-6 -m "Count the ships" --follow
      omnara agents list --status crashed
      omnara agents steps agt_…
      omnara agents resume agt_… --force
    """


@command.command("launch")
@click.option("--model", required=True, help="Configured model, or PROVIDER/SLUG.")
@click.option("--system", "system_prompt", default="You are a helpful assistant.", help="System prompt.")
@click.option("--tool", "tools", multiple=True, help="Built-in tool, such as web_fetch. May be repeated.")
@click.option("--machine", "machines", multiple=True, help="Machine that it runs commands on, by name or id.")
@click.option("--pool", "pools", multiple=True, help="Pool from which it gets a machine of its own, by name or id.")
@click.option("-m", "--message", help="First message; without one the agent waits.")
@click.option("--name", help="Name for lists.")
@click.option("--follow", is_flag=True, help="Print events until the turn is over.")
@json_option
def launch(
    model: str,
    system_prompt: str,
    tools: tuple[str, ...],
    machines: tuple[str, ...],
    pools: tuple[str, ...],
    message: str | None,
    name: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Launch an agent and print its id. The tools for machines come with --machine and --pool.

    \b
    Examples:
      omnara agents launch --model anthropic/claude-sonnet-4-6 --tool web_fetch -m "Summarise https://example.com"
      omnara agents launch --model anthropic/claude-sonnet-4-6 --machine laptop -m "Which files are here?" --follow
    """
    sources = [*({"machine": one} for one in machines), *({"pool": one} for one in pools)]

    async def work(client: Client) -> None:
        launched = await client.launch(
            model=model,
            system_prompt=system_prompt,
            tools=tools,
            machine_sources=sources,
            message=message,
            name=name,
        )
        if as_json:
            print_json(launched)
        else:
            print_line(launched.id)
        if follow and message is not None:
            await _follow(client, launched.id)

    with_client(work)


async def _follow(client: Client, agent: str) -> None:
    seen: list[Event] = []
    async with client.stream(agent) as stream:
        async for item in stream:
            if isinstance(item, Event):
                seen.append(item)
                print_line(f"{item.sequence:>5}  {describe(item)}")
                # The config that opens the log is no answer yet: the message comes after it.
                if item.kind == "model_output" and turn_is_over(seen):
                    return


def describe(event: Event) -> str:
    """Return one line about an event, for a terminal."""
    text = " ".join(event.text.split())
    shown = text if len(text) <= 100 else f"{text[:99]}…"
    if event.kind == "model_output":
        calls = ", ".join(str(call["name"]) for call in event.tool_calls)
        return f"model    {shown}{f'  → {calls}' if calls else ''}{'' if event.stop_reason != 'error' else '  (error)'}"
    if event.kind == "tool_result":
        return f"result   {event.outcome}: {shown or value_words(event)}"
    return f"{(event.input_kind or event.kind):<8} {shown}"


def value_words(event: Event) -> str:
    """Return what a command wrote, or else what a tool told in other ways than text, in one line for a terminal."""
    value = next((value for value in event.values if isinstance(value, dict)), {})
    told = (f"{key} {found}" for key, found in value.items() if found and key != "process_id")
    words = " ".join(str(value.get("output", "")).split()) or ", ".join(told)
    return words if len(words) <= 100 else f"{words[:99]}…"


@command.command("list")
@click.option("--status", type=click.Choice(_STATUSES), help="Only agents in this status.")
@json_option
def list_agents(status: str | None, as_json: bool) -> None:
    """List the agents of the default project, newest first. `--status crashed` finds what needs you."""
    agents = with_client(lambda client: client.agents(status=status))
    rows = [{"id": one.id, "status": one.status, "name": one.name, "created_at": one.created_at} for one in agents]
    if as_json:
        print_json(rows)
    else:
        print_table(("id", "status", "name", "created_at"), rows, empty="no such agents")


@command.command("show")
@click.argument("agent")
@json_option
def show(agent: str, as_json: bool) -> None:
    """Show what an agent is doing, what it said last, what it used, and why it crashed if it did."""
    status = with_client(lambda client: client.status(agent))
    if as_json:
        print_json(status)
        return
    fields = msgspec.to_builtins(status)
    for name in ("id", "name", "status", "next_action", "last_step", "usage", "diagnosis", "output"):
        if fields.get(name) is not None:
            print_line(f"{name}: {fields[name]}", lines=name == "output")


@command.command("steps")
@click.argument("agent")
@click.option("--after", default=0, help="Only after this sequence.")
@json_option
def steps(agent: str, after: int, as_json: bool) -> None:
    """Print the agent's log: messages, model outputs, tool results."""

    async def work(client: Client) -> list[Event]:
        return [event async for event in client.events(agent, after=after)]

    events = with_client(work)
    if as_json:
        print_json(events)
        return
    rows = [
        {"sequence": event.sequence, "time": event.created_at, "what": describe(event)} for event in events
    ]  # fmt: skip
    print_table(("sequence", "time", "what"), rows, empty="no events")


@command.command("pause")
@click.argument("agent")
def pause(agent: str) -> None:
    """Let the running step finish, then hold. Messages and answers are still accepted."""
    print_line(with_client(lambda client: client.pause(agent)).status)


@command.command("resume")
@click.argument("agent")
@click.option("--force", is_flag=True, help="A crashed agent: go on from the last valid step.")
def resume(agent: str, force: bool) -> None:
    """Go on from the last saved step."""
    print_line(with_client(lambda client: client.resume(agent, force=force)).status)


@command.command("restart")
@click.argument("agent")
def restart(agent: str) -> None:
    """Void what a crashed agent did since the last message from a person, and let it answer that again."""
    print_line(with_client(lambda client: client.resume(agent, restart=True)).status)


@command.command("cancel")
@click.argument("agent")
def cancel(agent: str) -> None:
    """Stop the current turn. Queued messages start next."""
    stopped = with_client(lambda client: client.cancel(agent))
    click.echo("canceled" if stopped else "nothing was running")


@command.command("delete")
@click.argument("agent")
@click.confirmation_option(prompt="Stop this agent and archive it?")
def delete(agent: str) -> None:
    """Stop the agent, tear down what it holds, archive it. Its log stays readable."""
    with_client(lambda client: client.delete(agent))
    click.echo("archived")
