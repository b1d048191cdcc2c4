"""`omnara secrets`: what an operator does to stored secrets as a whole. Their values are never shown."""

from __future__ import annotations

import click

from omnara.cli.output import json_option, print_json, print_line, run


@click.group("secrets")
def command() -> None:
    """Move stored secrets to another key of the ring.

    Works on the database directly (OMNARA_DATABASE_URL, else the embedded one), beside running servers.

    \b
    Examples:
      omnara secrets reseal
    """


@command.command("reseal")
@json_option
def reseal(as_json: bool) -> None:
    """Bring every stored secret under the active key, so that the others can leave the ring.

    To rotate: give all servers a ring with the old and the new key, the new one active; run this; take the old key out
    of the ring everywhere. It may be run again, also while agents work. Exit code 1 when a secret cannot be read: it
    stays as it is, and so must its key.

    \b
    Examples:
      omnara secrets reseal
      omnara secrets reseal --json
    """
    from omnara.app.first_start import visit_set_up
    from omnara.app.keyring import ring_of
    from omnara.engine.reseal import Resealed, reseal_secrets
    from omnara.log import configure
    from omnara.settings import load

    settings = load()
    configure(settings.log_level, settings.log_format)

    async def main() -> Resealed:
        async with visit_set_up(settings) as (database, pool):
            return await reseal_secrets(pool, await ring_of(settings, database))

    done = run(main())
    if as_json:
        print_json(done)
    else:
        print_line(f"{done.moved} moved to the active key")
        if done.retired:
            print_line(f"no longer needed: {', '.join(done.retired)}")
        for name in done.unreadable:
            print_line(f"cannot be read, left as it is: {name}")
    if done.unreadable:
        raise SystemExit(1)
