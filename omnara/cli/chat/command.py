"""`omnara chat`: options, the choice of the agent, and which kind of chat it will be."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial

import click

from omnara.cli.chat.pick import complete_agent, find, latest
from omnara.cli.output import print_line, run
from omnara.client import Client, Launched
from omnara.errors import ConfigurationError
from omnara.settings import load

__all__ = ["command"]

TERMINAL_RETRY_S = 2.0
"""On a terminal the chat itself waits for the server and says so."""
PIPED_RETRY_S = 60.0


@click.command("chat")
@click.argument("agent", required=False, shell_complete=complete_agent)
@click.option("--last", is_flag=True, help="The agent that was launched last.")
@click.option("--model", help="Launch a new agent with this model: a configured one, or PROVIDER/SLUG.")
@click.option("--system", default="You are a helpful assistant.", show_default=True, help="New agent: system prompt.")
@click.option("--tool", "tools", multiple=True, help="New agent: a built-in tool, such as web_fetch. May be repeated.")
@click.option("--machine", "machines", multiple=True, help="New agent: a machine that it runs commands on.")
@click.option("--pool", "pools", multiple=True, help="New agent: a pool from which it gets a machine of its own.")
@click.option("--name", help="New agent: its name.")
def command(
    agent: str | None,
    last: bool,
    model: str | None,
    system: str,
    tools: tuple[str, ...],
    machines: tuple[str, ...],
    pools: tuple[str, ...],
    name: str | None,
) -> int:
    """Talk to AGENT: its id, its name, or the beginning of either.

    On a terminal: the answer as it is written, your lines below it. Enter sends, and queues while the agent works;
    Alt-Enter steers the running turn; Ctrl-C stops it, twice leaves. Questions and permissions are answered in place.
    /help lists the rest.

    Through a pipe: the input is one message, the output is the text of the answer and nothing else, and the exit code
    is 1 when the turn failed, was stopped, or waits for a person.

    \b
    Examples:
      omnara chat --model anthropic/claude-sonnet-4-6 --tool ask_question
      omnara chat --last
      git diff | omnara chat reviewer > review.md
      eval "$(_OMNARA_COMPLETE=bash_source omnara)"     # completes agents, also: zsh_source, fish_source
    """
    if sum((agent is not None, last, model is not None)) != 1:
        raise click.UsageError("name an AGENT, or give --last, or --model to launch one; see `omnara chat --help`")
    settings = load()
    if settings.api_key is None:
        raise ConfigurationError("OMNARA_API_KEY is not set; put a key of the server there (see `omnara keys --help`)")
    key = settings.api_key
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    text = "" if on_terminal else _message()
    if not on_terminal and not text:
        raise click.UsageError("there is no terminal to talk on, and no message on standard input")

    async def main() -> int:
        retry_s = TERMINAL_RETRY_S if on_terminal else PIPED_RETRY_S
        async with Client(settings.url, key, retry_for_s=retry_s) as client:
            launch = partial(
                client.launch,
                system_prompt=system,
                tools=tools,
                machine_sources=[*({"machine": one} for one in machines), *({"pool": one} for one in pools)],
                name=name,
            )
            chosen = await _choose(client, agent, model, launch)
            if on_terminal:
                return await _on_terminal(client, chosen)
            if model is not None:
                click.echo(f"launched {chosen}", err=True)
            return await _piped(client, chosen, text)

    return run(main())


def _message() -> str:
    if sys.stdin.isatty():
        click.echo("the message, then Ctrl-D on a line of its own:", err=True)
    return sys.stdin.buffer.read().decode(errors="replace").strip()


async def _choose(
    client: Client, agent: str | None, model: str | None, launch: Callable[..., Awaitable[Launched]]
) -> str:
    if agent is not None:
        return await find(client, agent)
    if model is None:
        return await latest(client)
    return (await launch(model=model)).id


async def _on_terminal(client: Client, agent: str) -> int:
    # Imported here: the line editor and the Markdown renderer are of no use in a pipe.
    from prompt_toolkit.utils import is_dumb_terminal

    from omnara.cli.chat.session import Chat

    if is_dumb_terminal():
        raise click.UsageError("this terminal (TERM) cannot draw a chat; use a pipe: echo question | omnara chat AGENT")
    return await Chat(client, agent).run()


async def _piped(client: Client, agent: str, text: str) -> int:
    from omnara.cli.chat.piped import ask

    answer = await ask(client, agent, text)
    if sys.stdout.isatty():
        print_line(answer, lines=True)
    else:
        # For a program, or a file: exactly what was said. `click.echo` would leave out what colours a terminal.
        sys.stdout.write(f"{answer}\n")
    return 0
