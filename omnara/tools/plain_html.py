"""Visible text of an HTML page by one pass over it: what stands in when the real extractor gives nothing.

Written for hostile input rather than for beauty: every search either moves forward or is remembered to have found
nothing, so the time is linear in the size of the page. (The standard library's parser is quadratic for a page of
unclosed tags.)
"""

from __future__ import annotations

import html
import re
from typing import Final

__all__ = ["page_title", "plain_text", "unescape"]

_TITLE: Final = re.compile(r"<title(?:\s[^<>]{0,200})?>([^<]{0,500})", re.IGNORECASE)
_NAME: Final = re.compile(r"/?[a-z][a-z0-9]{0,15}")
# Bounded, because the standard library converts numbers of any length and fails on absurd ones.
_ENTITY: Final = re.compile(r"&(?:#\d{1,7}(?!\d)|#[xX][0-9a-fA-F]{1,6}(?![0-9a-fA-F])|[A-Za-z][A-Za-z0-9]{1,31});?")
_HIDDEN: Final = frozenset({"script", "style", "noscript", "template", "title", "svg", "iframe", "object"})
_BREAKING: Final = frozenset(
    {"address", "article", "aside", "blockquote", "body", "br", "dd", "div", "dl", "dt", "fieldset", "figure"}
    | {"footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "head", "header", "hr", "li", "main", "nav", "ol"}
    | {"option", "p", "pre", "section", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul"}
)


def unescape(text: str) -> str:
    """Replace character references. Never raises, whatever number one names."""
    return _ENTITY.sub(lambda found: html.unescape(found[0]), text)


def page_title(page: str) -> str | None:
    """Return the text of the first title element near the start, blanks merged, or None."""
    found = _TITLE.search(page[:100_000])
    title = " ".join(unescape(found[1]).split()) if found else ""
    return title or None


def plain_text(page: str) -> str:
    """Return the visible text, a line per block, blanks merged. Linear in the size of the page."""
    text = unescape("".join(_visible(page)))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def _visible(page: str) -> list[str]:
    parts: list[str] = []
    scan = _Scan(page)
    position = 0
    while (start := page.find("<", position)) >= 0:
        # Only markup breaks lines: a line end in the source is a blank.
        parts.append(page[position:start].replace("\n", " "))
        position = scan.after_markup(start, parts)
    parts.append(page[position:].replace("\n", " "))
    return parts


class _Scan:
    """Where markup ends, remembering which endings do not occur any more."""

    def __init__(self, page: str) -> None:
        # Lower-casing must keep positions, which str.lower() does not for every character.
        self._lower = page.translate(_ASCII_LOWER)
        self._absent: set[str] = set()

    def after_markup(self, start: int, parts: list[str]) -> int:
        """Return the position after the markup at `start`; append a line break, or the sign itself if it is text."""
        if self._lower.startswith("<!--", start):
            end = self._find("-->", start + 4)
            return len(self._lower) if end < 0 else end + 3
        found = _NAME.match(self._lower, start + 1)
        if found is None and self._lower[start + 1 : start + 2] not in ("!", "?"):
            parts.append("<")
            return start + 1
        end = self._find(">", start)
        if end < 0:
            return len(self._lower)
        name = found[0].lstrip("/") if found else ""
        if name in _BREAKING:
            parts.append("\n")
        if found and found[0] in _HIDDEN:
            return self._after_hidden(name, end + 1)
        return end + 1

    def _after_hidden(self, name: str, position: int) -> int:
        close = self._find(f"</{name}", position)
        # Not closed: only the tag is left out, rather than the rest of the page.
        return position if close < 0 else close

    def _find(self, text: str, position: int) -> int:
        if text in self._absent:
            return -1
        found = self._lower.find(text, position)
        if found < 0:
            self._absent.add(text)
        return found


_ASCII_LOWER: Final = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
