"""What a provider is told in confidence stays out of what it says, since that is logged, stored and shown to people."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from omnara.machines.providers.protocol import InvalidOptions, MachineSpec, ProviderUnavailable, ProvisionFailed
from omnara.vault import redact

__all__ = ["ProviderMistake", "confidential"]


class ProviderMistake(Exception):
    """What a provider raised and must not, in its words but for what is secret of them."""


@contextmanager
def confidential(spec: MachineSpec) -> Iterator[None]:
    """Take a daemon's token and a pool's credential out of the errors that come of calls with `spec`.

    What providers may raise keeps its kind and loses its cause, which is as talkative. Anything else passes as it is
    if nothing secret is in it or in what caused it; otherwise it becomes a ProviderMistake without a traceback.
    """
    secrets = [] if spec.daemon is None else [spec.daemon.token]
    secrets += [] if spec.credential is None else [spec.credential.value]
    if not secrets:
        yield
        return
    try:
        yield
    except (InvalidOptions, ProviderUnavailable, ProvisionFailed) as error:
        error.args = tuple(redact(str(each), secrets) for each in error.args)
        raise error from None
    except Exception as error:
        told = "".join(traceback.format_exception(error))
        if redact(told, secrets) == told:
            raise
        raise ProviderMistake(redact(f"{type(error).__name__}: {error}", secrets)) from None
