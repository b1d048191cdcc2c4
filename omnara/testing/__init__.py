"""A scripted model server, for whoever tests against models without having one.

Shipped in the package: `omnara demo`, `omnara mock-model`, the benches and the tests all use it.

    script = plan(call("read_file", {"path": "a"}, text="Reading it."), say("It says {{result 0}}."))
    async with ModelServer(script) as server:
        server.faults.push(rate_limited("2"), Cut("mid_text"))        # what the next two requests meet
        gate = server.gate("mid_text", match=Match(attempt=3))        # and the third is held where a test wants it
        ...                                                           # a client with the base URL `server.url`
        await gate.reached()
        gate.release()
        assert server.log.counts.repeats == 2

An OpenAI client takes `server.url + "/v1"` as its base URL. What a script, a fault or a gate is in Python is the
same in JSON at the control routes (see `omnara.testing.control`) of a server in another process.
"""

from omnara.testing.answer import Answer, Block, Call, Stop, Text, Thinking, Timing, Usage, call, say
from omnara.testing.audit import AuditTools, audit, file_bytes, report_of
from omnara.testing.catalog import ScriptSpec, build, parse_script
from omnara.testing.conversation import Conversation, Message, ToolCall, ToolResult, ToolSpec
from omnara.testing.faults import (
    COMMON_TROUBLE,
    Content,
    Cut,
    Drip,
    Fault,
    FaultQueue,
    HttpError,
    Match,
    NoHeaders,
    Planned,
    Point,
    Silence,
    StreamError,
    overloaded,
    rate_limited,
)
from omnara.testing.formats import CONVERSATION_HEADER
from omnara.testing.gates import Gate, GatePoint, GateSpec
from omnara.testing.mock import run_mock_model
from omnara.testing.request_log import Counts, Entry, RequestLog
from omnara.testing.script import Plan, Script, ScriptError, echo, embed, embedded, fixed, in_order, plan, steps
from omnara.testing.server import ModelServer
from omnara.testing.strict import DEFAULT_MODELS, ModelSpec, Strictness

__all__ = [
    "COMMON_TROUBLE",
    "CONVERSATION_HEADER",
    "DEFAULT_MODELS",
    "Answer",
    "AuditTools",
    "Block",
    "Call",
    "Content",
    "Conversation",
    "Counts",
    "Cut",
    "Drip",
    "Entry",
    "Fault",
    "FaultQueue",
    "Gate",
    "GatePoint",
    "GateSpec",
    "HttpError",
    "Match",
    "Message",
    "ModelServer",
    "ModelSpec",
    "NoHeaders",
    "Plan",
    "Planned",
    "Point",
    "RequestLog",
    "Script",
    "ScriptError",
    "ScriptSpec",
    "Silence",
    "Stop",
    "StreamError",
    "Strictness",
    "Text",
    "Thinking",
    "Timing",
    "ToolCall",
    "ToolResult",
    "ToolSpec",
    "Usage",
    "audit",
    "build",
    "call",
    "echo",
    "embed",
    "embedded",
    "file_bytes",
    "fixed",
    "in_order",
    "overloaded",
    "parse_script",
    "plan",
    "rate_limited",
    "report_of",
    "run_mock_model",
    "say",
    "steps",
]
