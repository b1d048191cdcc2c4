"""Which providers pools may have, and whether a provider can make machines of what a pool says.

What a provider takes is in its own modules; they are loaded when a pool first needs them, since some bring a client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from omnara.errors import InvalidRequest, Unprocessable
from omnara.machines.providers.protocol import InvalidOptions

_ELSEWHERE: Final = ("blaxel", "daytona", "unikraft")
"""What the contract knows beside ours."""


def _docker(config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from omnara.machines.docker.layout import config_of

    config_of(config, options)


def _local(config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from omnara.machines.providers.local import LocalProvider

    # Which replica will make the machine is not known, so what only some hosts can do is taken here.
    LocalProvider(Path(), host="", confined="bubblewrap").validate(config, options)


_CHECKS: Final[Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], None]]] = {
    "docker": _docker,
    "local": _local,
}


def known_provider(name: str) -> None:
    """Refuse what this release makes no machines with. Raises Unprocessable, InvalidRequest for an unknown name."""
    if name in _CHECKS:
        return
    offered = " and ".join(_CHECKS)
    if name in _ELSEWHERE:
        raise Unprocessable(f"machines of {name} are not available in this release; there are {offered}")
    raise InvalidRequest(f"there is no such provider; there are {offered}")


def check_provider(name: str, config: str, options: str) -> None:
    """Check a pool's configuration and the options of its machines, both JSON text. Raises InvalidRequest."""
    known_provider(name)
    try:
        _CHECKS[name](msgspec.json.decode(config), msgspec.json.decode(options))
    except InvalidOptions as error:
        raise InvalidRequest(str(error)) from None
