"""The parts of a channel that need no database: what was sent lately, a slow socket, the installer and its wheel."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import subprocess
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import ClientConnectionResetError, ClientSession, WSMessage, WSMsgType, web
from aiohttp.test_utils import TestServer

from omnara.api.daemon.install import render
from omnara.api.daemon.socket import QUEUE, SocketLink
from omnara.api.daemon.wheel import REQUIRES, own_wheel
from omnara.fleet.outstanding import MOST_OFFERS, Outstanding
from omnara.ids import new_uuid
from omnara.machines.daemon.socket_link import SocketLink as ClientSocketLink
from omnara.machines.frames import HeartbeatAck, ProcessAccept
from omnara.machines.link import LinkClosed
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


# --- what was sent lately -----------------------------------------------------------------------------------


def test_an_offer_is_not_repeated_until_it_is_old() -> None:
    sent, one = Outstanding(again_s=10, offer_again_s=30), new_uuid()
    sent.offered(one, 100)
    assert sent.skip(129) == {one}
    assert sent.skip(130) == set()


def test_what_was_accepted_is_held_and_what_was_refused_only_for_a_moment() -> None:
    sent, one, other = Outstanding(again_s=10, offer_again_s=30), new_uuid(), new_uuid()
    sent.offered(one, 100)
    sent.offered(other, 100)
    sent.accepted(one, 101)
    sent.refused(other, 101)
    assert sent.skip(101.5) == {one, other}
    assert sent.skip(102.1) == {one}


def test_offers_without_an_answer_are_bounded_and_become_old() -> None:
    sent = Outstanding(again_s=10, offer_again_s=30)
    for _ in range(MOST_OFFERS):
        assert not sent.full(100)
        sent.offered(new_uuid(), 100)
    assert sent.full(129)
    assert not sent.full(130)


def test_an_end_is_asked_for_at_intervals() -> None:
    sent, one = Outstanding(again_s=10), new_uuid()
    assert [sent.may_terminate(one, at) for at in (100, 105, 110, 119)] == [True, False, True, False]
    sent.terminations.clear()
    assert sent.may_terminate(one, 119.5)


# --- the socket ---------------------------------------------------------------------------------------------


class StuckSocket:
    """A WebSocket whose other side takes nothing."""

    def __init__(self, *messages: WSMessage) -> None:
        self.codes: list[int] = []
        self.close_code: int | None = None
        self._messages = list(messages)

    async def send_str(self, text: str) -> None:
        await asyncio.Event().wait()

    async def receive(self) -> WSMessage:
        return self._messages.pop(0)

    async def close(self, *, code: int, drain: bool) -> None:
        assert not drain
        self.codes.append(code)


async def test_a_machine_that_takes_nothing_is_cut_off() -> None:
    socket = StuckSocket()
    link = SocketLink(cast("web.WebSocketResponse", socket))
    async with link.writing():
        for _ in range(QUEUE):
            await link.send(HeartbeatAck(next_heartbeat_after_ms=1))
        await asyncio.sleep(0)  # the writer has taken one, and waits with it
        await link.send(HeartbeatAck(next_heartbeat_after_ms=1))
        with pytest.raises(LinkClosed) as cut:
            await link.send(HeartbeatAck(next_heartbeat_after_ms=1))
        assert cut.value.code == 1008
        with pytest.raises(LinkClosed):
            await link.send(HeartbeatAck(next_heartbeat_after_ms=1))
    assert socket.codes == [1008]


async def test_what_is_no_frame_ends_the_line() -> None:
    good = '{"type":"process_accept","payload":{"process_id":"prc_a"}}'
    for message, code in (
        (WSMessage(WSMsgType.TEXT, "{", None), 1002),
        (WSMessage(WSMsgType.BINARY, b"x", None), 1003),
    ):
        socket = StuckSocket(WSMessage(WSMsgType.TEXT, good, None), message)
        link = SocketLink(cast("web.WebSocketResponse", socket))
        assert await link.receive() == ProcessAccept(process_id="prc_a")
        with pytest.raises(LinkClosed) as closed:
            await link.receive()
        assert closed.value.code == code
        assert socket.codes == [code]


async def test_a_ping_that_is_read_when_the_line_is_gone_ends_the_line() -> None:
    """As on a laptop that was shut for a while: first it finds the server's ping, and then that nobody waits for it."""

    async def pings(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.ping()
        assert request.transport is not None
        request.transport.close()
        return socket

    app = web.Application()
    app.router.add_get("/", pings)
    async with TestServer(app) as server, ClientSession() as session:
        socket = await session.ws_connect(server.make_url("/"))
        gone = socket._writer.transport
        await until(gone.is_closing, "the line is gone", limit_s=20)
        with pytest.raises(LinkClosed):
            await ClientSocketLink(socket).receive()
        await socket.close()


async def test_a_socket_that_breaks_while_it_is_read_ends_the_line() -> None:
    class Broken(StuckSocket):
        async def receive(self) -> WSMessage:
            raise ClientConnectionResetError("Cannot write to closing transport")

    with pytest.raises(LinkClosed) as closed:
        await SocketLink(cast("web.WebSocketResponse", Broken())).receive()
    assert closed.value.code == 1006


# --- the installer ------------------------------------------------------------------------------------------


def test_the_wheel_is_a_wheel_with_this_code() -> None:
    packed = own_wheel()
    assert hashlib.sha256(packed.content).hexdigest() == packed.sha256
    with zipfile.ZipFile(io.BytesIO(packed.content)) as archive:
        names = archive.namelist()
        info = names[-1].rpartition("/")[0]
        record = {row[0]: row[1:] for row in csv.reader(io.TextIOWrapper(archive.open(f"{info}/RECORD")))}
        assert set(record) == set(names)
        for name in names[:-1]:
            content = archive.read(name)
            digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert record[name] == [f"sha256={digest}", str(len(content))]
        assert archive.read("omnara/ids.py") == (ROOT / "omnara/ids.py").read_bytes()
        assert "omnara/api/daemon/omnarad.sh" in names
        assert not [name for name in names if name.endswith((".pyc", ".sql"))]


def test_the_wheel_is_the_same_on_every_replica() -> None:
    first = own_wheel()
    own_wheel.cache_clear()
    assert own_wheel() == first


def test_what_the_wheel_requires_is_what_the_project_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(REQUIRES) <= set(project["dependencies"])


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        ("https://omnara.example.com", True),
        ("https://omnara.example.com:8443/base", True),
        ("http://127.0.0.1:8080", True),
        ("http://localhost", True),
        ("http://[::1]:8080", True),
        ("http://host.docker.internal:8080", True),
        ("http://omnara.example.com", False),
        ("http://127.0.0.1.example.com", False),
        ("http://localhostile", False),
    ],
)
def test_the_script_insists_on_https_but_for_loopback(url: str, fine: bool, tmp_path: Path) -> None:
    script = render(url, own_wheel())
    assert f"api_url='{url}'" in script
    assert not [word for word in ("@api_url@", "@wheel_url@", "@sha256@", "@wheel@") if word in script]
    # No Python is found here, so that the script ends where it would begin to fetch.
    ran: Any = subprocess.run(
        ["/bin/sh"], input=script, env={"PATH": str(tmp_path), "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert ("needs Python 3.11" in ran.stderr) is fine, ran.stderr
    assert ("is not https" in ran.stderr) is not fine


def test_half_a_script_does_nothing(tmp_path: Path) -> None:
    script = render("http://127.0.0.1:1", own_wheel())
    for length in range(0, len(script) - 20, 307):
        ran: Any = subprocess.run(
            ["/bin/sh"], input=script[:length], env={"HOME": str(tmp_path)}, capture_output=True, text=True
        )
        assert not list(tmp_path.iterdir()), ran.stderr
