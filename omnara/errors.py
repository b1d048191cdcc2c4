"""The errors that reach a caller: one class per stable `code` of the public contract.

Every error body is `{"error": text, "code": code}`. Raise the most precise class; the API middleware turns it
into a response, so nothing below `api` needs to know about HTTP beyond the `status` kept here.

Source: api.md §6 (status and code table).
"""

from __future__ import annotations

from typing import ClassVar


class OmnaraError(Exception):
    """Base of every expected failure. `str(error)` is safe to show to the caller: no secrets, no foreign data."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    phrase: ClassVar[str] = "internal server error"

    def __init__(self, detail: str = "") -> None:
        self.detail = detail
        super().__init__(f"{self.phrase}: {detail}" if detail else self.phrase)


class InvalidRequest(OmnaraError):
    """A semantic check failed on a well-formed request."""

    status, code, phrase = 400, "invalid_request", "invalid request"


class ValidationFailed(OmnaraError):
    """The request does not fit the contract (schema, unknown field, path pattern). Never echoes values."""

    status, code, phrase = 400, "validation_failed", "request validation failed"


class Unauthorized(OmnaraError):
    """No usable credential."""

    status, code, phrase = 401, "unauthorized", "authentication required"


class Forbidden(OmnaraError):
    """The caller can see the resource but may not do this to it."""

    status, code, phrase = 403, "forbidden", "not permitted"


class NotFound(OmnaraError):
    """Unknown, or not visible to the caller: the two are told apart by nobody."""

    status, code, phrase = 404, "not_found", "not found"


class Conflict(OmnaraError):
    """The request clashes with the current state of a resource."""

    status, code, phrase = 409, "conflict", "conflict"


class IdempotencyKeyConflict(Conflict):
    """The Idempotency-Key was used before with other content."""

    code, phrase = "idempotency_key_conflict", "idempotency key conflict"


class StateTransitionConflict(Conflict):
    """The resource is in a state from which this step is not possible."""

    code, phrase = "state_transition_conflict", "state transition conflict"


class PendingWork(Conflict):
    """The machine has queued or live work and cannot sleep now."""

    code, phrase = "pending_work", "the machine has pending work"


class NotWakeCapable(Conflict):
    """Nobody could wake the machine again, so it must not sleep."""

    code, phrase = "not_wake_capable", "the machine cannot be woken"


class Gone(OmnaraError):
    """What the caller speaks for has been replaced or ended for good. A daemon that hears it at registration ends."""

    status, code, phrase = 410, "gone", "gone"


class RuntimeUnregistered(Gone):
    """The runtime is not the machine's current one any more: register again."""

    code, phrase = "daemon_runtime_unregistered", "the runtime is not registered"


class RequestTooLarge(OmnaraError):
    """Body or part of it over its stated limit."""

    status, code, phrase = 413, "request_too_large", "request too large"


class RangeNotSatisfiable(OmnaraError):
    """A part of a file was asked for that lies behind its end."""

    status, code, phrase = 416, "invalid_request", "range not satisfiable"


class UnsupportedMediaType(OmnaraError):
    """The body is not of a type that the route reads."""

    status, code, phrase = 415, "unsupported_media_type", "unsupported media type"


class Unprocessable(OmnaraError):
    """Well-formed, but cannot be processed."""

    status, code, phrase = 422, "unprocessable", "unprocessable"


class RateLimited(OmnaraError):
    """Too many requests from this caller."""

    status, code, phrase = 429, "rate_limited", "rate limited"


class Unavailable(OmnaraError):
    """Postgres or another needed part is away; the same request may succeed after `retry_after_s` seconds."""

    status, code, phrase = 503, "service_unavailable", "service unavailable"

    def __init__(self, detail: str = "", *, retry_after_s: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class ConfigurationError(OmnaraError):
    """A setting or the environment is unusable; `detail` says what to do. Ends the command with exit code 2."""

    phrase = "configuration error"
