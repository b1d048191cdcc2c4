"""`omnara settings`: every setting with its present value, and the table for the README."""

from __future__ import annotations

import click
import msgspec

from omnara.cli.output import json_option, print_json, print_table
from omnara.setting_table import SPECS
from omnara.setting_types import default_text
from omnara.settings import load, markdown_table, unknown_variables


@click.command("settings")
@click.option("--markdown", is_flag=True, help="Print the table of the README: name, default, meaning.")
@json_option
def command(markdown: bool, as_json: bool) -> None:
    """Show every setting: its variable, its present value and what it means. Secrets are not shown.

    \b
    Examples:
      omnara settings
      OMNARA_WORKER_CAPACITY=64 omnara settings --json
    """
    if markdown:
        click.echo(markdown_table())
        return
    settings = load()
    rows = []
    for name, _, spec in SPECS:
        value = getattr(settings, name)
        shown = ("set" if value else "") if spec.secret else default_text(value)
        rows.append({"variable": spec.env, "value": shown, "meaning": spec.meaning})
    for warning in unknown_variables():
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        print_json(msgspec.to_builtins(rows))
    else:
        print_table(("variable", "value", "meaning"), rows, empty="")
