"""Models: one attempt at a time, in any of the wire formats that the server speaks."""

from omnara.providers.gateway import ModelGateway
from omnara.providers.in_process import InProcessAdapter, ask, say
from omnara.providers.protocol import (
    ApiKey,
    Completed,
    ErrorKind,
    Failed,
    Limits,
    ModelAdapter,
    ModelCall,
    ModelTarget,
    Outcome,
    RequestedCall,
    ToolSpec,
)
from omnara.providers.rendered import RenderedHistory
from omnara.providers.replay import DamagedReplay
from omnara.providers.retry import Compact, RetryIn, Stop, Verdict, decide_retry, delay_s, parse_retry_after

__all__ = [
    "ApiKey",
    "Compact",
    "Completed",
    "DamagedReplay",
    "ErrorKind",
    "Failed",
    "InProcessAdapter",
    "Limits",
    "ModelAdapter",
    "ModelCall",
    "ModelGateway",
    "ModelTarget",
    "Outcome",
    "RenderedHistory",
    "RequestedCall",
    "RetryIn",
    "Stop",
    "ToolSpec",
    "Verdict",
    "ask",
    "decide_retry",
    "delay_s",
    "parse_retry_after",
    "say",
]
