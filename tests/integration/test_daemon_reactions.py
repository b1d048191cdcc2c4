"""What a daemon makes of each answer of its server: go on, try later, leave it to another, or destroy everything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omnara.errors import ConfigurationError
from omnara.machines import wire
from omnara.machines.daemon import client
from omnara.machines.daemon.config import DaemonConfig, Home
from omnara.machines.daemon.daemon import Knobs
from omnara.machines.daemon.run import run_daemon
from omnara.machines.daemon.setup import bind
from omnara.setting_daemon import DaemonSettings
from omnara.testing.ports import free_ports
from tests.support.daemon_server import INSTALLATION, MACHINE, TOKEN, DaemonServer, daemon_server
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until

QUICK = Knobs(backoff_base_s=0.05, backoff_cap_s=0.1)


class Running:
    """A daemon in this process."""

    def __init__(self, server: DaemonServer, root: Path, knobs: Knobs) -> None:
        self.home = Home(root)
        self.stop = asyncio.Event()
        settings = DaemonSettings(
            home=root, api_url=server.url, machine_token=TOKEN, environment={"PATH": "/usr/bin:/bin", "SECRET": "s"}
        )
        self.work = asyncio.ensure_future(run_daemon(settings, self.home, self.stop, knobs=knobs))

    async def code(self) -> int:
        """Wait until the daemon has ended by itself."""
        async with asyncio.timeout(20):
            return await self.work

    async def end(self) -> int:
        """Stop it as SIGTERM does."""
        self.stop.set()
        return await self.code()


@asynccontextmanager
async def daemon(server: DaemonServer, root: Path, knobs: Knobs = QUICK) -> AsyncIterator[Running]:
    running = Running(server, root, knobs)
    try:
        yield running
    finally:
        running.stop.set()
        await asyncio.gather(running.work, return_exceptions=True)


def config_of(server: DaemonServer, **fields: str) -> DaemonConfig:
    values = {"api_url": server.url, "installation_id": INSTALLATION, "machine_id": MACHINE, "machine_token": TOKEN}
    return DaemonConfig(**{**values, **fields})


async def acknowledged(root: Path, process_id: str) -> None:
    """Wait until the daemon has kept that a report arrived; before that it may rightly be sent once more."""
    kept = next(root.glob(f"**/processes/{process_id}")) / "acknowledged"
    await until(kept.exists, "the acknowledgement is kept")


@pytest.fixture
async def server() -> AsyncIterator[DaemonServer]:
    async with daemon_server() as one:
        yield one


async def test_a_command_runs_with_a_small_environment_and_is_told(server: DaemonServer, tmp_path: Path) -> None:
    async with daemon(server, tmp_path) as running:
        channel = await server.channel()
        await channel.run("prc_1", "env; pwd", env={"CI": "1"}, cwd="/")
        event = await channel.expect_report(wire.ProcessFinished)
        assert (event.state, event.exit_code) == ("exited", 0)
        assert event.result is not None
        lines = event.result.output.splitlines()
        assert "CI=1" in lines
        assert "/" in lines
        assert not [line for line in lines if line.startswith(("SECRET", "OMNARA_MACHINE_TOKEN", "OMNARA_API"))]
        assert await running.end() == 0
    assert server.calls == ["bootstrap", "runtimes", "socket", "end"]
    (asked,) = server.registrations
    assert asked.daemon_version == "0.1.0"
    assert asked.observed_platform is not None


async def test_commands_run_on_while_the_daemon_is_away_and_are_told_once(server: DaemonServer, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with daemon(server, tmp_path / "home") as first:
        channel = await server.channel()
        await channel.run(
            "prc_1", f"echo began; echo x >> {mark}; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 3"
        )
        await channel.expect_report(wire.ProcessStarted)
        await acknowledged(tmp_path / "home", "prc_1")
        assert await first.end() == 0
    async with daemon(server, tmp_path / "home"):
        channel = await server.channel()
        (claim,) = server.registrations[-1].processes
        assert (claim.phase, claim.supervisor_live, claim.execution_committed) == ("accepted", True, True)
        (tmp_path / "go").touch()
        event = await channel.expect_report(wire.ProcessFinished)
        assert (event.state, event.exit_code) == ("failed", 3)
        assert event.result is not None
        assert event.result.output == "began\n"
    assert mark.read_text() == "x\n"
    assert server.registrations[0].daemon_instance_id != server.registrations[1].daemon_instance_id


async def test_a_line_that_is_cut_is_taken_up_again_by_the_same_instance(server: DaemonServer, tmp_path: Path) -> None:
    async with daemon(server, tmp_path):
        channel = await server.channel()
        await channel.socket.close()
        await server.channel()
        assert len({one.daemon_instance_id for one in server.registrations}) == 1
    assert server.calls[:5] == ["bootstrap", "runtimes", "socket", "runtimes", "socket"]


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("route", ["bootstrap", "runtimes"])
async def test_authority_lost_ends_what_runs_and_wipes_what_is_kept(
    server: DaemonServer, tmp_path: Path, route: str, status: int
) -> None:
    home = Home(tmp_path)
    config = config_of(server)
    home.save(config)
    async with daemon(server, tmp_path) as running:
        channel = await server.channel()
        await channel.run("prc_1", "echo $$; exec sleep 600", wait_ms=10_000)
        event = await channel.expect_report(wire.ProcessStarted)
        assert event.result is not None
        pid = int(event.result.output)
        assert await running.end() == 0
    assert Path(f"/proc/{pid}").exists()
    server.refuse(route, status, "unauthorized")
    async with daemon(server, tmp_path) as running:
        assert await running.code() == 0
    await until(lambda: not Path(f"/proc/{pid}").exists(), "the command is dead")
    assert not home.state(config).exists()
    assert home.load() is None


async def test_the_page_of_a_proxy_destroys_nothing(server: DaemonServer, tmp_path: Path) -> None:
    server.refuse("runtimes", 403)
    async with daemon(server, tmp_path) as running:
        await until(lambda: server.calls.count("runtimes") >= 3, "it tries again")
        assert not running.work.done()
        del server.answers["runtimes"]
        await server.channel()


async def test_a_refusal_at_the_socket_is_heard_at_the_registration(server: DaemonServer, tmp_path: Path) -> None:
    server.refuse("socket", 401, "unauthorized")
    async with daemon(server, tmp_path) as running:
        await until(lambda: server.calls.count("runtimes") >= 2, "it registers again")
        server.refuse("runtimes", 401, "unauthorized")
        assert await running.code() == 0


@pytest.mark.parametrize("code", ["machine_decommissioned", "authorization_revoked"])
async def test_the_end_by_frame_is_as_final_as_a_refusal(server: DaemonServer, tmp_path: Path, code: str) -> None:
    async with daemon(server, tmp_path) as running:
        channel = await server.channel()
        await channel.send(wire.RuntimeEnded(error_code=code))
        assert await running.code() == 0
    assert not running.home.state(config_of(server)).exists()


async def test_another_daemon_took_over_and_commands_run_on(server: DaemonServer, tmp_path: Path) -> None:
    async with daemon(server, tmp_path) as running:
        channel = await server.channel()
        await channel.run("prc_1", "echo $$; exec sleep 600")
        event = await channel.expect_report(wire.ProcessStarted)
        assert event.result is not None
        pid = int(event.result.output)
        server.refuse("runtimes", 410, "gone")
        await channel.send(wire.RuntimeEnded(error_code="daemon_runtime_replaced"))
        assert await running.code() == 0
    assert Path(f"/proc/{pid}").exists()
    del server.answers["runtimes"]
    server.refuse("runtimes", 401, "unauthorized")
    Home(tmp_path).save(config_of(server))
    async with daemon(server, tmp_path) as running:
        assert await running.code() == 0
    await until(lambda: not Path(f"/proc/{pid}").exists(), "the command is dead")


@pytest.mark.parametrize("route", ["bootstrap", "runtimes"])
async def test_a_request_that_is_wrong_is_not_repeated(server: DaemonServer, tmp_path: Path, route: str) -> None:
    server.refuse(route, 400, "validation_failed")
    async with daemon(server, tmp_path) as running:
        assert await running.code() == 1


@pytest.mark.parametrize("status", [404, 409, 429, 500, 502, 503])
async def test_anything_else_is_tried_again(server: DaemonServer, tmp_path: Path, status: int) -> None:
    for route in ("bootstrap", "runtimes", "socket"):
        server.refuse(route, status, "service_unavailable", Retry_After="0")
    async with daemon(server, tmp_path):
        for route in ("bootstrap", "runtimes", "socket"):
            await until(lambda route=route: server.calls.count(route) >= 2, f"{route} is tried again")  # type: ignore[misc]
            del server.answers[route]
        await server.channel()


async def test_a_redirect_is_not_followed(server: DaemonServer, tmp_path: Path) -> None:
    async with daemon_server() as elsewhere:
        where = {"Location": f"{elsewhere.url}/api/v1/daemon/bootstrap"}
        server.answers["bootstrap"] = (307, "", where)
        async with daemon(server, tmp_path):
            await until(lambda: server.calls.count("bootstrap") >= 2, "it tries again")
            del server.answers["bootstrap"]
            server.answers["socket"] = (302, "", {"Location": f"{elsewhere.url}/api/v1/daemon/runtimes/drt_1/socket"})
            await until(lambda: server.calls.count("socket") >= 2, "it tries again")
        assert elsewhere.calls == []


@pytest.mark.parametrize(
    "text", ["nonsense", '{"type":"heartbeat","payload":{"daemon_instance_id":"x"}}', '{"type":"process_offer"}']
)
async def test_a_malformed_frame_costs_the_socket_and_nothing_else(
    server: DaemonServer, tmp_path: Path, text: str
) -> None:
    server.frames_before = [text]
    async with daemon(server, tmp_path) as running:
        await server.channel()
        await server.channel()
        server.frames_before = []
        channel = await server.channel()
        await channel.run("prc_1", "true")
        await channel.expect_report(wire.ProcessFinished)
        assert not running.work.done()


async def test_directives_that_do_not_fit_are_refused_and_asked_for_again(server: DaemonServer, tmp_path: Path) -> None:
    wrong = {"process_id": "prc_x", "supervisor_instance_id": "s", "disposition": "release", "actions": []}
    runtime = {"id": "drt_1", "next_heartbeat_after_ms": 10_000}
    body = {"runtime": runtime, "reconciliation": {"processes": [wrong]}}
    server.answers["runtimes"] = (201, body, {})
    async with daemon(server, tmp_path):
        await until(lambda: server.calls.count("runtimes") >= 2, "it registers again")
        assert "socket" not in server.calls
        del server.answers["runtimes"]
        await server.channel()


async def test_an_idle_machine_says_that_it_may_sleep_and_is_woken_by_a_knock(
    server: DaemonServer, tmp_path: Path
) -> None:
    port = free_ports()[0]
    knobs = Knobs(backoff_base_s=0.05, backoff_cap_s=0.1, sleep_after_s=0.1, idle_tick_s=0.02, wake_port=port)
    async with daemon(server, tmp_path, knobs):
        await server.channel()
        await until(lambda: "sleep" in server.calls, "it wants to sleep")
        answer = await _knock(port)
        assert answer.startswith(b"HTTP/1.1 204")
        await server.channel()
        assert len({one.daemon_instance_id for one in server.registrations}) == 1


async def _knock(port: int) -> bytes:
    for _ in range(400):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.01)
            continue
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer
    raise AssertionError("nobody answers the knock")


@pytest.mark.parametrize(("code", "times"), [("pending_work", 2), ("not_wake_capable", 1)])
async def test_a_server_that_does_not_let_it_sleep(server: DaemonServer, tmp_path: Path, code: str, times: int) -> None:
    server.refuse("sleep", 409, code)
    knobs = Knobs(backoff_base_s=0.05, backoff_cap_s=0.1, sleep_after_s=0.05, idle_tick_s=0.01, wake_port=0)
    async with daemon(server, tmp_path, knobs):
        await server.channel()
        await until(lambda: server.calls.count("sleep") >= times, "it asked")
        await server.channel()
        if times == 1:
            await until(lambda: server.calls.count("socket") >= 2, "it goes on")
            began = asyncio.get_running_loop().time()
            await until(lambda: asyncio.get_running_loop().time() - began > 0.3, "time passes")
            assert server.calls.count("sleep") == 1


async def test_a_home_of_another_machine_is_not_used(server: DaemonServer, tmp_path: Path) -> None:
    Home(tmp_path).save(config_of(server))
    server.machine_id = "mch_bbbbbbbbbbbbbbbbbbbbbbbbbb"
    async with daemon(server, tmp_path) as running:
        with pytest.raises(ConfigurationError, match="belongs to machine"):
            await running.code()
    assert Home(tmp_path).load() is not None


async def test_an_installed_path_is_without_names_that_are_no_text(server: DaemonServer, tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/caf\udce9:/Zoë"}
    settings = DaemonSettings(home=tmp_path, api_url=server.url, machine_token=TOKEN, environment=environment)
    await bind(settings)
    kept = Home(tmp_path).load()
    assert kept is not None
    assert kept.runner_path == "/usr/bin:/Zoë"


async def test_stopping_while_the_server_is_away_takes_no_time(tmp_path: Path) -> None:
    gone = DaemonServer()
    gone.url = f"http://127.0.0.1:{free_ports()[0]}"
    async with daemon(gone, tmp_path) as running:
        async with asyncio.timeout(15):
            assert await running.end() == 0


async def test_a_line_that_swallows_everything_is_noticed_by_its_pings(
    server: DaemonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PING_S", 0.3)
    proxy = TcpProxy("127.0.0.1", int(server.url.rpartition(":")[2]))
    await proxy.start()
    try:
        server.url = f"http://127.0.0.1:{proxy.port}"
        async with daemon(server, tmp_path / "home") as running:
            channel = await server.channel()
            await channel.run("prc_1", f"echo up; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
            await channel.expect_report(wire.ProcessStarted)
            await acknowledged(tmp_path / "home", "prc_1")
            proxy.go_silent()
            (tmp_path / "go").touch()
            await until(lambda: _state(running) == "not connected", "the silence is noticed", limit_s=20)
            proxy.flow()
            again = await server.channel()
            event = await again.expect_report(wire.ProcessFinished)
            assert (event.state, event.exit_code) == ("exited", 0)
    finally:
        await proxy.stop()


def _state(running: Running) -> str:
    said = running.home.root / "status.json"
    return str(json.loads(said.read_bytes())["state"]) if said.exists() else ""
