"""`web_fetch` against real servers on loopback: what it reads, and everything a server or a name can try."""

from __future__ import annotations

import asyncio
import gzip
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID

import aiohttp
import pytest
from aiohttp import web

from omnara.domain.content import StructuredDataBlock, TextBlock
from omnara.tools.allow_list import AllowList, parse_allow_list
from omnara.tools.extract import Extractor
from omnara.tools.protocol import ToolCallRequest, ToolContext, ToolLimits, ToolResult
from omnara.tools.registry import execute
from omnara.tools.ssrf import open_session

MIB = 1024 * 1024
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DEVELOPMENT = AllowList(loopback=True)


class Names:
    """A resolver with a table; what is not in it is on loopback. Counts the questions."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): given for name, given in answers.items()}
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        given = self.answers.get(host, [["127.0.0.1"]])
        return given.pop(0) if len(given) > 1 else given[0]


class Site:
    """A web server on loopback that counts and keeps its requests."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        self.routes: dict[str, Handler] = {}
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        handler = self.routes.get(request.path)
        return web.Response(status=404, text="nothing here") if handler is None else await handler(request)

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def serve(self, path: str, body: bytes | str, content_type: str = "text/plain", **headers: str) -> str:
        data = body.encode() if isinstance(body, str) else body

        async def answer(_: web.Request) -> web.Response:
            named = {key.replace("_", "-"): value for key, value in headers.items()}
            return web.Response(body=data, headers={"Content-Type": content_type, **named})

        self.routes[path] = answer
        return self.url(path)

    def redirect(self, path: str, target: str, status: int = 302) -> str:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(status=status, headers={"Location": target})

        self.routes[path] = answer
        return self.url(path)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    runner = web.ServerRunner(web.Server(made.handle), shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    made.port = runner.addresses[0][1]
    try:
        yield made
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_server(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """A TCP server whose every byte is chosen by the test; its conversations end with it."""
    running: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            running.discard(task)
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()


async def get(
    url: str,
    *,
    allow: AllowList = DEVELOPMENT,
    names: Names | None = None,
    limits: ToolLimits | None = None,
    **more: Any,
) -> ToolResult:
    context = ToolContext(
        extractor=Extractor(),
        allow=allow,
        resolver=names or Names(),
        limits=limits or ToolLimits(),
        **more.pop("ctx", {}),
    )
    return await execute(ToolCallRequest(UUID(int=1), UUID(int=2), "web_fetch", {"url": url, **more}), context)


def text_of(result: ToolResult) -> str:
    assert result.outcome == "succeeded", result
    block = result.content_blocks[0]
    assert isinstance(block, TextBlock)
    return block.text


def facts_of(result: ToolResult) -> dict[str, Any]:
    block = result.content_blocks[-1]
    assert isinstance(block, StructuredDataBlock)
    facts: dict[str, Any] = block.value
    return facts


def assert_failed(result: ToolResult, code: str) -> str:
    assert (result.outcome, result.error_code) == ("failed", code), result
    facts = facts_of(result)
    assert facts["error_code"] == code
    error = facts["error"]
    assert isinstance(error, str)
    assert error
    return error


async def test_a_text_page_as_it_is_with_one_request(site: Site) -> None:
    result = await get(site.serve("/a", "plain  text\nsecond line"))
    assert text_of(result) == "plain  text\nsecond line"
    assert facts_of(result) == {"url": site.url("/a"), "status": 200, "content_type": "text/plain", "characters": 23}
    (request,) = site.requests
    assert request.method == "GET"
    assert request.headers["User-Agent"] == "omnara-agent/1.0"
    assert not {"Cookie", "Authorization", "Referer"} & set(request.headers)


async def test_html_becomes_markdown_or_text(site: Site) -> None:
    page = "<html><head><title>T</title></head><body><article><h1>Head</h1>" + "".join(
        f"<p>Paragraph {n} has <b>bold</b> words and a <a href='/x'>link</a> in it.</p>" for n in range(3)
    )
    url = site.serve("/page", page + "</article></body></html>", "text/html")
    markdown = await get(url)
    assert text_of(markdown).startswith("# Head")
    assert "**bold**" in text_of(markdown)
    assert facts_of(markdown)["title"] == "T"
    plain = text_of(await get(url, format="text"))
    assert "Paragraph 2 has bold words and a link in it." in plain


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", '{"a":1}'),
        ("application/problem+json; charset=utf-8", '{"a":1}'),
        ("application/xml", "<a>1</a>"),
        ("application/atom+xml", "<feed/>"),
        ("image/svg+xml", "<svg/>"),
        ("TEXT/CSV", "a,b"),
        ("text/markdown", "# x"),
    ],
)
async def test_types_that_are_read_unchanged(site: Site, content_type: str, body: str) -> None:
    assert text_of(await get(site.serve("/a", body, content_type))) == body


