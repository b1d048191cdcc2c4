"""Ids, counts and enumerations that many schemas share, each with the limits that the contract states."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_SEQUENCE = 9007199254740991
"""The largest integer that every JSON reader keeps exactly. Source: contract, AgentSequence."""


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every object of the contract: unknown fields are refused, in requests as in our own answers."""


OrganizationID = Annotated[str, Meta(pattern="^org_[a-z2-7]{26}$")]
ProjectID = Annotated[str, Meta(pattern="^proj_[a-z2-7]{26}$")]
UserID = Annotated[str, Meta(pattern="^usr_[a-z2-7]{26}$")]
ActorID = Annotated[str, Meta(pattern="^actr_[a-z2-7]{26}$")]
AgentID = Annotated[str, Meta(pattern="^agt_[a-z2-7]{26}$")]
AgentConfigID = Annotated[str, Meta(pattern="^acfg_[a-z2-7]{26}$")]
AgentProfileID = Annotated[str, Meta(pattern="^aprf_[a-z2-7]{26}$")]
AgentInputID = Annotated[str, Meta(pattern="^ain_[a-z2-7]{26}$")]
AgentEventID = Annotated[str, Meta(pattern="^evt_[a-z2-7]{26}$")]
AgentTurnID = Annotated[str, Meta(pattern="^trn_[a-z2-7]{26}$")]
AgentInteractionID = Annotated[str, Meta(pattern="^int_[a-z2-7]{26}$")]
AgentMachineBindingID = Annotated[str, Meta(pattern="^amb_[a-z2-7]{26}$")]
ToolCallID = Annotated[str, Meta(pattern="^tcl_[a-z2-7]{26}$")]
ModelCallContextID = Annotated[str, Meta(pattern="^mcc_[a-z2-7]{26}$")]
ContextCheckpointID = Annotated[str, Meta(pattern="^ccp_[a-z2-7]{26}$")]
ArtifactID = Annotated[str, Meta(pattern="^art_[a-z2-7]{26}$")]
MachineID = Annotated[str, Meta(pattern="^mch_[a-z2-7]{26}$")]
MachineDaemonTokenID = Annotated[str, Meta(pattern="^mdt_[a-z2-7]{26}$")]
MachinePoolID = Annotated[str, Meta(pattern="^mpo_[a-z2-7]{26}$")]
ProjectMachineGrantID = Annotated[str, Meta(pattern="^pmg_[a-z2-7]{26}$")]
ProjectMachinePoolGrantID = Annotated[str, Meta(pattern="^pmpg_[a-z2-7]{26}$")]
SecretID = Annotated[str, Meta(pattern="^sec_[a-z2-7]{26}$")]
OrgAPIKeyID = Annotated[str, Meta(pattern="^oak_[a-z2-7]{26}$")]
PersonalAccessTokenID = Annotated[str, Meta(pattern="^pat_[a-z2-7]{26}$")]
SecretGrantID = Annotated[str, Meta(pattern="^sgr_[a-z2-7]{26}$")]
MCPOAuthFlowID = Annotated[str, Meta(pattern="^moaf_[a-z2-7]{26}$")]
ModelProviderConfigID = Annotated[str, Meta(pattern="^mpc_[a-z2-7]{26}$")]
ProjectModelGrantID = Annotated[str, Meta(pattern="^pmog_[a-z2-7]{26}$")]
ConfiguredModelID = Annotated[str, Meta(pattern="^mdl_[a-z2-7]{26}$")]
ConfiguredModelRevisionID = Annotated[str, Meta(pattern="^mrev_[a-z2-7]{26}$")]

AgentSequence = Annotated[int, Meta(ge=1, le=MAX_SEQUENCE)]
AgentSequenceCursor = Annotated[int, Meta(ge=0, le=MAX_SEQUENCE)]
AgentCount = Annotated[int, Meta(ge=1, le=MAX_SEQUENCE)]
Int32 = Annotated[int, Meta(extra_json_schema={"format": "int32"})]
Natural = Annotated[int, Meta(ge=0)]
Timestamp = Annotated[datetime, Meta(tz=True)]
NonEmpty = Annotated[str, Meta(min_length=1)]
Metadata = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
JSONObject = dict[str, Any]

SourceFormat = Literal["yaml", "json"]
ToolCallState = Literal["awaiting_authorization", "awaiting_permission", "ready", "running", "waiting", "completed"]
ToolCallType = Literal["built_in", "custom", "mcp"]
ToolCallOutcome = Literal["succeeded", "failed", "denied", "canceled"]
AgentInputKind = Literal["content", "control", "interaction_response", "config_change"]
AgentInputDeliveryMode = Literal["queued", "steering", "immediate"]
CreateAgentInputDeliveryMode = Literal["queued", "steering"]
AgentInteractionState = Literal["open", "resolved", "canceled"]
AgentInteractionKind = Literal["permission", "question"]
AgentControlType = Literal["cancel_current"]
ModelOutputStopReason = Literal["end_turn", "tool_use", "max_tokens", "refusal", "content_filter", "error"]
ModelStopReason = Literal[
    "end_turn", "tool_use", "max_tokens", "refusal", "content_filter", "pause", "context_window", "unknown"
]
ModelAPIFormat = Literal["openai-responses", "openai-chat-completions", "anthropic-messages"]
ModelCacheRetention = Literal["none", "short", "long"]
CreatedResourceListSort = Literal["name", "-name", "-created_at", "created_at"]
ResourceListSort = Literal["name", "-name", "-updated_at", "updated_at", "-created_at", "created_at"]
MediaType = Literal[
    "image/png",
    "image/jpeg",
    "image/gif",
    "image/webp",
    "application/pdf",
    "text/plain",
    "text/markdown",
    "text/csv",
    "text/tab-separated-values",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
]
