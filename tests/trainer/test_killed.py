"""A run that is killed at any moment and restarted equals a run that was never killed."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from common.wire.codec import decode_groups
from tests.support.paths import ROOT
from trainer.observe.run_dir import read_lines

pytestmark = pytest.mark.integration

STEPS = 6
MOMENTS = (
    r"os\.mkdir .*/v000001\.partial",  # step 1 is trained, its weights are about to be published
    r"open w .*/step_000002\.partial/",  # while the first checkpoint is being written
    # the first checkpoint exists, the next weights are about to be published
    r"os\.mkdir .*/v000003\.partial",
    r"open a .*/metrics\.jsonl",  # step 3 is trained and acknowledged, but not recorded
    r"os\.rename .*/metrics\.jsonl\.partial",  # while the lines of lost steps are being removed
    r"os\.rename .*/step_000004\.partial",  # between step 4 and its checkpoint
    r"os\.rename .*/step_000006\.partial",  # evaluated at the end, but not saved
)


def train(model: Path, base: Path, moments: tuple[str, ...], *more: str) -> list[str]:
    """Returns the outcome of every attempt: first of the run that is not killed, then of the one
    that is."""
    command = [
        *(sys.executable, "-m", "tests.support.workers.killed_run", str(base), ",".join(moments)),
        *("--config", "jobgroup/configs/tiny-cpu.yaml", "--model.name", str(model)),
        *(
            "--trainer.batch_size",
            "4",
            "--trainer.max_steps",
            str(STEPS),
            "--sampling.group_size",
            "4",
        ),
        *(
            "--evaluation.samples",
            "4",
            "--evaluation.pass_samples",
            "2",
            "--evaluation.every",
            "3",
        ),
        *(
            "--checkpoint.every",
            "2",
            "--checkpoint.keep",
            "1",
            "--reward.workers",
            "1",
        ),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *more], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def positions(directory: Path) -> list[int]:
    with closing(sqlite3.connect(directory / "state" / "replay" / "replay.db")) as db:
        return sorted(row[0] for row in db.execute("SELECT position FROM groups"))


def told(directory: Path, name: str) -> list[dict[str, Any]]:
    return read_lines(directory / "run" / f"{name}.jsonl")


def stored(directory: Path) -> set[tuple[int, str, str]]:
    """Position, prompt and tokens of the groups in the replay store, which also keeps those of lost
    steps."""
    with closing(sqlite3.connect(directory / "state" / "replay" / "replay.db")) as db:
        blobs = [row[0] for row in db.execute("SELECT data FROM blobs")]
    groups = [decode_groups(b"\x81\xa6groups\x91" + blob)[0] for blob in blobs]
    return {
        (g.position, g.prompt_id, str([c.token_ids.tolist() for c in g.completions]))
        for g in groups
    }


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param((MOMENTS[5],), id="one"),
        pytest.param(MOMENTS, id="all", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_at_any_moment_equals_an_unbroken_one(
    base_model: Path, tmp_path: Path, moments: tuple[str, ...]
) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert train(base_model, tmp_path, moments) == [
        " 0",
        *(f"{moment} -9" for moment in moments),
        " 0",
    ]
    assert [line["step"] for line in told(broken, "metrics")] == list(range(1, STEPS + 1))
    for a, b in zip(told(unbroken, "metrics"), told(broken, "metrics"), strict=True):
        for name in (
            "reward",
            "accuracy",
            "zero_variance_groups",
            "staleness",
            "completion_tokens",
            "truncated",
            "dropped",
        ):
            assert a[name] == b[name]
        assert a["update"] == pytest.approx(b["update"], abs=1e-4)
    for name, columns in (
        ("samples", ("step", "prompt_id")),
        ("evaluations", ("step", "accuracy", "pass_at_k")),
    ):
        one, other = (
            [[line[c] for c in columns] for line in told(place, name)]
            for place in (unbroken, broken)
        )
        assert one == other
    assert stored(broken) == stored(unbroken)  # no prompt is skipped, and all completions are equal


@pytest.mark.slow
def test_a_killed_run_reuses_no_experience_of_lost_steps(base_model: Path, tmp_path: Path) -> None:
    """Before the first checkpoint, the run also recognises its own experience as its own."""
    moments = (r"open w .*/step_000002\.partial/", r"os\.rename .*/step_000004\.partial")
    attempts = train(
        base_model,
        tmp_path,
        moments,
        "--replay.reuse_ratio",
        "0.5",
        "--replay.max_times_sampled",
        "2",
    )
    assert attempts == [" 0", *(f"{moment} -9" for moment in moments), " 0"]
    broken = told(tmp_path / "broken", "metrics")
    unbroken = told(tmp_path / "unbroken", "metrics")
    reused = [(line["step"], line["reused_groups"]) for line in broken]
    # Groups of equal rewards are not reused.
    assert reused == [(line["step"], line["reused_groups"]) for line in unbroken]
    chosen = [
        [
            [group["position"] for group in line["groups"] if group["reused"]]
            for line in told(tmp_path / name, "groups")
        ]
        for name in ("unbroken", "broken")
    ]
    assert chosen[0] == chosen[1], "draws of lost steps count"
    assert max(count for _, count in reused) == 2
    assert positions(tmp_path / "broken") == list(range(2 * STEPS))  # every prompt once
