"""Which places this process may connect to on behalf of others: the operator's rule for model endpoints."""

from __future__ import annotations

from omnara.providers.http import AddressCheck
from omnara.settings import Settings
from omnara.tools.allow_list import AllowList, parse_allow_list, read_address, unmapped
from omnara.tools.ssrf import is_public

__all__ = ["address_check", "allow_list"]


def allow_list(settings: Settings) -> AllowList:
    """Return the private places that the operator has named. Raises ConfigurationError."""
    return parse_allow_list(",".join(settings.allowed_private_hosts))


def address_check(allow: AllowList) -> AddressCheck:
    """Return the rule for addresses that model calls may dial: public ones, and what the operator has named.

    A host that is named with a port is allowed on that port alone. Source: engine.md §7 (SSRF).
    """

    def check(host: str, ip: str, port: int) -> str | None:
        address = read_address(ip)
        if address is None:
            return "the address cannot be read"
        plain = unmapped(address)
        named = allow.names(host, port) or allow.names(str(plain), port)
        if is_public(plain) or allow.covers(plain) or named:
            return None
        return f"{host}:{port} is private; an operator can allow it with OMNARA_ALLOWED_PRIVATE_HOSTS"

    return check
