"""The private places that an operator opens to agents and model endpoints, read from one setting.

Everything private is closed by default (see `ssrf`); this is the list of exceptions.
"""

from __future__ import annotations

import ipaddress
from typing import Final

import msgspec

from omnara.errors import ConfigurationError

__all__ = ["Address", "AllowList", "Network", "normal_host", "parse_allow_list", "read_address", "unmapped"]

_NAME: Final = "OMNARA_ALLOWED_PRIVATE_HOSTS"
_FORMS: Final = "host, host:port, address or network such as 10.0.0.0/8"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AllowList(msgspec.Struct, frozen=True):
    """Private places that an operator lets agents and model endpoints reach.

    `hosts` are names or addresses on any port, `host_ports` on one port, `networks` ranges of addresses; `loopback`
    is the development switch. Everything here may also be reached over plain http.
    """

    hosts: frozenset[str] = frozenset()
    host_ports: frozenset[tuple[str, int]] = frozenset()
    networks: tuple[Network, ...] = ()
    loopback: bool = False

    def names(self, host: str, port: int) -> bool:
        """Return whether the operator named this host, whatever its address."""
        host = normal_host(host)
        return host in self.hosts or (host, port) in self.host_ports

    def covers(self, address: Address) -> bool:
        """Return whether the address is in an allowed range, or loopback in development."""
        plain = unmapped(address)
        if self.loopback and plain.is_loopback:
            return True
        return any(plain in network for network in self.networks if network.version == plain.version)


def parse_allow_list(text: str, *, loopback: bool = False) -> AllowList:
    """Read a comma-separated list of `host`, `host:port`, `[v6]:port`, addresses and CIDR ranges.

    Raises ConfigurationError naming the entry that cannot be read.
    """
    hosts: set[str] = set()
    host_ports: set[tuple[str, int]] = set()
    networks: list[Network] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        if "/" in entry:
            networks.append(_parse_network(entry))
            continue
        host, port = _split_port(entry)
        if port is None:
            hosts.add(host)
        else:
            host_ports.add((host, port))
    return AllowList(frozenset(hosts), frozenset(host_ports), tuple(networks), loopback)


def _parse_network(entry: str) -> Network:
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError as error:
        raise ConfigurationError(f"{_NAME}: {entry!r} is not a network") from error


def _split_port(entry: str) -> tuple[str, int | None]:
    if read_address(entry.strip("[]")) is not None:
        return normal_host(entry), None
    host, separator, port = entry.rpartition(":")
    if not separator:
        host, port = entry, ""
    name = normal_host(host)
    if "*" in name:
        raise ConfigurationError(f"{_NAME}: {entry!r} is a wildcard, which is not taken; name each {_FORMS}")
    readable = bool(name) and not set(name) & set(" /@?#[]") and (":" not in name or read_address(name) is not None)
    if not readable or (separator and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise ConfigurationError(f"{_NAME}: {entry!r} is no {_FORMS}")
    return name, int(port) if separator else None


def normal_host(host: str) -> str:
    """Return a host as it is compared: lower case, no brackets, no final dot, addresses in their short form."""
    bare = host.strip("[]").rstrip(".").lower()
    address = read_address(bare)
    return bare if address is None else str(address)


def read_address(text: str) -> Address | None:
    """Return the address that `text` spells, or None when it is a name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def unmapped(address: Address) -> Address:
    """Return the IPv4 address inside an IPv4-mapped IPv6 address, any other address itself."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped
