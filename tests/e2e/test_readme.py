"""The README is run, not believed: its settings table is generated, its client example is executed."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import types
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from click import Command, Context, Group

from omnara.cli.root import root
from omnara.client import Client
from omnara.settings import load, markdown_table
from omnara.testing.script import fixed
from omnara.testing.server import ModelServer
from omnara.testing.strict import Strictness
from tests.e2e.served import Served, served
from tests.support.postgres import PostgresForTests

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer(fixed("Hello from the model."), strict=Strictness(models=None)) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(
    postgres: PostgresForTests, model: ModelServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    async with postgres.fresh() as dsn, served(dsn, tmp_path_factory.mktemp("readme"), model) as running:
        yield running


def test_the_settings_table_is_the_generated_one() -> None:
    found = re.search(r"<!-- settings table: .*? -->\n(.*?)\n<!-- end of the settings table -->", README, re.DOTALL)
    assert found is not None, "the README has no settings table"
    assert found[1] == markdown_table(), "run `omnara settings --markdown` and put the table into the README"


async def test_the_client_example_runs(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"<!-- client example: .*? -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    module = types.ModuleType("readme_example")
    exec(compile(found[1], "README.md", "exec"), module.__dict__)
    async with asyncio.timeout(30):
        await module.main(server.url, server.key, "anthropic/scripted")
    assert "Hello from the model." in capsys.readouterr().out


def _commands() -> list[str]:
    """Every call of our program in the README's shell examples, without what is around it."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    calls = [re.search(r"(?:^|^.*[ /])omnara ([a-z].*)$", line.partition("   #")[0]) for line in lines]
    return [call[1].strip().removesuffix("&").strip() for call in calls if call is not None]


@pytest.mark.parametrize("line", sorted(set(_commands())))
def test_the_commands_of_the_readme_are_understood(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0].replace("…", "x"))
    found: Command = root
    context = Context(root)
    while isinstance(found, Group) and words:
        name, below, words = found.resolve_command(context, words)
        assert below is not None
        found, context = below, Context(below, parent=context, info_name=name)
    assert not isinstance(found, Group) or not words, line
    found.make_context(found.name, words)  # raises UsageError for what it does not take


def test_many_commands_are_found() -> None:
    found = _commands()
    for beginning in (
        "serve",
        "demo --machine docker",
        "machines connect laptop",
        "agents launch",
        "machines pools create",
    ):
        assert any(line.startswith(beginning) for line in found), beginning


@pytest.mark.skipif(shutil.which("curl") is None, reason="the example uses curl")
async def test_the_pool_example_over_http_runs(server: Served, tmp_path: Path) -> None:
    [block] = [each for each in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "machine-pool-grants" in each]
    (tmp_path / "example.sh").write_text(block.replace("http://127.0.0.1:8080", server.url))
    shell = await asyncio.create_subprocess_exec(
        "/bin/sh", "-eu", "example.sh",
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "OMNARA_API_KEY": server.key, "no_proxy": "127.0.0.1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(shell.communicate(), 60)
    assert (shell.returncode, err) == (0, b"")
    assert re.search(rb'"id":"(agt_[a-z2-7]+)"', out), out
    async with Client(server.url, server.key) as client:
        assert [pool.name for pool in await client.machines.pools()] == ["more"]


def test_what_the_readme_names_is_there() -> None:
    commands = root.list_commands(Context(root))
    named = re.search(r"^Commands: (.*?); each explains", README, re.MULTILINE | re.DOTALL)
    assert named is not None
    assert sorted(re.findall(r"`([a-z-]+)`", named[1])) == sorted(commands)
    for path in ("compose.yaml", "Containerfile", ".ci/run", "LICENSE", "ARCHITECTURE.md"):
        assert (ROOT / path).exists(), path


def test_the_server_of_the_examples_listens_where_the_readme_says() -> None:
    defaults = load({})
    assert f"http://{defaults.listen}" in README
    assert f"http://{defaults.ops_listen}" in README
