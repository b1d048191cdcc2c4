"""The README is run, not believed: its settings table is generated, its client example is executed."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from click import Context

from omnara.cli.root import root
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
