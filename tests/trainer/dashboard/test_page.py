"""The page in headless Chromium, with real run directories."""

import json
from pathlib import Path

import pytest

from tests.support.browser.browser import Page
from tests.support.browser.viewer_page import served
from tests.support.runs.run_files import STAGES, evaluation, line, make_run, write
from trainer.backends.server import BackgroundServer
from trainer.dashboard.app import create_dashboard_app
from trainer.dashboard.run_list import RunList

pytestmark = pytest.mark.integration

SHOWN = (
    *(
        "Reward",
        "Accuracy",
        "Length",
        "A step",
        "Loss",
        "KL to the reference",
        "Entropy",
        "Clip fraction",
    ),
    *(
        "Cut at the limit",
        "Groups of equal rewards",
        "Equal completions",
        "Dropped groups",
        "Lost episodes",
        "Refused calls",
    ),
    *(
        "Effective sample size",
        "|Δ logprob|",
        "KL(rollout ‖ trainer)",
        "Staleness",
        "Trained tokens",
    ),
    *("Completions in flight", "Coordinator"),
    *("Gradient norm", "Learning rate", "Skipped updates"),
)
CRITIC = (
    "Value loss",
    "Explained variance",
    "Value",
    "Return",
    "Gradient norm of the critic",
)


def reads(page: Page, step: int) -> None:
    """Waits until figures and details belong to this step."""
    page.until(
        lambda: f"{step / 100:.3f}" in page.text(".figure .value"), f"the figures of step {step}"
    )
    page.until(lambda: f"Step {step}" in page.text(".details h2"), f"the details of step {step}")


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_every_chart_of_a_real_run_is_drawn(
    page: Page, tiny_run: Path, width: int, dark: bool
) -> None:
    with served(tiny_run) as url:
        page.open(url, width=width, height=900, dark=dark)
        page.until(
            lambda: "Skipped updates 0" in page.text("#constant summary"),
            "what never changes, folded",
        )
        assert "Skipped updates" not in page.charts()
        page.run("document.querySelector('#constant').open = true")
        page.until(lambda: set(page.charts()) == {*SHOWN, *CRITIC}, "all charts are there")
        charts = page.charts()
        for title, chart in charts.items():
            assert "–" not in chart["values"], title
            assert chart["drawn"] > 30, (title, chart)
        assert "step 4 of 4" in page.text("header")
        assert "of 4" in page.text(".figures")  # groups
        assert "Groups of equal rewards" in page.text(".figure .title")
        assert "± " in page.text(".figures")  # of the evaluation accuracy
        assert page.run("return document.documentElement.scrollWidth <= innerWidth"), (
            "it is wider than the window"
        )
        assert (sum(page.background()) < 150) is dark
        assert "Services" not in page.text(".side")  # a finished run has no services
        assert page.errors() == []


def test_steps_are_scrubbed_by_keys_by_the_slider_and_by_a_click(
    page: Page, tmp_path: Path
) -> None:
    make_run(tmp_path, 40)
    alarm = {"kl_rollout": "the policy is far away"}
    lines = [
        line(step, reward=step / 100, alarms=alarm if step == 38 else {}) for step in range(1, 41)
    ]
    write(tmp_path / "metrics.jsonl", lines)
    with served(tmp_path) as url:
        page.open(url)
        page.until(lambda: "0.400" in page.text(".figure .value"), "the newest step")
        assert page.text(".number") == "step 40 of 60"
        charts = page.charts()
        assert charts["A step"]["areas"] >= len(STAGES) > charts["Reward"]["areas"], (
            "a stage has no area of its own"
        )
        for keys, step in (
            (("ARROW_LEFT", "ARROW_LEFT"), 38),
            (("HOME",), 1),
            (("ARROW_RIGHT",), 2),
            (("END",), 40),
        ):
            page.press(*keys)
            reads(page, step)
            assert page.text(".number") == f"step {step} of 60"
            assert ("the policy is far away" in page.text(".notes")) is (step == 38)
            assert f"{step / 100:.3f}" in page.charts()["Reward"]["values"]
        page.run(
            "const s = document.querySelector('input[type=range]'); s.value = 7; s.dispatchEvent(new Event('input'))"
        )
        page.until(lambda: "0.070" in page.text(".figure .value"), "the slider's step")
        page.press("l")
        page.until(lambda: "0.400" in page.text(".figure .value"), "the newest step again")
        page.click(".chart .u-over")  # the middle of the chart
        page.until(
            lambda: page.text(".number") in ("step 20 of 60", "step 21 of 60"),
            "the step that was clicked",
        )
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
        page.until(lambda: "rlhf why" in page.text("#why"), "why")
        page.press("ARROW_LEFT")
        page.until(
            lambda: page.text("#settings").startswith("Changed from the defaults"), "settings"
        )
        assert "trainer.batch_size" in page.text("#settings")
        assert page.charts() == {}
        page.press("ARROW_RIGHT")
        page.press("ARROW_RIGHT")
        seen = []
        for _ in range(6):
            page.press("TAB")
            seen.append(page.run("return document.activeElement.getAttribute('aria-label') ?? ''"))
        assert {
            "One step back (←)",
            "One step on (→)",
            "Step",
            "Follow the newest step (L)",
            "Horizontal axis",
        } <= set(seen)
        assert page.errors() == []


