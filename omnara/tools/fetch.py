"""One guarded GET: redirects followed by hand, sizes bounded, bytes turned into clean text.

Apart from the tool that uses it, because this is where a stranger's server is talked to. Each hop is checked and
dialled at a pinned address; the body is counted before and after decompression. Source: engine.md §7.
"""

from __future__ import annotations

import codecs
import re
import zlib
from typing import Final

import aiohttp
import msgspec
from yarl import URL

from omnara.domain.text import clean_text
from omnara.tools.ssrf import AllowList, GuardedResolver, HttpSessionFactory, Resolver, UrlRefused

__all__ = ["USER_AGENT", "FetchFailed", "Fetched", "fetch"]

USER_AGENT: Final = "omnara-agent/1.0"
"""Source: engine.md §7."""

_HEADERS: Final = {
    "User-Agent": USER_AGENT,
    "Accept": "text/html,application/xhtml+xml,text/plain,application/json,application/xml;q=0.9,*/*;q=0.1",
    "Accept-Encoding": "gzip, deflate",
}
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_CHUNK: Final = 64 * 1024
_XML_OR_JSON: Final = re.compile(r"(?:application|image|model)/(?:[\w.+-]+\+)?(?:xml|json)")
_HTML_TYPES: Final = frozenset({"text/html", "application/xhtml+xml"})
_META_CHARSET: Final = re.compile(
    rb"""<meta[^<>]{0,200}?charset\s{0,5}=\s{0,5}["']?\s{0,5}([\w:.-]{1,40})""", re.IGNORECASE
)
_XML_ENCODING: Final = re.compile(rb"""^\s{0,100}<\?xml[^<>]{0,100}?encoding\s{0,5}=\s{0,5}["']([\w:.-]{1,40})""")
_BOMS: Final = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
# What pages use. Python's other codecs include compressors, escapes and quadratic ones, which a page must not choose.
_CHARSETS: Final = frozenset(
    {"utf-8", "utf-16", "utf-16-le", "utf-16-be", "ascii", "mac-roman", "koi8-r", "koi8-u", "cp866", "cp874", "cp932"}
    | {f"iso8859-{part}" for part in range(1, 17)}
    | {f"cp125{part}" for part in range(9)}
    | {"gbk", "gb2312", "gb18030", "big5", "big5hkscs", "euc_jp", "shift_jis", "iso2022_jp", "euc_kr", "cp949"}
)


class FetchFailed(Exception):
    """The fetch ended without a usable page. `code` is for programs, the message for the model."""

    def __init__(self, code: str, message: str, *, status: int | None = None) -> None:
        self.code = code
        self.status = status
        super().__init__(message)


class Fetched(msgspec.Struct, frozen=True):
    """A page: where it was in the end, what it is, and its text without NUL and lone surrogates."""

    url: str
    status: int
    content_type: str
    is_html: bool
    text: str


