"""The commands as processes: what they print, with which exit code, and what they say when something is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from omnara.cli.demo.server import ServerProcess
from omnara.client import Client, Event
from omnara.clock import monotonic
from omnara.settings import child_environment
from omnara.testing.script import fixed
from omnara.testing.server import ModelServer
from omnara.testing.strict import Strictness
from tests.e2e.served import Served, environment_for, served
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until


class Done(msgspec.Struct):
    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code in (0, 1), self.err
        return json.loads(self.out)


async def omnara(*arguments: str, environment: Mapping[str, str] | None = None, stdin: str = "") -> Done:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "omnara",
        *arguments,
        env=child_environment(environment or {}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 60)
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), err.decode())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer(fixed("Hello from the model."), strict=Strictness(models=None)) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(
    postgres: PostgresForTests, model: ModelServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    async with postgres.fresh() as dsn, served(dsn, tmp_path_factory.mktemp("cli"), model) as running:
        yield running


@pytest.fixture
def caller(server: Served) -> dict[str, str]:
    return server.environment | {"OMNARA_URL": server.url, "OMNARA_API_KEY": server.key}


# --- help and settings ------------------------------------------------------------------------------------


async def test_help_is_quick_and_loads_nothing_heavy() -> None:
    best, tries = 1e9, 0
    while best >= 0.3 and tries < 10:  # one is enough; on a busy computer many are slow
        best, tries = min(best, await _timed("--help")), tries + 1
    assert best < 0.3, f"omnara --help takes {best:.2f} s"
    heavy = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys, omnara.cli.root; print([m for m in ('asyncpg', 'aiohttp', 'rich') if m in sys.modules])",
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await heavy.communicate()
    assert out.decode().strip() == "[]"


async def _timed(*arguments: str) -> float:
    begun = monotonic()
    assert (await omnara(*arguments)).code == 0
    return monotonic() - begun


@pytest.mark.parametrize(
    "command",
    [
        "serve", "demo", "agents", "keys", "models", "migrate", "doctor", "mock-model", "settings", "agents launch",
        "models probe", "chat", "machines", "machines connect", "machines tokens", "machines pools",
    ],
)  # fmt: skip
async def test_every_command_explains_itself_with_an_example(command: str) -> None:
    done = await omnara(*command.split(), "--help")
    assert done.code == 0
    assert "omnara " + command.split()[0] in done.out
    assert "Example" in done.out or command == "agents launch"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
async def test_closed_streams_are_as_good_as_empty(closed: str) -> None:
    script = f'"$0" -m omnara settings {closed} && "$0" -m omnara chat nobody {closed}'
    environment = child_environment({"OMNARA_API_KEY": "k", "OMNARA_URL": "http://127.0.0.1:1"})
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", script, sys.executable, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2, err  # of the chat, which got no message
    assert b"Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
async def test_the_exit_code_counts_although_the_log_can_go_nowhere() -> None:
    """A service manager goes by it: a daemon that is not wanted any more is not to be started again."""
    script = """import contextlib, sys
from omnara.cli import main
with contextlib.suppress(OSError):
    print("kept in the buffer", file=sys.stderr)
sys.argv = ["omnara", "--help"]
main()"""
    environment = {name: value for name, value in child_environment({}).items() if name != "PYTHONUNBUFFERED"}
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", 'exec "$@" 2>/dev/full', "sh", sys.executable, "-c", script, env=environment,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_signals_count_whoever_started_the_program() -> None:
    script = """import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
from omnara.cli import main
sys.argv = ["omnara", "--help"]
try:
    main()
finally:
    print(signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, signal.pthread_sigmask(signal.SIG_BLOCK, []))"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert out.splitlines()[-1] == b"True set()"


async def test_exit_codes_are_documented() -> None:
    done = await omnara("--help")
    for code in ("0  done", "2  wrong usage", "3  server or database away"):
        assert code in done.out