@pytest.mark.slow
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
        for kind, x in (
            ("mousePressed", 0.5),
            ("mouseMoved", 0.505),
            ("mouseMoved", 0.51),
            ("mouseReleased", 0.51),
        ):
            place = {"x": left + x * width, "y": top + height / 2}
            more = (
                {"button": "left", "clickCount": 1}
                if kind != "mouseMoved"
                else {"button": "left", "buttons": 1}
            )
            page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **place, **more})
        page.until(
            lambda: page.run("return document.querySelector('[title^=\"Show all\"]').offsetParent"),
            "the zoom",
        )
        page.press("0")
        page.until(
            lambda: (
                not page.run("return document.querySelector('[title^=\"Show all\"]').offsetParent")
            ),
            "all steps",
        )
        assert page.errors() == []


def test_runs_are_overlaid_and_their_settings_compared(page: Page, tmp_path: Path) -> None:
    first, second = (
        make_run(tmp_path / "low", 30, reward=0.25),
        make_run(tmp_path / "high", 50, reward=0.75),
    )
    (second / "config.json").write_text('{"trainer": {"max_staleness": 3, "batch_size": 32}}')
    with served(first, second) as url:
        page.open(url)
        page.until(
            lambda: "low 0.250\nhigh 0.750" in page.charts().get("Reward", {}).get("values", ""),
            "both rewards",
        )
        said = page.text("#overview .verdict").splitlines()
        assert [sentence.partition(":")[0] for sentence in said] == ["low", "high"]
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
        old = [
            {name: value for name, value in line(step).items() if name not in gone}
            for step in (1, 2)
        ]
        write(tmp_path / "metrics.jsonl", old)
        page.until(lambda: "Reward" in page.charts(), "what is there")
        assert "Entropy" not in page.charts()
        assert "Entropy" in page.text(".missing")
        assert page.errors() == []


def test_a_run_that_does_not_learn_catches_the_eye(page: Page, tmp_path: Path) -> None:
    with served(make_run(tmp_path, 40, reward=0.0, accuracy=0.0)) as url:
        page.open(url)
        page.until(lambda: page.count("#overview .verdict.warn"), "the verdict")
        assert "Not learning" in page.text("#overview .verdict")
        assert page.errors() == []


def test_without_verdicts_the_reward_stands_for_the_accuracy(page: Page, tmp_path: Path) -> None:
    unknown = {"gpus": 0, "update": {"loss": 0.1, "trained_tokens": 0}}
    make_run(tmp_path, 20, reward=8.5, accuracy=None, **unknown)
    held_out = {"accuracy": None, "standard_error": None, "mean_reward": 7.25}
    write(tmp_path / "evaluations.jsonl", [evaluation(step, 0.0) | held_out for step in (0, 20)])
    with served(tmp_path) as url:
        page.open(url)
        page.until(lambda: "8.50" in page.text(".figure .value"), "the reward")
        titles = page.text(".figure .title").splitlines()
        assert "Held-out reward" in titles
        assert not any("accuracy" in title.lower() for title in titles)
        assert "7.25" in page.text(".figure .value")
        assert "completion tokens of its updates" in page.text(".details")
        assert "GPUs" not in page.text(".details")
        assert "Trained tokens" not in page.text(".details")
        assert "Accuracy" not in page.charts()
        page.click("#tab-runs")
        page.until(lambda: "reward 7.25" in page.text(".runs [data-label=Held-out]"), "held-out")
        assert page.errors() == []


