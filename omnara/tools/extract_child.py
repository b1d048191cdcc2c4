"""The child process that turns one HTML page into markdown or text. Run as a script, never imported by the server.

Its own process, because the extractor takes minutes and gigabytes for pages made to hurt it (0.9 MB of small
inline elements: 46 s and 9.7 GB) and its parser is native code: here it can be limited and killed, and a crash
costs one page instead of every agent of the server. Reads `{"html", "format", "url"}` as JSON from standard input,
writes the text to standard output; nothing when there is none.
"""

import json
import resource
import sys

MEMORY_BYTES = 512 * 1024 * 1024
CPU_SECONDS = 20
OUTPUT_CHARS = 1_000_000


def limit() -> None:
    """Bound memory and processor time of this process, for the case that the parent cannot kill it any more."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Extract one page and end. Any failure ends the process with a status that is not zero."""
    limit()
    request = json.loads(sys.stdin.buffer.read())
    import trafilatura

    markdown = request["format"] == "markdown"
    text = trafilatura.extract(
        request["html"],
        url=request["url"],
        output_format="markdown" if markdown else "txt",
        include_formatting=markdown,
        include_links=markdown,
        include_tables=True,
        include_comments=False,
        favor_recall=True,
    )
    sys.stdout.buffer.write((text or "")[:OUTPUT_CHARS].encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