async def test_settings_show_values_and_no_secrets() -> None:
    environment = {"OMNARA_API_KEY": "canary-7f3a", "OMNARA_WORKER_CAPACITY": "7", "OMNARA_WORKER_CAPACTY": "8"}
    done = await omnara("settings", "--json", environment=environment)
    rows = {row["variable"]: row["value"] for row in done.json()}
    assert rows["OMNARA_WORKER_CAPACITY"] == "7"
    assert rows["OMNARA_API_KEY"] == "set"
    assert "canary" not in done.out + done.err
    assert "OMNARA_WORKER_CAPACTY is not a setting" in done.err


# --- wrong usage and missing things -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "says"),
    [
        (["nonsense"], {}, 2, "No such command"),
        (["serve"], {"OMNARA_LISTEN": "8080"}, 2, "OMNARA_LISTEN"),
        (["agents", "list"], {}, 2, "OMNARA_API_KEY"),
        (["keys", "list"], {"OMNARA_DATA_DIR": "/nonexistent/omnara"}, 2, "omnara serve"),
        (["mock-model", "--script", "nonsense"], {}, 2, "--script"),
        (["serve"], {"OMNARA_DATABASE_URL": "postgresql://x@127.0.0.1:1/x"}, 2, "OMNARA_SECRET_ENCRYPTION_KEYS"),
        (["keys", "list"], {"OMNARA_DATABASE_URL": "postgresql://x@127.0.0.1:1/x"}, 3, "is the database up?"),
        (["doctor"], {"OMNARA_DATABASE_URL": "postgresql://x@127.0.0.1:1/x"}, 1, "start Postgres, or mend host"),
        (
            ["doctor"], {"OMNARA_DATABASE_URL": "postgresql://x@127.0.0.1:1/x", "OMNARA_DOCKER_HOST": "tcp://127.0.0.1:1"},
            1, "mend OMNARA_DOCKER_HOST",
        ),
        (["agents", "list", "--status", "bogus"], {}, 2, "'idle', 'pausing', 'paused', 'crashed', 'archived'"),
        (["serve"], {"ANTHROPIC_API_KEY": "sk-ant\nx"}, 2, "ANTHROPIC_API_KEY must be printable ASCII"),
        (["serve"], {"OMNARA_ALLOWED_PRIVATE_HOSTS": "*"}, 2, "OMNARA_ALLOWED_PRIVATE_HOSTS: '*' is a wildcard"),
        (["demo", "--folder", "/nonexistent"], {}, 2, "does not exist"),
        (["models", "add", "justname", "--format", "anthropic", "--base-url", "https://x"], {}, 2, "PROVIDER/NAME"),
    ],
)  # fmt: skip
async def test_a_failure_is_a_sentence_and_a_code(
    arguments: list[str], environment: dict[str, str], code: int, says: str
) -> None:
    free = {"OMNARA_OPS_LISTEN": "127.0.0.1:0", **environment}
    done = await omnara(*arguments, environment=free)
    assert (done.code, says in done.out + done.err, "Traceback" in done.err) == (code, True, False), done.err


async def test_no_server_is_exit_code_3() -> None:
    environment = {"OMNARA_URL": "http://127.0.0.1:1", "OMNARA_API_KEY": "x"}
    done = await omnara("agents", "list", environment=environment)
    assert done.code == 3
    assert "OMNARA_URL" in done.err


# --- a running server -------------------------------------------------------------------------------------