def test_the_token_comes_with_the_link_or_is_asked_for_once_and_is_kept_in_the_tab(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "correct-horse-battery-staple")
    with served(make_run(tmp_path, 20)) as url:
        page.open(f"{url}#token=correct-horse-battery-staple")
        page.until(lambda: "Reward" in page.charts(), "the charts")
        assert page.count("dialog[open]") == 0
        assert "token" not in page.driver.current_url
        page.driver.refresh()
        page.until(lambda: "Reward" in page.charts(), "the charts again")
        assert page.count("dialog[open]") == 0
        assert page.errors() == []

        page.run("sessionStorage.clear()")
        page.open(url)
        for value in ("a-wrong-token-of-20-characters", "correct-horse-battery-staple"):
            page.until(lambda: page.count("dialog[open]"), "the question")
            page.press(value, "ENTER")
            page.until(
                lambda: page.run("return document.getElementById('token-value').value") == "",
                "it is taken",
            )
        page.until(lambda: page.charts(), "charts")
        page.driver.refresh()
        page.until(lambda: page.charts(), "charts without a question")
        assert page.count("dialog[open]") == 0
        assert {error for error in page.errors() if "401" not in error} == set()
    page.run("sessionStorage.clear()")


@pytest.mark.slow
def test_every_view_is_a_link_and_back_returns(page: Page, tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a b,c", 30), make_run(tmp_path / "<b>&'", 40, reward=0.75)
    with served(first, second) as url:
        page.open(url)
        page.until(lambda: "Reward" in page.charts(), "charts")
        page.click("#runs select option:nth-child(2)")
        page.until(lambda: page.text(".number") == "step 40 of 60", "the other run")
        page.click("[name=x] option[value=tokens]")
        page.click("[name=smooth] option[value='5']")
        page.run("document.activeElement.blur()")
        page.press("ARROW_LEFT")
        page.until(lambda: page.text(".number") == "step 39 of 60", "the step before")
        link = page.driver.current_url
        page.click("#tab-settings")
        page.until(lambda: "at their defaults" in page.text("#settings"), "settings")
        page.driver.back()
        page.until(lambda: page.text(".number") == "step 39 of 60", "the overview again")
        page.driver.back()
        page.until(lambda: page.text(".number") == "step 30 of 60", "the first run again")
        page.driver.get("about:blank")
        page.driver.get(f"{link}&from=10&to=20")
        page.until(lambda: page.text(".number") == "step 39 of 60", "the step of the link")
        chosen = "return [document.querySelector('[name=x]').value, document.querySelector('[name=smooth]').value]"
        assert page.run(chosen) == ["tokens", "5"]
        assert (
            page.run("return document.querySelector('#runs select').selectedOptions[0].text")
            == "<b>&'"
        )
        assert page.run(
            "return document.querySelector('[title^=\"Show all\"]').offsetParent !== null"
        ), "it is not zoomed"
        page.driver.get("about:blank")
        page.driver.get(f"{url}#overview?run=nobody")
        page.until(
            lambda: "to the run nobody" in page.text(".problems"),
            "what the link names and the page lacks",
        )
        assert page.errors() == []


@pytest.mark.slow
def test_runs_below_a_directory_are_listed_overlaid_and_noted(page: Page, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=window.hacked=1>"
    for number in range(6):
        name = f"study/{hostile if number == 5 else number}"
        run = make_run(tmp_path / name, 20 + number, reward=0.1 * number)
        config = {
            "model": {"name": hostile},
            "data": {"source": hostile},
            "optimizer": {"learning_rate": number / 100},
        }
        (run / "config.json").write_text(json.dumps(config))
    with BackgroundServer(create_dashboard_app(RunList([tmp_path])), "127.0.0.1", 0) as server:
        page.open(f"http://127.0.0.1:{server.port}/dashboard/")
        page.until(lambda: page.count(".runs tbody tr") == 6, "all runs")
        row = page.text(".runs tbody tr:nth-child(2)")
        for said in (
            "study/1",
            "stopped",
            "21 of 60",
            "90.0 % ± 2.0",
            "0.100",
            "optimizer.learning_rate 0.01",
            "84 s",
        ):
            assert said in row
        assert hostile in page.text(".runs tbody tr:nth-child(6)")
        page.click(".runs tbody tr:nth-child(3) input")
        page.click(".runs tbody tr:nth-child(2) .note-text button")
        page.press(hostile)
        page.run(
            "[...document.querySelectorAll('.note-text button')].find((b) => b.textContent === 'Keep').click()"
        )
        page.until(lambda: (tmp_path / "study/1/notes.md").exists(), "the note is kept")
        assert (tmp_path / "study/1/notes.md").read_text() == hostile
        page.until(
            lambda: hostile in page.text(".runs tbody tr:nth-child(2) .note-text"), "the note"
        )
        page.click("#tab-overview")
        page.until(
            lambda: "study/0 0\nstudy/2 0.200" in page.charts().get("Reward", {}).get("values", ""),
            "both",
        )
        make_run(tmp_path / "later", 5)
        page.click("#tab-runs")
        page.until(lambda: page.count(".runs tbody tr") == 7, "a run that began later")
        assert page.run("return window.hacked") is None
        assert page.errors() == []


def test_a_run_on_worked_answers_has_figures_of_its_own(page: Page, tmp_path: Path) -> None:
    gone = ("reward", "accuracy", "zero_variance_groups", "staleness", "truncated", "dropped")
    lines = [
        {k: v for k, v in line(step).items() if k not in gone} | {"examples": 16}
        for step in range(1, 20)
    ]
    make_run(tmp_path, 1)
    write(tmp_path / "metrics.jsonl", lines)
    write(
        tmp_path / "evaluations.jsonl",
        [{"step": step, "loss": 1.5 / (step + 1), "num_samples": 16} for step in (0, 19)],
    )
    with served(tmp_path) as url:
        page.open(url)
        page.until(lambda: "Held-out loss" in page.text(".figure .title"), "the figures")
        titles = page.text(".figure .title").splitlines()
        assert (titles[0], "Reward" in titles) == ("Loss", False)
        assert "–" not in page.text(".figure .value")
        assert "held-out 0.075" in page.charts()["Loss"]["values"]
        page.click("#tab-runs")
        page.until(lambda: "loss 0.075" in page.text(".runs"), "its held-out loss")
        assert "sft" in page.text(".runs")
        assert page.errors() == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (420, True)])
