"""HTML of strangers: good text from good pages, some text from any page, and no harm from the worst."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from omnara.tools import extract
from omnara.tools.extract import Extracted, ExtractLimits, Extractor
from omnara.tools.plain_html import page_title, plain_text

ARTICLE = (
    "<html><head><title>Rivers &amp; seas</title><style>p{}</style></head><body><nav><a href='/home'>Home</a></nav>"
    "<article><h1>Rivers</h1>"
    + "".join(
        f"<p>River number {i} runs <b>slowly</b> to the <a href='/sea{i}'>sea</a> and takes its time.</p>"
        for i in range(4)
    )
    + "<ul><li>one</li><li>two</li></ul></article><script>alert('no')</script></body></html>"
)


async def test_markdown_keeps_structure_and_links() -> None:
    found = await Extractor().extract(ARTICLE, "markdown", "https://pages.example/rivers")
    assert found.plain is False
    assert found.title == "Rivers & seas"
    assert "# Rivers" in found.text
    assert "**slowly**" in found.text
    assert "](https://pages.example/sea3)" in found.text or "](/sea3)" in found.text
    assert "alert" not in found.text


async def test_text_has_neither() -> None:
    found = await Extractor().extract(ARTICLE, "text", "https://pages.example/rivers")
    assert "River number 3 runs slowly to the sea and takes its time." in found.text
    assert "**" not in found.text
    assert "](" not in found.text


async def test_a_child_that_takes_too_long_is_killed_and_the_plain_text_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "pid"
    child = tmp_path / "child.py"
    child.write_text(f"import os, signal\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n")
    monkeypatch.setattr(extract, "_CHILD", str(child))
    for _ in range(3):
        found = await Extractor(limits=ExtractLimits(wall_s=2.0)).extract(ARTICLE, "text", "https://x.example/")
        assert found.plain is True
        assert "River number 3 runs slowly to the sea" in found.text
        if mark.exists():  # or it was killed before it began, on a computer that stood still
            break
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "import os; os.abort()", "pass", "import os; os._exit(0)"])
async def test_a_child_that_fails_or_says_nothing_is_replaced_by_the_plain_text(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text(code)
    monkeypatch.setattr(extract, "_CHILD", str(child))
    found = await Extractor().extract("<p>hello</p>" * 50_000, "text", "https://x.example/")
    assert found.plain is True
    assert found.text.startswith("hello\nhello")


async def test_the_child_gets_no_environment_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child.py"
    child.write_text("import os, sys; sys.stdin.read(); print(sorted(os.environ))")
    monkeypatch.setattr(extract, "_CHILD", str(child))
    monkeypatch.setenv("OMNARA_SECRET_ENCRYPTION_KEYS", "k1:secret")
    found = await Extractor().extract(ARTICLE, "text", "https://x.example/")
    assert "LC_ALL" in found.text
    assert "OMNARA" not in found.text


async def test_cancelling_kills_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    child = tmp_path / "child.py"
    child.write_text(f"import os, signal\nopen({str(fifo)!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n")
    monkeypatch.setattr(extract, "_CHILD", str(child))
    task = asyncio.create_task(Extractor().extract(ARTICLE, "text", "https://x.example/"))
    pid = int(await asyncio.to_thread(fifo.read_text))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_at_most_two_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0
    real = Extractor._in_child

    async def counted(self: Extractor, *args: str) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await real(self, *args)
        finally:
            running -= 1

    child = tmp_path / "child.py"
    child.write_text("print('text')")
    monkeypatch.setattr(extract, "_CHILD", str(child))
    monkeypatch.setattr(Extractor, "_in_child", counted)
    extractor = Extractor()
    results = await asyncio.gather(*(extractor.extract("<p>x", "text", "https://x.example/") for _ in range(5)))
    assert results == [Extracted("text", None, plain=False)] * 5
    assert most == 2


async def test_who_finds_no_free_slot_in_time_gets_the_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    child = tmp_path / "child.py"
    child.write_text(f"import signal\nopen({str(fifo)!r}, 'w').write('x')\nsignal.pause()\n")
    monkeypatch.setattr(extract, "_CHILD", str(child))
    extractor = Extractor(concurrency=1, limits=ExtractLimits(slot_s=0.05))
    first = asyncio.create_task(extractor.extract("<p>first", "text", "https://x.example/"))
    await asyncio.to_thread(fifo.read_text)
    assert await extractor.extract("<p>second", "text", "https://x.example/") == Extracted("second", None, plain=True)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    child.write_text("print('third')")
    assert (await extractor.extract("<p>x", "text", "https://x.example/")).text == "third"


def test_plain_text_has_a_line_per_block_and_hides_what_is_not_shown() -> None:
    page = (
        "<!doctype html><html><head><title>T</title><style>b{}</style></head><body><!-- no --><h1>A&nbsp;&amp; B</h1>"
        "<p>one <b>two</b>\n three<br>four</p><SCRIPT>if (a<b) x()</SCRIPT><p>5 < 6</p><noscript>n</noscript></body>"
    )
    assert plain_text(page) == "A & B\none two three\nfour\n5 < 6"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("", ""),
        ("just text", "just text"),
        ("a<b", "a"),
        ("a <!-- open", "a"),
        ("<script>never closed <p>x", "never closed\nx"),
        ("<p>x</p", "x"),
        ("&#x41;&#65;&#0;&#xD800;&#99999999999999;&bogus;", "AA\ufffd\ufffd&#99999999999999;&bogus;"),
        ("<İ>x", "<İ>x"),
        ("İ<SCRIPT>no</SCRIPT>x", "İx"),
    ],
)
def test_plain_text_of_odd_pages(page: str, text: str) -> None:
    assert plain_text(page) == text


def test_titles() -> None:
    assert page_title("<TITLE lang=en> a\n &lt;b&gt; </TITLE>") == "a <b>"
    assert page_title("<title></title>") is None
    assert page_title("x" * 200_000 + "<title>late</title>") is None
    assert page_title("<title>&#" + "9" * 400) == "&#" + "9" * 400


@pytest.mark.parametrize(
    "unit",
    [
        "<",
        "<a ",
        "<!--",
        "&",
        "&#x",
        "<a b='",
        "<!",
        "<?",
        "</",
        "<script>",
        "<script></script",
        "<svg>",
        "<title>",
        "<p>",
    ],
)
def test_plain_text_is_linear(unit: str) -> None:
    page = unit * (1_000_000 // len(unit))
    start = time.thread_time()
    plain_text(page)
    page_title(page)
    # About a tenth of this on an idle core; anything quadratic takes minutes.
    assert time.thread_time() - start < 10