async def test_an_agent_from_launch_to_delete(caller: dict[str, str]) -> None:
    launched = await omnara(
        "agents", "launch", "--model", "anthropic/scripted", "-m", "Hi", "--name", "cli test", "--follow",
        environment=caller,
    )  # fmt: skip
    assert launched.code == 0, launched.err
    agent, *events = launched.out.splitlines()
    assert re.fullmatch(r"agt_[a-z2-7]{26}", agent)
    assert "Hello from the model." in events[-1]

    listed = (await omnara("agents", "list", "--status", "idle", "--json", environment=caller)).json()
    assert agent in [row["id"] for row in listed]
    shown = (await omnara("agents", "show", agent, "--json", environment=caller)).json()
    assert (shown["status"], shown["output"]) == ("idle", "Hello from the model.")
    steps = (await omnara("agents", "steps", agent, "--json", environment=caller)).json()
    assert [step["sequence"] for step in steps] == list(range(1, len(steps) + 1))

    assert (await omnara("agents", "pause", agent, environment=caller)).out.strip() == "paused"
    assert (await omnara("agents", "resume", agent, environment=caller)).out.strip() in ("idle", "running")
    assert (await omnara("agents", "cancel", agent, environment=caller)).out.strip() == "nothing was running"
    refused = await omnara("agents", "restart", agent, environment=caller)
    assert refused.code in (0, 1)
    assert (await omnara("agents", "delete", agent, "--yes", environment=caller)).code == 0
    assert (await omnara("agents", "show", agent, "--json", environment=caller)).json()["status"] == "archived"
    remaining = (await omnara("agents", "list", "--json", environment=caller)).json()
    assert agent not in [row["id"] for row in remaining]
    archived = (await omnara("agents", "list", "--status", "archived", "--json", environment=caller)).json()
    assert {"id": agent, "status": "archived", "name": "cli test"}.items() <= archived[0].items()


async def test_work_shows_in_the_metrics(server: Served, model: ModelServer) -> None:
    async with Client(server.url, server.key) as client, aiohttp.ClientSession() as session:
        agent = (await client.launch(model="anthropic/scripted", system_prompt="x", message="Hi")).id
        async with client.stream(agent) as stream:
            async for item in stream:
                if isinstance(item, Event) and item.kind == "model_output":
                    break

        missing: list[str] = []

        async def shown() -> bool:
            async with session.get(f"{server.process.ops_url}/metrics") as response:
                lines = [line for line in (await response.text()).splitlines() if not line.endswith(" 0.0")]
            missing[:] = [name for name in COUNTED if not any(line.startswith(name) for line in lines)]
            return not missing

        try:
            await until(shown, "every metric of a step was written")
        except AssertionError:
            raise AssertionError(f"never written: {missing}") from None


COUNTED = (
    "omnara_claims_total",
    'omnara_steps_total{kind="model",outcome="saved"}',
    'omnara_model_attempts_total{error="none"}',
    "omnara_hint_lag_seconds_count",
    "omnara_step_seconds_count",
    "omnara_event_loop_lag_seconds_count",
    "omnara_pool_wait_seconds_count",
    "omnara_save_group_size_count",
    "omnara_workers_alive",
    "omnara_http_requests_total",
)


async def test_refusals_are_told_apart(caller: dict[str, str]) -> None:
    unknown = await omnara("agents", "show", "agt_agktlwj56547xndg7kih7il7ty", environment=caller)
    assert (unknown.code, "not found" in unknown.err) == (1, True)
    model = await omnara("agents", "launch", "--model", "nope", environment=caller)
    assert (model.code, "model" in model.err) == (1, True)
    key = await omnara("agents", "list", environment=caller | {"OMNARA_API_KEY": "wrong"})
    assert (key.code, "OMNARA_API_KEY" in key.err) == (1, True)


