"""The parts that a process shares, built once, and the services that it runs by role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from omnara.api.server import ApiRunner, build_app, build_hub
from omnara.app.addresses import address_check, allow_list
from omnara.app.hints import HintService
from omnara.app.identity import IdentityService
from omnara.app.listeners import Listener, api_limits
from omnara.app.pools import Pools
from omnara.db.bus import LocalBus
from omnara.db.connection import ConnectSettings
from omnara.engine.artifacts_objects import open_objects
from omnara.engine.artifacts_store import Blobs
from omnara.engine.artifacts_tools import AgentFiles
from omnara.engine.catalog import ModelCatalog
from omnara.engine.deps import Deps
from omnara.engine.feed import Feed
from omnara.engine.feed_remote import FeedLink
from omnara.engine.machines.files import AgentMachineFiles
from omnara.engine.machines.provisioning import Times
from omnara.engine.plan import PlanSource
from omnara.fleet.driver import Driver
from omnara.fleet.provisioner import Provisioner
from omnara.fleet.reached import Reached
from omnara.fleet.sessions import Sessions
from omnara.fleet.sweeps import MachineSweep
from omnara.machines.providers.places import PLACES, Place, sites_of
from omnara.maintenance import Emptying, OrphanSweep, Upkeep
from omnara.metrics import Metrics
from omnara.providers.gateway import ModelGateway
from omnara.service import Service
from omnara.settings import Settings
from omnara.tools.extract import Extractor
from omnara.tools.protocol import ToolContext
from omnara.tools.registry import BUILT_IN
from omnara.vault import KeyRing
from omnara.worker import Identity, IdentityTimes, Worker

__all__ = ["Parts", "build", "build_gateway"]


class Parts(msgspec.Struct, frozen=True):
    """The engine's dependencies and the services in the order in which they start."""

    deps: Deps
    services: tuple[Service, ...]


def build_gateway(settings: Settings) -> ModelGateway:
    """Return the door to models, guarded by the operator's list of private hosts. No I/O."""
    return ModelGateway(check_address=address_check(allow_list(settings)), answers_bytes=settings.model_answers_bytes)


def build(
    settings: Settings,
    database: ConnectSettings,
    ring: KeyRing,
    metrics: Metrics,
    gateway: ModelGateway,
    *,
    places: Mapping[str, Place] = PLACES,
) -> Parts:
    """Build the parts of a process without touching database or network."""
    pools = Pools(database, metrics)
    identity = Identity(database, _times(settings, embedded=database.embedded), sorted(settings.roles))
    hints = HintService(
        database,
        pools.session,
        metrics,
        on_connect=identity.hold if _works(settings) else None,
        heartbeat_s=settings.hint_heartbeat_s,
    )
    deps = Deps(
        db=pools.api,
        ring=ring,
        feed=Feed(),
        hints=hints,
        registry=BUILT_IN,
        gateway=gateway,
        models=ModelCatalog(pools.api, ring, settings),
        settings=settings,
        metrics=metrics,
        blobs=Blobs(None if settings.artifact_store is None else open_objects(settings.artifact_store)),
        places=places,
    )
    return Parts(deps, tuple(_services(deps, database, pools, hints, identity)))


def _works(settings: Settings) -> bool:
    """Whether other processes have to know of this one: it holds claims."""
    return bool(settings.roles & {"worker", "maintenance"})


def _services(
    deps: Deps, database: ConnectSettings, pools: Pools, hints: HintService, identity: Identity
) -> Iterator[Service]:
    """Make the services by role, in the order of their start.

    Connections, identity, hints, feed link, maintenance, machines, worker, streams, API. So work begins only when its
    results can be announced, and the API answers last; the stop goes the other way, the saves before the sign-off.
    """
    roles, works = deps.settings.roles, _works(deps.settings)
    yield pools
    if works:
        yield IdentityService(identity)
    yield hints
    yield FeedLink(deps.feed, hints.sender, hints.bus)
    if works:
        identity.listen(hints)
        orphans = OrphanSweep(deps)
        identity.listen(orphans)
        yield orphans
        yield Emptying(deps)
    if "maintenance" in roles:
        yield Upkeep(deps, database)
        yield MachineSweep(deps)
    sessions = Sessions(deps, hints.bus, lambda: identity.worker_id)
    yield sessions
    if works:
        yield from _fleet(deps, hints.bus, sessions, identity)
    if "worker" in roles:
        yield _worker(deps, database, pools, hints.bus, identity)
    if "api" in roles:
        yield from _api(deps, sessions)


def _fleet(deps: Deps, bus: LocalBus, sessions: Sessions, identity: Identity) -> list[Service]:
    """The makers and drivers of pool machines, for the places that this process comes to reach."""
    times = Times()
    reached = Reached(deps, sites_of(deps.places.values(), deps.settings), lambda: identity.worker_id, times)
    provisioner = Provisioner(deps, bus, reached, lambda: identity.worker_id, times)
    driver = Driver(deps, bus, sessions, reached, lambda: identity.worker_id)
    identity.listen(driver)
    return [provisioner, driver]


def _worker(deps: Deps, database: ConnectSettings, pools: Pools, bus: LocalBus, identity: Identity) -> Service:
    """Whoever runs agents, with what their tools may use."""
    tools = ToolContext(
        extractor=Extractor(),
        allow=allow_list(deps.settings),
        files=AgentFiles(pools.api, deps.blobs),
        machine_files=AgentMachineFiles(deps),
    )
    worker = Worker(deps, database, identity, bus, pools.session, PlanSource(deps.models), tools)
    identity.listen(worker)
    return worker


def _api(deps: Deps, sessions: Sessions) -> list[Service]:
    hub = build_hub(deps)
    runner = ApiRunner(build_app(deps, hub, sessions), api_limits(deps.settings))
    return [hub, Listener("api", runner, deps.settings.listen)]


def _times(settings: Settings, *, embedded: bool) -> IdentityTimes:
    return IdentityTimes(
        lease_s=settings.worker_lease_s,
        renew_s=settings.worker_renew_s,
        probe_s=settings.worker_probe_s,
        grace_s=settings.death_grace_embedded_s if embedded else settings.death_grace_s,
    )
