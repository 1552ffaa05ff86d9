"""`rlhf compare` counts from the files of runs; its numbers are those of a hand-made example."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from common.errors import ConfigError
from trainer.cli.compare import compare, evaluated, main
from trainer.dashboard.run_list import RunList

FIRST = [True] * 6 + [False] * 4
SECOND = [True] * 5 + [False] + [True] * 3 + [False]


def write(directory: Path, evaluations: dict[int, list[bool | None]], rate: float) -> None:
    """Writes a run that was evaluated at these steps."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"optimizer": {"learning_rate": rate}}))
    metrics = {"step": 2, "total_steps": 2, "reward": 0.5, "seconds": {"update": 30.0}}
    (directory / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    with (directory / "evaluations.jsonl").open("w") as file:
        for step, verdicts in evaluations.items():
            answers = [
                {"prompt_id": f"p{i}", "correct": verdict} for i, verdict in enumerate(verdicts)
            ]
            print(json.dumps({"step": step, "answers": answers}), file=file)


def printed(runs: list[Path], step: int | None = None, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        compare(RunList(runs)(), console, step)
    return capture.get()


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, {0: [False] * 10, 2: [*FIRST]}, rate=1e-4)
    write(second, {2: [*SECOND]}, rate=5e-4)
    return [first, second]


def test_runs_are_compared_problem_by_problem(runs: list[Path]) -> None:
    """Three problems gained and one lost of ten. McNemar's exact p is 2 · (1 + 4) / 16 = .625; the
    interval is 2/12 ± 1.96 · sqrt(5 − 4/12) / 12."""
    text = printed(runs)

    row = next(line for line in text.splitlines() if "+20.0%" in line)
    assert re.split(r"\s{2,}", row.strip()) == [
        "2",
        "10",
        "+20.0%",
        "-18.6% to +52.0%",
        "0.62",
        "3",
        "1",
    ]
    assert "60.0% (31.3% to 83.2%)" in text  # Wilson's interval of 6 of 10
    assert "optimizer.learning_rate" in text
    assert "   2  second\n" in text


def test_the_tables_fit_into_80_columns_whatever_the_names_of_the_runs(tmp_path: Path) -> None:
    names = [
        f"learning_rate={rate},kl_coef=0.001,group_size=16,seed={seed}"
        for seed in range(6)
        for rate in (1e-4, 5e-4)
    ]
    for place, name in enumerate(names):
        write(tmp_path / name, {2: [*SECOND]}, rate=1e-4 * (place + 1))
    text = printed([tmp_path], width=80)

    names_there = [line.strip() for line in text.splitlines() if "=" in line]
    assert names_there == [f"{number}  {name}" for number, name in enumerate(sorted(names), 1)]
    others = [line for line in text.splitlines() if "=" not in line]
    assert max(map(len, others)) <= 80
    assert text.count("80.0% (49.0% to 94.3%)") == len(names)  # none is broken over lines
    assert text.count("-16.3% to +16.3%") == len(names) - 1
    assert "0.0012" in text


def test_only_problems_that_both_have_answered_with_a_verdict_count(
    runs: list[Path], tmp_path: Path
) -> None:
    write(tmp_path / "third", {2: [None, True, False]}, rate=1e-4)
    text = printed([runs[0], tmp_path / "third"])
    row = next(line for line in text.splitlines() if "-50.0%" in line)
    assert row.split()[:2] == ["2", "2"]  # p1 and p2 alone


def test_a_step_is_chosen_and_one_without_an_evaluation_is_refused(runs: list[Path]) -> None:
    found = evaluated(runs[0], 0)
    assert found is not None
    assert (found.step, sum(found.graded)) == (0, 0)
    beside = runs[0].parent / "notes.txt"  # as in `runs/*`
    beside.touch()
    with pytest.raises(ConfigError) as caught:
        main([*map(str, runs), str(beside), "--step", "7"])
    assert (caught.value.field, caught.value.value) == ("--step", "7")


def test_held_out_rewards_that_are_no_verdicts_are_compared(tmp_path: Path) -> None:
    """Rewards of 1, 2, 3, 4 and of 2, 2, 4, 6: a mean of 1 more, and a standard error of
    √(2/3) / 2, so that the interval is 1 ± 1.96 · 0.408.
    """
    runs = [tmp_path / "first", tmp_path / "second"]
    for run, rewards in zip(runs, ([1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 4.0, 6.0]), strict=True):
        write(run, {2: [None] * 4}, rate=1e-4)
        path = run / "evaluations.jsonl"
        line = json.loads(path.read_text())
        for answer, reward in zip(line["answers"], rewards, strict=True):
            answer["reward"] = reward
        path.write_text(json.dumps(line) + "\n")
    text = printed(runs)
    assert "reward 2.500" in text
    assert "reward 3.500" in text
    row = next(line for line in text.splitlines() if "reward +1.000" in line)
    assert re.split(r"\s{2,}", row.strip()) == [
        "2",
        "4",
        "reward +1.000",
        "+0.200 to +1.800",
        "0.014",
        "3",
        "0",
    ]
