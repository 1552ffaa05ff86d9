"""The files of a run directory: what a resumed run keeps, what readers of growing files see."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from common.errors import ConfigError
from common.settings.config import Config
from tests.support.runs.run_files import make_run
from trainer.evaluation.evaluation import Answer, Evaluation
from trainer.observe import run_dir
from trainer.observe.group_files import DIRECTORY, read_trained, recorded_steps
from trainer.observe.jsonl import JsonlReader, last_steps, parsed
from trainer.observe.run_dir import Recorder, check_run, is_run, read_lines


def recorder(directory: Path, said: io.StringIO, **options: Any) -> Recorder:
    return Recorder(directory, Config(), Console(file=said, width=200), **options)


def evaluation(step: int, right: int, **more: Any) -> Evaluation:
    """An evaluation of three problems, of which the first `right` are solved."""
    answers = [
        Answer(f"p{i}", f"problem {i}", "1", f"response {i} of {step}", i < right, float(i < right))
        for i in range(3)
    ]
    return Evaluation(step, right / 3, 0.1, 3, None, 8, answers, **more)


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
    assert told.count("response 1 of 0") == told.count("response 1 of 4") == 1


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
