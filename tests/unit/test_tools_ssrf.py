"""Which addresses may be dialled: every blocked network, the disguises of addresses, and the operator's exceptions."""

from __future__ import annotations

import ipaddress

import pytest
from yarl import URL

from omnara.errors import ConfigurationError
from omnara.tools.ssrf import (
    AddressBlocked,
    AllowList,
    GuardedResolver,
    ResolutionFailed,
    UrlRefused,
    check_endpoint,
    is_public,
    parse_allow_list,
)

CLOSED = AllowList()


class FakeResolver:
    """Answers from a table and counts the questions; several answers for one name are given in turn."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): given for name, given in answers.items()}
        self.asked: list[tuple[str, int]] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        given = self.answers.get(host)
        if given is None:
            raise ResolutionFailed(f"{host} cannot be resolved")
        return given.pop(0) if len(given) > 1 else given[0]


@pytest.mark.parametrize(
    "text",
    [
        # one address at each end of every blocked network, and what the standard library calls private
        *("0.0.0.0", "0.255.255.255", "10.0.0.1", "10.255.255.255", "100.64.0.0", "100.127.255.255"),
        *("127.0.0.1", "127.255.255.254", "169.254.0.1", "169.254.169.254", "172.16.0.1", "172.31.255.255"),
        *("192.0.0.1", "192.0.0.255", "192.0.2.1", "192.88.99.1", "192.168.0.1", "192.168.255.255"),
        *("198.18.0.0", "198.19.255.255", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.255"),
        *("240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "febf::1", "fc00::1", "fdff::1", "fec0::1", "ff02::1"),
        *("64:ff9b:1::1", "100::1", "2001::1", "2001:1ff::1", "2001:db8::1", "3fff::1", "3fff:fff::1", "5f00::1"),
        # IPv4 inside IPv6: mapped, compatible, NAT64, 6to4
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "::10.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::10.1.2.3", "64:ff9b::169.254.169.254"),
        *("2002:7f00:1::", "2002:a00:1::1", "2002:a9fe:a9fe::1", "2002:c0a8:1::"),
    ],
)
def test_blocked_addresses(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.1", "100.63.255.255", "100.128.0.1", "172.15.255.255"),
        *("172.32.0.1", "192.0.1.1", "192.167.1.1", "198.17.255.255", "198.20.0.1", "223.255.255.255"),
        *("2606:4700::1111", "2a00:1450::1", "2400::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1"),
    ],
)
def test_public_addresses(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


async def test_the_first_allowed_address_is_pinned_and_asked_for_once() -> None:
    names = FakeResolver(pages_example=[["10.0.0.1", "nonsense", "93.184.216.34", "93.184.216.35"]])
    guard = GuardedResolver(CLOSED, names)
    assert await guard.admit(URL("https://pages.example/x")) is False
    answers = await guard.resolve("pages.example", 443)
    assert [(answer["host"], answer["port"]) for answer in answers] == [("93.184.216.34", 443)]
    assert names.asked == [("pages.example", 443)]


async def test_a_name_that_changes_its_address_after_the_check_is_still_dialled_at_the_checked_one() -> None:
    names = FakeResolver(rebind_example=[["93.184.216.34"], ["127.0.0.1"]])
    guard = GuardedResolver(CLOSED, names)
    await guard.admit(URL("https://rebind.example/"))
    assert (await guard.resolve("rebind.example", 443))[0]["host"] == "93.184.216.34"
    with pytest.raises(AddressBlocked):
        await guard.resolve("rebind.example", 444)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://169.254.169.254/latest/meta-data",
        "https://inside.example/",
        "http://①②⑦.⓪.⓪.①/",
        "http://127.0.0.1./",
    ],
)
async def test_private_places_are_not_admitted(url: str) -> None:
    names = FakeResolver(inside_example=[["10.1.2.3", "fd00::1"]])
    names.answers["127.0.0.1."] = [["127.0.0.1"]]
    with pytest.raises(AddressBlocked):
        await GuardedResolver(CLOSED, names).admit(URL(url))


@pytest.mark.parametrize("url", ["http://2130706433/", "http://0x7f.1/", "http://0177.0.0.1/", "http://127.1/"])
async def test_odd_spellings_of_loopback_are_blocked_by_the_system_resolver_too(url: str) -> None:
    with pytest.raises((AddressBlocked, ResolutionFailed)):
        await GuardedResolver(CLOSED).admit(URL(url))


async def test_names_without_addresses() -> None:
    guard = GuardedResolver(CLOSED, FakeResolver(empty_example=[[]]))
    for name in ("empty.example", "unknown.example"):
        with pytest.raises(ResolutionFailed):
            await guard.admit(URL(f"https://{name}/"))
    with pytest.raises(ResolutionFailed):
        await GuardedResolver(CLOSED).admit(URL(f"https://{'a' * 70}.example/"))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://pages.example/", "https://"),
        ("file:///etc/passwd", "https://"),
        ("//pages.example/", "https://"),
        ("pages.example", "https://"),
        ("https://user@pages.example/", "user or password"),
        ("https://user:sesame@pages.example/", "user or password"),
        ("https:///path", "host|cannot be read"),
    ],
)
async def test_urls_that_are_not_followed(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        await GuardedResolver(CLOSED, FakeResolver()).admit(URL(url))
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("allowed", "host", "port", "address", "exempt"),
    [
        ("wiki.internal", "wiki.internal", 8080, "10.0.0.5", True),
        ("WIKI.internal.", "wiki.internal", 443, "10.0.0.5", True),
        ("wiki.internal:8080", "wiki.internal", 8080, "10.0.0.5", True),
        ("10.0.0.0/8", "anything.example", 443, "10.0.0.5", True),
        ("10.0.0.5", "anything.example", 443, "10.0.0.5", True),
        ("10.0.0.5:81", "10.0.0.5", 81, "10.0.0.5", True),
        ("[fd00::5]:81", "fd00::5", 81, "fd00::5", True),
        ("fd00:0::5", "fd00::5", 81, "fd00::5", True),
        ("fd00::/8", "six.example", 443, "fd12::1", True),
        ("10.0.0.0/8", "mapped.example", 443, "::ffff:10.0.0.5", True),
        ("wiki.internal", "wiki.internal", 443, "93.184.216.34", False),
    ],
)
async def test_the_operator_opens_places(allowed: str, host: str, port: int, address: str, exempt: bool) -> None:
    names = FakeResolver()
    names.answers[host] = [[address]]
    guard = GuardedResolver(parse_allow_list(allowed), names)
    assert await guard.admit(URL.build(scheme="http", host=host, port=port, path="/")) is exempt


@pytest.mark.parametrize(
    ("allowed", "host", "port", "address"),
    [
        ("wiki.internal", "sub.wiki.internal", 443, "10.0.0.5"),
        ("wiki.internal:8080", "wiki.internal", 8081, "10.0.0.5"),
        ("10.0.0.0/24", "x.example", 443, "10.0.1.5"),
        ("fd00::/8", "x.example", 443, "10.0.0.5"),
        ("", "localhost", 80, "127.0.0.1"),
    ],
)
async def test_and_only_those(allowed: str, host: str, port: int, address: str) -> None:
    names = FakeResolver()
    names.answers[host] = [[address]]
    guard = GuardedResolver(parse_allow_list(allowed), names)
    with pytest.raises(AddressBlocked):
        await guard.admit(URL.build(scheme="http", host=host, port=port, path="/"))


async def test_the_development_switch_opens_loopback_and_nothing_else() -> None:
    guard = GuardedResolver(AllowList(loopback=True), FakeResolver(localhost=[["127.0.0.1"]]))
    for url in ("http://localhost:81/", "http://127.0.0.2/", "http://[::1]/", "http://[::ffff:127.0.0.1]/"):
        assert await guard.admit(URL(url)) is True
    for url in ("http://10.0.0.1/", "http://0.0.0.0/", "http://169.254.169.254/"):
        with pytest.raises(AddressBlocked):
            await guard.admit(URL(url))


def test_allow_lists_are_read() -> None:
    allow = parse_allow_list(" a.internal , b.internal:81,10.0.0.0/8, 10.1.2.3/16 ,[::1]:82,, ", loopback=True)
    assert allow.hosts == {"a.internal"}
    assert allow.host_ports == {("b.internal", 81), ("::1", 82)}
    assert [str(network) for network in allow.networks] == ["10.0.0.0/8", "10.1.0.0/16"]
    assert allow.loopback
    assert parse_allow_list("") == AllowList()


@pytest.mark.parametrize(
    "entry", ["10.0.0.0/99", "host:0", "host:65536", "host:x", "host:", "http://x", "a b", ":80", "x:y:80", "host:８０"]
)
def test_unreadable_entries_are_named(entry: str) -> None:
    with pytest.raises(ConfigurationError, match="OMNARA_ALLOWED_PRIVATE_HOSTS"):
        parse_allow_list(f"fine.internal,{entry}")


@pytest.mark.parametrize(
    ("url", "allow"),
    [
        ("https://api.provider.example/v1", CLOSED),
        ("https://93.184.216.34/v1", CLOSED),
        ("http://127.0.0.1:8123/v1", AllowList(loopback=True)),
        ("http://localhost:8123/v1", AllowList(loopback=True)),
        ("http://models.internal/v1", parse_allow_list("models.internal")),
        ("http://10.0.0.7:9000/v1", parse_allow_list("10.0.0.0/8")),
        ("http://93.184.216.34/v1", parse_allow_list("93.184.216.34")),
    ],
)
def test_endpoints_that_are_accepted(url: str, allow: AllowList) -> None:
    assert str(check_endpoint(url, allow)) == url


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://api.provider.example/v1", UrlRefused),
        ("http://93.184.216.34/v1", UrlRefused),
        ("https://api.provider.example/v1?key=1", UrlRefused),
        ("https://api.provider.example/v1#x", UrlRefused),
        ("https://me:pw@api.provider.example/v1", UrlRefused),
        ("ws://api.provider.example/", UrlRefused),
        ("https://api.provider.example:99999/", UrlRefused),
        ("", UrlRefused),
        ("https://xn--/", UrlRefused),
        ("https://" + "a" * 64 + ".example/", UrlRefused),
        ("https://127.0.0.1/v1", AddressBlocked),
        ("https://[fd00::1]/v1", AddressBlocked),
        ("http://localhost/v1", UrlRefused),
    ],
)
def test_endpoints_that_are_refused(url: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_endpoint(url, CLOSED)


@pytest.mark.parametrize("entry", ["*", "*:8080", "*.internal", "10.0.0.*"])
def test_a_wildcard_is_refused_and_what_is_taken_is_named(entry: str) -> None:
    with pytest.raises(ConfigurationError, match=r"OMNARA_ALLOWED_PRIVATE_HOSTS.*wildcard.*host:port.*10\.0\.0\.0/8"):
        parse_allow_list(f"fine.internal,{entry}")
