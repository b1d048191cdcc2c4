"""`ask_question`: the agent asks its user, and waits in the database for the answer.

Nothing runs: the engine opens an interaction with the form and the person's answer completes the call.
Source: engine.md §7; api.md §12.
"""

from __future__ import annotations

from typing import Final

from omnara.tools.protocol import Effect, Tool

__all__ = ["TOOL"]

_OPTION: Final = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": 1000, "pattern": r"\S"},
        {
            "type": "object",
            "properties": {"label": {"type": "string", "minLength": 1, "maxLength": 1000, "pattern": r"\S"}},
            "required": ["label"],
            "additionalProperties": False,
        },
    ]
}

TOOL: Final = Tool(
    name="ask_question",
    description=(
        "Ask the user one or more questions and wait for the answers. Give each question a few options to choose from; "
        "an option for an answer in the user's own words is added to every question. Use it when only the user can "
        "decide, not for what you can find out yourself."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "questions": {
                "type": "array",
                "minItems": 1,
                "maxItems": 20,
                "items": {
                    "type": "object",
                    "properties": {
                        "prompt": {
                            "type": "string",
                            "minLength": 1,
                            "maxLength": 8000,
                            "pattern": r"\S",
                            "description": "The question, complete in itself.",
                        },
                        "options": {
                            "type": "array",
                            "maxItems": 50,
                            "items": _OPTION,
                            "description": "Short labels to choose from. May be empty.",
                        },
                        "multiple": {
                            "type": "boolean",
                            "default": False,
                            "description": "Whether several options may be chosen.",
                        },
                    },
                    "required": ["prompt", "options"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["questions"],
        "additionalProperties": False,
    },
    type="built_in",
    effect=Effect.WAIT,
)
