"""An engine over TCP and TLS: what README says of it works, and what is wrong with certificates is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from omnara.machines.providers.docker import DockerProvider
from omnara.machines.providers.protocol import ProviderUnavailable
from tests.support.docker_engine import BUSYBOX_IMAGE, box
from tests.support.docker_tls import Authority, behind_tls

SOCKET = os.environ.get("OMNARA_DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")


async def test_commands_run_over_tls_and_only_with_its_certificates(
    provider: DockerProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    async with behind_tls(SOCKET, authority.directory(tmp_path / "server")) as endpoint:
        monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(authority.directory(tmp_path / "client")))
        secured = DockerProvider(endpoint)
        try:
            assert await secured.host() == await provider.host()
            async with box(secured, BUSYBOX_IMAGE) as made:
                started = await made.start("head -c 1000000 /dev/zero | wc -c; exit 3", wait_s=0)
                ended = await made.end(started.process_id)
                assert ended.exit is not None
                assert ended.exit.exit_code == 3
        finally:
            await secured.close()

        monkeypatch.setenv("DOCKER_CERT_PATH", str(Authority().directory(tmp_path / "stranger")))
        stranger = DockerProvider(endpoint)
        try:
            with pytest.raises(ProviderUnavailable, match=r"DOCKER_CERT_PATH to where ca\.pem"):
                await stranger.host()
        finally:
            await stranger.close()