@pytest.mark.parametrize(
    "content_type",
    ["application/pdf", "image/png", "application/octet-stream", "application/zip", "video/mp4", "nonsense", "text"],
)
async def test_types_that_are_not(site: Site, content_type: str) -> None:
    assert_failed(await get(site.serve("/a", b"\x00\x01", content_type)), "web_fetch_unsupported_type")


async def test_pages_without_a_type_are_read_when_they_are_text(site: Site) -> None:
    async def untyped(port_body: bytes) -> ToolResult:
        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(port_body), port_body))
            await writer.drain()

        async with raw_server(talk) as port:
            return await get(f"http://127.0.0.1:{port}/")

    assert text_of(await untyped(b"hello")) == "hello"
    assert facts_of(await untyped(b"<!DOCTYPE html><p>x</p>"))["content_type"] == "text/html"
    assert_failed(await untyped(b"\x7fELF\x00\x00"), "web_fetch_unsupported_type")


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        ("text/plain", "é€😀".encode(), "é€😀"),
        ("text/plain; charset=utf-8", b"\xef\xbb\xbfx", "x"),
        ("text/plain; charset=iso-8859-1", b"\xe9\x80", "é€"),
        ("text/plain; charset=windows-1251", "Привет".encode("cp1251"), "Привет"),
        ('text/plain; charset="Shift_JIS"', "日本".encode("shift_jis"), "日本"),
        ("text/plain", "\ufeffhé".encode("utf-16-le"), "hé"),
        ("text/plain; charset=nonsense", "é".encode(), "é"),
        ("text/plain; charset=zlib", "é".encode(), "é"),
        ("text/plain; charset=unicode_escape", b"\\u0000\\ud800", "\\u0000\\ud800"),
        ("text/plain; charset=utf-7", b"+AAA-", "+AAA-"),
        ("text/plain", b"a\x00b", "a\ufffdb"),
        ("text/plain", b"a\xff\xfeb", "a\ufffd\ufffdb"),
        ("text/plain", b"cut \xe2\x82", "cut \ufffd"),
        ("text/plain", b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        ("text/plain; charset=utf-16-le", b"\x00\xd8x\x00", "\ufffdx"),
        ("application/xml", '<?xml version="1.0" encoding="windows-1252"?><a>é</a>'.encode("cp1252"), None),
        ("application/json", b'{"a":"\\u0000"}', '{"a":"\\u0000"}'),
    ],
)
async def test_charsets_and_dirty_text(site: Site, content_type: str, body: bytes, text: str | None) -> None:
    found = text_of(await get(site.serve("/a", body, content_type)))
    assert found == (text or '<?xml version="1.0" encoding="windows-1252"?><a>é</a>')


async def test_a_charset_declared_inside_html(site: Site) -> None:
    page = (
        '<html><head><meta http-equiv="Content-Type" content="text/html; charset=windows-1251"></head><body><p>Привет'
    )
    assert "Привет" in text_of(await get(site.serve("/a", page.encode("cp1251"), "text/html")))


