"""The files of a run directory: what a resumed run keeps, what readers of growing files see."""

import io
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from common.errors import ConfigError
from common.settings.config import Config
from tests.support.runs.run_files import make_run
from trainer.evaluation.evaluation import Answer, Evaluation
from trainer.observe import run_dir
from trainer.observe.group_files import DIRECTORY, read_trained, recorded_steps
from trainer.observe.jsonl import JsonlReader, last_steps, parsed
from trainer.observe.run_dir import (
    Recorder,
    append_line,
    check_run,
    is_run,
    read_lines,
    seconds_table,
)


def recorder(directory: Path, said: io.StringIO, **options: Any) -> Recorder:
    return Recorder(directory, Config(), Console(file=said, width=200), **options)


def evaluation(step: int, right: int, truth: str = "1", **more: Any) -> Evaluation:
    """An evaluation of three problems, of which the first `right` are solved."""
    answers = [
        Answer(
            f"p{i}", f"problem {i}", truth, f"response {i} of {step}", i < right, float(i < right)
        )
        for i in range(3)
    ]
    return Evaluation(step, right / 3, 0.1, 3, None, 8, answers, **more)


def test_problems_without_a_true_answer_are_reported_without_one(tmp_path: Path) -> None:
    said = io.StringIO()
    with recorder(tmp_path, said, run_id="one") as made:
        made.evaluation(evaluation(0, 1, truth=""))
        made.evaluation(evaluation(4, 3, truth=""))
        made.report(tmp_path / "step_4")
    assert "problem: problem 1\n" in said.getvalue()


def test_an_evaluation_is_kept_with_its_answers_and_reported_with_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "_SHOWN_PROBLEMS", 2)
    said = io.StringIO()
    with recorder(tmp_path, said, run_id="one") as made:
        made.evaluation(evaluation(0, 1))
        made.evaluation(evaluation(4, 3, trained_on=2))
        made.evaluation(evaluation(4, 2))  # again, after a restart
        made.report(tmp_path / "step_4")
    lines = read_lines(tmp_path / "evaluations.jsonl")
    assert [line["step"] for line in lines] == [0, 4]
    assert [line["accuracy"] for line in lines] == [1 / 3, 2 / 3]
    for line, right in zip(lines, (1, 2), strict=True):
        assert [answer["prompt_id"] for answer in line["answers"]] == ["p0", "p1", "p2"]
        assert [answer["correct"] for answer in line["answers"]] == [i < right for i in range(3)]
    told = said.getvalue()
    assert told.count("2 of 3 held-out problems were trained on") == 1
    problems = [told.index(f"problem: problem {i}") for i in (1, 0)]
    assert problems == sorted(problems), "the one with another verdict comes first"
    assert "problem: problem 2" not in told
    assert told.count("(answer 1)") == 2
    assert told.count("response 1 of 0") == told.count("response 1 of 4") == 1


@pytest.mark.parametrize("seed", range(16))
def test_every_line_says_when_and_every_evaluation_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(run_dir, "time", SimpleNamespace(time=lambda: 1234.5))
    draw = random.Random(seed)
    said = io.StringIO()
    count = draw.randint(2, 40)
    found = Evaluation(
        step=draw.randint(0, 9),
        accuracy=draw.choice([None, 0.25, 0.5]),
        standard_error=draw.choice([None, 0.125]),
        num_samples=count,
        pass_at_k=draw.choice([None, 0.75]),
        k=8,
        answers=draw.choice([[], evaluation(0, 1).answers]),
        mean_reward=0.625,
        trained_on=draw.choice([0, draw.randint(1, count)]),
    )
    directory = tmp_path / "of" / "mine"
    with recorder(directory, said, run_id="one", data="mine", verdicts=True) as made:
        made.evaluation(found)
        made.measured({"step": 3, "loss": 0.5}, "step 3 is done")
    [line] = read_lines(directory / "evaluations.jsonl")
    answers = line.pop("answers", [])
    assert line == {"time": 1234.5, **found.summary()}
    assert [answer["response"] for answer in answers] == [each.response for each in found.answers]
    assert read_lines(directory / "metrics.jsonl") == [
        {"time": 1234.5, "total_steps": 0, "step": 3, "loss": 0.5}
    ]
    assert read_lines(directory / "attempts.jsonl") == [
        {"time": 1234.5, "run_id": "one", "step": 0, "verdicts": True, "data": "mine"}
    ]

    told, *others = said.getvalue().splitlines()
    assert f"at step {found.step}:" in told
    counts = [int(text) for text in re.findall(r"\d+", told[told.index(f"({count} problems") :])]
    assert counts[: 1 + bool(found.trained_on)] == [count, *[found.trained_on][: found.trained_on]]
    assert ("reward 0.625" in told) == (found.accuracy is None)
    assert (f"accuracy {found.accuracy or 0:.3f}" in told) == (found.accuracy is not None)
    is_sure = found.accuracy is not None and found.standard_error is not None
    assert ("± 0.125" in told) == is_sure
    assert ("pass@8 0.750" in told) == (found.pass_at_k is not None)
    warnings = [each for each in others if each.startswith("warning: ")]
    assert len(warnings) == bool(found.trained_on)
    assert all(f"{found.trained_on} of {count} held-out" in each for each in warnings)
    assert others[-1] == "step 3 is done"


