"""What no machine has any more is removed from each place, however many places there are."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from omnara.engine.machines.provisioning import Times
from omnara.fleet.provisioner import Provisioner
from omnara.ids import IdKind, encode, new_uuid
from omnara.machines.providers.owned import Owned, SweptProvider
from tests.support.engine_case import Engine
from tests.support.machine_floor import Floor


class Yard:
    """A place with things in it."""

    def __init__(self, *things: Owned) -> None:
        self.things = list(things)

    async def owned(self, installation_id: str) -> list[Owned]:
        return list(self.things)

    async def running(self, installation_id: str) -> set[str]:
        return {thing.resource_id for thing in self.things}

    async def discard(self, thing: Owned) -> None:
        self.things.remove(thing)


class Yards:
    """The places that a replica reaches."""

    def __init__(self, **yards: Yard) -> None:
        self.yards = yards

    def reach(self) -> list[tuple[str, str]]:
        return [(name, "here") for name in self.yards]

    def provider(self, name: str) -> Yard:
        return self.yards[name]

    async def installation(self) -> UUID:
        return UUID(int=1)


def thing(name: str, machine_id: UUID) -> Owned:
    return Owned("container", name, encode(IdKind.MACHINE, machine_id), "running")


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
async def test_each_place_loses_its_own_orphans_at_the_second_look(engine: Engine, order: tuple[str, str]) -> None:
    floor = await Floor.make(engine, register=False)
    kept = thing("kept", floor.machine.id)
    yards = {name: Yard(thing(f"lost-{name}", new_uuid()), kept) for name in order}
    assert all(isinstance(yard, SweptProvider) for yard in yards.values())
    places: Any = Yards(**yards)
    nobody: Any = None
    provisioner = Provisioner(engine.deps, nobody, places, new_uuid, Times())
    await provisioner._keep_up()
    assert [len(yard.things) for yard in yards.values()] == [2, 2], "seen once is no proof"
    await provisioner._keep_up()
    assert [yard.things for yard in yards.values()] == [[kept], [kept]]