async def test_a_machine_from_connect_to_delete(caller: dict[str, str]) -> None:
    made = (await omnara("machines", "connect", "laptop", "--json", environment=caller)).json()
    machine = made["machine"]["id"]
    assert made["token"].startswith("omnara_daemon_v1_")
    assert len(made["project_grants"]) == 1
    plain = await omnara("machines", "connect", "second", environment=caller)
    assert plain.out.startswith("omnara_daemon_v1_"), plain.err
    assert (len(plain.out.splitlines()), plain.err.splitlines()[0][:4]) == (1, "mch_")
    listed = await omnara("machines", "list", environment=caller)
    assert f"{machine}\tlaptop\toffline\tactive\tbyo" in listed.out
    assert (await omnara("machines", "list", "--source", "pool", environment=caller)).out == "no machines\n"
    spare = (await omnara("machines", "tokens", machine, "--new", "spare", "--json", environment=caller)).json()
    revoke = spare["token_record"]["id"]
    [revoked] = (await omnara("machines", "tokens", machine, "--revoke", revoke, "--json", environment=caller)).json()
    assert revoked["revoked_at"] is not None
    tokens = (await omnara("machines", "tokens", machine, "--json", environment=caller)).json()
    assert [token["name"] for token in tokens] == ["spare", "laptop"]
    both = await omnara("machines", "tokens", machine, "--new", "a", "--revoke", revoke, environment=caller)
    assert both.code == 2
    by_name = (await omnara("machines", "tokens", "laptop", "--json", environment=caller)).json()
    assert [token["name"] for token in by_name] == ["spare", "laptop"]
    nobody = await omnara("machines", "delete", "nobody", "--yes", environment=caller)
    assert (nobody.code, "no machine called nobody" in nobody.err) == (2, True), nobody.err
    assert (await omnara("machines", "delete", "second", "--yes", environment=caller)).out == "deleted\n"
    assert (await omnara("machines", "delete", machine, "--yes", environment=caller)).out == "deleted\n"
    gone = await omnara("machines", "delete", machine, "--yes", environment=caller)
    assert (gone.code, "not found" in gone.err) == (1, True)
    elsewhere = await omnara("machines", "connect", "x", "--project", "proj_x", environment=caller)
    assert elsewhere.code == 1


async def test_agents_are_launched_on_machines_and_pools(caller: dict[str, str]) -> None:
    connected = await omnara("machines", "connect", "desk", environment=caller)
    told = connected.err.splitlines()
    assert told[2] == f"curl -fsS {caller['OMNARA_URL']}/install/omnarad.sh | OMNARA_MACHINE_TOKEN=… sh"
    make = (
        "machines",
        "pools",
        "create",
        "cli-pool",
        "--provider",
        "docker",
        "--image",
        "busybox",
        "--network",
        "bridge",
    )
    pool = (await omnara(*make, environment=caller)).out.strip()
    assert (await omnara(*make, "--json", environment=caller)).json()["id"] == pool, "the same again"
    other = await omnara("machines", "pools", "create", "cli-pool", "--provider", "docker", environment=caller)
    assert other.code == 1
    assert f"{pool}\tcli-pool\tdocker\t10\t" in (await omnara("machines", "pools", "list", environment=caller)).out
    launch = ("agents", "launch", "--model", "anthropic/scripted")
    agent = await omnara(*launch, "--machine", "desk", environment=caller)
    assert (agent.code, agent.out[:4]) == (0, "agt_"), agent.err
    nobody = await omnara(*launch, "--machine", "desk", "--pool", "nowhere", environment=caller)
    assert (nobody.code, "machine_sources.1.pool" in nobody.err) == (1, True), nobody.err
    gone = await omnara("machines", "pools", "delete", "cli-pool", "--yes", environment=caller)
    assert (gone.code, gone.out) == (0, "deleted\n"), gone.err


async def test_keys_are_made_used_and_revoked(caller: dict[str, str]) -> None:
    made = await omnara("keys", "create", "laptop", environment=caller)
    key = made.out.strip()
    assert (await omnara("agents", "list", environment=caller | {"OMNARA_API_KEY": key})).code == 0
    rows = (await omnara("keys", "list", "--json", environment=caller)).json()
    (row,) = [row for row in rows if row["name"] == "laptop"]
    assert key not in json.dumps(rows)
    assert (await omnara("keys", "revoke", row["id"], environment=caller)).code == 0
    assert (await omnara("agents", "list", environment=caller | {"OMNARA_API_KEY": key})).code == 1
    assert (await omnara("keys", "revoke", row["id"], environment=caller)).code == 1


