"""`web_fetch`: the agent reads a page. The one built-in tool with an effect outside the server.

A GET may count something at the other side, so it is made once and never repeated; what goes wrong comes back to
the model as a failed result. Source: engine.md §7.
"""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp

from omnara.descriptors import exhausted
from omnara.domain.content import StructuredDataBlock, TextBlock
from omnara.domain.text import clean_text, is_blank
from omnara.log import get_logger
from omnara.tools.extract import TextFormat
from omnara.tools.fetch import Fetched, FetchFailed, fetch
from omnara.tools.protocol import Effect, Tool, ToolCallRequest, ToolContext, ToolResult, failed, succeeded
from omnara.tools.ssrf import AddressBlocked, ResolutionFailed, UrlRefused

__all__ = ["TOOL", "execute"]

log = get_logger(__name__)

_DEFAULT_TIMEOUT_S: Final = 30
_MAX_URL_CHARS: Final = 8192

TOOL: Final = Tool(
    name="web_fetch",
    description=(
        "Fetch a public web page by its URL and return its readable content. Reads HTML, plain text, JSON and XML up "
        "to 5 MiB; follows up to 5 redirects. Private network addresses cannot be reached."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "url": {
                "type": "string",
                "minLength": 1,
                "maxLength": _MAX_URL_CHARS,
                "description": "Absolute http or https URL. http is upgraded to https.",
            },
            "format": {
                "type": "string",
                "enum": ["markdown", "text"],
                "default": "markdown",
                "description": "How HTML is returned: with structure and links, or as plain text.",
            },
            "timeout": {
                "type": "integer",
                "minimum": 1,
                "maximum": 120,
                "default": _DEFAULT_TIMEOUT_S,
                "description": "Seconds to wait for the page.",
            },
        },
        "required": ["url"],
        "additionalProperties": False,
    },
    type="built_in",
    effect=Effect.OUTSIDE,
    shown_chars=30_000,
)


async def execute(call: ToolCallRequest, ctx: ToolContext) -> ToolResult:
    """Fetch the page of a valid input. Returns a failed result for whatever the network or the page does.

    Cancellation is passed on, with every connection closed and the extraction's process gone.
    """
    timeout_s = float(call.input.get("timeout", _DEFAULT_TIMEOUT_S))
    try:
        async with asyncio.timeout(timeout_s):
            page = await fetch(
                call.input["url"],
                allow=ctx.allow,
                resolver=ctx.resolver,
                open_session=ctx.open_session,
                max_bytes=ctx.limits.fetch_bytes,
                max_redirects=ctx.limits.fetch_redirects,
            )
    except TimeoutError:
        return failed(f"The page did not arrive within {timeout_s:g} s.", "web_fetch_timeout")
    except (FetchFailed, UrlRefused, OSError, aiohttp.ClientError, aiohttp.http.HttpProcessingError) as error:
        return _failure(error)
    return await _result(page, call.input.get("format", "markdown"), ctx)


def _failure(error: Exception) -> ToolResult:
    if exhausted(error):
        log.error("a page could not be fetched for want of file descriptors")
        # Said of this server, or the model takes it for a fact about the other one.
        return failed("This server could not open a connection just now; try again later.", "tool_fault")
    match error:
        case FetchFailed(status=None):
            return failed(str(error), error.code)
        case FetchFailed():
            return failed(str(error), error.code, status=error.status)
        case UrlRefused() | aiohttp.InvalidURL():
            return failed(f"The URL cannot be fetched: {_reason(error)}.", "web_fetch_invalid_url")
        case AddressBlocked():
            return failed(f"The address may not be reached: {_reason(error)}.", "web_fetch_address_blocked")
        case ResolutionFailed():
            return failed(f"The host was not found: {_reason(error)}.", "web_fetch_dns_failed")
        case aiohttp.ClientConnectorDNSError(os_error=AddressBlocked() as cause):
            return failed(f"The address may not be reached: {_reason(cause)}.", "web_fetch_address_blocked")
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return failed("No secure connection could be made: the certificate was refused.", "web_fetch_tls_failed")
        case aiohttp.ClientConnectorError():
            return failed("The server could not be reached.", "web_fetch_connection_failed")
        case _:
            return failed("The connection broke or the answer was not HTTP.", "web_fetch_bad_response")


def _reason(error: Exception) -> str:
    return clean_text(str(error))[:300]


async def _result(page: Fetched, text_format: TextFormat, ctx: ToolContext) -> ToolResult:
    text, title = page.text, None
    if page.is_html:
        extracted = await ctx.extractor.extract(page.text, text_format, page.url)
        # The extractor resolves character references, which can name what the page's own bytes could not.
        text, title = clean_text(extracted.text), extracted.title
    facts = {"url": page.url, "status": page.status, "content_type": page.content_type, "characters": len(text)}
    if title is not None:
        facts["title"] = clean_text(title)
    if len(text) > ctx.limits.stored_chars:
        facts["truncated_to"] = ctx.limits.stored_chars
        text = text[: ctx.limits.stored_chars]
    if is_blank(text):
        return succeeded(TextBlock("(the page has no readable text)"), StructuredDataBlock(facts))
    return succeeded(TextBlock(text), StructuredDataBlock(facts))
