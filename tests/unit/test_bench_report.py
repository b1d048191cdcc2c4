"""The benches' arithmetic and record: bars, ratios, doubles, the line of JSON, the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench import __main__ as command
from bench import report
from bench.contest import Score, ratio, slices_of
from bench.machine import Commit, Machine, commit, machine
from bench.options import Options
from bench.report import Result, Run, judge, save, table, to_json
from bench.usage import fine_cpu_s
from bench.verify import Counted, double_executions, wrong_with
from omnara.clock import Deadline


def result(figures: dict[str, Any], wrong: tuple[str, ...] = ()) -> Result:
    return Result(
        scenario="steps",
        commit=Commit("abc1234567", False),
        started_at="2031-01-01T00:00:00+00:00",
        took_s=1.5,
        machine=Machine(2, 8.0, "a cpu", "3.11", 0.1),
        default_sizes=True,
        run=Run(sizes={"agents": 256}, figures=figures, postgres={"fsync": "on"}, wrong=wrong),
    )


@pytest.mark.parametrize(
    ("figure", "value", "passed", "goal"),
    [
        ("ratio_raw", 0.4, True, False),
        ("ratio_raw", 0.399, False, False),
        ("ratio_raw", 1.0, True, True),
        ("overhead_ms_p50", 3.0, True, False),
        ("overhead_ms_p50", 3.1, False, False),
        ("recovery_s_max", 0.2, True, True),
        ("double_executions", 0, True, True),
        ("double_executions", 1, False, False),
    ],
)
def test_a_figure_is_held_against_its_bar(figure: str, value: float, passed: bool, goal: bool) -> None:
    (judged,) = judge({figure: value})
    assert (judged.passed, judged.goal_reached) == (passed, goal)


def test_figures_without_a_bar_or_a_value_are_not_judged() -> None:
    assert judge({"steps_per_s": 5000.0, "ratio_peer": None}) == []


def test_the_json_has_the_figures_by_name_and_what_they_were_measured_on() -> None:
    text = to_json(result({"steps_per_s": 5000.0, "ratio_raw": 1.5}))
    assert "\n" not in text
    found = json.loads(text)
    assert found["steps_per_s"] == 5000.0
    assert found["pass"] is True
    assert found["commit"] == "abc1234567"
    assert found["postgres"] == {"fsync": "on"}
    assert found["bars"][0] == {
        "figure": "ratio_raw",
        "sense": "at least",
        "bar": 0.4,
        "goal": 1.0,
        "value": 1.5,
        "passed": True,
        "goal_reached": True,
    }


def test_something_wrong_fails_a_run_whatever_its_speed() -> None:
    failed = result({"ratio_raw": 9.0}, wrong=("a step was lost",))
    assert failed.passed is False
    assert json.loads(to_json(failed))["wrong"] == ["a step was lost"]
    assert "WRONG: a step was lost" in table(failed)


def test_the_table_says_pass_or_missed() -> None:
    shown = table(result({"ratio_raw": 0.5, "ratio_peer": 2.0}))
    assert "pass: at least 0.4" in shown
    assert "MISSED: at least 8" in shown


def test_a_saved_result_is_named_by_scenario_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    path = save(result({"ratio_raw": 1.5}))
    assert path.name == "steps-abc1234567.json"
    assert json.loads(path.read_text())["ratio_raw"] == 1.5


def test_ledgers_show_what_was_executed_twice(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("model 1 1\ntool 1 x\nmodel 1 3\n")
    second.write_text("model 2 1\nmodel 1 3\n")
    assert double_executions([first, second]) == (5, 1)
    assert double_executions([first]) == (3, 0)


def test_what_was_counted_must_be_what_is_saved() -> None:
    assert wrong_with("engine", Counted(10, {}, []), 10) == []
    assert "9 steps were counted and 10 are in Postgres" in wrong_with("engine", Counted(10, {}, []), 9)[0]
    assert len(wrong_with("engine", Counted(10, {"failed": 1}, ["events: a gap"]), 10)) == 2


def test_rates_are_over_all_slices() -> None:
    score = Score()
    score.add({"steps": 100, "seconds": 1.0, "cpu_s": 0.01})
    score.add({"steps": 300, "seconds": 3.0, "cpu_s": 0.01})
    assert score.per_s == 100.0
    assert score.cpu_us_per_step == 50.0
    assert ratio(score, Score(steps=200, seconds=4.0)) == 2.0
    assert ratio(score, Score()) == 0.0


@pytest.mark.parametrize(("seconds", "rounds", "length"), [(30.0, 6, 5.0), (4.0, 2, 2.0), (1.0, 2, 0.5)])
def test_slices_make_up_the_time(seconds: float, rounds: int, length: float) -> None:
    assert slices_of(seconds) == (rounds, length)


def test_only_default_sizes_count_as_such() -> None:
    assert Options(peer="dbos", database_url="postgresql://x/y").default_sizes
    assert not Options(seconds=4.0).default_sizes
    assert not Options(processes=(1, 2)).default_sizes


def test_the_record_names_no_host_and_no_path() -> None:
    shown = f"{machine()} {commit()}"
    assert "/" not in shown.replace("N/A", "")
    assert machine().cores >= 1


def test_help_teaches_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for scenario in command.SCENARIOS:
        assert scenario in shown


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["steps", "--agents", "0"], ["replicas", "--processes", "1,99"], ["steps", "--x"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_the_json_is_the_last_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def measured(scenario: str, options: Options) -> Result:
        assert (scenario, options.seconds) == ("steps", 4.0)
        return result({"ratio_raw": 0.1})

    monkeypatch.setattr(command, "_measure", measured)
    assert command.main(["steps", "--seconds", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ratio_raw"] == 0.1
    assert command.main(["steps", "--seconds", "4", "--check"]) == 1


def test_what_was_not_measured_is_told_with_its_reason() -> None:
    run = Run(sizes={}, figures={"docker_ms_p50": None}, skipped={"docker": "no engine"})
    made = msgspec.structs.replace(result({}), run=run)
    assert "not measured: docker: no engine" in table(made)
    assert json.loads(to_json(made))["skipped"] == {"docker": "no engine"}
    assert made.passed


def test_a_quiet_process_is_measured_finely() -> None:
    before, deadline = fine_cpu_s(os.getpid()), Deadline(20)
    while fine_cpu_s(os.getpid()) == before:  # the kernel counts up at its next tick
        assert not deadline.passed
    assert fine_cpu_s(os.getpid()) - before < 20