async def test_models_are_added_with_a_key_from_standard_input(caller: dict[str, str], model: ModelServer) -> None:
    added = await omnara(
        "models", "add", "local/tiny", "--format", "openai-chat", "--base-url", f"{model.url}/v1", "--slug", "tiny-1",
        "--context", "32000", "--output", "2000", "--key-stdin", environment=caller, stdin="canary-key\n",
    )  # fmt: skip
    assert added.code == 0, added.err
    listed = await omnara("models", "list", "--json", environment=caller)
    assert "local/tiny" in [f"{row['provider_config']}/{row['name']}" for row in listed.json()]
    assert "canary" not in listed.out + added.out + added.err
    answered = await omnara("agents", "launch", "--model", "local/tiny", "-m", "Hi", "--follow", environment=caller)
    assert "Hello from the model." in answered.out
    keyless = await omnara(
        "models", "add", "bare/tiny", "--format", "openai-chat", "--base-url", f"{model.url}/v1", environment=caller
    )
    assert keyless.code == 0, keyless.err
    answered = await omnara("agents", "launch", "--model", "bare/tiny", "-m", "Hi", "--follow", environment=caller)
    assert "Hello from the model." in answered.out
    private = await omnara(
        "models", "add", "x/y", "--format", "anthropic", "--base-url", "http://10.1.2.3/v1", environment=caller
    )
    assert (private.code, "OMNARA_ALLOWED_PRIVATE_HOSTS" in private.err) == (2, True)


async def test_models_are_probed_and_those_configured_are_marked(caller: dict[str, str], model: ModelServer) -> None:
    endpoint = f"{model.url}/v1"
    for name, slug in (("one", "scripted"), ("old", "gone-1")):
        added = await omnara(
            "models", "add", f"lab/{name}", "--format", "openai-chat", "--base-url", endpoint, "--slug", slug,
            "--key-stdin", environment=caller, stdin="canary-key\n",
        )  # fmt: skip
        assert added.code == 0, added.err
    probed = await omnara("models", "probe", "lab", "--json", environment=caller)
    assert probed.json() == {
        "provider": "lab",
        "endpoint": endpoint,
        "complete": True,
        "models": [{"slug": "scripted", "configured": ["lab/one"]}],
        "not_offered": ["gone-1"],
    }
    table = await omnara("models", "probe", "lab", environment=caller)
    assert table.code == 0
    assert [line.split() for line in table.out.splitlines()[1:]] == [
        ["scripted", "lab/one"],
        ["configured,", "but", "not", "offered:", "gone-1"],
    ]
    assert (await omnara("models", "probe", "anthropic", environment=caller)).out.count("scripted") >= 1
    assert "canary" not in probed.out + probed.err + table.out + table.err
    unknown = await omnara("models", "probe", "nobody", environment=caller)
    assert (unknown.code, "omnara models list" in unknown.err) == (1, True)
    closed = caller | {"OMNARA_ALLOWED_PRIVATE_HOSTS": "127.0.0.1:1"}
    refused = await omnara("models", "probe", "lab", environment=closed)
    assert (refused.code, "OMNARA_ALLOWED_PRIVATE_HOSTS" in refused.err) == (1, True)


