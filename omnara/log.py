"""Structured logs: one JSON object per line, or coloured text for a person, with the ids of what is being done.

Ids travel in context variables, so a line written deep in a provider still names its agent, step and request. Every
line passes a redactor as a last net; the first one is that secrets are never handed to a logger.
Source: DESIGN §2, invariant 7.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Final, Literal, TextIO

import structlog

from omnara.visible import visible, visible_json

__all__ = ["Level", "configure", "get_logger", "ids", "note", "redact"]

Level = Literal["debug", "info", "warning", "error"]

_LEVELS: Final[Mapping[Level, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_JSON: Final = structlog.processors.JSONRenderer(ensure_ascii=False)

REDACTED: Final = "[redacted]"

REPEATS: Final = 10
"""Warnings of one kind that are written at once; then one in `REPEAT_S` seconds, until it was quiet for as long."""
REPEAT_S: Final = 10.0
_KINDS: Final = 1_000

_SECRET_FIELDS: Final = re.compile(
    r"(^|_)(authorization|api_?keys?|passwords?|secrets?|tokens?|credentials?|cookie|dsn|database_url)$", re.IGNORECASE
)
_COUNTS: Final = frozenset({"tokens", "input_tokens", "output_tokens", "max_tokens", "total_tokens", "cached_tokens"})
_SECRET_TEXTS: Final = re.compile(
    r"""omnara_(?:pat|org|daemon)_v1_\w+          # our own bearer tokens
      | \bsk-[\w-]{16,}                           # provider keys
      | (?<=Bearer\ )[\w.~+/=-]{8,}
      | (?<=x-api-key:\ )\S{8,}
      | (?<=://)[^/\s:@]*:[^/\s@]+(?=@)           # user and password of a URL
    """,
    re.VERBOSE | re.IGNORECASE,
)


def redact(text: str) -> str:
    """Return `text` without anything that looks like a bearer token, a provider key or a URL's password."""
    return _SECRET_TEXTS.sub(REDACTED, text)


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _field(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redacted(item) for item in value]
    return value


def _field(name: str, value: Any) -> Any:
    if name not in _COUNTS and _SECRET_FIELDS.search(name) and value is not None and not isinstance(value, bool):
        return REDACTED
    return _redacted(value)


def _redact_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        event[name] = _field(name, value)
    return event


class _Repeats:
    """Drops warnings that come again and again: an outage must not fill the disk. Source: field-reports B55.

    A kind is a logger and an event. The line that follows dropped ones says how many they were. Errors are all kept:
    each has an agent or a request of its own.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], tuple[int, float, int]] = {}

    def __call__(self, _logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if method != "warning":
            return event
        kind = (str(event.get("logger")), str(event.get("event")))
        now = time.monotonic()
        told, last, dropped = self._kinds.get(kind, (0, now, 0))
        if now - last >= REPEAT_S and not dropped:
            told = 0
        if told >= REPEATS and now - last < REPEAT_S:
            self._kinds[kind] = (told, last, dropped + 1)
            raise structlog.DropEvent
        if len(self._kinds) >= _KINDS:
            self._kinds.clear()
        self._kinds[kind] = (told + 1, now, 0)
        if dropped:
            event["not_shown"] = dropped
        return event


def _for_a_terminal(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Spell out what a terminal would obey: providers' messages and users' names are logged too."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = visible(value, lines=name == "exception")
    return event


def _as_json(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    line = _JSON(logger, method, event)
    return visible_json(line if isinstance(line, str) else line.decode())


_SHARED: Final[list[Any]] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
    _redact_event,
]
"""What our lines and those of libraries have in common."""


def configure(
    level: Level = "info", form: Literal["auto", "json", "console"] = "auto", *, stream: TextIO | None = None
) -> None:
    """Set up the process's logging, ours and that of libraries, on `stream` (default: standard error).

    `auto` writes for a person when `stream` is a terminal and JSON otherwise. May be called again; the last call wins.
    """
    out = stream if stream is not None else sys.stderr
    as_text = form == "console" or (form == "auto" and out.isatty())
    structlog.configure(
        processors=[
            structlog.stdlib.add_logger_name,
            _Repeats(),
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(_formatter(as_text=as_text, colors=out.isatty()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    # Libraries that log every request or reconnection would drown our own lines.
    for noisy in ("aiohttp.access", "httpx", "httpcore", "anthropic", "openai", "asyncio", "trafilatura"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, _LEVELS[level]))


def _formatter(*, as_text: bool, colors: bool) -> logging.Formatter:
    """What makes a line of an event, of ours or of a library, at the end of all processors."""
    rendered: list[Any] = [_for_a_terminal, structlog.dev.ConsoleRenderer(colors=colors)] if as_text else [_as_json]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module: `log = get_logger(__name__)`. Events are short phrases, facts are fields."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def note(**values: object) -> None:
    """Set ids for every further line of this task, until its `ids` block ends or they are set anew."""
    structlog.contextvars.bind_contextvars(**values)


@contextmanager
def ids(**values: object) -> Iterator[None]:
    """Add `agent_id`, `step`, `worker_id`, `request_id` … to every line written inside, in this task and its children.

    None values are left out. The former values come back at the end, also after an exception.
    """
    shown = {
        name: value if isinstance(value, int) else str(value) for name, value in values.items() if value is not None
    }
    with structlog.contextvars.bound_contextvars(**shown):
        yield
