"""Calls that are made again without what a provider refused, and what is remembered of a refusal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from omnara.domain.content import MediaPart, MediaRefBlock, TextBlock
from omnara.domain.context import ContextState
from omnara.domain.events import EventMeta
from omnara.engine.deps import Deps
from omnara.ids import new_uuid
from omnara.providers import Completed, Failed, ModelCall, ModelTarget, Outcome, RenderedHistory
from omnara.providers.media import ModelFile
from omnara.worker import refusals
from omnara.worker.refusals import call_with_files
from tests.support.agent_log import Log, new_call_id

OK = Completed("end_turn", (TextBlock("ok"),))
BAD = Failed(kind="invalid_request", message="Could not process image", status=400)
LARGE = Failed(kind="payload_too_large", message="too large", status=413)
UNKNOWN = Failed(kind="invalid_request", message="no such model", status=404)
BUSY = Failed(kind="provider_unavailable", message="busy", status=503)


class Gateway:
    """Answers in turn and notes which files each call showed."""

    def __init__(self, answers: Sequence[Outcome]) -> None:
        self._answers = iter(answers)
        self.shown: list[set[str]] = []
        self.tools: list[list[str]] = []

    async def call(self, call: ModelCall, sink: Any) -> Outcome:
        self.shown.append({name for name, file in call.media.items() if file.data is not None})
        self.tools.append([tool.name for tool in call.tools])
        return next(self._answers)


class Reader:
    """Sees nothing and counts the failures that it is told of."""

    shown = 1

    def __init__(self) -> None:
        self.failures: list[Failed] = []

    def fail(self, failure: Failed) -> None:
        self.failures.append(failure)

    def __call__(self, delta: Any) -> None:
        raise AssertionError("no deltas here")


async def attempt(
    monkeypatch: pytest.MonkeyPatch, *answers: Outcome, history: RenderedHistory | None = None, cut: bool = False
) -> tuple[Outcome, Gateway, Reader, RenderedHistory]:
    """Make an attempt in a conversation with an old picture, which was answered, and a new one."""

    async def files_of(
        _deps: Any, _agent: Any, media: Sequence[MediaPart], _target: Any, refused: Iterable[str]
    ) -> dict[str, ModelFile]:
        return {
            part.artifact_id: ModelFile(
                artifact_id=part.artifact_id,
                media_type="text/plain" if cut else "image/png",
                data=None if part.artifact_id in refused else b"x",
                cut=cut,
            )
            for part in media
        }

    monkeypatch.setattr(refusals, "files_of", files_of)
    log = Log()
    log.said(MediaRefBlock("old"))
    log.output(TextBlock("seen"), meta=EventMeta(frontier=1))
    log.said(MediaRefBlock("new"))
    context = ContextState()
    context.extend(log.events)
    gateway, reader = Gateway(answers), Reader()
    unused: Any = None
    deps = Deps(unused, unused, unused, unused, unused, gateway, unused, unused, unused)  # type: ignore[arg-type]
    call = ModelCall(
        target=ModelTarget(revision_id="", provider="", slug="", api_format=""),
        system="",
        tools=(),
        context=context,
        history=history or RenderedHistory(),
        new_call_id=new_call_id,
    )
    outcome = await call_with_files(deps, new_uuid(), call, reader)
    return outcome, gateway, reader, call.history


@pytest.mark.parametrize("refusal", [BAD, LARGE])
async def test_the_newest_file_is_suspected_first(monkeypatch: pytest.MonkeyPatch, refusal: Failed) -> None:
    outcome, gateway, reader, history = await attempt(monkeypatch, refusal, OK)
    assert outcome is OK
    assert gateway.shown == [{"old", "new"}, {"old"}]
    assert reader.failures == [refusal]
    assert history.refused_files == {"new"}
    _, again, _, _ = await attempt(monkeypatch, OK, history=history)
    assert again.shown == [{"old"}]


async def test_then_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, gateway, _, history = await attempt(monkeypatch, BAD, BAD, OK)
    assert outcome is OK
    assert gateway.shown == [{"old", "new"}, {"old"}, set()]
    assert history.refused_files == {"old", "new"}


async def test_a_fault_that_stays_is_not_put_down_to_files(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, gateway, _, history = await attempt(monkeypatch, BAD, BAD, BAD)
    assert outcome is BAD
    assert len(gateway.shown) == 3
    assert not history.refused_files


@pytest.mark.parametrize("failure", [UNKNOWN, BUSY])
async def test_other_failures_are_the_attempts(monkeypatch: pytest.MonkeyPatch, failure: Failed) -> None:
    outcome, gateway, reader, history = await attempt(monkeypatch, failure)
    assert outcome is failure
    assert len(gateway.shown) == 1
    assert not reader.failures
    assert not history.refused_files


async def test_a_cut_text_brings_the_tools_that_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, gateway, _, _ = await attempt(monkeypatch, OK, cut=True)
    assert gateway.tools == [["read_file", "search_files"]]
    _, gateway, _, _ = await attempt(monkeypatch, OK)
    assert gateway.tools == [[]]


async def test_a_text_is_never_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, gateway, _, _ = await attempt(monkeypatch, BAD, cut=True)
    assert outcome is BAD
    assert len(gateway.shown) == 1
