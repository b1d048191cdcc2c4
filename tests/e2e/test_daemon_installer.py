"""The installer from a server, in a home where nothing is: it brings the daemon of that very server, and it works."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from omnara.ids import IdKind, decode
from tests.contract.server import ApiServer, api_server
from tests.support.machines import TestMachine, bind, make_machine, queue_command
from tests.support.waiting import until


class Sql:
    """The database of a server under test."""

    def __init__(self, server: ApiServer) -> None:
        self.fetch = server.rows


@pytest_asyncio.fixture(loop_scope="session")
async def server(database: str) -> AsyncIterator[ApiServer]:
    async with api_server(database, machine_drain_s=0.2) as running:
        yield running


async def run_installer(server: ApiServer, home: Path, token: str, **more: str) -> tuple[int, str]:
    """Run the script as a person does who pipes it into a shell; exit code and what was said."""
    answer = await server.call("GET", "/install/omnarad.sh", key=None)
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/x-shellscript")
    assert (answer.headers["Cache-Control"], answer.headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
    environment = kept | {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "OMNARA_PYTHON": sys.executable,
        "OMNARA_MACHINE_TOKEN": token,
        **more,
    }
    shell = await asyncio.create_subprocess_exec(
        "/bin/sh",
        env=environment,
        cwd=home,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = await shell.communicate(answer.text.encode())
    assert shell.returncode is not None
    return shell.returncode, said.decode()


async def a_machine(server: ApiServer) -> TestMachine:
    return await make_machine(Sql(server), decode(IdKind.ORG, server.org), decode(IdKind.PROJECT, server.project))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_installed_daemon_runs_commands(server: ApiServer, tmp_path: Path) -> None:
    home = tmp_path / "a home"
    home.mkdir()
    machine = await a_machine(server)
    code, said = await run_installer(server, home, machine.token)
    assert code == 0, said
    root = home / ".omnara"
    bound = msgspec.json.decode((root / "daemon.json").read_bytes())
    assert (bound["api_url"], bound["machine_id"]) == (server.url, machine.public_id)
    assert (root / "daemon.json").stat().st_mode & 0o077 == 0
    assert not list(root.glob(".install.*"))

    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    daemon = await asyncio.create_subprocess_exec(
        str(root / "bin" / "omnara"), "daemon", "run", env=environment, cwd=home, stdin=subprocess.DEVNULL
    )
    try:
        agent_id = decode(IdKind.AGENT, (await server.agent()).rsplit("/", 1)[1])
        binding = await bind(Sql(server), machine, agent_id)
        process_id = await queue_command(Sql(server), machine, agent_id, binding, "echo hello > there")

        async def over() -> bool:
            row: Any = (await server.rows("select state from processes where id = $1", process_id))[0]
            return bool(row["state"] == "exited")

        await until(over, "the command has run", limit_s=30)
        assert (home / "there").read_text() == "hello\n"
    finally:
        daemon.terminate()
        assert await daemon.wait() == 0

    # Again, as for an update: what is there is used, and nothing is fetched from the index.
    code, said = await run_installer(server, home, machine.token, PIP_INDEX_URL="http://127.0.0.1:9/none")
    assert code == 0, said
    assert len(list((root / "releases").iterdir())) == 1


async def test_a_wheel_with_another_digest_is_not_installed(server: ApiServer, tmp_path: Path) -> None:
    script = (await server.call("GET", "/install/omnarad.sh", key=None)).text
    digest = script.partition("\nsha256='")[2].partition("'")[0]
    bad = script.replace(f"\nsha256='{digest}'", f"\nsha256='{'0' * 64}'")
    ran = await asyncio.to_thread(
        subprocess.run,
        ["/bin/sh"],
        input=bad,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "OMNARA_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "nothing was installed" in ran.stderr
    assert not list((tmp_path / ".omnara").iterdir())


async def test_the_script_names_the_address_under_which_it_was_found(server: ApiServer) -> None:
    behind_a_proxy = {"Host": "omnara.example.com", "X-Forwarded-Proto": "https"}
    answer = await server.call("GET", "/install/omnarad.sh", key=None, headers=behind_a_proxy)
    assert "api_url='https://omnara.example.com'\n" in answer.text
    for host in ("x'; rm -rf /; '", "a b", "a$(b)", "a/b", "@wheel@"):
        answer = await server.call("GET", "/install/omnarad.sh", key=None, headers={"Host": host})
        assert answer.status == 400, host


async def test_another_releases_wheel_is_not_found(server: ApiServer) -> None:
    script = (await server.call("GET", "/install/omnarad.sh", key=None)).text
    path = script.partition("\nwheel_url='")[2].partition("'")[0].removeprefix(server.url)
    async with server.session.get(server.url + path) as answer:
        assert (answer.status, answer.headers["X-Content-Type-Options"]) == (200, "nosniff")
        assert (await answer.read())[:2] == b"PK"
    digest = path.split("/")[3]
    async with server.session.get(server.url + path.replace(digest, "0" * 64)) as answer:
        assert answer.status == 404
