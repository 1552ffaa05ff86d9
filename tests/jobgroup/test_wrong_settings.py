"""A wrong setting ends a job group at once without restarts, and the last line is the reason."""

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from common.process.topology import WRONG_SETTING
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.processes.local_run import LocalRun

pytestmark = pytest.mark.integration

PYTHON = f"PYTHONPATH={ROOT} exec .venv/bin/python"
RESTARTS = "resources: {job_recovery: {max_restarts_on_errors: 3, recover_on_exit_codes: [78]}}"
GROUP = f"""name: small
execution: parallel
primary_tasks: [main]
---
name: main
run: sleep 600
---
name: replay-buffer
{RESTARTS}
envs: {{STATE_DIR: state}}
run: {PYTHON} -m services.replay WRONG
"""


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            "--trainer.batch_size many",
            "field: trainer.batch_size · value: many · remedy: give a value that is a valid integer",
        ),
        ("--config nothing.yaml", "field: --config · value: nothing.yaml"),
    ],
)
def test_a_wrong_setting_of_any_task_ends_the_group_at_once(
    local: "LocalRun", wrong: str, told: str
) -> None:
    status, out, _ = local.run(GROUP.replace("WRONG", wrong))
    assert status == WRONG_SETTING
    assert "replay-buffer FAILED after 0 restarts" in out
    assert told in out.rstrip().splitlines()[-1]
    assert local.marked() == []


def test_a_node_that_follows_another_leaves_it_the_time_to_say_why(local: "LocalRun") -> None:
    """The ranks of a trainer end at once when one of them has failed, which is still reporting."""
    follows = "until [ -e $FOLDER/failed ]; do sleep 0.02; done; exit 75"
    fails = "touch $FOLDER/failed; sleep 2; echo the reason; exit 78"
    script = f"if [ $SKYPILOT_NODE_RANK = 1 ]; then {follows}; fi; {fails}"
    status, out, _ = local.run(
        "name: small\nexecution: parallel\nprimary_tasks: [main]\n"
        f"---\nname: main\nnum_nodes: 2\n{RESTARTS}\nrun: |\n  {script}\n"
    )
    assert status == WRONG_SETTING, out
    assert "main-0 ended with status 78: main FAILED after 0 restarts (a setting is wrong)" in out
    assert out.rstrip().splitlines()[-1].endswith("the reason")


def test_a_wrong_variable_is_refused_before_anything_starts(local: "LocalRun") -> None:
    for word, told in (
        ("MAX_STEP=3", "did you mean MAX_STEPS?"),
        ("RLHF_TRAINER__LERNING_RATE=1", "RLHF_OPTIMIZER__LEARNING_RATE"),
        (
            "RLHF_TRAINER__BATCH_SIZE=many",
            "value: many · remedy: give a value that is a valid integer",
        ),
        ("RUN_CONFIG=nothing.yaml", "field: --config · value: nothing.yaml"),
        ("MODEL_NAME=./nothing", "field: model.name · value: ./nothing"),
    ):
        status, out, error = local.run(GROUP, "--env", word)
        assert (status, out) == (2, "")
        assert told in error
    assert not local.log("main-0")


def test_torchrun_ends_with_the_status_and_the_reason_of_the_rank(tmp_path: "Path") -> None:
    """With a missing model, the real launcher and trainer print one sentence, without the banner of
    torchrun."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "SKYPILOT_JOBGROUP_NAME": "small",
        "MODEL_NAME": "./nothing",
    }
    env |= {"JOBGROUP_HOSTS": "ppo-trainer-0.small=127.0.0.1", "RUN_DIR": str(tmp_path / "run")}
    command = [sys.executable, "-m", "trainer.launch"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == WRONG_SETTING, done.stdout
    lines = done.stdout.rstrip().splitlines()
    assert lines[-1].startswith(
        "error: there is no such directory · field: model.name · value: ./nothing · remedy: "
    )
    assert set(lines) == {lines[-1]}