async def test_references_to_nul_in_html_are_cleaned(site: Site) -> None:
    text = text_of(await get(site.serve("/a", "<p>a&#0;b&#xD800;c</p>", "text/html")))
    assert "\x00" not in text
    assert text.encode()


async def test_multi_byte_characters_cut_between_packets(site: Site) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        for byte in "é€😀".encode():
            await response.write(bytes([byte]))
        return response

    site.routes["/a"] = cut
    assert text_of(await get(site.url("/a"))) == "é€😀"


@pytest.mark.parametrize("body", ["", " \n\t "])
async def test_a_page_without_text_says_so(site: Site, body: str) -> None:
    assert text_of(await get(site.serve("/a", body))) == "(the page has no readable text)"


async def test_stored_text_is_cut_and_says_so(site: Site) -> None:
    result = await get(site.serve("/a", "é" * 150_000))
    assert text_of(result) == "é" * 100_000
    assert facts_of(result)["characters"] == 150_000
    assert facts_of(result)["truncated_to"] == 100_000


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 418, 429, 500, 503])
async def test_error_statuses_are_failures_and_not_repeated(site: Site, status: int) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text="secret page")

    site.routes["/a"] = answer
    result = await get(site.url("/a"))
    assert str(status) in assert_failed(result, "web_fetch_http_error")
    assert facts_of(result)["status"] == status
    assert len(site.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(site: Site, status: int) -> None:
    site.serve("/end", "the end")
    result = await get(site.redirect("/a", "../end#part", status))
    assert text_of(result) == "the end"
    assert facts_of(result)["url"] == site.url("/end")


async def test_five_redirects_are_followed_and_the_sixth_is_not(site: Site) -> None:
    for number in range(1, 7):
        site.redirect(f"/{number}", f"/{number - 1}")
    site.serve("/0", "the end")
    assert text_of(await get(site.url("/5"))) == "the end"
    site.requests.clear()
    assert_failed(await get(site.url("/6")), "web_fetch_too_many_redirects")
    assert [request.path for request in site.requests] == ["/6", "/5", "/4", "/3", "/2", "/1"]


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("http://10.0.0.1/", "web_fetch_address_blocked"),
        ("http://169.254.169.254/latest/meta-data", "web_fetch_address_blocked"),
        ("http://[::ffff:10.0.0.1]/", "web_fetch_address_blocked"),
        ("//192.168.0.1/", "web_fetch_address_blocked"),
        ("http://inside.example/", "web_fetch_address_blocked"),
        ("file:///etc/passwd", "web_fetch_invalid_url"),
        ("gopher://127.0.0.1/", "web_fetch_invalid_url"),
        ("http://me:pw@127.0.0.1/", "web_fetch_invalid_url"),
        ("http://[broken", "web_fetch_invalid_url"),
    ],
)
async def test_a_redirect_to_a_place_that_may_not_be_reached(site: Site, target: str, code: str) -> None:
    names = Names(inside_example=[["10.1.1.1", "192.168.3.3"]])
    assert_failed(await get(site.redirect("/a", target), names=names), code)
    assert len(site.requests) == 1


async def test_a_redirect_from_an_allowed_host_to_loopback_is_checked_on_its_own(site: Site) -> None:
    allow = parse_allow_list(f"wiki.internal:{site.port}")
    site.serve("/secret", "internal")
    site.redirect("/a", site.url("/secret"))
    result = await get(site.url("/a", host="wiki.internal"), allow=allow)
    assert_failed(result, "web_fetch_address_blocked")
    assert [request.path for request in site.requests] == ["/a"]
    assert text_of(await get(site.url("/secret", host="wiki.internal"), allow=allow)) == "internal"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://pages.example:{port}/"]
)
async def test_loopback_is_closed_without_the_development_switch(site: Site, url: str) -> None:
    result = await get(url.format(port=site.port), allow=AllowList())
    assert_failed(result, "web_fetch_address_blocked")
    assert site.requests == []


