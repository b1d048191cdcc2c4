"""The ready scripts by name, for the command line and the control routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from omnara.testing.audit import audit
from omnara.testing.script import Plan, Script, ScriptError, echo, embedded, fixed, plan, steps

ScriptName = Literal["embedded", "echo", "audit", "steps", "fixed", "plan"]


class ScriptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A script as data: a ready one with its options, or `plan` with its answers."""

    name: ScriptName = "plan"
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    plan: Plan | None = None


_READY: Mapping[str, Callable[..., Script]] = {
    "embedded": lambda: embedded,
    "echo": lambda: echo,
    "audit": audit,
    "steps": steps,
    "fixed": fixed,
}


def build(spec: ScriptSpec) -> Script:
    """Return the script that `spec` describes. Raises `ScriptError` for options that it does not take."""
    if spec.name == "plan":
        if spec.plan is None:
            raise ScriptError("a script named `plan` needs `plan`")
        return plan(*spec.plan.answers, loop=spec.plan.loop)
    try:
        return _READY[spec.name](**spec.options)
    except TypeError as error:
        raise ScriptError(f"script {spec.name}: {error}") from error


def parse_script(text: str) -> Script:
    """Read a script from text: a name, `name:{"option": ...}`, or a whole `ScriptSpec` as JSON.

    Raises `ScriptError` when it cannot be read.
    """
    name, _, options = text.partition(":")
    source = text if text.lstrip().startswith("{") else f'{{"name": "{name.strip()}", "options": {options or "{}"}}}'
    try:
        return build(msgspec.json.decode(source, type=ScriptSpec))
    except msgspec.DecodeError as error:
        raise ScriptError(f"{text[:200]!r} is no script: {error}") from error
