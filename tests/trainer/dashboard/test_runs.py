"""Run directories are read as they grow, whatever their state."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError, NotFound
from tests.support.errors import raises
from tests.support.runs.run_files import evaluation, line, make_run, write
from trainer.dashboard.columns import step_numbers
from trainer.dashboard.run_list import RunList
from trainer.dashboard.runs import RunReader
from trainer.dashboard.verdict import verdict
from trainer.observe.catalogue import ALARMS
from trainer.observe.jsonl import JsonlReader, parsed


def test_every_whole_line_of_a_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\ndamaged\n{"step": 3}\n{"step": 10')
    reader = JsonlReader(path, parsed)
    assert [content["step"] for content in reader.read()] == [1, 3]
    assert list(reader.damaged) == [2]
    with path.open("a") as file:
        file.write("01}\n")
    assert list(reader.read()) == [{"step": 1001}]
    assert list(reader.read()) == []


def test_a_file_that_is_rewritten_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [f'{{"step": {step}}}\n' for step in range(1, 1001)]
    path.write_text("".join(lines))
    reader = JsonlReader(path, parsed)
    for content in reader.read():
        if content["step"] == 901:
            break
    assert not reader.replaced()
    path.write_text("".join([*lines[:900], '{"step": 901, "again": true}\n', *lines[950:]]))
    assert reader.replaced()
    assert len(list(reader.read())) == 951


def test_problems_that_no_answer_solves_are_named(tmp_path: Path) -> None:
    run = RunReader(make_run(tmp_path, 3))
    path = tmp_path / "ground_truths.json"

    path.write_text(json.dumps({"checked": 40, "unsolvable": {}}))
    assert run.problems == []

    path.write_text(json.dumps({"checked": 40, "unsolvable": {"row 7": "'[': it cannot be read"}}))
    assert run.problems == ["40 ground truths; 1 cannot be graded: row 7 ('[': it cannot be read)"]

    path.write_text("[]")
    assert run.problems[0].startswith("ground_truths.json cannot be read")


def test_new_steps_are_sent_and_known_ones_are_not(tmp_path: Path) -> None:
    run = RunReader(make_run(tmp_path, 3))
    first = run.series()
    assert (first["steps"].tolist(), len(first["evaluations"])) == ([1, 2, 3], 2)
    assert run.series(first["generation"]) == {"generation": first["generation"]}
    write(tmp_path / "metrics.jsonl", [line(4), line(5)], "a")
    more = run.series(first["generation"])
    assert more["steps"].tolist() == [1, 2, 3, 4, 5]
    assert more["columns"]["reward"].tolist()[3:] == [
        np.float32(line(step)["reward"]) for step in (4, 5)
    ]
    assert more["columns"]["tokens_total"].tolist() == [700, 1400, 2100, 2800, 3500]
    write(tmp_path / "evaluations.jsonl", [evaluation(5, 0.95)], "a")
    assert len(run.series(more["generation"])["evaluations"]) == 3


def test_old_lines_are_not_read_again(tmp_path: Path) -> None:
    path = make_run(tmp_path, 2000) / "metrics.jsonl"
    read: list[bytes] = []

    def counting(line: bytes) -> dict[str, Any]:
        read.append(line)
        return parsed(line)

    reader = JsonlReader(path, counting)
    assert len(list(reader.read())) == 2000
    read.clear()
    write(path, [line(2001)], "a")
    assert [content["step"] for content in reader.read()] == [2001]
    assert len(read) == 1


def test_ten_thousand_steps_are_thinned_to_fit_a_chart_and_spikes_stay(tmp_path: Path) -> None:
    make_run(tmp_path, 10_000)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines[6999] = json.dumps(line(7000, reward=50.0, alarms={"kl_rollout": "far away"}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = RunReader(tmp_path)
    series = run.series(points=600)
    assert len(series["steps"]) == 600
    assert series["steps"][-1] == 10_000
    at = int(np.searchsorted(series["steps"], 7000))
    assert series["high"]["reward"][at] == 50
    assert series["low"]["reward"][at] <= 1 < series["columns"]["reward"][at] < 50
    assert series["columns"]["alarm.kl_rollout"][at] == 1
    assert np.nansum(series["columns"]["alarm.kl_rollout"]) == 1
    near = run.series(first=6990, last=7010, points=600)
    assert near["steps"].tolist() == list(range(6990, 7011))
    assert "high" not in near
    detail = run.step(7000)
    assert (detail["numbers"]["reward"], detail["notes"]) == (
        50,
        [{"kind": "alarm", "text": "far away"}],
    )


def test_a_resumed_run_begins_again_where_it_was_cut(tmp_path: Path) -> None:
    run = RunReader(make_run(tmp_path, 30))
    before = run.series()
    (tmp_path / "again").write_text("")
    write(tmp_path / "again", [line(step, reward=-1.0) for step in range(1, 41)])
    (tmp_path / "again").replace(
        tmp_path / "metrics.jsonl"
    )  # as the recorder does; the new file even has more lines
    after = run.series(before["generation"])
    assert after["steps"].tolist() == list(range(1, 41))
    assert set(after["columns"]["reward"].tolist()) == {-1.0}
    assert len(after["evaluations"]) == 2


def test_lines_of_an_attempt_that_was_undone_do_not_count(tmp_path: Path) -> None:
    run = RunReader(make_run(tmp_path, 5))
    generation = run.series()["generation"]
    write(tmp_path / "metrics.jsonl", [line(3, reward=7.0)], "a")
    series = run.series(generation)
    assert (series["steps"].tolist(), series["columns"]["reward"][-1]) == ([1, 2, 3], 7)
    assert run.step(3)["numbers"]["reward"] == 7
    with pytest.raises(NotFound):
        run.step(4)


def test_an_empty_directory_opens_and_says_what_is_missing(tmp_path: Path) -> None:
    run = RunReader(tmp_path)
    assert run.problems == [
        "config.json is missing: the settings of this run are not known",
        "metrics.jsonl is missing: no step was recorded",
    ]
    assert run.series()["steps"].tolist() == []
    assert run.summary().step is None
    assert run.facts()["config"] is None
    make_run(tmp_path, 2)  # the run starts to write
    assert run.problems == []
    assert run.series()["steps"].tolist() == [1, 2]


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, field="RUN_DIR"):
        RunReader(tmp_path / "absent")


def test_damaged_and_half_written_files_open_with_what_is_there(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"step": 3, "rew\n'
            + b"[1]\n"
            + b"\xff\xfe\n"
            + json.dumps(line(4)).encode()
            + b'\n{"step": 5'
        )
    (tmp_path / "config.json").write_text('{"seed": ')
    run = RunReader(tmp_path)
    assert run.series()["steps"].tolist() == [1, 2, 4]
    problems = run.problems
    assert problems[0].startswith("config.json cannot be read")
    assert problems[1].startswith("line 3 of metrics.jsonl is damaged and left out: ")
    assert problems[2] == "line 4 of metrics.jsonl is damaged and left out: it is not an object"
    assert problems[3].startswith("line 5 of metrics.jsonl")
    assert len(problems) == 4
    write(tmp_path / "metrics.jsonl", [], "a")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b', "reward": 0.5}\n')
    assert run.series()["columns"]["reward"].tolist()[-1] == 0.5


def test_the_numbers_in_lines_of_another_version_are_read(tmp_path: Path) -> None:
    make_run(tmp_path, 1)
    strange = {
        "step": 2,
        "reward": "high",
        "update": 3,
        "new": {"deep": 1.5, "flag": True},
        "alarms": ["x"],
        "huge": 1e300,
    }
    nothing = float("nan")
    write(
        tmp_path / "metrics.jsonl",
        [strange, {"no": "step"}, {"step": nothing}, {"step": 3, "reward": nothing}],
        "a",
    )
    columns = RunReader(tmp_path).series()["columns"]
    assert columns["new.deep"].tolist()[1] == 1.5
    assert "new.flag" not in columns
    assert "huge" not in columns
    assert np.isnan(columns["reward"][1:]).all()
    assert columns["update"].tolist()[1] == 3
    assert RunReader(tmp_path).series()["steps"].tolist() == [1, 2, 3]


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    assert "metrics.jsonl cannot be read: Is a directory" in RunReader(tmp_path).problems


def test_sums_are_added_to_a_line() -> None:
    found = step_numbers(
        line(1, dropped={"generation": 2, "stale": 3}, alarms={"kl_rollout": "text"})
    )
    assert (found["seconds"], found["dropped"], found["tokens_per_s"]) == (4.0, 5, 175)
    assert (found["alarms"], found["alarm.kl_rollout"]) == (1, 1)


def test_a_step_without_trained_tokens_has_no_rate() -> None:
    assert "tokens_per_s" not in step_numbers(line(1, update={"trained_tokens": 0}))


def test_data_is_where_the_prompts_came_from(tmp_path: Path) -> None:
    """A caller's own rows leave `data.source` at its default."""
    directory = make_run(tmp_path, 2)
    (directory / "config.json").write_text('{"data": {"source": "gsm8k"}}')
    assert RunReader(directory).summary().data == "gsm8k"
    write(directory / "attempts.jsonl", [{"run_id": "group", "step": 0, "data": "rows"}])
    assert RunReader(directory).summary().data == "rows"