async def test_a_name_is_resolved_once_and_dialled_where_it_was_checked(site: Site) -> None:
    names = Names(rebind_example=[["127.0.0.1"], ["10.0.0.1"]])
    site.serve("/a", "here")
    assert text_of(await get(site.url("/a", host="rebind.example"), names=names)) == "here"
    assert names.asked == ["rebind.example"]
    assert site.requests[0].headers["Host"] == f"rebind.example:{site.port}"


async def test_private_answers_before_an_allowed_one_are_skipped(site: Site) -> None:
    names = Names(mixed_example=[["10.0.0.1", "169.254.169.254", "127.0.0.1"]])
    site.serve("/a", "here")
    assert text_of(await get(site.url("/a", host="mixed.example"), names=names)) == "here"


async def test_http_is_upgraded_for_public_places(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[tuple[str, int, bool]] = []

    async def refuse(_: Any, request: aiohttp.ClientRequest, *__: Any, **___: Any) -> None:
        dialled.append((str(request.url), request.url.port or 0, request.is_ssl()))
        raise aiohttp.ClientConnectionError

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", refuse)
    names = Names(pages_example=[["93.184.216.34"]])
    for url in ("http://pages.example/a?b=c", "http://pages.example:8080/", "http://pages.example:80/"):
        assert_failed(await get(url, names=names), "web_fetch_bad_response")
    assert dialled == [
        ("https://pages.example/a?b=c", 443, True),
        ("https://pages.example:8080/", 8080, True),
        ("https://pages.example/", 443, True),
    ]


async def test_proxies_of_the_environment_are_ignored(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert text_of(await get(site.serve("/a", "direct"))) == "direct"


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "raw", "identity"])
async def test_compressed_pages(site: Site, encoding: str) -> None:
    body = b"hello " * 1000
    raw = zlib.compressobj(wbits=-15)
    packed = {
        "gzip": gzip.compress(body[:3000]) + gzip.compress(body[3000:]) + b"\x00" * 20,
        "x-gzip": gzip.compress(body),
        "deflate": zlib.compress(body),
        "raw": raw.compress(body) + raw.flush(),
        "identity": body,
    }[encoding]
    sent = "deflate" if encoding == "raw" else encoding
    assert text_of(await get(site.serve("/a", packed, Content_Encoding=sent))) == body.decode()


@pytest.mark.parametrize(
    ("body", "encoding", "code"),
    [
        (gzip.compress(b"x" * 100)[:-9], "gzip", "web_fetch_bad_response"),
        (b"not gzip", "gzip", "web_fetch_bad_response"),
        (b"x", "br", "web_fetch_unsupported_type"),
        (b"x", "gzip, gzip", "web_fetch_unsupported_type"),
        (gzip.compress(b"\x00" * (200 * MIB)), "gzip", "web_fetch_too_large"),
        (gzip.compress(b"\x00" * (3 * MIB)) * 2, "gzip", "web_fetch_too_large"),
        (zlib.compress(b"\x00" * (200 * MIB)), "deflate", "web_fetch_too_large"),
    ],
    ids=["cut", "broken", "br", "twice", "bomb", "members", "deflate-bomb"],
)
async def test_damaged_and_exploding_compression(site: Site, body: bytes, encoding: str, code: str) -> None:
    assert_failed(await get(site.serve("/a", body, Content_Encoding=encoding)), code)


async def test_the_largest_page_is_read_and_one_byte_more_is_not(site: Site) -> None:
    assert facts_of(await get(site.serve("/a", b"x" * (5 * MIB))))["characters"] == 5 * MIB
    assert_failed(await get(site.serve("/b", b"x" * (5 * MIB + 1))), "web_fetch_too_large")
    exactly = gzip.compress(b"x" * (5 * MIB))
    assert facts_of(await get(site.serve("/c", exactly, Content_Encoding="gzip")))["characters"] == 5 * MIB


