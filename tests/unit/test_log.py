"""Logs: one JSON object per line, ids of what is being done, and nothing that looks like a secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from omnara import log


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    log.configure("info", "json", stream=stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_ids_are_in_every_line_inside_and_gone_outside(out: io.StringIO) -> None:
    logger = log.get_logger("omnara.test")
    with log.ids(agent_id="agt_1", step=3, worker_id=None):
        with log.ids(step=4):
            logger.info("inner")
        logging.getLogger("library").warning("from %s", "outside")
    logger.info("after")
    inner, foreign, after = lines(out)
    assert (inner["agent_id"], inner["step"], inner["logger"]) == ("agt_1", 4, "omnara.test")
    assert (foreign["event"], foreign["step"], foreign["level"]) == ("from outside", 3, "warning")
    assert "agent_id" not in after
    assert "worker_id" not in inner


def test_levels_hold_back_lines(out: io.StringIO) -> None:
    logger = log.get_logger("omnara.test")
    logger.debug("quiet")
    logging.getLogger("aiohttp.access").info("GET /")
    logger.info("loud")
    assert [line["event"] for line in lines(out)] == ["loud"]


SECRETS = [
    "omnara_pat_v1_" + "0" * 43 + "_3ovNGW",
    "sk-ant-api03-abcdefghijklmnop",
    "postgresql://omnara:hunter2hunter2@db:5432/omnara",
    "Authorization: Bearer abcdefghijklmnop",
    "x-api-key: abcdefghijklmnop",
]
CORES = ["0" * 43, "abcdefghijklmnop", "hunter2", "abcdefghijklmnop", "abcdefghijklmnop"]


@pytest.mark.parametrize(("text", "core"), list(zip(SECRETS, CORES, strict=True)))
def test_texts_that_look_like_secrets_are_cut_out(out: io.StringIO, text: str, core: str) -> None:
    logger = log.get_logger("omnara.test")
    logger.info(f"asked with {text}", detail=text, nested={"list": [text]})
    logging.getLogger("library").error("failed: %s", text)
    try:
        raise RuntimeError(text)
    except RuntimeError:
        logger.exception("broken")
    assert core not in out.getvalue()
    assert len(lines(out)) == 3


def test_fields_named_like_secrets_are_cut_out_but_counts_are_not(out: io.StringIO) -> None:
    log.get_logger("omnara.test").info(
        "x", api_key="canary", headers={"Authorization": "canary"}, password="canary", output_tokens=12, token=None
    )
    assert "canary" not in out.getvalue()
    (line,) = lines(out)
    assert line["output_tokens"] == 12
    assert line["token"] is None


def test_a_terminal_gets_text_and_a_pipe_gets_json() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    root = logging.getLogger()
    before = root.handlers[:]
    screen, pipe = Terminal(), io.StringIO()
    try:
        log.configure("info", "auto", stream=screen)
        log.get_logger("t").info("hello")
        log.configure("info", "auto", stream=pipe)
        log.get_logger("t").info("hello")
    finally:
        root.handlers[:] = before
    assert "hello" in screen.getvalue()
    assert not screen.getvalue().startswith("{")
    assert json.loads(pipe.getvalue())["event"] == "hello"


@pytest.mark.parametrize("form", ["json", "console"])
def test_nothing_in_a_line_is_obeyed_by_a_terminal(out: io.StringIO, form: Literal["json", "console"]) -> None:
    log.configure("info", form, stream=out)
    hostile = "\x1b]52;c;ZXZpbA==\x07\x9b2J\r\u202e"
    logger = log.get_logger("omnara.test")
    logger.warning(f"said {hostile}", message=hostile, nested=[hostile])
    try:
        raise RuntimeError(hostile)
    except RuntimeError:
        logger.exception("broken")
    assert "52;c;ZXZpbA==" in out.getvalue()
    assert out.getvalue().replace("\n", "").isprintable()


def test_a_warning_that_comes_again_and_again_is_told_now_and_then(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: field-reports B55 (an outage must not fill the disk with lines about it)."""
    now = 100.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now)
    logger = log.get_logger("omnara.test")
    for second in range(31):
        now = 100.0 + second
        for number in range(20):
            logger.warning("away", number=number)
        logger.error("broken", second=second)
    logger.warning("something else")
    log.get_logger("omnara.other").warning("away")
    told = lines(out)
    away = [(line["number"], line.get("not_shown")) for line in told if line["event"] == "away" and "number" in line]
    assert away[:10] == [(number, None) for number in range(10)]
    assert away[10:] == [(0, 10 + 9 * 20), (0, 19 + 9 * 20), (0, 19 + 9 * 20)]
    assert sum(line["event"] == "broken" for line in told) == 31, "an error is never dropped"
    assert [line["event"] for line in told[-2:]] == ["something else", "away"]
    now += log.REPEAT_S
    logger.warning("away")  # tells what was dropped before the quiet
    now += log.REPEAT_S
    out.truncate(0)
    out.seek(0)
    for _ in range(log.REPEATS + 5):
        logger.warning("away")
    assert len(lines(out)) == log.REPEATS, "after a quiet time all is told again"