def test_every_view_is_accessible(page: Page, tiny_run: Path, width: int, dark: bool) -> None:
    """Checks every view against the rules of axe-core."""
    views = {
        "overview": ".chart canvas",
        "rollouts": ".row-completion",
        "runs": ".runs td",
        "settings": ".settings td",
    }
    with served(tiny_run) as url:
        found = []
        for view, there in views.items():
            page.open(f"{url}#{view}", width=width, dark=dark)
            page.until(lambda s=there: page.count(s), view)  # type: ignore[misc]
            found += serious(page)
        page.open(f"{url}#rollouts", width=width, dark=dark)
        page.until(lambda: page.count(".viewer-open"), "the list")
        page.click(".viewer-open")
        page.until(lambda: page.count(".reader-card"), "a group")
        for key in ("t", "a"):
            found += serious(page)
            page.press(key)
        assert found == []
        assert page.errors() == []


def serious(page: Page) -> list[str]:
    """Returns the serious and critical findings of axe-core, each with its first place."""
    page.run((Path(__file__).parents[2] / "support/browser/axe/axe.min.js").read_text())
    found = page.driver.execute_async_script(
        "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']}).then((r) => done(r.violations))"
    )
    grave = [each for each in found if each["impact"] in ("serious", "critical")]
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:160]} {each['nodes'][0]['failureSummary'][:200]}"
        for each in grave
    ]