async def fetch(
    url: str,
    *,
    allow: AllowList,
    resolver: Resolver | None,
    open_session: HttpSessionFactory,
    max_bytes: int,
    max_redirects: int,
) -> Fetched:
    """GET `url`, following at most `max_redirects`; http becomes https except at allowed private hosts.

    Each server is asked at most once per hop. Raises FetchFailed, and what dialling raises: AddressBlocked,
    ResolutionFailed, UrlRefused, aiohttp.ClientError, OSError. The caller sets the deadline; cancellation closes all.
    """
    guard = GuardedResolver(allow, resolver)
    async with open_session(guard) as session:
        target = _parse(url)
        for _ in range(max_redirects + 1):
            target = await _secured(guard, target)
            async with session.get(target, headers=_HEADERS, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await _read(response, target, max_bytes)
                target = _next_hop(target, response)
    raise FetchFailed("web_fetch_too_many_redirects", f"The page redirects more than {max_redirects} times.")


def _parse(url: str) -> URL:
    try:
        return URL(url.strip()).with_fragment(None)
    except ValueError as error:
        raise UrlRefused("the URL cannot be read") from error


async def _secured(guard: GuardedResolver, url: URL) -> URL:
    """Pin the address of `url` and return the URL to ask: https, unless the place is private and allowed."""
    exempt = await guard.admit(url)
    if url.scheme == "https" or exempt:
        return url
    secure = url.with_scheme("https") if url.explicit_port != 80 else url.with_port(None).with_scheme("https")
    # Another port may be another rule of the allow-list, and is another pin.
    await guard.admit(secure)
    return secure


def _next_hop(url: URL, response: aiohttp.ClientResponse) -> URL:
    location = response.headers.get("Location")
    if not location:
        raise FetchFailed("web_fetch_http_error", "The page redirects without saying where to.", status=response.status)
    try:
        return url.join(URL(location)).with_fragment(None)
    except ValueError as error:
        raise UrlRefused("the page redirects to a URL that cannot be read") from error


async def _read(response: aiohttp.ClientResponse, url: URL, max_bytes: int) -> Fetched:
    if not 200 <= response.status < 300:
        message = f"The server answered {response.status} {clean_text(response.reason or '')}".rstrip() + "."
        raise FetchFailed("web_fetch_http_error", message, status=response.status)
    content_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    _require_text_type(content_type)
    body = await _body(response, max_bytes)
    if not content_type:
        content_type = _sniff(body)
    text = _decode(body, response.charset, content_type)
    return Fetched(str(url), response.status, content_type, content_type in _HTML_TYPES, text)


def _require_text_type(content_type: str) -> None:
    if content_type and not content_type.startswith("text/") and _XML_OR_JSON.fullmatch(content_type) is None:
        raise FetchFailed(
            "web_fetch_unsupported_type",
            f"The page is of the type {clean_text(content_type)[:100]!r}; only HTML, text, JSON and XML can be read.",
        )


def _sniff(body: bytes) -> str:
    if b"\x00" in body[:1024]:
        raise FetchFailed("web_fetch_unsupported_type", "The page does not say its type and is not text.")
    return "text/html" if re.match(rb"\s{0,100}(?:<!doctype html|<html)", body, re.IGNORECASE) else "text/plain"


async def _body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read and decompress the body; neither the bytes received nor those they become may exceed `max_bytes`."""
    if response.content_length is not None and response.content_length > max_bytes:
        raise _too_large(max_bytes)
    inflate = _Inflater(response.headers.get("Content-Encoding", "").strip().lower(), max_bytes)
    received = 0
    async for chunk in response.content.iter_chunked(_CHUNK):
        received += len(chunk)
        if received > max_bytes:
            raise _too_large(max_bytes)
        inflate.feed(chunk)
    return inflate.finish()


def _too_large(max_bytes: int) -> FetchFailed:
    return FetchFailed("web_fetch_too_large", f"The page is larger than {max_bytes // (1024 * 1024)} MiB.")


class _Inflater:
    """Decompresses gzip and deflate with a bound on the output, or passes bytes on."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise FetchFailed("web_fetch_unsupported_type", "The page is compressed in a way that was not asked for.")
        self._encoding = encoding
        self._max = max_bytes
        self._out = bytearray()
        self._engine: zlib._Decompress | None = None
        self._first = True

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises FetchFailed when they are too many or damaged."""
        if self._encoding in ("", "identity"):
            self._out += data
            return
        try:
            while data:
                data = self._inflate(data)
        except zlib.error as error:
            raise FetchFailed("web_fetch_bad_response", "The page's compression is damaged.") from error

    def _inflate(self, data: bytes) -> bytes:
        if self._engine is None:
            self._engine = self._start(data)
        # One byte over the limit is enough to know, so a bomb costs no more than a page of that size.
        self._out += self._engine.decompress(data, self._max + 1 - len(self._out))
        if len(self._out) > self._max:
            raise _too_large(self._max)
        if not self._engine.eof:
            return b""
        rest = self._engine.unused_data
        self._engine = None
        # Several gzip members in a row are one body; what follows a deflate stream, or is padding, is nothing.
        return rest if rest[:2] == b"\x1f\x8b" else b""

    def _start(self, data: bytes) -> zlib._Decompress:
        if self._encoding != "deflate":
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        # Servers send raw deflate under this name as often as the zlib format it stands for.
        is_zlib = data[0] & 0x0F == 8 and (len(data) < 2 or (data[0] << 8 | data[1]) % 31 == 0)
        return zlib.decompressobj(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)

    def finish(self) -> bytes:
        """Return everything. Raises FetchFailed when the compressed body was cut short."""
        if self._engine is not None and not self._engine.eof:
            raise FetchFailed("web_fetch_bad_response", "The page's compressed body ended too early.")
        return bytes(self._out)


def _decode(body: bytes, declared: str | None, content_type: str) -> str:
    """Decode by byte-order mark, header, declaration inside the page, else UTF-8; wrong bytes become U+FFFD."""
    for mark, name in _BOMS:
        if body.startswith(mark):
            return clean_text(body[len(mark) :].decode(name, "replace"))
    name = _codec(declared) or _codec(_declared_inside(body, content_type)) or "utf-8"
    return clean_text(body.decode(name, "replace"))


def _declared_inside(body: bytes, content_type: str) -> str | None:
    pattern = _META_CHARSET if content_type in _HTML_TYPES else _XML_ENCODING
    found = pattern.search(body[:2048]) or _XML_ENCODING.search(body[:2048])
    return found[1].decode("ascii") if found else None


def _codec(label: str | None) -> str | None:
    if not label:
        return None
    try:
        name = codecs.lookup(label).name
    except (LookupError, ValueError):
        return None
    if name not in _CHARSETS:
        return None
    # Pages that say Latin-1 or ASCII mean the superset that Windows made of it; every browser reads them so.
    return "cp1252" if name in ("iso8859-1", "ascii") else name
