"""A researcher follows the tutorial "own data and reward" word by word, then reads the results."""

import json
from pathlib import Path

import pytest

from tests.support.browser.browser import Page
from tests.support.browser.viewer_page import Tab
from tests.support.paths import ROOT
from tests.support.runs.journey import Journey, blocks

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_own_data_and_reward_are_trained_on_read_compared_and_sent(
    base_model: Path, tmp_path: Path, page: Page
) -> None:
    journey = Journey("researcher", tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "tiny-base").symlink_to(base_model.resolve())
    (_, problems), (_, reward), (_, training), (_, evaluation), *_ = blocks(
        ROOT / "docs/tutorials/own-data-and-reward.md"
    )
    with journey.part("writes problems"):
        journey.run(problems)
    (tmp_path / "my_reward.py").write_text(reward)
    (tmp_path / "train.py").write_text(training)
    with journey.part("trains in one process, 20 steps"):
        assert "step   20/20" in journey.run(".venv/bin/python train.py")
    lines = [
        json.loads(line)
        for line in (tmp_path / "outputs/brief/metrics.jsonl").read_text().splitlines()
    ]
    rewards = [line["reward"] for line in lines]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    with journey.part("evaluates the result"):
        found = journey.run(evaluation)
        assert "accuracy" in found
        assert "were trained on" not in found

    with journey.part("trains the same as a job group"):
        ((_, command),) = blocks(ROOT / "examples/own_reward/README.md")[:1]
        shown = command.replace(".venv/bin/python", str(tmp_path / ".venv/bin/python"))
        journey.run(shown.replace("runs/own_reward", str(tmp_path / "outputs/group")), cwd=ROOT)

    with journey.dashboard(tmp_path / "outputs") as url:
        with journey.part("opens the list of runs and compares"):
            page.open(url, 1400)
            page.until(lambda: {"brief", "group"} <= set(page.text("#runs").split()), "both runs")
            for box in page.driver.find_elements("css selector", "#runs input[type=checkbox]"):
                if not box.is_selected():
                    box.click()
            page.click("#tab-overview")
            page.until(lambda: page.charts(), "charts")
            assert "Reward" in page.charts()
        with journey.part("reads a wrong answer and copies its link"):
            page.open(f"{url}#rollouts", 1400)
            tab = Tab(page, url)
            page.until(lambda: tab.status, "the list")
            everything = tab.status
            tab.type("reward_max", "0.5")
            page.until(lambda: tab.status != everything, "groups with wrong answers")
            tab.open()
            page.press("t")
            page.until(lambda: page.count("[data-token]"), "tokens")
            link = page.driver.current_url
            page.driver.get("about:blank")
            page.driver.get(link)
            page.until(lambda: page.count("[data-token]"), "the same from the link")
        assert page.errors() == []
        page.driver.get("about:blank")

    with journey.part("sends a report"):
        journey.run(".venv/bin/rlhf report outputs/brief")
        assert (tmp_path / "outputs/brief/report.html").stat().st_size < 1e6
