"""Processes on a POSIX system: what runs commands for `omnara daemon` and for the machines of the local pool."""

from omnara.machines.posix.environment import base_environment
from omnara.machines.posix.home import PosixHome
from omnara.machines.posix.launcher import Launcher
from omnara.machines.posix.terms import Limits, Sandbox, User

__all__ = ["Launcher", "Limits", "PosixHome", "Sandbox", "User", "base_environment"]
