"""The server's side of machines as a small model: rows in memory, grants, the table of dispositions, first result wins.

Written from the specification alone, so that the runtime is tested against the rules and not against our own server.
Source: machines.md §4, §5, §6.
"""

from __future__ import annotations

from typing import Any

import msgspec

from omnara.machines import wire

OVER = ("exited", "failed", "killed", "unknown")


class Contradiction(AssertionError):
    """Something happened that no peer may do."""


class Row:
    """One process, with at most one action with an effect."""

    def __init__(self, process_id: str) -> None:
        self.id = process_id
        self.state = "queued"
        self.reason = ""
        self.ends_told: list[wire.ProcessFinished] = []
        self.action: str | None = None  # queued, accepted, applied, failed, unknown

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def action_id(self) -> str:
        return f"pac_{self.id}"


class ModelServerSide:
    """Answers one runtime. `act`: each process that runs is written to once."""

    def __init__(self, names: list[str], *, act: bool) -> None:
        self.rows = {name: Row(name) for name in names}
        self._act = act

    @property
    def done(self) -> bool:
        """True when every process is over, with its action."""
        return all(row.over and row.action not in ("queued", "accepted") for row in self.rows.values())

    # --- the registration -------------------------------------------------------------------------------

    def register(self, claims: list[wire.ProcessClaim]) -> list[wire.ProcessDirective]:
        """The table of dispositions."""
        claimed = {claim.process_id for claim in claims}
        assert len(claimed) == len(claims)
        for row in self.rows.values():
            if row.id not in claimed and row.state in ("starting", "running"):
                self._close(row, "unknown", "local_process_missing_after_daemon_reconnect")
            if row.id not in claimed and row.action == "accepted":
                row.action = "failed"
        return [self._directive(claim) for claim in claims]

    def _directive(self, claim: wire.ProcessClaim) -> wire.ProcessDirective:
        row = self.rows[claim.process_id]
        disposition = self._disposition(row, claim)
        actions = self._actions(row, claim, disposition)
        return wire.ProcessDirective(
            process_id=claim.process_id,
            supervisor_instance_id=claim.supervisor_instance_id,
            disposition=disposition,
            actions=actions,
        )

    def _disposition(self, row: Row, claim: wire.ProcessClaim) -> Any:
        uncommitted = not claim.execution_committed and claim.phase != "terminal"
        if row.state == "queued":
            if not uncommitted:
                raise Contradiction(f"queued, but claimed as {claim}")
            return "close_preparation"
        if row.over:
            return "close_preparation" if uncommitted else "release"
        if row.state == "running" and uncommitted:
            raise Contradiction(f"running, but claimed as {claim}")
        if uncommitted and claim.supervisor_live:
            return "start"
        if uncommitted:
            self._close(row, "failed", "execution_not_started")
            return "release"
        if claim.phase == "terminal" or claim.supervisor_live:
            return "retain"
        self._close(row, "unknown", "local_process_missing_after_daemon_reconnect")
        return "release"

    def _actions(self, row: Row, claim: wire.ProcessClaim, disposition: str) -> list[wire.ActionDirective]:
        if row.action is None:
            return []
        local = next((one.position for one in claim.actions if one.process_action_id == row.action_id), None)
        if local is None and claim.resolved_action_seq >= 1:
            return []
        what: str | None = None
        payload = msgspec.Raw()
        if row.action == "accepted":
            if local == "terminal" or (local is not None and claim.supervisor_live):
                what = "retain"
            elif local is not None:
                row.action, what = "unknown", "release"
            elif disposition in ("start", "retain") and claim.supervisor_live and not claim.action_admission_closed:
                what, payload = "apply", msgspec.Raw(b'{"data":"x"}')
            else:
                row.action, what = "failed", "release"
        elif row.action != "queued":
            what = "settle" if local == "terminal" else "retain" if local is not None else "release"
        if what is None:
            return []
        return [
            wire.ActionDirective(
                process_action_id=row.action_id, seq=1, action_kind="write", disposition=what, payload=payload
            )
        ]

    # --- the channel ------------------------------------------------------------------------------------

    def offers(self) -> list[wire.FromServer]:
        """What is to be handed over now."""
        found: list[wire.FromServer] = [
            wire.ProcessOffer(process_id=row.id, command="make", io_mode="pipe", wait_ms=1)
            for row in self.rows.values()
            if row.state == "queued"
        ]
        for row in self.rows.values():
            if row.action == "queued" and row.state == "running":
                payload = msgspec.Raw(b'{"data":"x"}')
                found.append(
                    wire.ActionOffer(
                        process_id=row.id,
                        process_action_id=row.action_id,
                        action_kind="write",
                        seq=1,
                        payload=payload,
                    )
                )
        return found

    def take(self, frame: wire.FromDaemon) -> wire.FromServer | None:
        """Take one frame; the answer."""
        if isinstance(frame, wire.ProcessAccept):
            row = self.rows[frame.process_id]
            if row.state != "queued":
                return wire.ErrorFrame(error_code="process_offer_unavailable", process_id=row.id)
            row.state = "starting"
            return wire.ProcessAcceptAck(process_id=row.id)
        if isinstance(frame, wire.ActionAccept):
            row = self.rows[frame.process_id]
            if row.action != "queued" or row.state != "running":
                return wire.ErrorFrame(
                    error_code="action_offer_unavailable", process_id=row.id, process_action_id=row.action_id
                )
            row.action = "accepted"
            return wire.ActionAcceptAck(process_id=row.id, process_action_id=row.action_id, process_state="running")
        if isinstance(frame, wire.Report):
            return wire.ReportAck(ack_status=self._report(frame.event), report_id=frame.report_id)
        return wire.HeartbeatAck(next_heartbeat_after_ms=60_000)

    def _report(self, event: wire.Event) -> Any:
        row = self.rows[event.process_id]
        if isinstance(event, wire.ProcessStarted):
            if row.state == "queued":
                raise Contradiction("started without a grant")
            if row.over:
                return "cleanup_only"
            if row.state == "starting":
                row.state = "running"
                row.action = "queued" if self._act else None
            return "committed"
        if isinstance(event, wire.ProcessFinished):
            if row.state == "queued":
                raise Contradiction("finished without a grant")
            row.ends_told.append(event)
            if row.over:
                return "cleanup_only"
            self._close(row, event.state, event.state_reason_code)
            return "committed"
        if row.action == "queued":
            raise Contradiction("an action was performed without a grant")
        if row.action == "accepted":
            row.action = type(event).__name__.removeprefix("Action").lower()
        return "committed"

    def _close(self, row: Row, state: str, reason: str) -> None:
        row.state, row.reason = state, reason
        if row.action == "queued":
            row.action = "failed"
