"""A real job group is diagnosed while one of its ranks is stopped, after that rank was killed, and when it has ended."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.processes.local_run import LocalRun
from trainer.observe import catalogue

pytestmark = [pytest.mark.integration, pytest.mark.slow]
GROUP = (ROOT / "jobgroup" / "rlhf-math-jobgroup.yaml").read_text(encoding="utf-8")
SETTINGS = {
    "RUN_CONFIG": str(ROOT / "jobgroup" / "configs" / "tiny-cpu.yaml"),
    "MAX_STEPS": "1000",
    "RLHF_EVALUATION__SAMPLES": "0",
    # On a busy machine, rank 1 may be stopped for longer than the default before it is diagnosed.
    "RLHF_LIMITS__LOST_AFTER_S": "3600",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def group(tmp_path: Path, base_model: Path) -> Iterator[LocalRun]:
    run = LocalRun(tmp_path)
    words = [f"--env={name}={value}" for name, value in SETTINGS.items()]
    words += [f"--env=RUN_DIR={tmp_path / 'run'}", f"--env=MODEL_NAME={base_model}"]
    text = GROUP.replace("workdir: .", f"workdir: {ROOT}")
    run.start(text, *words, "--num-nodes", "rollout-server=1", stdout=subprocess.DEVNULL)
    yield run
    for process in run.marked():
        process.kill()
    assert run.process is not None
    assert run.process.stderr is not None
    run.process.stderr.close()
    run.process.wait()


def steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def diagnose(group: LocalRun) -> dict[str, object]:
    command = [sys.executable, "-m", "trainer.diagnose", str(group.folder / "run"), "--json"]
    command += ["--logs", str(group.logs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    report: dict[str, object] = json.loads(done.stdout)
    return report


def rank_one(group: LocalRun) -> psutil.Process:
    """Returns the second rank, which is the only process of its node that torchrun started."""
    found = []
    for process in group.marked():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            environment = process.environ()
            if environment.get("RANK") == "1" and "LOCAL_RANK" in environment:
                found.append(process)
    (rank,) = found
    return rank


def test_a_stuck_a_killed_and_an_interrupted_run_are_told_apart(group: LocalRun) -> None:
    run_dir = group.folder / "run"
    group.wait_for(lambda: steps(run_dir) >= 2)
    # On a busy machine, a step may take longer than usual for a while.
    group.wait_for(lambda: str(diagnose(group)["first_line"]).startswith("nothing is wrong: "))

    rank = rank_one(group)
    rank.send_signal(signal.SIGSTOP)
    group.wait_for(lambda: str(diagnose(group)["first_line"]).startswith(catalogue.RANK_STUCK))
    rank.send_signal(signal.SIGCONT)

    rank.kill()
    report = run_dir / "diagnosis.txt"
    group.wait_for(lambda: f"({report})" in group.log("ppo-trainer-0"))  # the last line of rank 0
    assert report.read_text().startswith(f"{catalogue.RANK_DIES}: rank 1 on ppo-trainer-1")

    assert group.process is not None
    group.process.terminate()
    group.finish()
    last = diagnose(group)
    assert last["state"] == "ended"
    assert str(last["first_line"]).startswith((catalogue.INTERRUPTED, catalogue.RANK_DIES))
