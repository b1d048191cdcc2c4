"""What a server offers to be run, as a home is told of it; or why no home can run it, in words for the model.

Source: machines.md §3 (offers whose preparation failed), §7.
"""

from __future__ import annotations

from typing import Literal, cast

from omnara.machines import wire
from omnara.machines.processes import ProcessSpec, StartFailed

__all__ = ["spec_of"]


def spec_of(offer: wire.ProcessOffer) -> ProcessSpec:
    """What is to be run. Raises StartFailed for an offer that says that it cannot be, or that no home can run."""
    if offer.preparation_error:
        raise StartFailed(offer.preparation_error)
    if offer.io_mode not in ("", "pipe", "pty"):
        raise StartFailed("there is no such io_mode")
    texts = (offer.command, offer.cwd, *offer.env, *offer.env.values())
    if any("\0" in text for text in texts):
        raise StartFailed("a command, its directory and its environment cannot contain NUL")
    if not offer.command.strip():
        raise StartFailed("there is no command")
    return ProcessSpec(
        process_id=offer.process_id,
        command=offer.command,
        shell=offer.shell_selector or "default",
        io_mode=cast("Literal['pipe', 'pty']", offer.io_mode or "pipe"),
        cwd=offer.cwd,
        env=offer.env,
        timeout_seconds=offer.timeout_seconds,
    )
