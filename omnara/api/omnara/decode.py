"""From the contract's request objects to what the use cases take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omnara import ids
from omnara.access.roles import ProjectScope
from omnara.api.body import check_depth
from omnara.api.omnara.types.agents import ExternalActorParams
from omnara.api.omnara.types.blocks import (
    CreateAgentInputContentBlock,
    InlineMediaContentBlock,
    StructuredDataContentBlock,
    SubmitToolResultContentBlock,
    TextContentBlock,
)
from omnara.api.omnara.types.tools import InteractionAnswer
from omnara.api.routing import Call
from omnara.domain.content import InlineMedia, NewInputBlock, NewResultBlock, StructuredDataBlock, TextBlock
from omnara.engine.actors import ExternalActor
from omnara.engine.scope import AgentPath
from omnara.errors import ValidationFailed
from omnara.ids import IdKind
from omnara.tools.interactions import Answer

T = TypeVar("T")

PROJECT = {"orgID": IdKind.ORG, "projectID": IdKind.PROJECT}
AGENT = {**PROJECT, "agentID": IdKind.AGENT}
"""Ids in the paths of project and agent routes."""
PROJECT_PATH = "/api/v1/orgs/{orgID}/projects/{projectID}"
AGENT_PATH = PROJECT_PATH + "/agents/{agentID}"


class PageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`limit` and `cursor`. Source: api.md §7."""

    limit: Annotated[int, Meta(ge=1, le=100, extra_json_schema={"format": "int32"})] = 50
    cursor: Annotated[str, Meta(max_length=1024)] | UnsetType = UNSET


def project_scope(call: Call) -> ProjectScope:
    """The project in the request's path."""
    return ProjectScope(call.ids["orgID"], call.ids["projectID"])


def agent_path(call: Call) -> AgentPath:
    """The agent in the request's path."""
    return AgentPath(call.ids["agentID"], call.ids["orgID"], call.ids["projectID"])


def given(value: T | UnsetType) -> T | None:
    """None instead of absent."""
    return None if isinstance(value, UnsetType) else value


def id_in_body(kind: IdKind, text: str) -> UUID:
    """The id that a body names. Raises ValidationFailed. Source: api.md §1."""
    try:
        return ids.decode(kind, text)
    except ids.InvalidPublicId:
        raise ValidationFailed(f"an id that starts with {kind.value}_ is malformed") from None


def actor(params: ExternalActorParams | UnsetType) -> ExternalActor | None:
    """The external actor that a request names."""
    if isinstance(params, UnsetType):
        return None
    return ExternalActor(
        provider_user_id=params.provider_user_id,
        provider_tenant_id=given(params.provider_tenant_id) or "",
        display_name=given(params.display_name),
        metadata=given(params.metadata),
    )


def input_blocks(blocks: Sequence[CreateAgentInputContentBlock]) -> list[NewInputBlock]:
    """The blocks of a message."""
    return [_said(block) for block in blocks]


def result_blocks(blocks: Sequence[SubmitToolResultContentBlock]) -> list[NewResultBlock]:
    """The blocks of a tool result. Raises ValidationFailed for values that nest too deep."""
    found: list[NewResultBlock] = []
    for block in blocks:
        if isinstance(block, StructuredDataContentBlock):
            check_depth(block.value)
            found.append(StructuredDataBlock(block.value, given(block.metadata)))
        else:
            found.append(_said(block))
    return found


def _said(block: TextContentBlock | InlineMediaContentBlock) -> TextBlock | InlineMedia:
    if isinstance(block, InlineMediaContentBlock):
        return InlineMedia(block.media_type, block.data, given(block.filename), given(block.metadata))
    return TextBlock(block.text, given(block.metadata))


def answers(given_answers: Sequence[InteractionAnswer]) -> list[Answer]:
    """The answers to a form. Raises ValidationFailed when an index is named twice."""
    found: list[Answer] = []
    for answer in given_answers:
        if len(set(answer.option_indices)) != len(answer.option_indices):
            raise ValidationFailed("option_indices must be unique")
        found.append(Answer(tuple(answer.option_indices), given(answer.text)))
    return found
