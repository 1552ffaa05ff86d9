"""The tab "Rollouts" in headless Chromium: list, filters, links, reading, single tokens, hostile
text, keyboard."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from common.wire.schemas import Group, Turn
from tests.support.browser.browser import Page
from tests.support.browser.viewer_page import Tab, shown
from tests.support.runs.recorded_groups import entry, group, record, trained, write_lines
from tests.support.runs.run_files import make_run
from trainer.cli.tiny_base import TURN_END, make_tokenizer
from trainer.observe.group_files import LINES, RecordedGroup

pytestmark = pytest.mark.integration

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202e\x1b[31m\x00 é😀\n\tend'
SHOWN = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>⟨U+202E⟩␛[31m␀ é😀↵\n⇥\tend'


def written(texts: list[str], directory: Path) -> Group:
    """Returns a group whose completions are these texts, split by a tokenizer that it saves in
    `directory`."""
    tokenizer = make_tokenizer(iter(["How many apples now? 1 2 3", "#### 12"]))
    tokenizer.save_pretrained(directory / "model")
    made = group(1, [float(i % 2) for i in range(len(texts))], texts, prompt=HOSTILE)
    completions = []
    for completion, text in zip(made.completions, texts, strict=True):
        ids = np.array(tokenizer(text, verbose=False).input_ids, np.int32)
        logprobs = -np.linspace(0, 3, len(ids), dtype=np.float32)
        completions.append(
            replace(
                completion,
                token_ids=ids,
                logprobs=logprobs,
                weight_versions=[(1, 0, len(ids))],
                extracted_answer=text[:80],
            )
        )
    return replace(made, completions=completions)


def recorded(made: Group, shift: float) -> RecordedGroup:
    advantages = [
        np.full(len(completion.token_ids), 0.5, np.float32) for completion in made.completions
    ]
    logprobs = [completion.logprobs + np.float32(shift) for completion in made.completions]
    return RecordedGroup(made, advantages, logprobs)


def test_groups_are_paged_filtered_and_sorted_and_the_address_has_the_filters(
    page: Page, tmp_path: Path
) -> None:
    steps = 300
    write_lines(tmp_path, 1, steps)
    groups, alike = steps * 32, len(range(123, steps * 32, 1000))
    with shown(page, tmp_path) as tab:
        tab.says(f"1–50 of {groups:,}")  # after all lines are read
        assert tab.texts(".row-step") == [f"step {steps:,}"] * 32 + [f"step {steps - 1:,}"] * 18
        assert not tab.enabled("First")
        tab.push("Next")
        tab.says(f"51–100 of {groups:,}")
        tab.push("Last")
        tab.says(f"{groups - 49:,}–{groups:,} of {groups:,}")
        assert not tab.enabled("Next")
        page.driver.back()
        tab.says(f"51–100 of {groups:,}")
        tab.type("text", "IS 123 +")
        tab.says(f"1–{min(alike, 50)} of {alike}")
        assert set(tab.texts(".row-prompt")) == {"What is 123 + 1?"}
        assert set(tab.texts("mark")) == {"is 123 +"}
        tab.type("step_to", "200")
        tab.says("1–7 of 7")
        for sort, downwards in (("-length", True), ("length", False)):
            tab.choose("sort", sort)
            page.until(
                lambda d=downwards: (found := longest(tab)) == sorted(found, reverse=d),  # type: ignore[misc]
                sort,
            )
        assert len(set(longest(tab))) > 1
        tab.choose("error", "unparsable")
        found = sum(number % 7 == 0 for number in range(123, 200 * 32, 1000))
        tab.says(f"1–{found} of {found}")
        assert set(tab.texts(".row-facts b")) == {" unparsable"}
        assert tab.address == "#rollouts?text=IS+123+%2B&step_to=200&sort=length&error=unparsable"
        tab.type("reward_min", "0.9")
        tab.says("no group is as asked for")
        tab.push("Clear")
        tab.says(f"1–50 of {groups:,}")
        assert tab.address == "#rollouts"


def longest(tab: Tab) -> list[int]:
    return [int(text.split()[1]) for text in tab.texts(".row-facts")]


def run_of(directory: Path, steps: int = 3, each: int = 20) -> Path:
    """Records steps of groups with four completions each: rewards 0, 1, 0.5 and 0, different
    lengths."""
    texts = ["short", "the longest of them all by far", "middle one here", "hay"]
    rewards, number = [0.0, 1.0, 0.5, 0.0], 0
    found = []
    for _ in range(steps):
        found.append([trained(group(number := number + 1, rewards, texts)) for _ in range(each)])
    record(directory, found)
    return directory


def test_a_researcher_reads_a_group_and_its_neighbours_by_keys_and_sends_a_link(
    page: Page, tmp_path: Path
) -> None:
    run_of(tmp_path)
    with shown(page, tmp_path) as tab:
        first = tab.texts(".viewer-open")[0]
        assert "✗ wrong: short" in first
        assert "0.375" in first
        tab.open(48)
        tab.reads(1)
        assert tab.text(".viewer-place") == "49 of 60"
        page.press("j")
        page.until(lambda: tab.text(".viewer-place") == "50 of 60", "the next group")
        page.press("j")
        page.until(lambda: tab.text(".viewer-place") == "51 of 60", "a group of the next page")
        page.press("k")
        page.until(lambda: tab.text(".viewer-place") == "50 of 60", "back on the first page")
        assert tab.texts(".reader-list b") == ["1", "2", "3", "4"]
        tab.choose("order", "reward")
        assert tab.texts(".reader-list b") == ["2", "3", "1", "4"]
        page.run("document.activeElement.blur()")
        tab.reads(2)
        page.press("ARROW_RIGHT")
        tab.reads(3)
        page.press("ARROW_LEFT", "ARROW_LEFT")
        tab.reads(2)
        page.click("[data-completion='4']")
        tab.reads(4)
        link, group_of = page.driver.current_url, tab.text("#viewer-title")
        assert "order=reward" in link
        page.press("ESCAPE")
        page.until(lambda: page.count(".viewer-list:not([hidden])"), "the list again")
        assert tab.run("return document.activeElement.className") == "viewer-open"
        page.driver.back()
        tab.reads(4)
        page.driver.get("about:blank")
        page.driver.get(link)
        tab.reads(4)
        page.until(lambda: tab.text(".viewer-place") == "50 of 60", "its place, from a link")
        assert tab.text("#viewer-title") == group_of
        assert tab.texts(".reader-list b") == ["2", "3", "1", "4"]
        page.press("a")
        assert [text.split()[1] for text in tab.texts(".reader-card h4")] == ["2", "3", "1", "4"]


def test_math_and_code_are_set_and_hostile_text_is_text(page: Page, tmp_path: Path) -> None:
    evil = (
        r"$\href{javascript:window.hacked=1}{x}$ $\htmlStyle{color:red}{y}$ \(\includegraphics{x.png}\)"
        r" $\fcolorbox{red}{blue}{z}$ $\def\a{\a\a}\a$"
    )
    code = "```python\nprint('<b>')\n```\n<think>hm</think> **yes**"
    text = f"So $x^2$, \\boxed{{\\frac{{1}}{{2}}}} and $$\\sum_i i$$ cost $5 and $10.\n{code}"
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    texts = [text, HOSTILE, evil, call, "\\[" * 20_000]
    record(tmp_path, [[trained(group(1, [1.0, 0.0, 0.0, 0.0, 0.0], texts, prompt=HOSTILE))]])
    with shown(page, tmp_path) as tab:
        assert tab.text(".row-prompt") == SHOWN.replace("↵\n⇥\t", " ")
        tab.open()
        page.until(lambda: page.count(".reader-card math") == 3, "three formulas")
        assert page.count(".reader-card mfrac") == 1
        assert tab.text(".reader-card pre code") == "print('<b>')"
        assert tab.text(".reader-card .thought").endswith("hm")
        assert tab.text(".reader-card strong") == "yes"
        assert "cost $5 and $10." in tab.text(".reader-card .prose")
        page.press("ARROW_RIGHT")
        tab.reads(2)
        assert tab.text(".reader-card .prose") == SHOWN.replace("↵\n⇥\t", "\n\t")
        assert tab.texts(".reader-card .prose *:not(.viewer-control)") == []
        page.press("ARROW_RIGHT")
        tab.reads(3)
        page.until(
            lambda: page.count(".reader-card .formula") == 5 and page.count(".formula.unset") >= 1,
            "formulas that are refused",
        )
        page.until(
            lambda: page.count(".reader-card math") + page.count(".formula.unset") == 5,
            "all are decided",
        )
        assert (
            tab.texts(".reader-card a")
            == tab.texts(".reader-card img")
            == tab.texts(".reader-card [style]")
            == []
        )
        page.press("ARROW_RIGHT")
        tab.reads(4)
        assert '"name": "add"' in tab.text(".call code")
        page.press("ARROW_RIGHT")
        tab.reads(5)


def test_tokens_are_shaded_and_their_numbers_shown_exactly(page: Page, tmp_path: Path) -> None:
    made = written(["How many apples now? 1 2 3 #### 12"], tmp_path)
    record(tmp_path, [[recorded(made, 0.05)]])
    (completion,) = made.completions
    count, last = len(completion.token_ids), completion.logprobs[-1]
    with shown(page, tmp_path) as tab:
        tab.open()
        page.press("t")
        assert (tab.texts("[data-token]", "class")[0], tab.texts("[data-token]", "class")[-1]) == (
            "",
            "viewer-low4",
        )
        assert "below −2" in tab.text(".viewer-legend")
        tab.choose("shade", "difference")
        assert set(tab.texts("[data-token]", "class")) == {
            "viewer-up2"
        }  # the difference is above 0.01
        tab.choose("shade", "none")
        assert set(tab.texts("[data-token]", "class")) == {""}
        assert tab.address.endswith("&show=tokens&shade=none")
        page.press("TAB")
        assert tab.text(".viewer-tip").startswith(
            f"token 1 of {count} · id {completion.token_ids[0]} · rollout 0 · trainer 0.05"
        )
        page.press("END")
        said = dict(fact.rsplit(" ", 1) for fact in tab.text(".viewer-tip").split(" · "))
        assert said.pop(f"token {count} of") == str(count)
        numbers = {name: np.float32(value) for name, value in said.items()}
        assert (numbers["rollout"], numbers["trainer"]) == (last, last + np.float32(0.05))
        assert numbers["difference"] == pytest.approx(0.05, abs=1e-6)
        assert [numbers[name] for name in ("advantage", "weights", "id")] == [
            0.5,
            1,
            completion.token_ids[-1],
        ]
        page.press("HOME", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT")
        assert tab.text(".viewer-tip").startswith("token 2 of")
        tab.run("document.querySelector('.viewer-facts').open = true")
        facts = dict(zip(tab.texts(".viewer-facts dt"), tab.texts(".viewer-facts dd"), strict=True))
        assert facts == {
            **{"Reward": "0", "· math": "0", "· format": "–", "Advantage": "0.500"},
            **{
                "Extracted answer": completion.text,
                "Status": "ok",
                "Finish reason": "stop",
                "Tokens": str(count),
                "Weights": "1",
            },
        }


def test_turns_of_an_episode_and_what_is_not_trained_can_be_told_apart(
    page: Page, tmp_path: Path
) -> None:
    made = written([f"1 2 3 #### 12 1 2 3{TURN_END}"], tmp_path)
    (completion,) = made.completions
    count = len(completion.token_ids)
    mask = np.array([1, 1, *[0] * (count - 5), 1, 1, 1], np.int32)
    turns = [Turn(0, 2), Turn(count - 3, count)]
    episode = replace(completion, mask=mask, turns=turns, episode=0)
    item = RecordedGroup(
        replace(made, completions=[episode]),
        [np.full(5, 0.5, np.float32)],
        [np.zeros(5, np.float32)],
    )
    record(tmp_path, [[item]])
    with shown(page, tmp_path) as tab:
        tab.open()
        titles = [text.split(" ", 3)[:3] for text in tab.texts(".turn h5")]
        assert titles == [["Turn", "1", "of"], ["Tool,", "environment", "or"], ["Turn", "2", "of"]]
        assert "".join(tab.texts(".turn .prose")) == completion.text.removesuffix(TURN_END)
        tab.push("Source")
        assert "".join(tab.texts(".turn .viewer-prose")) == completion.text
        tab.push("Text")
        assert [("not trained" in text) for text in tab.texts(".turn h5")] == [False, True, False]
        page.press("t")
        assert [name == "viewer-masked" for name in tab.texts("[data-token]", "class")] == [
            kept == 0 for kept in mask
        ]
        assert "not trained" in tab.text(".viewer-legend")


def test_a_prompt_is_compared_across_steps_by_keyboard(page: Page, tmp_path: Path) -> None:
    late = RecordedGroup(
        group(7, [1.0, float("nan")]),
        reason="reward",
        detail="an answer could not be graded: timeout",
    )
    steps = [
        [trained(group(1, [0.0, 0.0, 1.0]))],
        [trained(group(4, [1.0, 1.0, 1.0])), late],
        [trained(group(2, [0.0, 1.0]))],
    ]
    record(tmp_path, steps)
    with shown(page, tmp_path) as tab:
        tab.focus(".viewer-open")
        page.press("ARROW_DOWN", "ARROW_DOWN", "ARROW_UP", "ENTER")
        page.until(
            lambda: tab.text("#viewer-title") == "Group of step 2", "the group of the second row"
        )
        assert tab.run("return document.activeElement.id") == "viewer-title"
        assert "Not known: the texts of tokens" in tab.text(".reader .viewer-missing")
        assert tab.texts(".viewer-history button", "title") == [
            *("step 1: mean reward 0.333, 1 of 3 right", "step 2: mean reward 1, 3 of 3 right"),
            "step 2: mean reward –, 1 of 2 right, dropped: reward",
        ]
        assert tab.texts(".viewer-history button", "aria-current") == [None, "true", None]
        assert len(tab.texts(".viewer-history li:first-child rect")) == 3
        tab.focus(".viewer-history button", 2)
        page.press("ENTER")
        page.until(
            lambda: tab.text("#viewer-title").startswith("Dropped group of step 2"),
            "the dropped group",
        )
        assert "Dropped (reward): an answer could not be graded: timeout" in tab.text(".reader")
        assert [text.startswith("2not graded") for text in tab.texts(".reader-list button")] == [
            False,
            True,
        ]
        tab.push("‹ All groups")
        assert tab.texts(".reader") == []


def test_the_list_follows_a_run_that_goes_on_and_the_step_of_the_page(
    page: Page, tmp_path: Path
) -> None:
    one, two = make_run(tmp_path / "one", 3), make_run(tmp_path / "two", 3)
    write_lines(one, 1, 2, each=2)
    write_lines(two, 1, 1, each=1)
    with shown(page, one, two) as tab:
        tab.says("1–4 of 4")
        tab.focus(".viewer-open", 1)
        focused = tab.run("return document.activeElement.textContent")
        with (one / LINES).open("a") as file:
            file.write(json.dumps({"step": 3, "groups": [entry(80)]}) + "\n")
        tab.says("1–5 of 5")
        assert tab.run("return document.activeElement.textContent") == focused
        tab.go("#overview?step=2")
        page.until(lambda: page.text(".number") == "step 2 of 60", "the step of the link")
        page.click("#tab-rollouts")
        tab.run("document.querySelector('.viewer-filters details').open = true")
        page.click("[name=follow]")
        tab.says("1–2 of 2")
        assert set(tab.texts(".row-step")) == {"step 2"}
        page.click("[name=follow]")
        tab.says("1–5 of 5")
        page.click("#runs select option:nth-child(2)")
        tab.says("1–1 of 1")


def test_missing_data_is_reported(page: Page, tmp_path: Path) -> None:
    with shown(page, tmp_path) as tab:
        assert tab.status == "no group is as asked for"
        assert "groups.jsonl is missing" in tab.text(".viewer-missing")
        write_lines(tmp_path, 1, 1, each=1)
        tab.says("1–1 of 1")
        tab.run("document.querySelector('.viewer-open').click()")
        alert = ".viewer-detail p[role=alert]"
        page.until(lambda: tab.text(alert), "why it is not shown")
        assert (
            "the group is known, but its content is not: groups/ has no file of step 1"
            in tab.text(alert)
        )
        (complaint,) = page.errors()
        assert "404" in complaint
        tab.push("Close")
        assert tab.texts(alert) == []


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1600, False)])
def test_the_tab_is_never_wider_than_the_screen(
    page: Page, tmp_path: Path, width: int, dark: bool
) -> None:
    record(tmp_path, [[recorded(written([HOSTILE, "x" * 500, "1 2 3"], tmp_path), 0.05)]])
    with shown(page, tmp_path, width=width, dark=dark) as tab:
        assert (
            tab.run(
                "return document.querySelector('.row-completion').getBoundingClientRect().width"
            )
            > 200
        )
        fits = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert tab.run(fits)
        tab.open()
        for view in ("t", "t", "a"):
            assert tab.run(fits), view
            page.press(view)
