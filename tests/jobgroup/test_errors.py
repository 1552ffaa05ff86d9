"""Wrong YAML and wrong options end with status 2 and a message that names field, value and
remedy."""

import os
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.process.run_lock import RunLock
from jobgroup import spec
from jobgroup.local import __main__ as local

GOOD = "name: small\nexecution: parallel\nprimary_tasks: [main]\n---\nname: main\nrun: echo ran > ran\n"


def _load(folder: Path, text: str) -> spec.JobGroup:
    (folder / "group.yaml").write_text(text)
    return spec.load(folder / "group.yaml")


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ("execution: parallel\n", "", "execution", "one after the other"),
        ("execution: parallel", "execution: serial", "header.execution", "parallel"),
        ("name: small", "name: Small_Group", "header.name", "pattern"),
        (
            "name: small\n",
            "name: small\ntermination_dely: 3s\n",
            "header.termination_dely",
            "the known fields are name",
        ),
        ("name: small\n", "name: small\ntermination_delay: soon\n", "termination_delay", "10s"),
        (
            "name: small\n",
            "name: small\ntermination_delay: {mian: 1s}\n",
            "termination_delay",
            "the tasks are main",
        ),
        ("[main]", "[mian]", "primary_tasks", "the tasks are main"),
        ("run: echo", "rum: echo", "main.rum", "the known fields are"),
        ("run: echo ran > ran\n", "setup: x\n", "main.run", "it is missing"),
        ("name: main\n", "name: main\nnum_nodes: 0\n", "main.num_nodes", "equal to 1"),
        ("name: main\n", "name: main\nnum_nodes: many\n", "main.num_nodes", "a valid integer"),
        ("name: main\n", "name: main\nworkdir: nowhere\n", "main.workdir", "does not exist"),
        ("name: main\n", "name: main\nenvs: {A: }\n", "main.envs", "--env A="),
        ("name: main\n", "name: main\nenvs: {A-B: 1}\n", "main.envs", "not the name of a variable"),
        (
            "run: echo",
            "envs: {STATE_DRI: /state}\nrun: python -m services.data; echo",
            "main.envs",
            "did you mean STATE_DIR?",
        ),
        (
            "run: echo",
            "envs: {RLHF_DATA__SORCE: x}\nrun: python -m services.data; echo",
            "main.envs",
            "did you mean RLHF_DATA__SOURCE?",
        ),
        (
            "name: main\n",
            "name: main\nresources: {job_recovery: {max_restart_on_errors: 3}}\n",
            "main.job_recovery.max_restart_on_errors",
            "did you mean max_restarts_on_errors?",
        ),
        ("name: main\n", "name: main\nsecrets: {NOT_SET_ANYWHERE: }\n", "main.envs", "--secret"),
        (
            "name: main\n",
            "name: main\nresources: {accelerators: 'H100:x'}\n",
            "main.accelerators",
            "H100:1",
        ),
        (
            "name: main\n",
            "name: main\nresources: {job_recovery: {max_restarts_on_errors: -1}}\n",
            "main.job_recovery.max_restarts_on_errors",
            "equal to 0",
        ),
        ("---\nname: main", "---\nname: main\nrun: x\n---\nname: main", "name", "same name"),
        ("---\n", "---\n- list\n---\n", "YAML", "mapping"),
        ("name: main\n", "name: [main\n", "YAML", "cannot be read"),
    ],
)
def test_a_wrong_yaml_is_refused_by_name(
    tmp_path: Path, old: str, new: str, field: str, words: str
) -> None:
    assert _load(tmp_path, GOOD).tasks[0].run == "echo ran > ran"
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, GOOD.replace(old, new, 1))
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--follow", "mian"], ["--follow", "mian", "the tasks are main"]),
        (["--num-nodes", "mian=2"], ["--num-nodes", "mian", "the tasks are main"]),
        (["--num-nodes", "main=0"], ["--num-nodes", "main=0", "TASK=N"]),
        (["--log-dir", ""], ["--log-dir", "leave it out"]),
        (["--clear", ""], ["--clear", "leave it out"]),
        (["--num-nodes", "main"], ["--num-nodes", "TASK=N"]),
        (["--env", "=3"], ["--env", "not the name of a variable"]),
        (["--env", "NOT_SET_ANYWHERE"], ["--env", "NOT_SET_ANYWHERE=VALUE"]),
        (["--secret", "1A=3"], ["--secret", "1A"]),
        (["--grace", "never"], ["--grace", "never", "10s"]),
        (["--log-dir", "group.yaml/logs"], ["--log-dir", "group.yaml/logs"]),
        (["--env", "RUN_DIR=group.yaml/run"], ["field: RUN_DIR", "value: group.yaml/run"]),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "group.yaml").write_text(GOOD)
    with pytest.raises(SystemExit) as caught:
        local.main(["group.yaml", *arguments])
    assert caught.value.code == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert all(word in error for word in words), error
    assert not (tmp_path / "ran").exists()


