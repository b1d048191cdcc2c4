"""`omnara models`: the model catalogue, written in the database directly, and what providers say of theirs."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from omnara.cli.output import json_option, print_json, print_line, print_table, run
from omnara.visible import visible

if TYPE_CHECKING:
    from omnara.db.catalog import ListedModel, ModelFacts
    from omnara.db.pool import ApiPool
    from omnara.engine.model_admin import ProviderSpec
    from omnara.providers.probe import Catalogue, ProbeTarget
    from omnara.vault import KeyRing

T = TypeVar("T")

_FORMATS = {
    "anthropic": "anthropic_messages",
    "openai-chat": "openai_chat_completions",
    "openai-responses": "openai_responses",
}
_PATHS = {"anthropic": "/messages", "openai-chat": "/chat/completions", "openai-responses": "/responses"}
_AUTH = {"anthropic": "api_key_header", "openai-chat": "bearer_token", "openai-responses": "bearer_token"}


@click.group("models")
def command() -> None:
    """Add, list and probe models. ANTHROPIC_API_KEY and OPENAI_API_KEY at a server's start add the well-known ones.

    Works on the database directly (OMNARA_DATABASE_URL, else the embedded one), beside a running server, which sees a
    new model within a second. A host in a private network needs OMNARA_ALLOWED_PRIVATE_HOSTS, here and at the server.

    \b
    Examples:
      omnara models list
      omnara models probe anthropic
      OMNARA_ALLOWED_PRIVATE_HOSTS=10.0.0.5:8000 omnara models add local/llama \\
        --format openai-chat --base-url http://10.0.0.5:8000/v1 --context 128000      # no key needed there
      omnara models add acme/thinker --format openai-responses --reasoning --base-url https://api.acme.example/v1
      echo "$KEY" | omnara models add acme/large --format openai-chat --base-url https://api.acme.example/v1 --key-stdin
    """


def _with_pool(work: Callable[[ApiPool, KeyRing], Awaitable[T]]) -> T:
    from omnara.app.first_start import visit_set_up
    from omnara.app.keyring import ring_of
    from omnara.log import configure
    from omnara.settings import load

    settings = load()
    configure(settings.log_level, settings.log_format)

    async def main() -> T:
        async with visit_set_up(settings) as (database, pool):
            return await work(pool, await ring_of(settings, database))

    return run(main())


@command.command("list")
@json_option
def list_models_(as_json: bool) -> None:
    """List models by provider and name."""

    async def work(pool: ApiPool, _ring: KeyRing) -> list[dict[str, object]]:
        from omnara.engine.bootstrap import default_org
        from omnara.engine.model_admin import list_models

        return [msgspec.to_builtins(row) for row in await list_models(pool, (await default_org(pool)).org_id)]

    rows = _with_pool(work)
    if as_json:
        print_json(rows)
        return
    shown = [
        {
            "model": f"{row['provider_config']}/{row['name']}",
            "format": row["api_format"],
            "endpoint": row["base_url"],
            "context": row["context_window_tokens"],
            "output": row["max_output_tokens"],
        }
        for row in rows
    ]
    print_table(
        ("model", "format", "endpoint", "context", "output"), shown, empty="no models; see omnara models --help"
    )


@command.command("probe")
@click.argument("provider")
@json_option
def probe(provider: str, as_json: bool) -> None:
    """Ask a provider which models it offers, with its stored key, and mark those that are configured.

    Tells whether key and endpoint work. Changes nothing, retries nothing, takes ten seconds at most.

    \b
    Examples:
      omnara models probe anthropic
      omnara models probe local --json | jq -r '.models[] | select(.configured == []) | .slug'
    """
    from omnara.app.addresses import address_check, allow_list
    from omnara.engine.bootstrap import default_org
    from omnara.engine.model_admin import list_models, probe_target
    from omnara.providers.probe import ProbeFailed, probe_models
    from omnara.settings import load

    async def stored(pool: ApiPool, ring: KeyRing) -> tuple[ProbeTarget, list[ListedModel]]:
        org_id = (await default_org(pool)).org_id
        return await probe_target(pool, ring, org_id, provider), await list_models(pool, org_id)

    target, listed = _with_pool(stored)
    found = run(probe_models(target, check_address=address_check(allow_list(load()))))
    if isinstance(found, ProbeFailed):
        refused = _Away if found.reason in ("connection", "timeout") else click.ClickException
        raise refused(visible(f"{provider}: {found.message}"))
    _show_catalogue(provider, target.base_url, found, listed, as_json=as_json)


class _Away(click.ClickException):
    """The provider does not answer; it may later."""

    exit_code = 3


def _show_catalogue(
    provider: str, endpoint: str, found: Catalogue, listed: list[ListedModel], *, as_json: bool
) -> None:
    names: dict[str, list[str]] = {}
    for model in listed:
        if model.provider_config == provider:
            names.setdefault(model.provider_model_slug, []).append(f"{provider}/{model.name}")
    models = [{"slug": slug, "configured": names.get(slug, [])} for slug in found.slugs]
    missing = sorted(names.keys() - set(found.slugs)) if found.complete else []
    if as_json:
        print_json(
            {
                "provider": provider,
                "endpoint": endpoint,
                "complete": found.complete,
                "models": models,
                "not_offered": missing,
            }
        )
        return
    rows = [{"slug": slug, "configured as": ", ".join(names.get(slug, []))} for slug in found.slugs]
    print_table(("slug", "configured as"), rows, empty=f"{endpoint} offers no models")
    if not found.complete:
        click.echo(f"… and more than these {len(found.slugs)}")
    if missing:
        print_line(f"configured, but not offered: {', '.join(missing)}")


@command.command("add")
@click.argument("model", metavar="PROVIDER/NAME")
@click.option(
    "--format", "wire", type=click.Choice(sorted(_FORMATS)), required=True, help="Wire format of the endpoint."
)
@click.option("--base-url", required=True, help="Endpoint, without the last part of the path.")
@click.option("--slug", help="Name that the endpoint knows. Default: NAME.")
@click.option("--context", default=128_000, show_default=True, help="Context window in tokens.")
@click.option("--output", default=8_192, show_default=True, help="Longest answer in tokens.")
@click.option("--no-tools", is_flag=True, help="The model cannot call tools.")
@click.option("--reasoning", is_flag=True, help="The model takes a reasoning effort.")
@click.option(
    "--key-stdin", is_flag=True, help="Read the API key from standard input. Default: the stored one, else none."
)
def add(
    model: str,
    wire: str,
    base_url: str,
    slug: str | None,
    context: int,
    output: int,
    no_tools: bool,
    reasoning: bool,
    key_stdin: bool,
) -> None:
    """Add a model, or change one, and let every project use it. Agents then name it as PROVIDER/NAME.

    \b
    Example:
      echo "$KEY" | omnara models add acme/large --format openai-chat --base-url https://api.acme.example/v1 --key-stdin
    """
    from omnara.db.catalog import ModelFacts

    provider_name, separator, name = model.partition("/")
    if not (provider_name and separator and name):
        raise click.UsageError("the model is written PROVIDER/NAME, for example local/llama")
    key = sys.stdin.readline().strip() if key_stdin else ""
    facts = ModelFacts(
        provider_model_slug=slug or name,
        context_window_tokens=context,
        max_output_tokens=output,
        default_max_output_tokens=None,
        supports_tools=not no_tools,
        supports_reasoning=reasoning,
        supported_reasoning_efforts=("low", "medium", "high") if reasoning else (),
    )
    _put(_provider(provider_name, wire, base_url), key, name, facts)
    click.echo(f"{model} can be used")


def _put(provider: ProviderSpec, key: str, name: str, facts: ModelFacts) -> None:
    from omnara.engine.bootstrap import default_org
    from omnara.engine.model_admin import add_model
    from omnara.vault import Secret

    async def work(pool: ApiPool, ring: KeyRing) -> None:
        org_id = (await default_org(pool)).org_id
        await add_model(pool, ring, org_id, provider, Secret(key) if key else None, name, facts)

    _with_pool(work)


def _provider(name: str, wire: str, base_url: str) -> ProviderSpec:
    from omnara.engine.model_admin import ProviderSpec

    return ProviderSpec(
        name=name,
        api_format=_FORMATS[wire],
        base_url=_checked(base_url),
        request_path=_PATHS[wire],
        auth_kind=_AUTH[wire],
        secret_name=f"model provider {name}",
        origin="api",
    )


def _checked(base_url: str) -> str:
    """Return the URL as it is stored. Raises UsageError for one that the server would not call."""
    from omnara.app.addresses import allow_list
    from omnara.settings import load
    from omnara.tools.ssrf import UrlRefused, check_endpoint

    try:
        return str(check_endpoint(base_url, allow_list(load()))).rstrip("/")
    except (UrlRefused, OSError) as error:
        raise click.UsageError(f"--base-url: {error}; private hosts need OMNARA_ALLOWED_PRIVATE_HOSTS") from error
