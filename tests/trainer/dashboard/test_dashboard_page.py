"""The page in a headless Chromium, over real run directories."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.browser import Page
from tests.support.run_files import line, make_run, write
from trainer.dashboard.app import create_dashboard_app
from trainer.dashboard.runs import RunReader
from trainer.server import BackgroundServer

pytestmark = pytest.mark.process

SHOWN = (
    *("Reward", "Accuracy", "Loss", "KL to the reference", "Entropy", "Clip fraction"),
    *("Length", "Cut at the limit", "Groups without gradient", "Dropped groups"),
    *("Effective sample size", "|Δ logprob|", "KL(rollout ‖ trainer)", "Staleness", "A step", "Trained tokens"),
    *("Gradient norm", "Learning rate", "Skipped updates"),
)
CRITIC = ("Value loss", "Explained variance", "Value and return", "Gradient norm of the critic")


@contextmanager
def served(*directories: Path) -> Iterator[str]:
    """The page's address."""
    with BackgroundServer(create_dashboard_app([RunReader(directory) for directory in directories]), "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.port}/dashboard/"


def reads(page: Page, step: int) -> None:
    """Waits until figures and details are of this step."""
    page.until(lambda: f"{step / 100:.3f}" in page.text(".figure .value"), f"the figures of step {step}")
    page.until(lambda: f"Step {step}" in page.text(".details h2"), f"the details of step {step}")


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_every_chart_of_a_real_run_is_drawn(page: Page, tiny_run: Path, width: int, dark: bool) -> None:
    with served(tiny_run) as url:
        page.open(url, width=width, height=900, dark=dark)
        page.until(lambda: set(page.charts()) == {*SHOWN, *CRITIC}, "all charts are there")
        charts = page.charts()
        for title, chart in charts.items():
            assert "–" not in chart["values"], title
            assert chart["drawn"] > 30, (title, chart)
        assert charts["A step"]["areas"] > 3 > charts["Reward"]["areas"]
        assert "step 4 of 4" in page.text("header")
        assert "of 4" in page.text(".figures")  # groups
        assert "± " in page.text(".figures")  # of the evaluation
        assert page.run("return document.documentElement.scrollWidth <= innerWidth"), "it is wider than the window"
        assert (sum(page.background()) < 150) is dark
        assert "Services" in page.text(".side")
        assert page.errors() == []


def test_steps_are_scrubbed_by_keys_by_the_slider_and_by_a_click(page: Page, tmp_path: Path) -> None:
    make_run(tmp_path, 40)
    alarm = {"kl_rollout": "the policy is far away"}
    lines = [line(step, reward=step / 100, alarms=alarm if step == 38 else {}) for step in range(1, 41)]
    write(tmp_path / "metrics.jsonl", lines)
    with served(tmp_path) as url:
        page.open(url)
        page.until(lambda: "0.400" in page.text(".figure .value"), "the newest step")
        assert page.text(".number") == "step 40 of 60"
        for keys, step in ((("ARROW_LEFT", "ARROW_LEFT"), 38), (("HOME",), 1), (("ARROW_RIGHT",), 2), (("END",), 40)):
            page.press(*keys)
            reads(page, step)
            assert page.text(".number") == f"step {step} of 60"
            assert ("the policy is far away" in page.text(".notes")) is (step == 38)
            assert f"{step / 100:.3f}" in page.charts()["Reward"]["values"]
        page.run("const s = document.querySelector('input[type=range]'); s.value = 7; s.dispatchEvent(new Event('input'))")
        page.until(lambda: "0.070" in page.text(".figure .value"), "the slider's step")
        page.press("l")
        page.until(lambda: "0.400" in page.text(".figure .value"), "the newest step again")
        page.click(".chart .u-over")  # its middle
        page.until(lambda: page.text(".number") in ("step 20 of 60", "step 21 of 60"), "the step that was clicked")
        write(tmp_path / "metrics.jsonl", [line(41, reward=0.41)], "a")
        page.press("l")
        page.until(lambda: "0.410" in page.text(".figure .value"), "a new step by itself")
        assert page.errors() == []


def test_tabs_and_controls_are_used_by_keyboard_alone(page: Page, tmp_path: Path) -> None:
    with served(make_run(tmp_path, 20)) as url:
        page.open(url)
        page.until(lambda: page.charts(), "charts")
        page.run("document.body.tabIndex = -1; document.body.focus()")
        page.press("TAB")
        assert page.run("return document.activeElement.id") == "tab-overview"
        page.press("ARROW_LEFT")
        page.until(lambda: page.text("#settings").startswith("Settings"), "settings")
        assert "trainer.batch_size" in page.text("#settings")
        assert page.charts() == {}
        page.press("ARROW_RIGHT")
        seen = []
        for _ in range(6):
            page.press("TAB")
            seen.append(page.run("return document.activeElement.getAttribute('aria-label') ?? ''"))
        assert {"One step back (←)", "One step on (→)", "Step", "Follow the newest step (L)", "Smoothing"} <= set(seen)
        assert page.errors() == []


def test_ten_thousand_steps_are_drawn_zoomed_into_and_followed(page: Page, tmp_path: Path) -> None:
    make_run(tmp_path, 10_000)
    with served(tmp_path) as url:
        page.open(url)
        page.until(lambda: "step 10,000" in page.text("header"), "all steps")
        page.until(lambda: page.charts().get("Reward", {}).get("drawn", 0) > 100, "the curve")
        write(tmp_path / "metrics.jsonl", [line(10_001, reward=0.123)], "a")
        page.until(lambda: "0.123" in page.text(".figure .value"), "the next step")
        drag = "const o = document.querySelector('.u-over').getBoundingClientRect(); return [o.left, o.top, o.width, o.height]"
        left, top, width, height = page.run(drag)
        for kind, x in (("mousePressed", 0.5), ("mouseMoved", 0.505), ("mouseMoved", 0.51), ("mouseReleased", 0.51)):
            place = {"x": left + x * width, "y": top + height / 2}
            more = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {"button": "left", "buttons": 1}
            page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **place, **more})
        page.until(lambda: page.run("return document.querySelector('[title^=\"Show all\"]').offsetParent"), "the zoom")
        page.press("0")
        page.until(lambda: not page.run("return document.querySelector('[title^=\"Show all\"]').offsetParent"), "all steps")
        assert page.errors() == []