async def test_a_server_says_which_endpoint_of_its_environment_it_will_not_call(tmp_path: Path) -> None:
    values = {"ANTHROPIC_API_KEY": "k", "ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "OMNARA_DATA_DIR": str(tmp_path)}
    done = await omnara("serve", environment=values)
    assert (done.code, "ANTHROPIC_BASE_URL" in done.err, "OMNARA_ALLOWED_PRIVATE_HOSTS" in done.err) == (2, True, True)
    assert list(tmp_path.iterdir()) == [], "before anything was set up"


async def test_the_doctor_and_migrate_find_a_healthy_database(caller: dict[str, str]) -> None:
    findings = (await omnara("doctor", "--json", environment=caller)).json()
    # Tests may run with fsync off, which the doctor is right to point out.
    wrong = [finding["name"] for finding in findings if not finding["ok"] and finding["name"] != "durability"]
    assert wrong == []
    expected = {"container engine", "advisory locks", "notifications", "schema", "key ring"}
    assert expected <= {finding["name"] for finding in findings}
    assert (await omnara("migrate", "--check", environment=caller)).code == 0
    other = environment_for(caller["OMNARA_DATABASE_URL"], Path("/tmp"), None)
    wrong_ring = (await omnara("doctor", "--json", environment=other)).json()
    assert [finding["ok"] for finding in wrong_ring if finding["name"] == "key ring"] == [False]


async def test_another_ring_is_refused_at_start(server: Served, tmp_path: Path) -> None:
    environment = environment_for(server.environment["OMNARA_DATABASE_URL"], tmp_path, None)
    done = await omnara("serve", environment=environment | {"OMNARA_OPS_LISTEN": ":0", "OMNARA_LISTEN": ":0"})
    assert done.code == 2
    assert "set up" in done.err


async def test_a_taken_port_is_told(server: Served) -> None:
    listen = server.url.removeprefix("http://")
    done = await omnara("serve", environment=server.environment | {"OMNARA_LISTEN": listen, "OMNARA_OPS_LISTEN": ":0"})
    assert done.code == 2
    assert "OMNARA_LISTEN" in done.err


async def test_an_empty_database_is_migrated_and_one_key_written(postgres: PostgresForTests, tmp_path: Path) -> None:
    async with postgres.empty() as dsn:
        environment = environment_for(dsn, tmp_path, None)
        del environment["OMNARA_BOOTSTRAP_API_KEY"]
        assert (await omnara("migrate", "--check", environment=environment)).code == 1
        process = ServerProcess(environment, tmp_path / "log")
        try:
            await process.start()
            path = tmp_path / "initial-api-key"
            key = path.read_text().strip()
            assert path.stat().st_mode & 0o777 == 0o600
            assert key not in (tmp_path / "log").read_text()
            async with Client(process.url, key) as client:
                assert await client.agents() == []
            assert await process.stop() == 0
        finally:
            process.kill()


# --- signals ----------------------------------------------------------------------------------------------


async def test_sigterm_closes_streams_answers_to_the_end_and_exits_with_0(
    postgres: PostgresForTests, tmp_path: Path
) -> None:
    async with (
        ModelServer(fixed("late"), strict=Strictness(models=None)) as slow,
        postgres.fresh() as dsn,
        served(dsn, tmp_path, slow, {"OMNARA_WORKER_DRAIN_TIMEOUT": "60"}) as running,
        Client(running.url, running.key, retry_for_s=1) as client,
        aiohttp.ClientSession() as session,
    ):
        gate = slow.gate()
        agent = (await client.launch(model="anthropic/scripted", system_prompt="x", message="Hi")).id
        await gate.reached()
        path = (await client.links(agent)).stream
        streams = [await _open_stream(session, running, path) for _ in range(50)]
        assert running.process.pid is not None
        begun = monotonic()
        os.kill(running.process.pid, signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*(_to_the_end(stream) for stream in streams)), 15)
        # The step still runs, so the drain lasts, and ordinary requests are answered.
        assert (await client.status(agent)).status in ("running", "pausing")
        assert await running.process.ready() is False
        gate.release()
        assert await running.process.ended() == 0
        assert monotonic() - begun < 45
        await running.process.start()
        output = [event async for event in client.events(agent)][-1]
        assert (output.text, slow.log.counts.repeats) == ("late", 0)


async def _open_stream(session: aiohttp.ClientSession, running: Served, path: str) -> aiohttp.ClientResponse:
    response = await session.get(running.url + path, headers={"Authorization": f"Bearer {running.key}"})
    assert response.status == 200
    await response.content.readany()
    return response


async def _to_the_end(response: aiohttp.ClientResponse) -> None:
    async for _ in response.content.iter_any():
        pass


