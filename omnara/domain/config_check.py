"""Checking an agent config's document: every fault at once, each with its path, in an order that never changes.

The result is a draft: names of providers and models are still names, since only the database can resolve them.
Source: api.md §9 (names, custom tools, sorted path-message pairs); engine.md §7 (tool names).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_args

import msgspec

from omnara.domain.config import (
    BuiltInTool,
    CacheRetention,
    CustomTool,
    Permission,
    PermissionMode,
    Reasoning,
    ToolDefinition,
)
from omnara.domain.config_machines import DraftPool, DraftSource, read_sources
from omnara.domain.config_source import join_path
from omnara.domain.config_values import Problem, Values, describe

__all__ = ["BuiltIn", "Draft", "DraftFallback", "DraftModel", "Offer", "Problem", "check_document", "describe"]

TOOL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
MAX_TOOLS: Final = 128
MAX_FALLBACKS: Final = 5
MAX_INSTRUCTION_CHARS: Final = 256 * 1024
MAX_DESCRIPTION_CHARS: Final = 16 * 1024
MAX_NAME_CHARS: Final = 256

_LATER: Final = (
    "event_webhook",
    "integrations",
    "max_depth",
    "max_subagents",
    "mcp",
    "memory_stores",
    "skills",
    "subagents",
)
"""Parts of the format that this release reads past when empty and refuses when used."""

_TOP: Final = frozenset({"version", "instruction", "model", "tools", "temperature", "machine_sources", *_LATER})
_MODEL: Final = frozenset(
    {
        "provider_config",
        "name",
        "context_window_tokens",
        "default_max_output_tokens",
        "cache_retention",
        "reasoning",
        "fallback_models",
    }
)
_FALLBACK: Final = frozenset({"provider_config", "name"})
_TOOL: Final = frozenset({"type", "enabled", "permission", "description", "input_schema"})
_MODES: Final = frozenset(get_args(PermissionMode))
_RETENTIONS: Final = frozenset(get_args(CacheRetention))


class BuiltIn(msgspec.Struct, frozen=True):
    """What a config may say about a built-in tool."""

    modes: frozenset[str]
    default_mode: str = "always_allow"


class Offer(msgspec.Struct, frozen=True):
    """The tools of this server, and a check of input schemas that returns (JSON pointer, message) pairs.

    `machine_tools` come with any machine, `pool_tools` also with a pool, unless the document speaks of them.
    """

    built_in: Mapping[str, BuiltIn]
    schema_problems: Callable[[dict[str, Any]], Iterable[tuple[str, str]]]
    machine_tools: tuple[str, ...] = ()
    pool_tools: tuple[str, ...] = ()


class DraftFallback(msgspec.Struct, frozen=True):
    """A further model, as the source names it."""

    provider_config: str
    name: str


class DraftModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model as the source names it, with what it narrows."""

    provider_config: str
    name: str
    context_window_tokens: int | None = None
    default_max_output_tokens: int | None = None
    cache_retention: CacheRetention | None = None
    reasoning: Reasoning | None = None
    fallback_models: tuple[DraftFallback, ...] = ()


class Draft(msgspec.Struct, frozen=True):
    """A checked document whose model and machines are not resolved yet."""

    instruction: str
    model: DraftModel
    tools: dict[str, ToolDefinition]
    temperature: float | None
    machine_sources: tuple[DraftSource, ...] = ()


def check_document(document: Mapping[str, Any], offer: Offer) -> Draft | list[Problem]:
    """Return the draft of a document, or everything that is wrong with it."""
    check = _Check(offer)
    draft = check.document(document)
    return check.problems if check.problems or draft is None else draft


