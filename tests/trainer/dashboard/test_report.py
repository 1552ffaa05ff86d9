"""The report: a single file that needs nothing else."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from tests.support.browser.browser import Page
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.runs.run_files import evaluation, line, make_run, write
from trainer.cli.report import main
from trainer.dashboard.runs import RunReader
from trainer.observe.metrics import METRICS

pytestmark = pytest.mark.integration


def test_a_report_of_a_real_run_shows_what_the_page_does(
    page: Page, tiny_run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "elsewhere" / "report.html"
    path.parent.mkdir()
    main([str(tiny_run), "--output", str(path)])
    page.open(path.as_uri())
    page.until(lambda: "Reward" in page.charts(), "charts")
    assert {"A step", "Accuracy", "Value loss"} <= page.charts().keys()
    said = page.text("#summary")
    for part in ("4 of 4, finished", "ppo", "tiny", "optimizer.learning_rate 0.0005", "→"):
        assert part in said
    assert "Samples of step 4" in page.text("#tables")
    assert path.stat().st_size < 1_000_000
    assert all(chart["drawn"] > 30 for chart in page.charts().values())
    assert "4 steps" in page.text("header")
    assert "Evaluations" in page.text("#tables")
    assert "Answers before and after" in page.text("#tables")
    page.press("HOME")
    page.until(lambda: "Step 1" in page.text(".details h2"), "the first step")
    assert page.errors() == []


def test_every_number_of_a_real_run_is_declared_once(tiny_run: Path) -> None:
    several = ("seconds.", "dropped.", "rewards.", "logged.", "alarm")
    declared = {metric.name for metric in METRICS}
    added = {"time", "total_steps", "critic.skipped"}
    names = RunReader(tiny_run).step(4)["numbers"]
    assert {name for name in names if not name.startswith(several)} - added <= declared


def test_a_report_loads_nothing_and_no_text_of_a_model_is_markup(
    page: Page, tmp_path: Path
) -> None:
    make_run(tmp_path, 20)
    alarm = {"kl_rollout": "</script><img src=x onerror=alert(1)>"}
    write(tmp_path / "metrics.jsonl", [line(21, alarms=alarm)], "a")
    main([str(tmp_path)])
    text = (tmp_path / "report.html").read_text()
    assert re.findall(r"<(?:script|link|img)[^>]*(?:src|href)", text) == []
    assert text.count("</script>") == 3
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text)[0])
    assert data["notes"] == [{"step": 21, "kind": "alarm", "text": alarm["kl_rollout"]}]
    page.open((tmp_path / "report.html").as_uri())
    page.until(lambda: alarm["kl_rollout"] in page.text("#tables"), "the alarm as text")
    assert "</script>2" in page.text("#tables")
    assert page.errors() == []


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    with raises(ConfigError, field="RUN_DIR"):
        main([str(tmp_path / "absent")])
    for module in ("trainer.report", "trainer.dashboard"):
        done = subprocess.run(
            [sys.executable, "-m", module, str(tmp_path / "absent")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 2
        assert "absent" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_report_of_a_long_run_of_long_answers_is_below_a_megabyte(tmp_path: Path) -> None:
    make_run(tmp_path, 2000, update={f"number_{i}": 0.123456789 * i for i in range(60)})
    answer = {"prompt": "p" * 9000, "ground_truth": "2", "response": "x" * 90_000, "correct": True}
    answers = [answer | {"prompt_id": str(i)} for i in range(50)]
    write(
        tmp_path / "evaluations.jsonl",
        [evaluation(step, 0.5) | {"answers": answers} for step in (0, 2000)],
    )
    main([str(tmp_path)])
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