def test_held_out_is_the_newest_evaluation_whatever_it_measured(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 2, accuracy=None)
    write(
        directory / "evaluations.jsonl",
        [{"step": step, "accuracy": None, "mean_reward": 0.25 * step} for step in (0, 2)],
    )
    assert RunReader(directory).summary().held_out == {"step": 2, "mean_reward": 0.5}
    (directory / "evaluations.jsonl").unlink()
    assert RunReader(directory).summary().held_out is None


def test_limits_are_those_of_the_alarms(tmp_path: Path) -> None:
    make_run(tmp_path, 1)
    limit = RunReader(tmp_path).facts()["limits"]["update.kl_rollout"]
    assert limit == {"alarm": "kl_rollout", "value": ALARMS["kl_rollout"].limit, "above": True}
    (tmp_path / "config.json").write_text(json.dumps({"trainer": {"max_staleness": 2}}))
    assert RunReader(tmp_path).facts()["limits"]["update.kl_rollout"]["value"] == 1e-2


def test_evaluations_come_without_their_answers(tmp_path: Path) -> None:
    make_run(tmp_path, 3)
    run = RunReader(tmp_path)
    assert [sorted(each) for each in run.series()["evaluations"]] == [
        ["accuracy", "k", "num_samples", "standard_error", "step", "time"]
    ] * 2


