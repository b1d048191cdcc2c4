"""How a model endpoint is reached: presets, defaults of each wire format, and what is not allowed. Pure.

Source: api.md §14 (presets, default paths, URLs); contract (CreateModelProviderConfigRequest).
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from omnara.errors import InvalidRequest
from omnara.providers import anthropic_messages
from omnara.providers.headers import BadCredential, credential
from omnara.providers.protocol import ApiKey
from omnara.tools.allow_list import AllowList
from omnara.tools.ssrf import UrlRefused, check_endpoint

AuthKind = Literal["bearer_token", "api_key_header"]

DEFAULT_TIMEOUT_MS: Final = 600_000
"""Source: api.md §14."""

_PATH: Final = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")
_PATHS: Final = {
    "openai_responses": "/responses",
    "openai_chat_completions": "/chat/completions",
    "anthropic_messages": "/messages",
}


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about an endpoint but its name and key. `auth_header` only with `api_key_header`."""

    api_format: str
    api_variant: str
    base_url: str
    request_path: str
    auth_kind: AuthKind
    auth_header: str | None
    request_timeout_ms: int


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of an endpoint; None where it says nothing. `header_given`: it has auth options at all."""

    api_format: str | None = None
    api_variant: str | None = None
    base_url: str | None = None
    request_path: str | None = None
    auth_kind: AuthKind | None = None
    auth_header: str | None = None
    header_given: bool = False
    request_timeout_ms: int | None = None


_PRESETS: Final = {
    "openai": ("openai_responses", "default", "https://api.openai.com/v1"),
    "openrouter": ("openai_chat_completions", "openrouter", "https://openrouter.ai/api/v1"),
    "anthropic": ("anthropic_messages", "default", "https://api.anthropic.com/v1"),
}


def new_endpoint(preset: str | None, wishes: Wishes, allow: AllowList) -> Endpoint:
    """Return the endpoint of a new provider config. Raises InvalidRequest."""
    if preset is not None:
        _only_timeout(wishes)
        api_format, api_variant, base_url = _PRESETS[preset]
        wishes = msgspec.structs.replace(wishes, api_format=api_format, api_variant=api_variant, base_url=base_url)
    if wishes.api_format is None or wishes.base_url is None:
        raise InvalidRequest("without a preset, api_format and base_url are needed")
    kind: AuthKind = "api_key_header" if wishes.api_format == anthropic_messages.API_FORMAT else "bearer_token"
    before = Endpoint(
        api_format=wishes.api_format,
        api_variant=wishes.api_variant or "default",
        base_url="",
        request_path=_PATHS[wishes.api_format],
        auth_kind=kind,
        auth_header=_default_header(wishes.api_format) if kind == "api_key_header" else None,
        request_timeout_ms=DEFAULT_TIMEOUT_MS,
    )
    return changed_endpoint(before, wishes, allow)


def changed_endpoint(before: Endpoint, wishes: Wishes, allow: AllowList) -> Endpoint:
    """Return an endpoint with the wishes applied; format and variant stay. Raises InvalidRequest."""
    kind = wishes.auth_kind or before.auth_kind
    return Endpoint(
        api_format=before.api_format,
        api_variant=before.api_variant,
        base_url=before.base_url if wishes.base_url is None else _checked_url(wishes.base_url, allow),
        request_path=before.request_path if wishes.request_path is None else _checked_path(wishes.request_path),
        auth_kind=kind,
        auth_header=_header(before, kind, wishes),
        request_timeout_ms=wishes.request_timeout_ms or before.request_timeout_ms,
    )


def header_shown(api_format: str, auth_kind: str, auth_header: str | None) -> str | None:
    """Return the name of the header that carries a key; None for bearer tokens."""
    if auth_kind != "api_key_header":
        return None
    return auth_header or _default_header(api_format) or "api-key"


def _only_timeout(wishes: Wishes) -> None:
    stated = msgspec.structs.replace(wishes, request_timeout_ms=None)
    if stated != Wishes():
        raise InvalidRequest("a preset sets format, variant, URL, path and authentication by itself")


def _default_header(api_format: str) -> str | None:
    return anthropic_messages.KEY_HEADER if api_format == anthropic_messages.API_FORMAT else None


def _header(before: Endpoint, kind: AuthKind, wishes: Wishes) -> str | None:
    if kind == "bearer_token":
        if wishes.auth_header is not None:
            raise InvalidRequest("auth_options.header_name is only for api_key_header")
        return None
    kept = before.auth_header if before.auth_kind == "api_key_header" and not wishes.header_given else None
    name = wishes.auth_header or kept or _default_header(before.api_format)
    if name is None:
        raise InvalidRequest("api_key_header needs auth_options.header_name")
    try:
        credential("api_key_header", name, ApiKey("probe"))
    except BadCredential:
        raise InvalidRequest("auth_options.header_name cannot be used") from None
    return name


def _checked_url(text: str, allow: AllowList) -> str:
    try:
        return str(check_endpoint(text, allow)).rstrip("/")
    except UrlRefused as error:
        raise InvalidRequest(f"base_url: {error}") from None
    except OSError:
        raise InvalidRequest("base_url: private addresses are for hosts that the operator has named") from None


def _checked_path(text: str) -> str:
    if _PATH.fullmatch(text) is None or ".." in text.split("/"):
        raise InvalidRequest("endpoint_path is a plain path that begins with a slash")
    return text
