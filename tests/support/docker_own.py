"""An engine of a test's own, that it may stop and start: another data directory, another socket, no network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omnara.machines.providers.docker import DockerProvider
from omnara.machines.providers.protocol import ProviderUnavailable
from tests.support.docker_engine import BUSYBOX_IMAGE, import_busybox
from tests.support.waiting import until


class OwnEngine:
    """A `dockerd` with everything of it below one directory."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._options = options
        self.endpoint = f"unix://{directory}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped since."""
        return self._process is not None

    async def start(self) -> None:
        """Start it and wait until it answers."""
        program = shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        unshare = shutil.which("unshare")
        if program is None or unshare is None or os.geteuid() != 0:
            pytest.skip("an engine of one's own needs dockerd, and root")
        assert program is not None
        assert unshare is not None
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    # Without the system's network: it would take the bridge of the other engine away.
                    unshare, "--net", "--",
                    program, "--data-root", f"{self.directory}/data", "--exec-root", f"{self.directory}/exec",
                    "--host", self.endpoint, "--pidfile", f"{self.directory}/pid",
                    "--bridge", "none", "--iptables=false", *self._options,
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env={"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin"},
            )  # fmt: skip
        provider = DockerProvider(self.endpoint)

        async def answers() -> bool:
            try:
                await provider.host()
            except ProviderUnavailable:
                return False
            return True

        try:
            await until(answers, "the engine answers", limit_s=30)
        finally:
            await provider.close()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop it, with all its containers; they are not kept alive."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(30)


@contextlib.asynccontextmanager
async def own_engine(*options: str) -> AsyncIterator[OwnEngine]:
    """An engine with the small image, gone at the end; `options` are further ones of `dockerd`."""
    # Sockets have short names.
    with tempfile.TemporaryDirectory(prefix="od", dir="/tmp", ignore_cleanup_errors=True) as name:
        engine = OwnEngine(Path(name), *options)
        await engine.start()
        try:
            import_busybox(shutil.which("busybox") or "/bin/busybox", engine.endpoint)
            yield engine
        finally:
            engine.stop()
            # One that keeps its containers alive, or was killed once, leaves its directory mounted on itself.
            subprocess.run(["umount", f"{name}/data"], check=False, capture_output=True)


__all__ = ["BUSYBOX_IMAGE", "OwnEngine", "own_engine"]
