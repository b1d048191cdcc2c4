"""Which addresses the server may connect to when somebody else chose the URL.

Tools and model endpoints take URLs from agents and tenants, and the server stands inside a private network. Every
connection is therefore checked at the address that is dialled, not at the name that was typed: a name is resolved
once, the first allowed address is pinned, and nothing in between can change it. Source: engine.md §7 (SSRF).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Protocol

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from omnara.tools.allow_list import Address, AllowList, Network, parse_allow_list, read_address, unmapped

__all__ = [
    "AddressBlocked",
    "AllowList",
    "GuardedResolver",
    "HttpSessionFactory",
    "ResolutionFailed",
    "Resolver",
    "UrlRefused",
    "check_endpoint",
    "is_public",
    "open_session",
    "parse_allow_list",
]

# Beyond what is private, loopback, link-local, multicast or unspecified. Source: engine.md §7.
_BLOCKED: Final[tuple[Network, ...]] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "240.0.0.0/4",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",
        "2001:db8::/32",
        "3fff::/20",
        "5f00::/16",
        "fec0::/10",
    )
)
_IPV4_COMPATIBLE: Final = ipaddress.IPv6Network("::/96")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR: Final = ipaddress.IPv6Network("2002::/16")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class UrlRefused(ValueError):
    """The URL is not one that the server follows. The message is for people and repeats no credentials."""


class AddressBlocked(OSError):
    """Every address of the host is inside a network that must not be reached. An OSError, as dialling expects."""


class ResolutionFailed(OSError):
    """The name has no address."""


class Resolver(Protocol):
    """Turns a name into addresses; the part that tests replace."""

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of `host` in order of preference. Raises OSError."""
        ...


class SystemResolver:
    """The operating system's resolver, in the loop's thread pool."""

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of `host`. Raises ResolutionFailed."""
        resolver = aiohttp.ThreadedResolver()
        try:
            found = await resolver.resolve(host, port, socket.AF_UNSPEC)
        except (OSError, UnicodeError) as error:
            raise ResolutionFailed(f"{host} cannot be resolved") from error
        return [entry["host"] for entry in found]


def is_public(address: Address) -> bool:
    """Return whether an address is global unicast and in none of the blocked networks, also by an embedded IPv4.

    Source: engine.md §7 (SSRF).
    """
    address = unmapped(address)
    if (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address.is_reserved
    ) and not _embeds(address):
        return False
    if any(address in network for network in _BLOCKED if network.version == address.version):
        return False
    embedded = _embedded_ipv4(address)
    return embedded is None or is_public(embedded)


def _embeds(address: Address) -> bool:
    # NAT64's own prefix counts as reserved to the standard library; what decides is the IPv4 address inside.
    return address.version == 6 and address in _NAT64


def _embedded_ipv4(address: Address) -> ipaddress.IPv4Address | None:
    if address.version == 4:
        return None
    number = int(address)
    if address in _IPV4_COMPATIBLE or address in _NAT64:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    if address in _SIX_TO_FOUR:
        return ipaddress.IPv4Address(number >> 80 & 0xFFFFFFFF)
    return None


def _pick_address(host: str, port: int, addresses: Iterable[str], allow: AllowList) -> tuple[Address, bool]:
    """Return the first address that may be dialled, and whether only the allow-list makes it so.

    Raises AddressBlocked when there is none.
    """
    named = allow.names(host, port)
    for text in addresses:
        address = read_address(text)
        if address is None:
            continue
        if is_public(address):
            return address, False
        if named or allow.covers(address) or allow.names(str(address), port):
            return address, True
    raise AddressBlocked(f"{host} has no address that may be reached")


class GuardedResolver(AbstractResolver):
    """The resolver for a connector: it answers with one allowed address, or not at all.

    aiohttp asks no resolver about hosts written as addresses; `admit` (or `check_endpoint`) must have seen those.
    """

    def __init__(self, allow: AllowList, resolver: Resolver | None = None) -> None:
        self._allow = allow
        self._resolver = resolver or SystemResolver()
        self._pins: dict[tuple[str, int], Address] = {}

    async def admit(self, url: URL) -> bool:
        """Resolve the host of `url` and pin the address for the dial; return whether it is a private, allowed place.

        Raises UrlRefused, AddressBlocked, ResolutionFailed or another OSError.
        """
        host, port = _host_and_port(url)
        address, exempt = await self._pick(host, port)
        self._pins[host, port] = address
        return exempt

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the pinned or first allowed address of `host`. Raises AddressBlocked, ResolutionFailed."""
        address = self._pins.get((host, port))
        if address is None:
            address, _ = await self._pick(host, port)
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
        ]

    async def close(self) -> None:
        """Nothing is held."""

    async def _pick(self, host: str, port: int) -> tuple[Address, bool]:
        literal = read_address(host)
        addresses = [host] if literal is not None else await self._resolver.resolve(host, port)
        if not addresses:
            raise ResolutionFailed(f"{host} cannot be resolved")
        return _pick_address(host, port, addresses, self._allow)


def _host_and_port(url: URL) -> tuple[str, int]:
    if url.scheme not in _DEFAULT_PORTS:
        raise UrlRefused("the URL must begin with https:// or http://")
    if url.raw_user is not None or url.raw_password is not None:
        raise UrlRefused("the URL must not contain a user or password")
    if not url.raw_host or not url.port:
        raise UrlRefused("the URL names no host")
    return url.raw_host, url.port


def check_endpoint(url: str, allow: AllowList) -> URL:
    """Check the address of a model endpoint as it is configured; return it parsed.

    https only, except for allowed private hosts; no user, query or fragment; no private address written as such.
    Names are checked when they are dialled, by a connector with a `GuardedResolver`. Raises UrlRefused; AddressBlocked
    for a blocked literal. Source: api.md §14.
    """
    try:
        parsed = URL(url)
        host, port = _host_and_port(parsed)
        (parsed.host or "").encode("idna")  # what cannot be a name is refused here and not when it is dialled
    except UrlRefused:
        raise
    except ValueError as error:
        raise UrlRefused("the URL cannot be read") from error
    if parsed.raw_query_string or parsed.raw_fragment:
        raise UrlRefused("the URL must have no query and no fragment")
    exempt = allow.names(host, port) or (allow.loopback and host == "localhost")
    if read_address(host) is not None:
        exempt = _pick_address(host, port, [host], allow)[1] or exempt
    if parsed.scheme != "https" and not exempt:
        raise UrlRefused("the URL must begin with https://")
    return parsed


HttpSessionFactory = Callable[[AbstractResolver], aiohttp.ClientSession]


async def _send_once(
    request: aiohttp.ClientRequest, handler: Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]]
) -> aiohttp.ClientResponse:
    """Keep aiohttp from sending a GET a second time, which it does when a server closes without an answer."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        # These two classes are what its retry looks for; the request may have been acted upon.
        raise aiohttp.ClientConnectionError(str(error)) from error


def open_session(resolver: AbstractResolver) -> aiohttp.ClientSession:
    """Return a session for one fetch that dials only what `resolver` answers. The caller closes it.

    No proxy or netrc from the environment, no cookies, no kept connections, and each request is sent at most once.
    Source: DESIGN §2, invariant 4; engine.md §7.
    """
    connector = aiohttp.TCPConnector(
        resolver=resolver, use_dns_cache=False, force_close=True, happy_eyeballs_delay=None
    )
    return aiohttp.ClientSession(
        connector=connector,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        middlewares=(_send_once,),
    )
