"""What a call is told whose machine nobody makes: no server reaches the provider, or the provider cannot be asked.

Who reads it is a model, and whoever runs the server behind it: so it says what is missing, and where to set it right.
Nothing is ended by it but the call: a later command finds the machine when it can be made after all.
Source: machines.md §4 (offline grace), §12.
"""

from __future__ import annotations

from collections.abc import Mapping

from omnara.db.process_ends import Unmade
from omnara.engine.machines.provisioning import UNAVAILABLE
from omnara.machines.providers.places import PLACES, Place

__all__ = ["about_unmade"]


def about_unmade(machine: Unmade, places: Mapping[str, Place] = PLACES) -> dict[str, str]:
    """Return what a failure says of a pool machine without a place, or without anybody who works for it there."""
    place = places.get(machine.provider)
    missing = f"a server that has the provider {machine.provider}" if place is None else place.wanted
    mended = f"What is missing is {missing}. Try again when that is mended."
    why = machine.reason_message.rstrip(".")
    if machine.lifecycle_state == "active" and place is not None and place.daemons:
        text = (
            "The machine was made, but its daemon has not connected to this server. Try again later; if that does not "
            "help, OMNARA_PUBLIC_URL may not be reachable from there."
        )
    elif machine.lifecycle_state == "active":
        text = "The machine was made, but no server reaches it now. Try again later."
    elif machine.reason_code == UNAVAILABLE:
        text = f"The machine cannot be made now: {why}. {mended}"
    elif why:
        text = f"The machine is not there: {why}. It is made again as soon as that is possible; try again later."
    else:
        text = f"The machine is not there yet, and no server is making it. {mended}"
    return {"error": text, "machine_state": machine.lifecycle_state}
