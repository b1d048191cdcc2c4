"""Files inside requests: where they stand is decided once, what stands there is decided per request.

The rendered history is kept between steps and has to stay small, and which files fit into a request changes as newer
ones come. So a renderer writes a slot, a byte that no JSON has around the file's id, where one or more content parts
will stand; when the request is made the slots are filled from `ModelCall.media`. A file that is missing there, or that
the format or the model does not take, becomes a line of text: a refused file must never end a conversation.
Source: engine.md §6 (media); field-reports B03.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

_SLOT: Final = re.compile(rb"\xff(\+?)([a-z0-9_]+)\xff")
_SLOT_BYTE: Final = b"\xff"

_encode: Final = msgspec.json.Encoder().encode


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the conversation, as one request has it.

    `data` is what is shown: base64 of an image or document, UTF-8 of a text (`is_text`), or nothing, and then `note`
    says why. A text that is `cut` says so in `note` too. `size` is that of the whole file, in bytes.
    """

    artifact_id: str
    media_type: str = ""
    filename: str = ""
    size: int = 0
    data: bytes | None = None
    note: str = ""
    cut: bool = False

    @property
    def is_image(self) -> bool:
        """Whether this is a picture."""
        return self.media_type.startswith("image/")

    @property
    def is_text(self) -> bool:
        """Whether `data` is text."""
        return self.media_type.startswith("text/")

    @property
    def label(self) -> str:
        """The line that tells a model which file this is."""
        facts = [self.filename, self.media_type, f"{self.size} bytes" if self.media_type else ""]
        named = ", ".join(fact for fact in facts if fact)
        head = f"[Attachment {self.artifact_id}{': ' if named else ''}{named}]"
        return f"{head} {self.note}" if self.note else head


class RequestLimits(msgspec.Struct, frozen=True):
    """What a format's endpoints take in one request: bytes before base64, pixels of the longer side, pictures.

    `documents`: types of files, beside pictures and texts, that can be sent as they are.
    """

    total_bytes: int = 24 * 1024 * 1024
    image_bytes: int = 10 * 1024 * 1024
    document_bytes: int = 10 * 1024 * 1024
    image_side: int = 8000
    images: int = 50
    documents: frozenset[str] = frozenset({"application/pdf"})


_PDF: Final = "application/pdf"
_OFFICE: Final = "application/vnd.openxmlformats-officedocument."
_COMMON: Final = RequestLimits()
_LIMITS: Final = {
    # 32 MB of request, 5 MB of base64 for a picture; above 20 pictures a longer side of 2000 px would be the limit.
    "anthropic_messages": RequestLimits(total_bytes=20 * 1024 * 1024, image_bytes=3932160, images=20),
    "openai_responses": RequestLimits(
        documents=frozenset({
            _PDF,
            _OFFICE + "wordprocessingml.document",
            _OFFICE + "presentationml.presentation",
            _OFFICE + "spreadsheetml.sheet",
        })
    ),
}  # fmt: skip


def limits_of(api_format: str) -> RequestLimits:
    """The limits of a wire format. Source: the providers' documentation; engine.md §6 (24 MiB per request)."""
    return _LIMITS.get(api_format, _COMMON)


def slot(artifact_id: str) -> bytes:
    """The place of a file among content parts."""
    return _SLOT_BYTE + artifact_id.encode() + _SLOT_BYTE


def mark_last(part: bytes, mark: bytes) -> bytes:
    """Add a member, with its comma, to a content part; for a slot the last of its parts will carry it."""
    if part.startswith(_SLOT_BYTE):
        return _SLOT_BYTE + b"+" + part[1:]
    return part[:-1] + mark + b"}"


def fill(
    body: bytes, files: Mapping[str, ModelFile], parts: Callable[[ModelFile], list[bytes]], mark: bytes = b""
) -> bytes:
    """Put content parts, from `parts`, into the slots of a body. `mark` goes to the last part of a marked slot."""
    if _SLOT_BYTE not in body:
        return body

    def filled(match: re.Match[bytes]) -> bytes:
        artifact_id = match.group(2).decode()
        found = parts(files.get(artifact_id) or ModelFile(artifact_id=artifact_id, note="Its content is not shown."))
        if match.group(1) and mark:
            found[-1] = mark_last(found[-1], mark)
        return b",".join(found)

    return _SLOT.sub(filled, body)


def object_with(value: dict[str, Any], key: str, prefix: bytes, data: bytes) -> bytes:
    """Encode `value` with one more text member whose content, `prefix` and base64 `data`, needs no escaping."""
    return _encode(value)[:-1] + b',"' + key.encode() + b'":"' + prefix + data + b'"}'