def cells(table: Table) -> dict[str, list[str]]:
    """Returns the cells of each column by its header."""
    return {str(column.header): list(map(str, column.cells)) for column in table.columns}


@pytest.mark.parametrize("seed", range(20))
def test_tables_have_the_means_of_stages_and_what_two_evaluations_measured(seed: int) -> None:
    draw = random.Random(seed)
    names = ["loss", "accuracy", "mean_reward", "pass_at_k"]
    common = {"num_samples": 6, "k": 8, "temperature": draw.choice([0, 0.5])}
    first, last = (
        {"step": step, **common, **{name: draw.random() for name in names if draw.random() < 0.7}}
        for step in (0, 4)
    )
    titles = {
        "loss": "loss (nats per token)",
        "accuracy": "accuracy" if common["temperature"] else "greedy accuracy",
        "mean_reward": "mean reward",
        "pass_at_k": "pass@8",
    }
    both = [name for name in names if name in first and name in last]
    if "accuracy" in last and "mean_reward" in both:
        both.remove("mean_reward")
    assert cells(run_dir._comparison_table(first, last)) == {
        "": [titles[name] for name in both],
        "before (step 0)": [f"{first[name]:.3f}" for name in both],
        "after (step 4)": [f"{last[name]:.3f}" for name in both],
    }

    stages = ("update", "generation")
    steps = [
        {"seconds": {stage: draw.random() for stage in stages}} for _ in range(draw.randint(0, 3))
    ]
    shown = cells(seconds_table(steps))
    sums = {stage: sum(each["seconds"][stage] for each in steps) for stage in stages}
    for stage in stages:
        assert shown[stage] == [f"{sums[stage] / max(1, len(steps)):.3f}"]
    assert shown["step"] == [f"{sum(sums.values()) / max(1, len(steps)):.3f}"]


@pytest.mark.parametrize("width", [40, 90, 300])
def test_a_table_is_as_wide_as_the_console_but_at_most_120_columns(
    tmp_path: Path, width: int
) -> None:
    said = io.StringIO()
    table = Table("name", "text")
    table.add_row("a", "word " * 99)
    with Recorder(tmp_path, Config(), Console(file=said, width=width)) as made:
        made.show(table)
    widest = max(map(len, said.getvalue().splitlines()))
    assert widest == min(width, 120)


@pytest.mark.parametrize("correct", [True, False, None])
def test_an_answer_is_one_short_line_with_its_verdict(correct: bool | None) -> None:
    words = {True: "  [right]", False: "  [wrong]", None: ""}
    shown = run_dir._one_line({"response": "a\nb\r\nc", "correct": correct})
    assert shown == "a ⏎ b ⏎ c" + words[correct]
    long = run_dir._one_line({"response": "x" * 999, "correct": correct})
    assert long == "x" * 300 + words[correct]


@pytest.mark.parametrize("samples", [0, 8])
@pytest.mark.parametrize("evaluated", [[], [0], [2]])
def test_a_resumed_run_says_whether_its_first_evaluation_is_missing(
    tmp_path: Path, samples: int, evaluated: list[int]
) -> None:
    """It is what later ones are compared with."""
    config = Config()
    config.evaluation.samples = samples
    said = io.StringIO()
    (tmp_path / "evaluations.jsonl").write_text(
        "".join(json.dumps({"step": step}) + "\n" for step in evaluated)
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 4}\n')
    console = Console(file=said, width=200)
    with Recorder(tmp_path, config, console, step=4, files=("metrics",)):
        pass
    is_missing = samples > 0 and 0 not in evaluated
    assert ("evaluations.jsonl lacks step 0" in said.getvalue()) == is_missing
    assert "metrics.jsonl lacks 2 of the steps 2 to 3" in said.getvalue()


