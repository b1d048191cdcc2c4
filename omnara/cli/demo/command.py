"""`omnara demo`: the command around the story."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import click

from omnara.cli.demo.plan import MachineKind
from omnara.cli.output import json_option, print_json, run


@click.command("demo")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder to audit, 200 files and 250 kB of it at most. Default: the documents shipped with omnara.",
)
@click.option("--seed", type=click.IntRange(0), help="Draws where the server is killed. Default: a new one, printed.")
@click.option("--model", metavar="PROVIDER/SLUG", help="Use a real provider (its key from the environment), for money.")
@click.option(
    "--machine",
    type=click.Choice(("docker", "local")),
    help="Audit by commands, in a container or in a directory of this computer.",
)
@click.option("--image", help="Image of the container. Default: omnara-sandbox, which you make once.")
@click.option("--keep", is_flag=True, help="Keep the demo's data directory with database and server log.")
@json_option
def command(
    folder: Path | None,
    seed: int | None,
    model: str | None,
    machine: MachineKind | None,
    image: str | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Watch an agent survive `kill -9`.

    Starts an embedded Postgres, a server and a scripted model, all on loopback, and lets an agent audit a folder:
    list it, read every file, fetch a web page, ask you one question, report. At a point drawn from the seed the
    server's whole process group is killed; a second server goes on. Then it is counted from outside whether anything
    was lost or done twice. Exit code 0 only if all is right. Needs no network and no key.

    With --machine the agent has no such tools: it unpacks the folder on a machine and runs find, wc, sha256sum and grep
    there. The server is killed as a command is handed over, or while it runs; each command writes into a file on the
    machine when it begins and when it ends, and that file is counted.

    \b
    Examples:
      omnara demo
      omnara demo --seed 7 --json
      omnara demo --folder ~/notes
      omnara demo --machine docker
      ANTHROPIC_API_KEY=… omnara demo --model anthropic/claude-sonnet-4-6
    """
    from omnara.cli.demo.folder import shipped_documents
    from omnara.cli.demo.show import Show
    from omnara.cli.demo.story import Options, tell
    from omnara.settings import load

    if machine is None and image is not None:
        raise click.UsageError("--image is for --machine docker")
    if machine is not None and model is not None:
        raise click.UsageError("--machine goes with the scripted model: leave --model out")
    show = Show(silent=as_json)
    options = Options(
        folder=folder or shipped_documents(),
        seed=secrets.randbelow(2**31) if seed is None else seed,
        model=model,
        keep=keep,
        machine=machine,
        image=image,
    )
    verdict = run(tell(options, load(), show))
    if as_json:
        print_json(verdict)
    else:
        show.verdict(verdict)
    if not verdict.ok:
        sys.exit(1)