@pytest.mark.parametrize(
    ("reward", "level"),
    [
        (np.linspace(0.1, 0.9, 60), "good"),
        (np.full(60, 0.25), "warn"),
        (np.zeros(60), "warn"),
        (np.full(60, 1.0), "good"),
        (np.concatenate([np.linspace(0.1, 0.9, 40), np.full(20, 0.15)]), "bad"),
        (np.linspace(0.1, 0.9, 5), "none"),
        (np.array([]), "none"),
        (np.full(60, np.nan), "none"),
    ],
)
def test_one_sentence_says_whether_it_learns(reward: np.ndarray, level: str) -> None:
    noise = (
        0.02 * np.random.default_rng(0).standard_normal(len(reward)) if len(set(reward)) > 1 else 0
    )
    assert verdict(reward + noise, reward)["level"] == level


def test_the_cost_counts_the_gpus_of_every_step(tmp_path: Path) -> None:
    """Each step takes 4 s (eight stages of 0.5 s)."""
    assert RunReader(make_run(tmp_path / "cpu", 9, gpus=0)).summary().gpu_hours == 0
    assert RunReader(make_run(tmp_path / "unknown", 9, gpus=None)).summary().gpu_hours is None
    assert RunReader(make_run(tmp_path / "older", 9)).summary().gpu_hours is None
    directory = make_run(tmp_path / "moved", 450, gpus=8)
    write(directory / "metrics.jsonl", [line(step, gpus=4) for step in range(451, 901)], "a")
    found = RunReader(directory).summary()
    assert (found.hours, found.gpu_hours) == (1.0, 6.0)


def test_the_csv_has_every_number_of_every_step_whatever_its_name(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 2)
    odd = {'a,"b"\n': 2.5, "=1+1": 1e-7}
    write(directory / "metrics.jsonl", [line(step, logged=odd) for step in range(3, 1003)], "a")
    run = RunReader(directory)
    rows = list(csv.reader(io.StringIO(run.csv(), newline="")))
    assert [row[0] for row in rows] == ["step", *map(str, range(1, 1003))]
    assert {len(row) for row in rows} == {len(rows[0])}
    first, last = (dict(zip(rows[0], row, strict=True)) for row in (rows[1], rows[-1]))
    assert float(last["reward"]) == line(1002)["reward"]
    assert float(last['logged.a,"b"\n']) == 2.5
    assert float(last["logged.=1+1"]) == 1e-7  # a name never starts a cell with a formula
    assert first["logged.=1+1"] == ""


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = RunList([make_run(tmp_path / where / "run", 1) for where in ("one", "two")])()
    assert len({run.name for run in runs}) == 2
