"""Commands on an agent's machines: start one, read on in its output, write to it, stop it, list what runs.

Descriptions only: each call is a transaction of the engine (`omnara.engine.machines.tools`), and what a machine has to
do first completes it later. Source: engine.md §7 (inputs and limits); machines.md §7.
"""

from __future__ import annotations

from typing import Any, Final

from omnara.tools.protocol import Effect, Tool

__all__ = [
    "LIST_PROCESSES",
    "MACHINE_SCHEMAS",
    "MAX_COMMAND_BYTES",
    "MAX_WRITE_BYTES",
    "READ_PROCESS",
    "RUN_COMMAND",
    "STOP_PROCESS",
    "WRITE_PROCESS",
]

MAX_COMMAND_BYTES: Final = 131_071
"""Length of a command in UTF-8: what Linux takes as one argument of a program (128 KiB with its end)."""

MAX_WRITE_BYTES: Final = 131_072
MAX_READ_BYTES: Final = 65_536
DEFAULT_READ_BYTES: Final = 8_192
MAX_WAIT_MS: Final = 10_000
"""Source: engine.md §7; machines.md §7."""

SHELLS: Final = ("default", "sh", "bash", "zsh", "pwsh", "powershell", "cmd")

MACHINE_SCHEMAS: Final[dict[str, Any]] = {
    "machine_ref": {
        "type": "string",
        "minLength": 1,
        "maxLength": 100,
        "description": "Which machine, by its machine_ref from list_machines. May be left out when there is only one.",
    },
    "machine_id": {
        "type": "string",
        "minLength": 1,
        "maxLength": 100,
        "description": "Which machine, by its id (mch_…), instead of machine_ref.",
    },
}
"""How the tools name a machine."""

_PROCESS_ID: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": 100,
    "description": "Id of the process (prc_…), from run_command or list_processes.",
}
_WAIT_MS: Final = {"type": "integer", "minimum": 1, "maximum": MAX_WAIT_MS}


def _tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(
        name=name,
        description=description,
        input_schema=schema,
        type="built_in",
        effect=Effect.TRANSACTIONAL,
        exact=True,
    )


RUN_COMMAND: Final = _tool(
    "run_command",
    "Run a shell command on one of your machines. The result has a process_id. When the command ends within wait_ms it "
    "also has the output and the exit code; otherwise its state is running, the command goes on in the background, and "
    "read_process, write_process and stop_process act on it. Output is standard output and standard error together, at "
    "most 64 KiB at a time. Each command starts in a fresh shell: a cd or an export does not last, and what is left in "
    "the background (&) ends with it, so run a server as a command of its own. A command is run once; if its result "
    "says unknown, find out what it did before you run it again.",
    {
        "command": {
            "type": "string",
            "minLength": 1,
            "description": "The command line, at most 131071 bytes. Put longer scripts into a file.",
        },
        **MACHINE_SCHEMAS,
        "shell": {
            "type": "string",
            "enum": list(SHELLS),
            "default": "default",
            "description": "The shell that runs it; default: /bin/sh (cmd on Windows).",
        },
        "cwd": {
            "type": "string",
            "maxLength": 4096,
            "description": "Directory to run it in; a relative one starts at the machine's working directory.",
        },
        "wait_ms": {
            **_WAIT_MS,
            "default": MAX_WAIT_MS,
            "description": "Milliseconds to wait for output or the end before the result comes with state running.",
        },
        "io_mode": {
            "type": "string",
            "enum": ["pipe", "pty"],
            "default": "pipe",
            "description": "pty gives the command a terminal of 80 columns, for programs that insist on one.",
        },
    },
    ["command"],
)

READ_PROCESS: Final = _tool(
    "read_process",
    "Read output of a process that run_command started, running or over. Without cursor it goes on where the last "
    "result ended; with cursor it reads from that byte on and leaves that place alone. truncated says that there is "
    "more, or that the oldest output is gone; done says that the process is over and everything was read.",
    {
        "process_id": _PROCESS_ID,
        "cursor": {
            "type": "integer",
            "minimum": 0,
            "maximum": 2**53,
            "description": "Byte of the output to begin at; 0 is the start.",
        },
        "max_bytes": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_READ_BYTES,
            "default": DEFAULT_READ_BYTES,
            "description": "Most bytes to return.",
        },
        "wait_ms": {**_WAIT_MS, "description": "Milliseconds to wait for new output if there is none yet."},
    },
    ["process_id"],
)

WRITE_PROCESS: Final = _tool(
    "write_process",
    "Write text to the standard input of a running process, exactly as given: end lines with \\n yourself. close_stdin "
    "ends the input afterwards (only with io_mode pipe).",
    {
        "process_id": _PROCESS_ID,
        "data": {"type": "string", "description": "The text, at most 131072 bytes."},
        "close_stdin": {"type": "boolean", "default": False, "description": "Whether this is the end of the input."},
    },
    ["process_id"],
)

STOP_PROCESS: Final = _tool(
    "stop_process",
    "Stop a process. interrupt is Ctrl-C; terminate asks it to end and kills it after 2 seconds. May be called again.",
    {
        "process_id": _PROCESS_ID,
        "mode": {"type": "string", "enum": ["interrupt", "terminate"], "default": "terminate"},
    },
    ["process_id"],
)

LIST_PROCESSES: Final = _tool(
    "list_processes", "List your processes that are not over, newest first, at most 20.", {}, []
)