async def test_a_second_sigterm_cuts_the_drain_short(postgres: PostgresForTests, tmp_path: Path) -> None:
    async with (
        ModelServer(fixed("late"), strict=Strictness(models=None)) as slow,
        postgres.fresh() as dsn,
        served(dsn, tmp_path, slow, {"OMNARA_WORKER_DRAIN_TIMEOUT": "60"}) as running,
        Client(running.url, running.key) as client,
    ):
        gate = slow.gate()
        await client.launch(model="anthropic/scripted", system_prompt="x", message="Hi")
        await gate.reached()
        assert running.process.pid is not None
        begun = monotonic()
        os.kill(running.process.pid, signal.SIGTERM)
        await until(lambda: "draining" in running.process.log_tail(), "the drain begins")
        assert await running.process.stop() == 0
        assert monotonic() - begun < 40
        gate.release()
        await running.process.start()


async def test_a_stop_during_the_start_is_a_clean_stop(tmp_path: Path) -> None:
    environment = environment_for("postgresql://nobody@127.0.0.1:1/none", tmp_path, None)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omnara", "serve",
        env=child_environment(environment | {"OMNARA_OPS_LISTEN": "127.0.0.1:0"}),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    async for line in process.stderr:
        if b"waiting for the database" in line:
            break
    process.send_signal(signal.SIGTERM)
    await process.stderr.read()
    assert await asyncio.wait_for(process.wait(), 20) == 0


async def test_the_mock_model_serves_and_stops() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-m", "omnara", "mock-model", "--port", "0", "--tokens", "5",
        env=child_environment({}),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    url = re.findall(r"http://[\d.:]+", line)[0]
    body = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"x-api-key": "any", "anthropic-version": "2023-06-01"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/messages", json=body, headers=headers) as got,
    ):
        assert (await got.json())["content"][0]["text"].startswith("w000 w001")
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) in (0, 130)


def test_events_are_described_in_one_line() -> None:
    from omnara.cli.agents import describe

    made = {
        "id": "evt", "sequence": 1, "event_kind": "model_output", "turn_id": "t", "turn_sequence": 1,
        "created_at": "2026-01-01T00:00:00Z", "stop_reason": "tool_use",
        "content_blocks": [{"type": "text", "text": "a\nb " * 80}, {"type": "tool_call", "name": "web_fetch"}],
    }  # fmt: skip
    line = describe(msgspec.convert(made, Event))
    assert "\n" not in line
    assert "…" in line
    assert "web_fetch" in line


# --- output that goes nowhere -----------------------------------------------------------------------------


async def into(path: str, *arguments: str, environment: Mapping[str, str], stdin: str = "") -> Done:
    """Run a command whose standard output is this file."""
    with open(path, "wb") as target:  # noqa: ASYNC230 - a device, or a file of the test
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "omnara", *arguments,
            env=child_environment(environment), stdin=asyncio.subprocess.PIPE, stdout=target,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    _, err = await asyncio.wait_for(process.communicate(stdin.encode()), 60)
    assert process.returncode is not None
    return Done(process.returncode, "", err.decode())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
async def test_a_full_disk_is_said_in_words(caller: dict[str, str]) -> None:
    for arguments, stdin in (
        (("settings",), ""),
        (("--help",), ""),
        (("chat", "--model", "anthropic/scripted"), "Hi\n"),
    ):
        done = await into("/dev/full", *arguments, environment=caller, stdin=stdin)
        assert (done.code, "Traceback" in done.err) == (1, False), done.err
        assert "error: the output could not be written: No space left on device" in done.err


async def test_a_reader_that_leaves_is_no_error_worth_words(caller: dict[str, str]) -> None:
    process = await asyncio.create_subprocess_shell(
        f"{sys.executable} -m omnara settings | true",
        env=child_environment(caller) | {"PYTHONUNBUFFERED": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert err.decode() == ""
