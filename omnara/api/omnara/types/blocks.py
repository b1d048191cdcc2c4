"""Content blocks as clients send and receive them; what is stored has the same shape (`omnara.domain.content`)."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.scalars import (
    ArtifactID,
    JSONObject,
    MediaType,
    Metadata,
    ToolCallID,
    ToolCallType,
    Wire,
)


class TextContentBlock(Wire, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """Plain text."""

    text: str
    metadata: Metadata | UnsetType = UNSET


class InlineMediaContentBlock(Wire, frozen=True, kw_only=True, tag="media", tag_field="type"):
    """A file inside the request; stored ones come back as references."""

    media_type: MediaType
    filename: Annotated[str, Meta(max_length=255)] | UnsetType = UNSET
    data: Annotated[str, Meta(min_length=1, extra_json_schema={"format": "byte"})]
    metadata: Metadata | UnsetType = UNSET


class MediaRefContentBlock(Wire, frozen=True, kw_only=True, tag="media_ref", tag_field="type"):
    """A stored file."""

    artifact_id: ArtifactID
    metadata: Metadata | UnsetType = UNSET


class StructuredDataContentBlock(Wire, frozen=True, kw_only=True, tag="structured_data", tag_field="type"):
    """Any JSON value."""

    value: Any
    metadata: Metadata | UnsetType = UNSET


class ReasoningContentBlock(Wire, frozen=True, kw_only=True, tag="reasoning", tag_field="type"):
    """Readable reasoning of the model."""

    text: str
    metadata: Metadata | UnsetType = UNSET


class ModelToolCallContentBlock(Wire, frozen=True, kw_only=True, tag="tool_call", tag_field="type"):
    """A tool call that the model asked for."""

    tool_call_id: ToolCallID
    tool_type: ToolCallType
    name: str
    input: JSONObject
    metadata: Metadata | UnsetType = UNSET


class ErrorContentBlock(Wire, frozen=True, kw_only=True, tag="error", tag_field="type"):
    """Why a model call ended for good."""

    text: str
    metadata: Metadata | UnsetType = UNSET


CreateAgentInputContentBlock = TextContentBlock | InlineMediaContentBlock
AgentInputContentBlock = TextContentBlock | MediaRefContentBlock
SubmitToolResultContentBlock = TextContentBlock | InlineMediaContentBlock | StructuredDataContentBlock
ToolResultContentBlock = TextContentBlock | MediaRefContentBlock | StructuredDataContentBlock
ModelOutputContentBlock = (
    TextContentBlock | MediaRefContentBlock | ReasoningContentBlock | ModelToolCallContentBlock | ErrorContentBlock
)