def test_runs_are_laid_over_each_other_and_their_settings_compared(page: Page, tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "low", 30, reward=0.25), make_run(tmp_path / "high", 50, reward=0.75)
    (second / "config.json").write_text('{"trainer": {"max_staleness": 3, "batch_size": 32}}')
    with served(first, second) as url:
        page.open(url)
        page.until(lambda: "low 0.250\nhigh 0.750" in page.charts().get("Reward", {}).get("values", ""), "both rewards")
        both = page.charts()["Reward"]["colours"]
        page.click("#runs label:nth-of-type(2) input")
        page.until(lambda: page.charts()["Reward"]["values"] == "0.250", "one reward")
        assert page.charts()["Reward"]["colours"] < both
        page.click("#runs select option:nth-child(2)")
        page.until(lambda: page.text(".number") == "step 50 of 60", "the other run's steps")
        page.click("#tab-settings")
        page.until(lambda: "Where these runs differ" in page.text("#settings"), "differences")
        differ = page.text("#settings section:first-child")
        assert "trainer.max_staleness\t3\t0" in differ
        assert "batch_size" not in differ
        assert page.errors() == []


def test_a_half_written_run_opens_and_says_what_is_missing(page: Page, tmp_path: Path) -> None:
    with served(tmp_path) as url:
        page.open(url)
        page.until(lambda: "metrics.jsonl is missing" in page.text(".problems"), "what is missing")
        assert "config.json is missing" in page.text(".problems")
        gone = ("seconds", "update", "alarms")
        old = [{name: value for name, value in line(step).items() if name not in gone} for step in (1, 2)]
        write(tmp_path / "metrics.jsonl", old)
        page.until(lambda: "Reward" in page.charts(), "what is there")
        assert "Entropy" not in page.charts()
        assert "Not recorded in this run directory: Loss," in page.text(".missing")
        assert page.errors() == []


@pytest.mark.parametrize(("reward", "level"), [(0.0, "warn"), (None, "good")])
def test_a_run_that_does_not_learn_catches_the_eye(page: Page, tmp_path: Path, reward: float | None, level: str) -> None:
    with served(make_run(tmp_path, 40, **({} if reward is None else {"reward": reward, "accuracy": reward}))) as url:
        page.open(url)
        page.until(lambda: page.count(f"#overview .verdict.{level}"), f"the verdict {level}")
        assert ("Not learning" in page.text("#overview .verdict")) is (level == "warn")
        assert page.errors() == []


def test_the_token_is_asked_for_once_and_kept_in_the_tab(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "correct-horse-battery-staple")
    with served(make_run(tmp_path, 20)) as url:
        page.open(url)
        for value in ("a-wrong-token-of-20-characters", "correct-horse-battery-staple"):
            page.until(lambda: page.count("dialog[open]"), "the question")
            page.press(value, "ENTER")
            page.until(lambda: page.run("return document.getElementById('token-value').value") == "", "it is taken")
        page.until(lambda: page.charts(), "charts")
        page.driver.refresh()
        page.until(lambda: page.charts(), "charts without a question")
        assert page.count("dialog[open]") == 0
        assert {error for error in page.errors() if "401" not in error} == set()
    page.run("sessionStorage.clear()")
