"""Recorded answers are graded again: by the same reward to the bit, by another one with what it
would have changed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from common.errors import ConfigError
from common.settings.config import Config
from tests.support.paths import ROOT
from tests.support.runs.audits import audited
from tests.support.runs.in_process import metrics, quiet
from tests.support.runs.recorded_groups import group, record, trained
from trainer.dashboard.app import create_dashboard_app
from trainer.dashboard.run_list import RunList
from trainer.observe.group_files import read_group
from trainer.observe.regrades import read_regrades
from trainer.start.in_process import train_in_process
from trainer.what_if.regrade import main, read_golds

OWN = """
def long(completions, **_):
    return [float(len(completion) > 8) for completion in completions]
"""


def written(directory: Path, **settings: Any) -> Path:
    """Returns a run of two steps: two right answers that say 5, two wrong ones, a dropped group."""
    texts = ["It is #### 5", "#### 5", "#### 6", "no number"]
    first = group(1, [1.0, 1.0, 0.0, 0.0], texts)
    second = group(2, [1.0, 1.0, 0.0, 0.0], texts, prompt="How many more?")
    for item in (first, second):
        for completion in item.completions:
            completion.components = {"math": completion.reward}
    record(directory, [[trained(first)], [trained(second)]])
    content = {"reward": {"functions": ["math"]}, "data": {"source": "tiny"}} | settings
    (directory / "config.json").write_text(json.dumps(content))
    line = {"step": 2, "total_steps": 2, "reward": 0.5, "seconds": {"update": 1.0}}
    (directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return directory


@pytest.mark.integration
@pytest.mark.slow
def test_the_reward_of_the_run_gives_every_recorded_grade_again(
    base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = audited(base_model, tmp_path / "run")
    train_in_process(config, quiet())
    main([str(tmp_path / "run")])
    assert "64 answers of 4 steps" in capsys.readouterr().out
    assert read_regrades(tmp_path / "run") == {}

    # A recorded reward whose last bit is another one is no longer equal.
    assert sum(line["accuracy"] for line in metrics(config)) > 0, "nothing is right"
    weight = '[{"name": "math", "weight": 1.0000000000000002}]'
    main([str(tmp_path / "run"), "--set", f"reward.functions={weight}"])
    assert "reward higher" in capsys.readouterr().out


@pytest.mark.integration
@pytest.mark.slow
def test_a_function_in_a_file_and_what_it_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = written(tmp_path / "run")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "json.py").write_text("")  # not that of the library
    main([str(run), "--reward", str(tmp_path / "own.py")])

    said = capsys.readouterr().out
    assert "8 answers of 2 steps" in said
    assert "4 grades change" in said
    regrades = read_regrades(run)
    assert [regrade.changed for regrade in regrades.values()] == [2, 2]
    # "#### 5" is too short for a reward now, and "no number" long enough.
    rewards = [grade.reward for grade in regrades[1, "group-1"].grades.values()]
    assert rewards == [1.0, 0.0, 0.0, 1.0]
    assert all(grade.correct is None for grade in regrades[1, "group-1"].grades.values())


@pytest.mark.integration
@pytest.mark.slow
def test_a_corrected_answer_turns_verdicts_and_the_dashboard_finds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "run")
    gold = tmp_path / "gold.jsonl"
    gold.write_text(json.dumps({"question": "How many more?", "answer": "so #### 6"}) + "\n")
    main([str(run), "--gold", str(gold)])

    said = capsys.readouterr().out
    assert "right → wrong" in said
    assert "wrong → right" in said
    assert "1 of 1 corrected answers" in said
    client = TestClient(create_dashboard_app(RunList([run])))
    rows = client.get("/dashboard/api/groups?error=regraded").json()["groups"]
    assert [(row["id"], row["regraded"]["changed"]) for row in rows] == [("group-2", 3)]
    rows = client.get("/dashboard/api/groups").json()["groups"]
    assert [row["regraded"] is None for row in rows] == [False, True]
    answers = client.get("/dashboard/api/groups/group-2").json()["completions"]
    assert [answer["regraded"]["correct"] for answer in answers] == [False, False, True, False]

    gold.write_text(gold.read_text() + json.dumps({"id": "unknown", "answer": "6"}) + "\n")
    main([str(run), "--gold", str(gold)])
    assert "1 of 2 corrected answers are of recorded problems; not asked: unknown" in (
        capsys.readouterr().out
    )
    gold.write_text(json.dumps({"id": "unknown", "answer": "6"}) + "\n")
    with pytest.raises(ConfigError) as caught:
        main([str(run), "--gold", str(gold)])
    assert (caught.value.field, caught.value.value) == ("--gold", "unknown")


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        (
            "g.jsonl",
            '{"id": 7, "answer": 1018.0}\n{"id": "8", "answer": "9"}',
            {"7": "1018", "8": "9"},
        ),
        ("g.jsonl", '{"prompt_id": "p", "ground_truth": "so\\n#### 1,018"}', {"p": "1018"}),
        ("g.json", '[{"id": "p", "answer": ["9"]}, {"id": "p", "answer": 9}]', {"p": "9"}),
        ("g.csv", '\ufeffid,note,answer\r\np,"a, b",9\r\n', {"p": "9"}),
        ("g.csv", 'id,question,answer\n,"How, now?",9\n', {"How, now?": "9"}),
    ],
)
def test_corrected_answers_are_read_as_data_sets_are(
    name: str, content: str, wanted: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(content, newline="")
    assert read_golds(file, Config()) == wanted


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("g.jsonl", '{"id": "p", "answer": 9}\n{"id": "p", "answer": 8}', "line 2: 'p' has"),
        ("g.jsonl", "", "has no rows"),
        ("g.csv", "id,answer\n", "has no rows"),
        ("g.csv", "id,answer\np,\n", "line 2: column 'answer' is empty"),
        ("g.jsonl", '{"id": null, "answer": "9"}', "column 'id' is None"),
        ("g.jsonl", '{"id": "p", "answer": {"a": 9}}', "not a text or a number"),
        ("g.jsonl", '{"name": "p", "answer": 9}', "no column 'id'; there are name, answer"),
    ],
)
def test_corrected_answers_that_say_nothing_are_refused(
    name: str, content: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_golds(file, Config())
    assert said in caught.value.message
    assert caught.value.field == "--gold"


@pytest.mark.integration
@pytest.mark.slow
def test_the_last_answer_of_an_episode_is_graded_where_the_run_recorded_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "run", environment={"name": "python:own:Environment"})
    main([str(run)])
    assert "8 answers cannot be" in capsys.readouterr().out

    content = read_group(run, 1, 0)
    assert content is not None
    alone = group(3, [1.0, 0.0], ["a tool, then #### 5", "a tool, then #### 6"])
    for index, completion in enumerate(alone.completions):
        completion.components = {}
        completion.episode = index
        completion.extracted_answer = completion.text[-6:]
    record(run, [[trained(alone)]], done=2)
    main([str(run)])
    said = capsys.readouterr().out
    assert "2 answers of 3 steps graded again by math" in said
    assert "0 grades change" in said


@pytest.mark.integration
@pytest.mark.slow
def test_the_data_of_the_settings_is_not_that_of_prompts_that_a_program_gave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = written(tmp_path / "run", data={"source": "gsm8k"})
    attempt = {"run_id": "demo", "step": 0, "data": "rows of the caller"}
    (run / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    (tmp_path / "given.py").write_text(OWN)
    main([str(run), "--reward", str(tmp_path / "given.py")])
    assert "the run had rows of the caller" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--set", "trainer.max_steps=3"], "--set"),
        (["--reward", "none.py"], "--reward"),
        (["--reward", "own.py:short"], "--reward"),
        (["--reward", "nothing"], "reward.functions"),
        (["--gold", "none.jsonl"], "--gold"),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path, words: list[str], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    with pytest.raises(ConfigError) as caught:
        main([str(written(tmp_path / "run")), *words])
    assert (caught.value.field or "").startswith(field)
    assert caught.value.remedy


@pytest.mark.integration
@pytest.mark.slow
def test_no_torch_is_imported(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    code = (
        "import sys; from trainer.what_if.regrade import main, read_golds; "
        f"main([{str(run)!r}]); assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=True)