async def test_an_endless_page_is_left_at_the_limit() -> None:
    sent = 0

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with raw_server(talk) as port:
        assert_failed(await get(f"http://127.0.0.1:{port}/"), "web_fetch_too_large")
    assert sent < 16 * MIB


@pytest.mark.parametrize("stage", ["connect", "silence", "headers", "body"])
async def test_slow_servers_run_into_the_timeout(stage: str) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if stage == "body":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1000\r\n\r\n")
        elif stage == "headers":
            writer.write(b"HTTP/1.1 200 OK\r\n")
        while stage != "silence":
            writer.write(b"x" if stage == "body" else b"X-Drip: 1\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)
        await asyncio.Event().wait()

    async with AsyncExitStack() as stack:
        if stage == "connect":
            # A listening socket whose queue is full answers no further connection.
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            port = listener.getsockname()[1]
            for _ in range(4):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
        else:
            port = await stack.enter_async_context(raw_server(talk))
        result = await get(f"http://127.0.0.1:{port}/", timeout=1)
    assert "1 s" in assert_failed(result, "web_fetch_timeout")


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 50\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
    ids=["closed", "garbage", "cut", "chunks", "headers"],
)
async def test_broken_answers_are_failures_with_one_request(reply: bytes) -> None:
    hits = 0

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hits
        hits += 1
        writer.write(reply)
        await writer.drain()

    async with raw_server(talk) as port:
        assert_failed(await get(f"http://127.0.0.1:{port}/"), "web_fetch_bad_response")
    assert hits == 1


async def test_a_reset_connection_is_not_asked_again() -> None:
    hits = 0

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hits
        hits += 1
        # Closing with this option sends a reset instead of an orderly end.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.transport.abort()

    async with raw_server(talk) as port:
        assert_failed(await get(f"http://127.0.0.1:{port}/"), "web_fetch_bad_response")
    assert hits == 1


async def test_nobody_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert_failed(await get(f"http://127.0.0.1:{port}/"), "web_fetch_connection_failed")


async def test_a_certificate_that_is_not_trusted_or_no_tls_at_all(site: Site) -> None:
    result = await get(f"https://127.0.0.1:{site.port}/")
    assert_failed(result, "web_fetch_tls_failed")
    assert site.requests == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "ftp://x.example/",
        "javascript:alert(1)",
        "http://",
        "http://[::1",
        "https://x.example:99999/",
        "//",
    ],
)
async def test_urls_that_are_none(url: str) -> None:
    result = await get(url or " ")
    assert_failed(result, "web_fetch_invalid_url")


async def test_names_that_do_not_exist() -> None:
    assert_failed(await get("https://empty.example/", names=Names(empty_example=[[]])), "web_fetch_dns_failed")


async def test_messages_hold_no_dirty_text(site: Site) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 \xff\xfe\xed\xa0\x80 bad\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async with raw_server(talk) as port:
        error = assert_failed(await get(f"http://127.0.0.1:{port}/"), "web_fetch_http_error")
    assert error.encode()


async def test_sessions_are_closed_and_cancellation_leaves_nothing(site: Site) -> None:
    sessions: list[aiohttp.ClientSession] = []

    def opened(resolver: Any) -> aiohttp.ClientSession:
        sessions.append(open_session(resolver))
        return sessions[-1]

    waiting = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        waiting.set()
        await asyncio.Event().wait()
        return web.Response()

    site.routes["/a"] = hang
    task = asyncio.create_task(get(site.url("/a"), ctx={"open_session": opened}))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    site.serve("/b", "x")
    await get(site.url("/b"), ctx={"open_session": opened})
    assert [session.closed for session in sessions] == [True, True]
