"""`omnara serve`: the server."""

from __future__ import annotations

import sys

import click

from omnara.cli.output import run


@click.command("serve")
@click.option("--roles", metavar="LIST", help="Parts to run, out of api,worker,maintenance. Default: all.")
@click.option("--listen", metavar="HOST:PORT", help="Address of the API; overrides OMNARA_LISTEN.")
@click.option("--ops-listen", metavar="HOST:PORT", help="Address of health and metrics; overrides OMNARA_OPS_LISTEN.")
@click.option("--data-dir", metavar="PATH", help="Embedded database and generated keys; overrides OMNARA_DATA_DIR.")
def command(roles: str | None, listen: str | None, ops_listen: str | None, data_dir: str | None) -> None:
    """Run the server: API, workers and maintenance in one process.

    Everything is set by environment variables (`omnara settings` lists them). Without OMNARA_DATABASE_URL an embedded
    Postgres is used. The first start makes an organization, a project and a personal key, which is shown once on a
    terminal and otherwise written to `<data dir>/initial-api-key`. SIGTERM drains and exits with 0; a second one
    hurries.

    \b
    Examples:
      omnara serve
      ANTHROPIC_API_KEY=… omnara serve --listen :8080
      OMNARA_DATABASE_URL=postgresql://… omnara serve --roles worker,maintenance
    """
    from omnara.app import serve
    from omnara.log import configure
    from omnara.settings import load

    overrides = {
        "OMNARA_ROLES": roles,
        "OMNARA_LISTEN": listen,
        "OMNARA_OPS_LISTEN": ops_listen,
        "OMNARA_DATA_DIR": data_dir,
    }
    settings = load(overrides={name: value for name, value in overrides.items() if value is not None})
    configure(settings.log_level, settings.log_format)
    sys.exit(run(serve(settings)))