ONE_NODE = ["services.data", "services.reward", "services.replay"]
SEVERAL = ["services.rollout", "services.environment", "trainer.launch", "trainer.tinker"]


@pytest.mark.parametrize("module", ONE_NODE)
def test_a_service_whose_callers_know_one_node_has_no_second_one(
    tmp_path: Path, module: str
) -> None:
    text = GOOD.replace("run: echo ran > ran", f"run: exec python -m {module}")
    for more, given, field in (
        ("num_nodes: 2\n", {}, "num_nodes"),
        ("", {"main": 3}, "--num-nodes"),
    ):
        (tmp_path / "group.yaml").write_text(text + more)
        with pytest.raises(ConfigError) as caught:
            spec.load(tmp_path / "group.yaml", num_nodes=given)
        assert caught.value.field == field
        assert (caught.value.value or "").startswith("main=")
        assert caught.value.remedy
    assert spec.load(tmp_path / "group.yaml", num_nodes={"main": 1}).tasks[0].num_nodes == 1


@pytest.mark.parametrize("module", SEVERAL)
def test_other_tasks_may_have_several_nodes(tmp_path: Path, module: str) -> None:
    text = GOOD.replace("run: echo ran > ran", f"run: exec python -m {module}")
    assert _load(tmp_path, f"{text}num_nodes: 2\n").tasks[0].num_nodes == 2


def test_a_run_directory_in_use_is_refused_with_the_process_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "group.yaml").write_text(GOOD)
    for held in ("run", "run/logs"):  # by a trainer, and by another job group that starts
        with RunLock(tmp_path / held, "first"), pytest.raises(SystemExit):
            local.main(["group.yaml", "--env", "RUN_DIR=run", "--log-dir", "elsewhere"])
        error = capfd.readouterr().err
        assert f"run first (process {os.getpid()} on " in error
        assert "field: RUN_DIR" in error
        assert not (tmp_path / "ran").exists()


def test_a_task_of_the_user_may_declare_any_variable(tmp_path: Path) -> None:
    made = _load(tmp_path, f"{GOOD}envs: {{STATE_DRI: /state, SEEDS: 3}}\n")
    assert made.tasks[0].env == {"STATE_DRI": "/state", "SEEDS": "3"}


def test_a_file_that_is_no_job_group_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.yaml").write_text("name: task\nrun: echo\n")
    for path in (tmp_path / "task.yaml", tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(SystemExit) as caught:
            local.main([str(path)])
        assert caught.value.code == 2
        assert str(path) in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10s", 10),
        ("1m", 60),
        ("1.5m", 90),
        ("2h", 7200),
        (7, 7),
        ("7", 7),
        ("0s", 0),
        ("1d", 86400),
    ],
)
def test_durations_are_read_as_skypilot_reads_them(text: str | int, expected: float) -> None:
    assert spec.seconds(text, "termination_delay") == expected
