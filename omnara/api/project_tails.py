"""Which projects are followed in this process, and which of them a grown log belongs to.

Hints name agents, not projects, so an agent is looked up once and then remembered. A log of a project that nobody
follows costs that look-up and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from uuid import UUID

import msgspec

from omnara.access.roles import ProjectScope
from omnara.api.project_tail import Acquire, ProjectReader, ProjectTail
from omnara.db import project_log
from omnara.db.project_log import Here
from omnara.engine.feed import Feed
from omnara.errors import Unavailable
from omnara.service import Tasks

MAX_REMEMBERED: Final = 50_000
"""Agents whose project is remembered; then all are forgotten."""
MAX_STRANGERS: Final = 1_000
"""Agents that wait to be looked up; with more, every followed project is looked at instead."""


class Following(msgspec.Struct, frozen=True):
    """A reader of a project's tail, and the moment from which it reads if it has no place of its own."""

    tail: ProjectTail
    reader: ProjectReader
    here: Here


class ProjectTails:
    """The followed projects of one process. For one event loop."""

    def __init__(self, feed: Feed, acquire: Acquire, tasks: Tasks, sweep_s: float) -> None:
        self._feed = feed
        self._acquire = acquire
        self._tasks = tasks
        self._sweep_s = sweep_s
        self._tails: dict[UUID, tuple[ProjectTail, asyncio.Task[None]]] = {}
        self._project_of: dict[UUID, UUID] = {}
        self._strangers: set[UUID] = set()
        self._met = asyncio.Event()

    @asynccontextmanager
    async def follow(self, project: ProjectScope) -> AsyncIterator[Following]:
        """Follow a project for as long as the block runs. Raises Unavailable."""
        async with self._acquire() as conn:
            here = await project_log.here(conn)
        tail = self._tail(project, here)
        reader = ProjectReader()
        tail.readers.add(reader)
        try:
            yield Following(tail, reader, here)
        finally:
            tail.readers.discard(reader)
            if not tail.readers:
                self._tails.pop(project.project_id)[1].cancel()
            if not self._tails:
                self._feed.unwatch(self._heard)
                self._project_of.clear()
                self._strangers.clear()

    async def meet(self) -> None:
        """Look up the agents that were heard of for the first time, for as long as the process runs."""
        while True:
            await self._met.wait()
            self._met.clear()
            strangers, self._strangers = list(self._strangers), set()
            if not self._tails or not strangers:
                continue
            try:
                async with self._acquire() as conn:
                    found = await project_log.projects_of(conn, strangers)
            except Unavailable:
                # The tails sweep; and whoever writes again is heard of again.
                continue
            if len(self._project_of) + len(found) > MAX_REMEMBERED:
                self._project_of.clear()
            self._project_of |= found
            for project_id in set(found.values()) & self._tails.keys():
                self._tails[project_id][0].poke()

    def _tail(self, project: ProjectScope, here: Here) -> ProjectTail:
        if not self._tails:
            self._feed.watch(self._heard)
        found = self._tails.get(project.project_id)
        if found is None:
            tail = ProjectTail(project.org_id, project.project_id, self._acquire, here)
            found = tail, self._tasks.spawn(tail.run(self._sweep_s), "project-tail")
            self._tails[project.project_id] = found
        return found[0]

    def _heard(self, agent_id: UUID | None) -> None:
        if agent_id is not None and (project_id := self._project_of.get(agent_id)) is not None:
            if project_id in self._tails:
                self._tails[project_id][0].poke()
        elif agent_id is not None and len(self._strangers) < MAX_STRANGERS:
            self._strangers.add(agent_id)
            self._met.set()
        else:
            for tail, _ in self._tails.values():
                tail.poke()
