"""`omnara keys`: personal API keys of the first organization's owner, written in the database directly.

The API creates keys in browser sessions only, so the operator's way is the database. Source: api.md §3.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from omnara.cli.output import json_option, print_json, print_line, print_table, run

if TYPE_CHECKING:
    from omnara.db.accounts import TokenRow
    from omnara.db.pool import ApiPool

T = TypeVar("T")


@click.group("keys")
def command() -> None:
    """Create, list and revoke personal API keys.

    Works on the database directly (OMNARA_DATABASE_URL, else the embedded one), beside a running server.

    \b
    Examples:
      export OMNARA_API_KEY=$(omnara keys create laptop)
      omnara keys list
      omnara keys revoke 3f9c…
    """


def _with_pool(work: Callable[[ApiPool], Awaitable[T]]) -> T:
    from omnara.app.first_start import visit_set_up
    from omnara.log import configure
    from omnara.settings import load

    settings = load()
    configure(settings.log_level, settings.log_format)

    async def main() -> T:
        async with visit_set_up(settings) as (_, pool):
            return await work(pool)

    return run(main())


def _shown(row: TokenRow) -> dict[str, object]:
    return {"id": row.token_id, "name": row.name, "created_at": row.created_at, "last_used_at": row.last_used_at}


@command.command("create")
@click.argument("name")
@json_option
def create(name: str, as_json: bool) -> None:
    """Create a key and print it. It cannot be shown again: only its hash is stored."""
    from omnara.engine.bootstrap import create_key

    token, row = _with_pool(lambda pool: create_key(pool, name))
    if as_json:
        print_json({"key": token.text, **_shown(row)})
    else:
        click.echo(token.text)


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List keys that work, newest first."""
    from omnara.engine.bootstrap import list_keys

    rows = [_shown(row) for row in _with_pool(list_keys)]
    if as_json:
        print_json(rows)
    else:
        print_table(
            ("id", "name", "created_at", "last_used_at"), rows, empty="no keys; make one: omnara keys create NAME"
        )


@command.command("revoke")
@click.argument("key_id", metavar="ID")
def revoke(key_id: str) -> None:
    """Revoke a key by the id that `omnara keys list` shows. Streams opened with it end within seconds."""
    from omnara.engine.bootstrap import revoke_key

    row = _with_pool(lambda pool: revoke_key(pool, key_id))
    print_line(f"revoked {row.name}")
