"""`omnara mock-model`: the scripted model server as a command, for trying things out without a provider."""

from __future__ import annotations

from typing import Any

import click

from omnara.cli.output import run


@click.command("mock-model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8090, show_default=True, type=click.IntRange(0, 65535), help="Port; 0: any free one.")
@click.option("--delay-ms", default=0.0, show_default=True, help="Wait before each answer.")
@click.option("--tokens", type=click.IntRange(1), help="Answer with so many words instead of an echo.")
@click.option("--token-delay-ms", default=0.0, show_default=True, help="Wait between two words.")
@click.option("--script", "script_text", help="embedded, echo, audit, steps, fixed, or one with options as JSON.")
@click.option("--errors-every", default=0, show_default=True, help="Let each N-th request meet trouble; 0: none.")
@click.option("--lenient", is_flag=True, help="Accept requests that the real providers refuse.")
@click.option("--fast", is_flag=True, help="For load tests: no checks, no log of bodies.")
def command(
    host: str,
    port: int,
    delay_ms: float,
    tokens: int | None,
    token_delay_ms: float,
    script_text: str | None,
    errors_every: int,
    lenient: bool,
    fast: bool,
) -> None:
    """Serve a scripted model that speaks Anthropic Messages, OpenAI Chat Completions and OpenAI Responses.

    It refuses what the real providers refuse, so a request that passes here passes there. Any key and any model name
    are accepted.

    \b
    Examples:
      omnara mock-model
      omnara mock-model --tokens 200 --token-delay-ms 20 --errors-every 10
      ANTHROPIC_API_KEY=x ANTHROPIC_BASE_URL=http://127.0.0.1:8090 \\
        OMNARA_ALLOWED_PRIVATE_HOSTS=127.0.0.1:8090 omnara serve
    """
    from omnara.testing.catalog import parse_script
    from omnara.testing.script import ScriptError

    try:
        script = parse_script(script_text) if script_text is not None else None
    except ScriptError as error:
        raise click.UsageError(f"--script: {error}") from error
    options = {
        "delay_ms": delay_ms,
        "tokens": tokens,
        "token_delay_ms": token_delay_ms,
        "script": script,
        "errors_every": errors_every,
        "strict": not lenient,
        "fast": fast,
    }
    run(_serve(host, port, options))


async def _serve(host: str, port: int, options: dict[str, Any]) -> None:
    """Serve until a signal. Raises ConfigurationError when the address cannot be used."""
    from omnara.errors import ConfigurationError
    from omnara.testing.mock import run_mock_model

    def ready(url: str) -> None:
        click.echo(f"listening on {url} (base URLs: {url}/v1)")

    try:
        await run_mock_model(host, port, ready=ready, **options)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
