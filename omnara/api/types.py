"""The one error body, shared by every surface. Source: api.md §6."""

from __future__ import annotations

from typing import Literal

import msgspec

ErrorCode = Literal[
    "invalid_request",
    "unauthorized",
    "forbidden",
    "not_found",
    "conflict",
    "gone",
    "request_too_large",
    "unsupported_media_type",
    "unprocessable",
    "rate_limited",
    "internal_error",
    "upstream_error",
    "service_unavailable",
    "idempotency_key_conflict",
    "state_transition_conflict",
    "managed_work_admission_denied",
    "pending_work",
    "not_wake_capable",
    "daemon_runtime_unregistered",
    "validation_failed",
    "csrf_check_failed",
    "authentication_unavailable",
]
ClientErrorCode = Literal[
    "invalid_request",
    "validation_failed",
    "unauthorized",
    "forbidden",
    "csrf_check_failed",
    "not_found",
    "conflict",
    "idempotency_key_conflict",
    "state_transition_conflict",
    "pending_work",
    "not_wake_capable",
    "gone",
    "daemon_runtime_unregistered",
    "request_too_large",
    "unsupported_media_type",
    "unprocessable",
    "rate_limited",
]
ServerErrorCode = Literal["internal_error", "upstream_error", "service_unavailable", "authentication_unavailable"]


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of request bodies that change what they name, at least one thing. The document says `minProperties: 1`."""

    def __post_init__(self) -> None:
        """Refuse a body without any change. Raises ValueError, which decoding turns into a refusal."""
        if all(getattr(self, name) is msgspec.UNSET for name in self.__struct_fields__):
            raise ValueError("nothing to change")


class Error(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Any error: text for people, code for programs."""

    error: str
    code: ErrorCode


class ClientError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error of the 4xx family that the route does not list by itself."""

    error: str
    code: ClientErrorCode


class ServerError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error of the 5xx family that the route does not list by itself."""

    error: str
    code: ServerErrorCode
