"""Which providers pools may have, and whether a provider can make machines of what a pool says.

The places of this server are the list (`machines/providers/places.py`), and each checks what it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from omnara.errors import InvalidRequest, Unprocessable
from omnara.machines.providers.places import Place
from omnara.machines.providers.protocol import InvalidOptions

_ELSEWHERE: Final = ("blaxel", "daytona", "unikraft")
"""What the contract knows beside ours."""


def known_provider(places: Mapping[str, Place], name: str) -> Place:
    """Return the place that pools call so. Raises Unprocessable for one that others have, InvalidRequest."""
    if name in places:
        return places[name]
    offered = " and ".join(places)
    if name in _ELSEWHERE:
        raise Unprocessable(f"machines of {name} are not available in this release; there are {offered}")
    raise InvalidRequest(f"there is no such provider; there are {offered}")


def usable_provider(places: Mapping[str, Place], name: str, public_url: str | None, *, credential: bool) -> None:
    """Refuse a provider whose machines nobody could use. Raises as `known_provider`, InvalidRequest where a credential
    is asked for and not named, and Unprocessable where daemons would not find this server."""
    place = known_provider(places, name)
    if place.credential and not credential:
        raise InvalidRequest(f"a pool of {name} names the secret with its key there as provider_auth_secret_id")
    if place.daemons and public_url is None:
        raise Unprocessable(
            f"machines of {name} run a daemon that has to find this server: set OMNARA_PUBLIC_URL to its address first"
        )


def check_provider(places: Mapping[str, Place], name: str, config: str, options: str) -> None:
    """Check a pool's configuration and the options of its machines, both JSON text. Raises InvalidRequest."""
    place = known_provider(places, name)
    try:
        place.check(msgspec.json.decode(config), msgspec.json.decode(options))
    except InvalidOptions as error:
        raise InvalidRequest(str(error)) from None
