"""Which providers pools may have, and whether a provider can make machines of what a pool says."""

from __future__ import annotations

from typing import Final

import msgspec

from omnara.errors import InvalidRequest, Unprocessable

PROVIDERS: Final = ("docker", "local")
_ELSEWHERE: Final = ("blaxel", "daytona", "unikraft")
"""What the contract knows beside ours."""


def known_provider(name: str) -> None:
    """Refuse what this release makes no machines with. Raises Unprocessable, InvalidRequest for an unknown name."""
    if name in PROVIDERS:
        return
    offered = " and ".join(PROVIDERS)
    if name in _ELSEWHERE:
        raise Unprocessable(f"machines of {name} are not available in this release; there are {offered}")
    raise InvalidRequest(f"there is no such provider; there are {offered}")


def check_provider(name: str, config: str, options: str) -> None:
    """Check a pool's configuration and the options of its machines, both JSON text. Raises InvalidRequest."""
    msgspec.json.decode(config)
    msgspec.json.decode(options)
    known_provider(name)
