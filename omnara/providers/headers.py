"""Request headers: what a wire format asks for, the credential where it belongs, and nothing else.

They are few, so they are made here instead of by the official SDKs, whose import takes 1.8 s of CPU and 60 MB in every
process, at the very moment when a restarted one has work waiting. A test compares them with what the installed SDKs
send. Nothing is read from the environment: what the operator has there never reaches a tenant's endpoint.
Source: DESIGN §5; invariant 7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from omnara import __version__
from omnara.providers.protocol import ApiKey, AuthKind, ModelTarget

USER_AGENT: Final = f"omnara/{__version__}"

_FIXED: Final = {
    "content-type": "application/json",
    "accept": "text/event-stream",
    "accept-encoding": "identity",
    "user-agent": USER_AGENT,
}
_VALUE: Final = re.compile(r"[!-~]+")
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_RESERVED: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", *_FIXED})


class BadCredential(ValueError):
    """The provider config has no usable credential. The message does not contain it."""


def request_headers(target: ModelTarget, own: Mapping[str, str], key_header: str) -> dict[str, str]:
    """Return the headers of a model call; `own` are those of its wire format. Raises BadCredential.

    `key_header` is the wire format's header for a key, where the target names none itself.
    """
    return {**own, **_FIXED, **credential(target.auth_kind, target.auth_header or key_header, target.api_key)}


def credential(kind: AuthKind, key_header: str, key: ApiKey | None) -> dict[str, str]:
    """Return the one header that carries `key`. Raises BadCredential when there is no key or no header can carry it."""
    secret = key.reveal() if key is not None else ""
    if not _VALUE.fullmatch(secret):
        raise BadCredential("the provider's API key is missing or has characters that a header cannot carry")
    if kind == "bearer_token":
        return {"authorization": f"Bearer {secret}"}
    name = key_header.lower()
    if not _TOKEN.fullmatch(name) or name in _RESERVED:
        raise BadCredential("the provider's API key header has a name that cannot be used")
    return {name: secret}
