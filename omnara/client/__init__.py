"""An async client for an Omnara server: launch agents, follow their events, answer their calls and questions."""

from omnara.client.client import Client
from omnara.client.errors import ApiError, ClientError, ServerUnreachable, StreamBroken
from omnara.client.files import file_block
from omnara.client.machines import ConnectedMachine, DaemonToken, Machine, MachinePool, Machines, NewDaemonToken
from omnara.client.stream import EventStream, StreamItem
from omnara.client.turns import turn_is_over
from omnara.client.types import (
    Agent,
    AgentStatus,
    Delta,
    Event,
    Input,
    Interaction,
    Launched,
    Links,
    ToolCall,
    ToolCallUpdate,
)

__all__ = [
    "Agent",
    "AgentStatus",
    "ApiError",
    "Client",
    "ClientError",
    "ConnectedMachine",
    "DaemonToken",
    "Delta",
    "Event",
    "EventStream",
    "Input",
    "Interaction",
    "Launched",
    "Links",
    "Machine",
    "MachinePool",
    "Machines",
    "NewDaemonToken",
    "ServerUnreachable",
    "StreamBroken",
    "StreamItem",
    "ToolCall",
    "ToolCallUpdate",
    "file_block",
    "turn_is_over",
]
