"""An agent's machines: which there are, how one is, a new one from a pool, and giving one up.

Descriptions only, as in `machine_processes`. Source: engine.md §7; features.md (machines).
"""

from __future__ import annotations

from typing import Any, Final

from omnara.tools.builtin.machine_processes import MACHINE_SCHEMAS
from omnara.tools.protocol import Effect, Tool

__all__ = ["CREATE_MACHINE", "DELETE_MACHINE", "INSPECT_MACHINE", "LIST_MACHINES"]


def _tool(name: str, description: str, properties: dict[str, Any]) -> Tool:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return Tool(
        name=name,
        description=description,
        input_schema=schema,
        type="built_in",
        effect=Effect.TRANSACTIONAL,
        exact=True,
    )


LIST_MACHINES: Final = _tool(
    "list_machines",
    "List your machines with their machine_ref, state and connection, and the pools that create_machine can use.",
    {},
)

INSPECT_MACHINE: Final = _tool(
    "inspect_machine",
    "Show one of your machines: its state and why it is in it, connection, platform, size, working directory, and what "
    "failed last if its start-up failed.",
    MACHINE_SCHEMAS,
)

CREATE_MACHINE: Final = _tool(
    "create_machine",
    "Create a new machine from a pool. Returns its machine_ref at once; commands for it wait until it is ready.",
    {
        "pool": {
            "type": "string",
            "minLength": 1,
            "maxLength": 256,
            "description": "Name or id (mpo_…) of the pool. May be left out when there is only one.",
        }
    },
)

DELETE_MACHINE: Final = _tool(
    "delete_machine",
    "Delete one of your machines that came from a pool, with its files. Its processes are ended. This is final.",
    MACHINE_SCHEMAS,
)