@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_a_resumed_run_keeps_the_lines_up_to_its_step(tmp_path: Path, step: int) -> None:
    make_run(tmp_path, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # a crash cut it
    said = io.StringIO()
    with recorder(tmp_path, said, step=step, run_id="two", files=("metrics",)):
        pass
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(
        range(1, step + 1)
    )
    kept = [line["step"] for line in read_lines(tmp_path / "evaluations.jsonl")]
    assert kept == [each for each in (0, 5) if step and each <= step]
    attempts = read_lines(tmp_path / "attempts.jsonl")
    assert [line["run_id"] for line in attempts] == ["group", "two"]
    assert is_run(tmp_path)
    if step:
        check_run(tmp_path)
    else:
        with pytest.raises(ConfigError) as refused:
            check_run(tmp_path)
        assert refused.value.field == "RUN_DIR"


@pytest.mark.parametrize("step", range(4))
def test_lines_that_are_kept_stay_as_they_were_written(tmp_path: Path, step: int) -> None:
    written = {}
    for name in ("metrics", "groups", "samples", "evaluations"):
        path = tmp_path / f"{name}.jsonl"
        for number in range(1, 4):
            content = {"step": number, "text": f"ä ✓ \u2028 {name}", "x": [0.1, None, 1e-9]}
            append_line(path, content)
        whole = path.read_bytes().splitlines(keepends=True)
        written[path] = b"".join(whole[:step])
        with path.open("a") as file:
            file.write('{"step": 1, "te')  # a crash cut it
    with recorder(tmp_path, io.StringIO(), step=step):
        pass
    assert {path: path.read_bytes() for path in written} == written


def test_a_damaged_line_is_an_error_unless_a_crash_cut_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ConfigError) as refused:
        read_lines(path)
    assert "line 2" in refused.value.message


def test_the_groups_of_a_step_that_are_not_kept_are_an_error(tmp_path: Path) -> None:
    folder = tmp_path / DIRECTORY
    folder.mkdir()
    for name in ("step_000003.zip", "step_000012.zip", "step_x.zip", "other.zip"):
        (folder / name).touch()
    assert recorded_steps(tmp_path) == {
        3: folder / "step_000003.zip",
        12: folder / "step_000012.zip",
    }
    with pytest.raises(ConfigError) as refused:
        read_trained(tmp_path, 5)
    assert refused.value.field == "trainer.keep_groups_mb"
    assert str(refused.value.value) == str(folder / "step_000005.zip")


_LINES = st.one_of(
    st.integers(1, 99).map(lambda step: json.dumps({"step": step})),
    st.sampled_from(['{"step": NaN}', "[1]", "{", "", "null", '{"other": 1}']),
)


@settings(max_examples=40)
@given(st.lists(_LINES, max_size=12), st.lists(st.integers(0, 200), max_size=4))
def test_a_growing_file_is_read_line_by_line_however_it_grows(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "x.jsonl"
    reader = JsonlReader(path, parsed)
    content = "".join(f"{line}\n" for line in lines)
    found: list[Any] = []
    for cut in [*sorted(cuts), len(content)]:
        path.write_text(content[:cut])
        assert not reader.replaced()
        found += reader.read()
    whole = [line.startswith("{") and line.endswith("}") for line in lines]
    good = [line for line, is_whole in zip(lines, whole, strict=True) if is_whole]
    assert [repr(each) for each in found] == [repr(json.loads(line)) for line in good]
    assert list(reader.damaged) == [i for i, is_whole in enumerate(whole, 1) if not is_whole]
    assert len(reader.problems()) == min(4, len(reader.damaged))
    steps = [each for each in map(json.loads, good) if isinstance(each.get("step"), int)]
    assert last_steps(path, 3) == steps[-3:]

    if found or reader.damaged:
        path.write_text('{"step": 1000}\n')
        assert reader.replaced()
        assert list(reader.read()) == [{"step": 1000}]
        assert not reader.damaged
