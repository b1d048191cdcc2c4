"""`omnara migrate`: bring the schema up to date without starting a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from omnara.cli.output import json_option, print_json, run

if TYPE_CHECKING:
    from omnara.db.migrate import MigrationReport


@click.command("migrate")
@click.option("--check", is_flag=True, help="Change nothing; exit code 1 if migrations are missing.")
@click.option("--without-contract", is_flag=True, help="Leave out steps that an older release could not live with.")
@json_option
def command(check: bool, without_contract: bool, as_json: bool) -> None:
    """Bring the database's schema up to date. `omnara serve` does this by itself at each start.

    Several may run at once: one applies, the others wait. A migration that was killed is repeated. Works on
    OMNARA_DATABASE_URL, else on the embedded database.

    \b
    Examples:
      omnara migrate
      omnara migrate --check
      omnara migrate --without-contract      # rolling upgrade: run again without it when no old replica is left
    """
    missing, report = run(_work(check, without_contract))
    if as_json:
        print_json({"missing": missing} if report is None else msgspec.to_builtins(report))
    elif report is None:
        click.echo("up to date" if not missing else f"missing: {', '.join(f'{version:04d}' for version in missing)}")
    else:
        click.echo(f"version {report.version:04d}, {len(report.applied)} applied in {report.seconds:.1f} s")
        if report.deferred:
            click.echo(f"left out: {', '.join(f'{version:04d}' for version in report.deferred)}")
    if missing:
        raise SystemExit(1)


async def _work(check: bool, without_contract: bool) -> tuple[list[int], MigrationReport | None]:
    from omnara.app.database import WAIT_FOR_DATABASE_S, direct_connection, visit_database
    from omnara.db.migrate import Progress, check_schema, migrate
    from omnara.settings import load

    def tell(progress: Progress) -> None:
        click.echo(f"{progress.what} {progress.version:04d} {progress.name}".rstrip(), err=True)

    async with visit_database(load(), WAIT_FOR_DATABASE_S) as database:
        if check:
            async with direct_connection(database) as connection:
                return list(await check_schema(connection)), None
        return [], await migrate(database, include_contract=not without_contract, on_progress=tell)
