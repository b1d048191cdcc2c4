"""The installer that anybody can fetch: a shell script that knows this server's address, and the wheel that it fetches.

Nothing here is secret; the machine's token is given to the script by whoever runs it, and goes to the daemon's own
files. Source: machines.md §10 (headers, https but for loopback).
"""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files
from typing import Final
from urllib.parse import quote

from aiohttp import web

from omnara.api.context import CONTEXT
from omnara.api.daemon.wheel import Wheel, own_wheel
from omnara.errors import InvalidRequest, NotFound

__all__ = ["SCRIPT_PATH", "WHEEL_PATH", "render", "script", "wheel"]

SCRIPT_PATH: Final = "/install/omnarad.sh"
WHEEL_PATH: Final = "/install/wheels/{sha256}/{filename}"
_HOST: Final = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
"""What may stand in the script: nothing that a shell would read as anything but a word."""
_NOSNIFF: Final = {"X-Content-Type-Options": "nosniff"}


async def script(request: web.Request) -> web.Response:
    """Answer with the installer. Raises InvalidRequest for a Host header that no browser or curl sends."""
    base = _base_url(request)
    packed = await asyncio.to_thread(own_wheel)
    return web.Response(
        body=render(base, packed).encode(),
        content_type="text/x-shellscript",
        charset="utf-8",
        headers={"Cache-Control": "no-store", **_NOSNIFF},
    )


async def wheel(request: web.Request) -> web.Response:
    """Answer with the wheel. Raises NotFound when another digest is asked for: that of another release's script."""
    packed = await asyncio.to_thread(own_wheel)
    if request.match_info["sha256"] != packed.sha256 or request.match_info["filename"] != packed.filename:
        raise NotFound
    return web.Response(
        body=packed.content,
        content_type="application/octet-stream",
        headers={"Cache-Control": "public, max-age=3600", **_NOSNIFF},
    )


def render(base_url: str, packed: Wheel) -> str:
    """Return the script for a server at `base_url` (checked, without a slash at its end)."""
    path = WHEEL_PATH.format(sha256=packed.sha256, filename=quote(packed.filename))
    values = {"api_url": base_url, "wheel_url": base_url + path, "wheel": packed.filename, "sha256": packed.sha256}
    text = files("omnara.api.daemon").joinpath("omnarad.sh").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _base_url(request: web.Request) -> str:
    """Where the client found this server. Only the client reads the answer, so its own headers are believed."""
    given = request.app[CONTEXT].deps.settings.public_url
    if given is not None:
        return given.rstrip("/")
    host = request.headers.get("Host", "")
    if _HOST.fullmatch(host) is None:
        raise InvalidRequest("the Host header is not a host")
    forwarded = request.headers.get("X-Forwarded-Proto", "").strip().lower()
    return f"{forwarded if forwarded in {'http', 'https'} else request.scheme}://{host}"
