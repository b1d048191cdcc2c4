"""What can go wrong for a caller, in three kinds: the server said no, it could not be reached, the stream is broken."""

from __future__ import annotations

from typing import Final

__all__ = ["ApiError", "ClientError", "ServerUnreachable", "StreamBroken", "is_retryable_status"]

_RETRYABLE_STATUS: Final = frozenset({408, 429})


class ClientError(Exception):
    """Base of everything that this client raises."""


class ApiError(ClientError):
    """The server answered with an error. `code` is the stable word of the contract; `text` is for people."""

    def __init__(self, status: int, code: str, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {code}: {text}")
        self.status = status
        self.code = code
        self.text = text
        self.retry_after_s = retry_after_s


class ServerUnreachable(ClientError):
    """No answer after all attempts. Whether the last request took effect is unknown."""


class StreamBroken(ClientError):
    """The event stream ended for good: the server reported an internal error, or its log has a gap."""


def is_retryable_status(status: int) -> bool:
    """Whether the same request may succeed later. Source: api.md §15."""
    return status in _RETRYABLE_STATUS or status >= 500