class _Check(Values):
    """Collects faults while building the parts; a part with a fault is None and never used."""

    def __init__(self, offer: Offer) -> None:
        super().__init__()
        self._offer = offer

    def document(self, document: Mapping[str, Any]) -> Draft | None:
        self.known_keys(document, _TOP, "")
        for key in _LATER:
            if document.get(key) not in (None, [], {}):
                self.fault(key, "is not supported yet")
        if document.get("version", "v1") != "v1":
            self.fault("version", "must be v1")
        instruction = self.text(document, "instruction", "", MAX_INSTRUCTION_CHARS)
        model = self._model(document.get("model"))
        sources = read_sources(self, document.get("machine_sources"))
        tools = self._tools(document.get("tools")) | self._default_tools(sources, document.get("tools"))
        temperature = self.number(document, "temperature", 0, 2)
        if instruction is None or model is None:
            return None
        return Draft(instruction.strip(), model, tools, temperature, sources)

    # --- parts --------------------------------------------------------------------------------------------

    def _model(self, value: Any) -> DraftModel | None:
        if not isinstance(value, dict):
            self.fault("model", "is required" if value is None else "must be a mapping")
            return None
        self.known_keys(value, _MODEL, "model")
        provider = self.text(value, "provider_config", "model", MAX_NAME_CHARS)
        name = self.text(value, "name", "model", MAX_NAME_CHARS)
        window = self.positive(value, "context_window_tokens", "model")
        output = self.positive(value, "default_max_output_tokens", "model")
        retention = value.get("cache_retention")
        if retention is not None and not (isinstance(retention, str) and retention in _RETENTIONS):
            self.fault("model.cache_retention", "must be none, short or long")
        reasoning = self._reasoning(value.get("reasoning"))
        fallbacks = self._fallbacks(value.get("fallback_models"))
        if provider is None or name is None:
            return None
        return DraftModel(
            provider_config=provider,
            name=name,
            context_window_tokens=window,
            default_max_output_tokens=output,
            cache_retention=retention,
            reasoning=reasoning,
            fallback_models=fallbacks,
        )

    def _fallbacks(self, value: Any) -> tuple[DraftFallback, ...]:
        path = "model.fallback_models"
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > MAX_FALLBACKS:
            self.fault(path, f"must be a list of at most {MAX_FALLBACKS}")
            return ()
        found = []
        for number, entry in enumerate(value):
            where = f"{path}.{number}"
            if not isinstance(entry, dict):
                self.fault(where, "must be a mapping")
                continue
            self.known_keys(entry, _FALLBACK, where)
            provider = self.text(entry, "provider_config", where, MAX_NAME_CHARS)
            name = self.text(entry, "name", where, MAX_NAME_CHARS)
            if provider is not None and name is not None:
                found.append(DraftFallback(provider, name))
        return tuple(found)

    def _reasoning(self, value: Any) -> Reasoning | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fault("model.reasoning", "must be a mapping")
            return None
        self.known_keys(value, frozenset({"effort"}), "model.reasoning")
        effort = self.text(value, "effort", "model.reasoning", 64)
        return None if effort is None else Reasoning(effort)

    def _tools(self, value: Any) -> dict[str, ToolDefinition]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fault("tools", "must be a mapping from tool names")
            return {}
        if len(value) > MAX_TOOLS:
            self.fault("tools", f"must not be more than {MAX_TOOLS}")
        tools: dict[str, ToolDefinition] = {}
        for name, entry in value.items():
            tool = self._tool(name, entry)
            if tool is not None:
                tools[name] = tool
        return tools

    def _default_tools(self, sources: tuple[DraftSource, ...], named: Any) -> dict[str, ToolDefinition]:
        """Tools that come with machines and that the document does not name. Source: features.md (default tools)."""
        names = self._offer.machine_tools if sources else ()
        if any(isinstance(source, DraftPool) for source in sources):
            names += self._offer.pool_tools
        missing = [name for name in names if not isinstance(named, dict) or name not in named]
        tools = {name: self._built_in(name, {}, join_path("tools", name)) for name in missing}
        return {name: tool for name, tool in tools.items() if tool is not None}

    def _tool(self, name: str, entry: Any) -> ToolDefinition | None:
        path = join_path("tools", name)
        if TOOL_NAME.fullmatch(name) is None:
            self.fault(path, "must be a letter or underscore, then up to 63 letters, digits or underscores")
        if name.startswith("mcp__"):
            self.fault(path, "must not start with mcp__")
        entry = {} if entry is None else entry
        if not isinstance(entry, dict):
            self.fault(path, "must be a mapping")
            return None
        self.known_keys(entry, _TOOL, path)
        if not isinstance(entry.get("enabled", True), bool):
            self.fault(f"{path}.enabled", "must be true or false")
        kind = entry.get("type", "built_in")
        if kind == "custom":
            tool: ToolDefinition | None = self._custom(name, entry, path)
        elif kind == "built_in":
            tool = self._built_in(name, entry, path)
        else:
            self.fault(f"{path}.type", "must be built_in or custom")
            return None
        return tool if entry.get("enabled", True) is True else None

    def _built_in(self, name: str, entry: dict[str, Any], path: str) -> ToolDefinition | None:
        known = self._offer.built_in.get(name)
        if known is None:
            self.fault(path, "is not a built-in tool of this server; a tool of your own needs type: custom")
            return None
        for key in ("description", "input_schema"):
            if key in entry:
                self.fault(f"{path}.{key}", "is not allowed for a built-in tool")
        permission = self._permission(entry.get("permission"), known.modes, known.default_mode, path)
        return None if permission is None else BuiltInTool(permission)

    def _custom(self, name: str, entry: dict[str, Any], path: str) -> ToolDefinition | None:
        if name in self._offer.built_in:
            self.fault(path, f"is the name of a built-in tool; give yours another name, such as my_{name}")
        description = self.text(entry, "description", path, MAX_DESCRIPTION_CHARS)
        schema = entry.get("input_schema")
        permission = self._permission(entry.get("permission"), _MODES, "always_allow", path)
        if not isinstance(schema, dict):
            self.fault(f"{path}.input_schema", "is required" if schema is None else "must be a mapping")
            return None
        self._schema(schema, f"{path}.input_schema")
        if description is None or permission is None:
            return None
        return CustomTool(description, schema, permission)

    def _schema(self, schema: dict[str, Any], path: str) -> None:
        for pointer, message in self._offer.schema_problems(schema):
            self.fault(path + "".join(f".{part}" for part in pointer.split("/") if part), message)

    def _permission(self, value: Any, modes: frozenset[str], default: str, path: str) -> Permission | None:
        path = f"{path}.permission"
        if value is None:
            return msgspec.convert({"mode": default, "parameters": {}}, Permission)
        if isinstance(value, str):
            value = {"mode": value}
        if not isinstance(value, dict):
            self.fault(path, "must be a mapping")
            return None
        self.known_keys(value, frozenset({"mode", "parameters"}), path)
        mode = value.get("mode")
        if not isinstance(mode, str) or mode not in modes:
            self.fault(f"{path}.mode", f"must be one of {', '.join(sorted(modes))}")
            return None
        if value.get("parameters") not in (None, {}):
            self.fault(f"{path}.parameters", "must be empty: no mode takes any")
        return msgspec.convert({"mode": mode, "parameters": {}}, Permission)
