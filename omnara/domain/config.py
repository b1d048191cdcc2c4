"""The compiled agent config: what an agent is told, which model it uses, which tools it has.

A definition is the meaning of a source text with every default filled in and every name resolved; two texts with one
meaning give one hash. It is stored once and never changed, so a field added later must have a default here.
Source: api.md §9.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, Literal

import msgspec

PermissionMode = Literal["always_allow", "always_ask", "always_deny"]
CacheRetention = Literal["none", "short", "long"]


class Permission(msgspec.Struct, frozen=True):
    """Whether a call runs at once, asks a person, or is refused. `parameters` belong to the mode; none has any yet."""

    mode: PermissionMode
    parameters: dict[str, Any]


class BuiltInTool(msgspec.Struct, frozen=True, tag_field="type", tag="built_in"):
    """A tool that the server runs; its description and schema come from the registry."""

    permission: Permission


class CustomTool(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """A tool that the client runs: its call waits until a result is posted."""

    description: str
    input_schema: dict[str, Any]
    permission: Permission


ToolDefinition = BuiltInTool | CustomTool


class Reasoning(msgspec.Struct, frozen=True):
    """How much a model should think, in the provider's word."""

    effort: str


class ModelChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The configured model (public id `mdl_…`) and what this config narrows. Sizes in tokens.

    `fallback_model_ids` are further configured models, in the order in which they take over from those that fail.
    """

    configured_model_id: str
    context_window_tokens: int | None = None
    default_max_output_tokens: int | None = None
    cache_retention: CacheRetention | None = None
    reasoning: Reasoning | None = None
    fallback_model_ids: tuple[str, ...] = ()


class MachineSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="source", tag="machine"):
    """A machine that every agent gets (public id `mch_…`). In overlays null removes a name; secrets are `sec_…`."""

    machine_id: str
    ref: str = ""
    description: str = ""
    cwd: str = ""
    env_overlay: dict[str, str | None] = {}
    secret_env_overlay: dict[str, str | None] = {}


class PoolSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="source", tag="pool"):
    """A pool (`mpo_…`) from which every agent gets machines of its own. None: as the grant or the pool says."""

    pool_id: str
    initial_num_machines: int = 1
    max_machines: int = 1
    cpu: int | None = None
    memory_mb: int | None = None
    delete_after_idle_minutes: int | None = None
    provider_options: dict[str, Any] = {}
    description: str = ""
    cwd: str = ""
    env_overlay: dict[str, str | None] = {}
    secret_env_overlay: dict[str, str | None] = {}


Source = MachineSource | PoolSource


class Definition(msgspec.Struct, frozen=True, omit_defaults=True):
    """A compiled config. `tools` holds the enabled ones by name."""

    version: Literal["v1"]
    instruction: str
    model: ModelChoice
    tools: dict[str, ToolDefinition]
    temperature: float | None = None
    machine_sources: tuple[Source, ...] = ()


class Compiled(msgspec.Struct, frozen=True):
    """A definition with its canonical JSON text and hashes (hex SHA-256)."""

    definition: Definition
    text: str
    definition_hash: str
    instruction_hash: str


_DECODER: Final = msgspec.json.Decoder(Definition)
_GO_ESCAPES: Final = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def compiled(definition: Definition) -> Compiled:
    """Return the definition with the text that is stored and the hashes that identify it."""
    text = canonical_json(msgspec.to_builtins(definition))
    return Compiled(definition, text, sha256_hex(text), sha256_hex(definition.instruction))


def decode_definition(text: str | bytes) -> Definition:
    """Read a stored definition. Raises msgspec.MsgspecError when it is damaged."""
    return _DECODER.decode(text)


def canonical_json(value: Any) -> str:
    """Return key-sorted JSON without blanks, with `<`, `>` and `&` escaped and whole numbers as integers.

    Source: api.md §9 (the hash is over Go's encoding of the value).
    """
    text = json.dumps(_whole(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(_GO_ESCAPES)


def sha256_hex(text: str) -> str:
    """Return the hex SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value
