"""What a command says when it fails, and with which exit code: one table for all commands.

Known failures become one sentence that says what to do; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from typing import Final

import msgspec

from omnara.cli.root import OUTPUT_ERRORS
from omnara.client.errors import ApiError, ClientError, ServerUnreachable
from omnara.errors import ConfigurationError, OmnaraError, Unavailable

__all__ = ["AWAY", "BUG", "FAILED", "USAGE", "Failure", "explain", "output_error"]

FAILED: Final = 1
USAGE: Final = 2
AWAY: Final = 3
BUG: Final = 70


class Failure(msgspec.Struct, frozen=True):
    """One sentence for the person, one number for the script."""

    text: str
    exit_code: int


def explain(error: BaseException) -> Failure | None:
    """Return what to say about `error`; None for a bug, whose traceback is the most useful answer."""
    if isinstance(error, BaseExceptionGroup):
        # Tasks that run together fail together; the first one that can be explained is the one to mend.
        return next((found for part in error.exceptions if (found := explain(part)) is not None), None)
    if isinstance(error, ConfigurationError):
        return Failure(error.detail or str(error), USAGE)
    if isinstance(error, Unavailable):
        return Failure(f"{error}; is the database up? `omnara doctor` tells more", AWAY)
    if isinstance(error, ServerUnreachable):
        return Failure(f"no answer from the server ({error}); is it up, and is OMNARA_URL right?", AWAY)
    if isinstance(error, ApiError):
        return _refusal(error)
    if isinstance(error, ClientError | OmnaraError):
        return Failure(str(error), FAILED)
    return None


def output_error(error: BaseException) -> OSError | None:
    """Return the error of a write to standard output, also from among those of tasks that failed together."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for part in error.exceptions if (found := output_error(part)) is not None), None)
    if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS and error.filename is None:
        return error
    return None


def _refusal(error: ApiError) -> Failure:
    if error.status == 401:
        return Failure(
            "the server does not accept this key; set OMNARA_API_KEY (see `omnara keys create --help`)", FAILED
        )
    if error.status == 404:
        return Failure("not found, or not visible to this key", FAILED)
    if error.status == 503:
        return Failure(f"the server is not available right now: {error.text}", AWAY)
    return Failure(error.text, FAILED)
