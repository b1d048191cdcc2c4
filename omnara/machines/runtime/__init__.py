"""The one runtime that runs commands for a server, over any home of processes and any line to that server.

Frames in, effects in the home, reports out. It keeps nothing durable of its own: whatever must outlive it is in the
home, so a runtime may be killed at any moment and another one goes on. Source: machines.md §3 to §7.
"""

from omnara.machines.runtime.connection import Ended
from omnara.machines.runtime.runtime import Runtime
from omnara.machines.runtime.timing import Timing

__all__ = ["Ended", "Runtime", "Timing"]
