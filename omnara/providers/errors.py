"""What a provider's refusal means: one classifier for error responses and for errors inside a 200 stream.

It is ours rather than the SDKs' exception classes because those go by status alone, and a stream that fails half-way
has none. Structured codes win over the status; prose is read only for the three findings that change what the engine
does next (too long, too large, refused replay), and only on errors that say nothing more precise.
Source: engine.md §5 (signals); field-reports B02, B43, B45.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omnara.domain.text import clean_text
from omnara.providers.protocol import MAX_MESSAGE_BYTES, ApiKey, ErrorKind, Failed
from omnara.providers.retry import parse_retry_after

MAX_BODY_BYTES: Final = 64 * 1024
"""How much of an error body is read. Source: engine.md §5."""

_CODES: Final[dict[str, ErrorKind]] = {
    # Anthropic error types
    "authentication_error": "auth",
    "permission_error": "auth",
    "billing_error": "billing_account",
    "not_found_error": "invalid_request",
    "request_too_large": "payload_too_large",
    "rate_limit_error": "rate_limit",
    "overloaded_error": "provider_unavailable",
    "timeout_error": "transient",
    # OpenAI error codes and types
    "context_length_exceeded": "context_window",
    "insufficient_quota": "billing_account",
    "billing_hard_limit_reached": "billing_account",
    "billing_not_active": "billing_account",
    "account_deactivated": "billing_account",
    "rate_limit_exceeded": "rate_limit",
    "invalid_api_key": "auth",
    "model_not_found": "invalid_request",
    "content_filter": "invalid_request",
    "content_policy_violation": "invalid_request",
    "moderation_blocked": "invalid_request",
    "overloaded": "provider_unavailable",
    "invalid_prompt": "invalid_request",
    "bio_policy": "invalid_request",
    "misalignment_policy_violation": "invalid_request",
    "data_residency_mismatch": "invalid_request",
    "invalid_encrypted_content": "invalid_request",
}
_VAGUE: Final[dict[str, ErrorKind]] = {
    # Types that cover everything; they say less than a status, and something where there is none.
    "api_error": "provider_unavailable",
    "server_error": "provider_unavailable",
    "invalid_request_error": "invalid_request",
}
_STATUS: Final[dict[int, ErrorKind]] = {
    401: "auth",
    402: "billing_account",
    403: "auth",
    408: "transient",
    409: "transient",
    413: "payload_too_large",
    429: "rate_limit",
}
_GENERIC: Final = frozenset({"invalid_request", "provider_unavailable", "unknown"})
_CONTEXT: Final = (
    "prompt is too long",
    "context length",
    "context window",
    "context_length",
    "maximum context",
    "input is too long",
    "input length",
    "reduce the length",
)
_PAYLOAD: Final = ("request too large", "payload too large", "entity too large", "exceeds the maximum size")
_REPLAY: Final = (
    "signature",
    "redacted_thinking",
    "cannot be modified",
    "encrypted_content",
    "encrypted content",
    "not persisted",
    "required following item",
    "required 'reasoning' item",
    "duplicate item found",
)


class ErrorBody(msgspec.Struct, frozen=True):
    """What is common to the providers' error objects."""

    message: str = ""
    codes: tuple[str, ...] = ()
    status: int | None = None


def read_error(value: Any) -> ErrorBody:
    """Read a decoded error object of any of the formats; anything else gives an empty one."""
    if not isinstance(value, dict):
        return ErrorBody(message=value if isinstance(value, str) else "")
    error = value.get("error", value)
    if isinstance(error, str):
        return ErrorBody(message=error)
    if not isinstance(error, dict):
        return ErrorBody()
    message = error.get("message")
    code = error.get("code")
    codes = tuple(item for item in (code, error.get("type")) if isinstance(item, str) and item)
    # Aggregators put the upstream's status into `code`.
    status = code if isinstance(code, int) and not isinstance(code, bool) and 300 <= code <= 599 else None
    return ErrorBody(message if isinstance(message, str) else "", codes, status)


def from_response(
    status: int, headers: Mapping[str, str], body: bytes, *, key: ApiKey | None, replays: bool, now: float
) -> Failed:
    """Classify an HTTP response that is not a success. `now` is Unix time, for dates in `Retry-After`.

    `replays`: whether the request carried provider-exact content that a retry could leave out.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        value = None
    error = read_error(value)
    if not error.message:
        text = body[:MAX_MESSAGE_BYTES].decode("utf-8", "replace").strip()
        error = ErrorBody(text if value is None and text else f"HTTP status {status}", error.codes, error.status)
    if 300 <= status < 400:
        error = ErrorBody(f"the endpoint answered with a redirect ({status}); redirects are not followed")
    return Failed(
        kind=_kind(status, error, replays=replays),
        message=safe_message(error.message, key),
        status=status,
        provider_code=_code(error, key),
        retry_after_s=parse_retry_after(headers, now),
        should_retry={"true": True, "false": False}.get(headers.get("x-should-retry", "").strip().lower()),
        request_id=request_id(headers),
    )


def from_stream(value: Any, *, key: ApiKey | None, replays: bool, request_id: str) -> Failed:
    """Classify an error event inside a 200 stream. The provider may have charged for what it sent before."""
    error = read_error(value)
    return Failed(
        kind=_kind(error.status, error, replays=replays),
        message=safe_message(error.message or "the provider reported an error in its stream", key),
        ambiguous=True,
        status=error.status,
        provider_code=_code(error, key),
        request_id=request_id,
    )


def safe_message(text: str, key: ApiKey | None) -> str:
    """Clean provider text for storage: no credential, no NUL, at most 2000 bytes, cut between characters."""
    if key is not None and len(key.reveal()) >= 8:
        text = text.replace(key.reveal(), "***")
    text = clean_text(text)
    raw = text.encode()
    return text if len(raw) <= MAX_MESSAGE_BYTES else raw[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore")


def request_id(headers: Mapping[str, str]) -> str:
    """The provider's id of the request, for its support; at most 200 characters."""
    return clean_text(headers.get("request-id") or headers.get("x-request-id") or "")[:200]


def _code(error: ErrorBody, key: ApiKey | None) -> str:
    return safe_message(error.codes[0], key)[:200] if error.codes else ""


def _kind(status: int | None, error: ErrorBody, *, replays: bool) -> ErrorKind:
    coded = next((_CODES[code] for code in error.codes if code in _CODES), None)
    kind = coded or _by_status(error.status or status, error)
    if kind == "auth" and status == 403 and "moderation" in error.message.lower():
        return "invalid_request"  # it is the input that is refused, not the key
    return _by_prose(kind, error.message.lower(), replays=replays) if kind in _GENERIC else kind


def _by_status(status: int | None, error: ErrorBody) -> ErrorKind:
    if status is None or status < 300:
        # A success that is no stream, or an error inside one: worth another try unless it says otherwise.
        return next((_VAGUE[code] for code in error.codes if code in _VAGUE), "unknown")
    if status in _STATUS:
        return _STATUS[status]
    return "provider_unavailable" if status >= 500 else "invalid_request"


def _by_prose(kind: ErrorKind, text: str, *, replays: bool) -> ErrorKind:
    if any(marker in text for marker in _CONTEXT):
        return "context_window"
    if any(marker in text for marker in _PAYLOAD):
        return "payload_too_large"
    if replays and kind == "invalid_request" and any(marker in text for marker in _REPLAY):
        return "replay_rejected"
    return kind
