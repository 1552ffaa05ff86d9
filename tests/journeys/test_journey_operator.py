"""An operator starts the job group, watches it, loses a service, stops it, continues it, and hands
over the result."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.browser.browser import Page
from tests.support.paths import ROOT
from tests.support.processes.processes import marked
from tests.support.runs.journey import LIMIT_S, Journey

pytestmark = [pytest.mark.integration, pytest.mark.slow]
STEPS = 60


class Group:
    """`jobgroup.local` with the settings of `make demo`."""

    def __init__(self, journey: Journey, model: Path) -> None:
        self.journey, self.mark, self.output = (
            journey,
            uuid.uuid4().hex,
            journey.folder / "output.txt",
        )
        place = journey.folder
        settings = {
            **{"RUN_CONFIG": "jobgroup/configs/tiny-cpu.yaml", "MODEL_NAME": str(model)},
            **{
                "MAX_STEPS": str(STEPS),
                "RUN_DIR": str(place / "run"),
                "STATE_DIR": str(place / "state"),
            },
            **{"RLHF_CHECKPOINT__EVERY": "10", "OMP_NUM_THREADS": "1"},
        }
        self.command = [
            sys.executable,
            "-m",
            "jobgroup.local",
            "jobgroup/rlhf-math-jobgroup.yaml",
            "--follow",
            "ppo-trainer",
        ]
        self.command += [
            "--log-dir",
            str(place / "logs"),
            *(f"--env={name}={value}" for name, value in settings.items()),
        ]

    def start(self) -> "subprocess.Popen[bytes]":
        environment = {**self.journey.env, "JOURNEY_MARK": self.mark}
        with self.output.open("w") as log:
            return subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def found(self, pattern: str, process: "subprocess.Popen[bytes]") -> str:
        """Waits for a line that matches the pattern and returns its first group."""
        limit = time.monotonic() + LIMIT_S
        while (match := re.search(pattern, self.output.read_text())) is None:
            assert process.poll() is None, self.output.read_text()[-6000:]
            assert time.monotonic() < limit, (
                f"{pattern} never came: {self.output.read_text()[-6000:]}"
            )
            time.sleep(0.05)
        return match[1]


def test_a_run_is_started_watched_repaired_stopped_continued_and_handed_over(
    base_model: Path, tmp_path: Path, page: Page
) -> None:
    journey = Journey("operator", tmp_path)
    with journey.part("asks whether the machine is ready"):
        found = journey.run(f"{tmp_path}/.venv/bin/rlhf doctor || test $? -eq 1", cwd=ROOT)
        assert re.search(r"[1-9]\d* ok, \d+ warn, \d+ fail", found)
    group = Group(journey, base_model.resolve())
    first = group.start()
    try:
        with journey.part("starts the group, until the address of the dashboard"):
            token = group.found(r"API_TOKEN of this run: (\S+),", first)
            url = group.found(r"dashboard (http\S+)", first)
        with journey.part("opens the dashboard, until the first step"):
            page.open(f"{url}#token={token}", 1400)
            page.until(lambda: re.search(r"step \d", page.text(".scrubber .number")), "a step")
        page.until(lambda: page.count(".services .healthy") >= 6, "all are healthy")
        with journey.part("sees that the reward-server was killed"):
            os.kill(min(marked(group.mark, "-m services.reward")), signal.SIGKILL)
            page.until(
                lambda: "reward-server is dead" in page.text("#alarms [role=alert]"), "it is red"
            )
        with journey.part("sees it come back"):
            page.until(
                lambda: page.count(".services .healthy[data-name=reward-server]"), "it is back"
            )
            page.until(lambda: page.text("#alarms") == "", "and nothing is red")
        group.found(r"(step\s+1[1-9]/60)", first)
        with journey.part("stops it with Ctrl-C"):
            first.send_signal(signal.SIGINT)
            assert first.wait(LIMIT_S) == 130
            assert marked(group.mark) == []
        page.until(
            lambda: "does not answer since" in page.text("#alarms [role=alert]"),
            "the trainer is gone",
        )
        page.driver.get("about:blank")
        second = group.start()
        with journey.part("starts it again, until it goes on"):
            assert int(group.found(r"continuing after step (\d+)", second)) >= 10
        with journey.part("waits for the end"):
            assert second.wait(LIMIT_S) == 0, group.output.read_text()[-6000:]
            assert marked(group.mark) == []
    finally:
        for pid in marked(group.mark):
            with suppress(ProcessLookupError):  # it ended with its parent
                os.kill(pid, signal.SIGKILL)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    with journey.part("hands over a report"):
        journey.run(".venv/bin/rlhf report run")
        page.open((tmp_path / "run/report.html").as_uri(), 1000)
        page.until(lambda: "Reward" in page.charts(), "the curves in the report")
    assert page.errors() == []
