"""`omnara doctor`: does everything that the server relies on really work here? Tried out, not assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from omnara.cli.output import json_option, print_json, run
from omnara.visible import visible

if TYPE_CHECKING:
    from omnara.db.checks import CheckResult
    from omnara.db.connection import ConnectSettings
    from omnara.settings import Settings


class Finding(msgspec.Struct, frozen=True):
    """One thing that was tried. `fix` says what to do when it is not all right."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Check settings, container engine, database, locks, notifications, schema, keys and the data. Changes nothing.

    Works on OMNARA_DATABASE_URL, else on the embedded database, also beside a running server. Exit code 1 if anything
    is wrong; each problem says what to do.

    \b
    Examples:
      omnara doctor
      omnara doctor --json | jq '.[] | select(.ok | not)'
    """
    findings = run(_examine())
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            mark = click.style("ok   ", fg="green") if finding.ok else click.style("WRONG", fg="red")
            click.echo(f"{mark} {finding.name}: {visible(finding.detail)}")
            if not finding.ok and finding.fix:
                click.echo(f"      → {visible(finding.fix)}")
    if not all(finding.ok for finding in findings):
        raise SystemExit(1)


async def _examine() -> list[Finding]:
    from omnara.app.database import direct_connection, visit_database
    from omnara.db.checks import run_checks
    from omnara.db.migrate import check_schema
    from omnara.db.selftest import run_selftest
    from omnara.errors import OmnaraError, Unavailable
    from omnara.log import configure
    from omnara.settings import load, unknown_variables

    settings = load()
    configure(settings.log_level, settings.log_format)
    warnings = unknown_variables()
    findings = [Finding("settings", not warnings, "; ".join(warnings) or "all variables are known", "fix the names")]
    findings.append(await _engine(settings))
    try:
        async with visit_database(settings) as database:
            tried = await run_selftest(database)
            findings += [Finding(one.name, one.ok, one.detail, one.fix) for one in tried]
            if not tried[0].ok:
                return findings
            async with direct_connection(database) as connection:
                missing = await check_schema(connection)
                findings.append(_schema(missing))
                if missing:
                    return findings
                findings += [_data(check) for check in await run_checks(connection)]
            findings.append(await _keys(settings, database))
    except Unavailable as error:
        fix = "start Postgres, or mend host, port, name and password in OMNARA_DATABASE_URL"
        findings.append(Finding("database", False, error.detail or str(error), fix))
    except OmnaraError as error:
        findings.append(Finding("database", False, error.detail or str(error), "see the text"))
    return findings


async def _engine(settings: Settings) -> Finding:
    """Whether containers can be made here. Only an engine that is asked for has to be there."""
    from omnara.machines.providers.docker import DockerProvider
    from omnara.machines.providers.protocol import ProviderUnavailable

    if settings.docker_host == "off":
        return Finding("container engine", True, "none is to be used here")
    provider = DockerProvider(settings.docker_host)
    try:
        host = await provider.host()
    except ProviderUnavailable as error:
        fix = "mend OMNARA_DOCKER_HOST, or take it away where no agent runs commands in containers"
        return Finding("container engine", settings.docker_host is None, str(error), fix)
    finally:
        await provider.close()
    lacking = ", ".join(provider.engine.unlimited)
    return Finding("container engine", True, f"it is {host}" + (f"; it cannot limit {lacking}" if lacking else ""))


def _data(check: CheckResult) -> Finding:
    if not check.broken:
        return Finding(f"data: {check.name}", True, check.meaning)
    detail = f"does not hold: {check.meaning} {'; '.join(check.broken)}"
    return Finding(f"data: {check.name}", False, detail, "report this with the log; agents named here need an operator")


def _schema(missing: tuple[int, ...]) -> Finding:
    if not missing:
        return Finding("schema", True, "up to date")
    return Finding("schema", False, f"{len(missing)} migrations are missing", "run `omnara migrate`, or start a server")


async def _keys(settings: Settings, database: ConnectSettings) -> Finding:
    """Whether the key ring is this database's. Reads only."""
    from omnara.app.database import direct_connection
    from omnara.app.keyring import RING_FILE, load_ring, ring_source
    from omnara.db.accounts import installation_value
    from omnara.engine.bootstrap import CHECK_NAME
    from omnara.errors import ConfigurationError
    from omnara.vault import verify_check_value

    async with direct_connection(database) as connection:
        stored = await installation_value(connection, CHECK_NAME)
    path = settings.data_dir / RING_FILE
    if database.embedded and settings.secret_encryption_keys is None and not path.exists():
        if stored is None:
            return Finding("key ring", True, "none yet; the first start makes one")
        return Finding("key ring", False, f"{path} is missing", "restore the file from a backup")
    try:
        ring = load_ring(settings, embedded=database.embedded)
        if stored is None:
            return Finding("key ring", True, "readable; the database has not seen one yet")
        verify_check_value(stored, ring)
    except ConfigurationError as error:
        detail = f"{ring_source(settings)}: {error.detail or error}"
        return Finding("key ring", False, detail, "use the ring that this database was set up with")
    return Finding("key ring", True, "it is this database's ring")
