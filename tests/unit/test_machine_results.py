"""What a model is told about processes on machines."""

from __future__ import annotations

import pytest

from omnara.domain.processes import command_result, failure, process_outcome, working_directory
from omnara.ids import new_uuid


@pytest.mark.parametrize(
    ("asked", "binding", "machine", "found"),
    [
        ("", "", "", ""),
        ("", "", "/m", "/m"),
        ("", "/b", "/m", "/b"),
        ("/x", "/b", "/m", "/x"),
        ("x", "/b/", "/m", "/b/x"),
        ("x", "", "", "x"),
        ("C:\\x", "/b", "", "C:\\x"),
        ("", "b", "/m", "/m/b"),
        ("x", "b", "/m/", "/m/b/x"),
        ("/x", "b", "/m", "/x"),
        ("x", "b", "", "b/x"),
        ("x", "", "m", "m/x"),
        ("x", "C:\\b", "/m", "C:\\b/x"),
    ],
)
def test_where_a_command_starts(asked: str, binding: str, machine: str, found: str) -> None:
    assert working_directory(asked, binding, machine) == found


@pytest.mark.parametrize(
    ("state", "reason", "outcome"),
    [
        ("running", "", "succeeded"),
        ("exited", "", "succeeded"),
        ("failed", "nonzero_exit", "succeeded"),
        ("failed", "signal", "succeeded"),
        ("killed", "terminate_requested", "succeeded"),
        ("failed", "start_failed", "failed"),
        ("unknown", "local_process_missing_after_daemon_reconnect", "failed"),
    ],
)
def test_a_command_that_ran_was_run_however_it_ended(state: str, reason: str, outcome: str) -> None:
    assert process_outcome(state, reason) == outcome


def test_a_failure_says_what_is_known_and_whether_to_try_again() -> None:
    process_id = new_uuid()
    away = failure("machine_unreachable", process_id=process_id, state="running")
    assert away["retryable"] is True
    assert "may go on" in away["error"]
    assert "retryable" not in failure("process_terminal", process_id=process_id, state="exited")
    assert failure("odd_reason") == {"error": "odd_reason", "error_code": "odd_reason"}


def test_a_result_has_a_message_only_where_the_reason_alone_says_too_little() -> None:
    ended = command_result(new_uuid(), "failed", exit_code=2, reason_code="nonzero_exit")
    assert (ended["error"], ended["done"], "message" in ended) == ("nonzero_exit", True, False)
    lost = command_result(new_uuid(), "unknown", reason_code="authorization_revoked")
    assert "not known" in lost["message"]
    assert command_result(new_uuid(), "running", reason_code="")["error"] == ""
