"""The tab "Rollouts" in headless Chromium: list, filters, pages, a group token by token, hostile text, keyboard."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from common.schemas import Group
from tests.support.browser import Page
from tests.support.recorded_groups import entry, group, record, trained, write_lines
from tests.support.viewer_page import Tab, shown
from trainer.cli.tiny_base import make_tokenizer
from trainer.dashboard.runs import RunReader
from trainer.observe.group_files import LINES, RecordedGroup

pytestmark = pytest.mark.process

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202e\x1b[31m\x00 é😀\n\tend'
SHOWN = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>⟨U+202E⟩␛[31m␀ é😀↵\n⇥\tend'


def written(texts: list[str], directory: Path) -> Group:
    """A group whose completions are these texts, as the tokenizer in `directory` cuts them."""
    tokenizer = make_tokenizer(iter(["How many apples now? 1 2 3", "#### 12"]))
    tokenizer.save_pretrained(directory / "model")
    made = group(1, [float(i % 2) for i in range(len(texts))], texts, prompt=HOSTILE)
    completions = []
    for completion, text in zip(made.completions, texts, strict=True):
        ids = np.array(tokenizer(text, verbose=False).input_ids, np.int32)
        logprobs = -np.linspace(0, 3, len(ids), dtype=np.float32)
        completions.append(
            replace(
                completion, token_ids=ids, logprobs=logprobs, weight_versions=[(1, 0, len(ids))], extracted_answer=text[:80]
            )
        )
    return replace(made, completions=completions)


def recorded(made: Group, shift: float) -> RecordedGroup:
    advantages = [np.full(len(completion.token_ids), 0.5, np.float32) for completion in made.completions]
    logprobs = [completion.logprobs + np.float32(shift) for completion in made.completions]
    return RecordedGroup(made, advantages, logprobs)


@pytest.mark.parametrize("steps", [1000, pytest.param(3125, marks=pytest.mark.slow)])
def test_a_hundred_thousand_groups_are_paged_filtered_and_sorted(page: Page, steps: int, tmp_path: Path) -> None:
    """The short form has 32,000."""
    write_lines(tmp_path, 1, steps)
    groups, alike = steps * 32, len(range(123, steps * 32, 1000))
    with shown(page, RunReader(tmp_path)) as tab:
        assert tab.status == f"1–50 of {groups:,}"
        assert tab.texts("td[data-column=Step]") == [str(steps)] * 32 + [str(steps - 1)] * 18
        assert not tab.enabled("First")
        tab.push("Next")
        tab.says(f"51–100 of {groups:,}")
        tab.push("Last")
        tab.says(f"{groups - 49:,}–{groups:,} of {groups:,}")
        assert not tab.enabled("Next")
        tab.type("prompt", "IS 123 +")
        tab.says(f"1–{min(alike, 50)} of {alike}")
        assert set(tab.texts(".viewer-open")) == {"What is 123 + 1?"}
        tab.type("step_to", "500")
        tab.says("1–16 of 16")
        page.click("option[value=unparsable]")
        found = sum(number % 7 == 0 for number in range(123, 16_000, 1000))
        tab.says(f"1–{found} of {found}")
        assert set(tab.texts("td[data-column=Marks]")) == {"unparsable"}
        page.click("[data-sort=length]")
        page.until(lambda: (lengths := longest(tab)) == sorted(lengths, reverse=True), "the longest first")
        assert tab.texts("th:nth-child(5)", "aria-sort") == ["descending"]
        page.press("ENTER")  # the head has the focus
        page.until(lambda: (lengths := longest(tab)) == sorted(lengths), "the shortest first")
        assert len(set(longest(tab))) > 1
        tab.type("reward_min", "0.9")
        tab.says("no group is as asked for")
        tab.push("Clear")
        tab.says(f"1–50 of {groups:,}")


def longest(tab: Tab) -> list[int]:
    return [int(text) for text in tab.texts("td[data-column=Longest]")]


def test_a_group_is_shown_side_by_side_and_hostile_text_as_text(page: Page, tmp_path: Path) -> None:
    record(tmp_path, [[recorded(written([HOSTILE, "1 2 3"], tmp_path), 0.05)]])
    with shown(page, RunReader(tmp_path)) as tab:
        assert tab.text(".viewer-open") == SHOWN.replace("↵\n⇥\t", " ")
        tab.open()
        assert tab.text("#viewer-title") == "Group of step 1, prompt prompt/1"
        assert tab.text(".viewer-problem .viewer-prose") == SHOWN
        assert tab.texts(".viewer-card h4") == ["Completion 1 ✗ wrong", "Completion 2 ✓ right"]
        tops = tab.run("return [...document.querySelectorAll('.viewer-card')].map((e) => e.getBoundingClientRect().top)")
        assert tops[0] == tops[1]
        facts = dict(zip(tab.texts(".viewer-card:last-child dt"), tab.texts(".viewer-card:last-child dd"), strict=True))
        assert facts == {
            **{
                "Reward": "1",
                "· math": "1",
                "· format": "–",
                "Advantage": "0.500",
                "Extracted answer": "1 2 3",
                "Status": "ok",
            },
            **{"Finish reason": "stop", "Tokens": facts["Tokens"], "Weights": "1"},
        }
        assert tab.text(".viewer-card .viewer-tokens").replace("·", "") == SHOWN
        assert tab.texts(".viewer-card img") == tab.texts(".viewer-card script") == []


def test_tokens_are_shaded_and_their_numbers_said_exactly(page: Page, tmp_path: Path) -> None:
    made = written(["How many apples now? 1 2 3 #### 12"], tmp_path)
    record(tmp_path, [[recorded(made, 0.05)]])
    (completion,) = made.completions
    count, last = len(completion.token_ids), completion.logprobs[-1]
    with shown(page, RunReader(tmp_path)) as tab:
        tab.open()
        assert (tab.texts("[data-token]", "class")[0], tab.texts("[data-token]", "class")[-1]) == ("", "viewer-low4")
        assert "below −2" in tab.text(".viewer-legend")
        tab.focus(".viewer-shading input")
        page.press("ARROW_RIGHT", "ARROW_RIGHT")
        assert page.run("return document.querySelector('input[value=difference]').checked")
        assert set(tab.texts("[data-token]", "class")) == {"viewer-up2"}  # above 0.01
        page.press("ARROW_RIGHT")
        assert set(tab.texts("[data-token]", "class")) == {""}
        page.press("ARROW_LEFT", "TAB")
        assert tab.text(".viewer-tip").startswith(
            f"token 1 of {count} · id {completion.token_ids[0]} · rollout 0 · trainer 0.05"
        )
        page.press("END")
        said = dict(fact.rsplit(" ", 1) for fact in tab.text(".viewer-tip").split(" · "))
        assert said.pop(f"token {count} of") == str(count)
        numbers = {name: np.float32(value) for name, value in said.items()}
        assert (numbers["rollout"], numbers["trainer"]) == (last, last + np.float32(0.05))
        assert numbers["difference"] == pytest.approx(0.05, abs=1e-6)
        assert [numbers[name] for name in ("advantage", "weights", "id")] == [0.5, 1, completion.token_ids[-1]]
        page.press("HOME", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT")
        assert tab.text(".viewer-tip").startswith("token 2 of")
        page.press("ESCAPE")
        assert tab.texts(".viewer-group") == []
        assert tab.run("return document.activeElement.className") == "viewer-open"


def test_an_opened_group_is_at_the_top_of_the_window_below_a_long_list(page: Page, tmp_path: Path) -> None:
    record(tmp_path, [[trained(group(number, [0.0, 1.0] * 8)) for number in range(40)]])
    with shown(page, RunReader(tmp_path), width=500) as tab:
        tab.open()
        top, height = tab.run("return [document.querySelector('#viewer-title').getBoundingClientRect().top, innerHeight]")
        assert 0 <= top < height / 8


def test_a_prompt_is_compared_across_steps_by_keyboard(page: Page, tmp_path: Path) -> None:
    late = RecordedGroup(group(7, [1.0, float("nan")]), reason="reward", detail="an answer could not be graded: timeout")
    steps = [[trained(group(1, [0.0, 0.0, 1.0]))], [trained(group(4, [1.0, 1.0, 1.0])), late], [trained(group(2, [0.0, 1.0]))]]
    record(tmp_path, steps)
    with shown(page, RunReader(tmp_path)) as tab:
        tab.focus(".viewer-open")
        page.press("ARROW_DOWN", "ARROW_DOWN", "ARROW_UP", "ENTER")
        page.until(lambda: tab.text("#viewer-title") == "Group of step 2, prompt prompt/1", "the group of the second row")
        assert tab.run("return document.activeElement.id") == "viewer-title"
        assert "Not known: the texts of tokens" in tab.text(".viewer-group .viewer-missing")
        assert tab.texts(".viewer-history button", "aria-label") == [
            *("step 1: mean reward 0.333, 1 of 3 right", "step 2: mean reward 1, 3 of 3 right"),
            "step 2: mean reward –, 1 of 2 right, dropped: reward",
        ]
        assert tab.texts(".viewer-history button", "aria-current") == [None, "true", None]
        assert len(tab.texts(".viewer-history li:first-child rect")) == 3
        tab.focus(".viewer-history button", 2)
        page.press("ENTER")
        page.until(lambda: tab.text("#viewer-title").startswith("Dropped group of step 2"), "the dropped group")
        assert "Dropped (reward): an answer could not be graded: timeout" in tab.text(".viewer-group")
        assert tab.texts(".viewer-card h4")[1] == "Completion 2 not graded"
        tab.push("Close")
        assert tab.texts(".viewer-group") == []


def test_a_very_long_completion_is_folded(page: Page, tmp_path: Path) -> None:
    made = written(["1 2 3 " * 300], tmp_path)
    count = len(made.completions[0].token_ids)
    assert count > 1000
    record(tmp_path, [[recorded(made, 0.0)]])
    with shown(page, RunReader(tmp_path)) as tab:
        tab.open()
        assert len(tab.texts("[data-token]")) == 512
        tab.push(f"Show all {count:,} tokens")
        assert len(tab.texts("[data-token]")) == count


def test_the_list_follows_a_run_that_goes_on_and_the_step_of_the_page(page: Page, tmp_path: Path) -> None:
    write_lines(tmp_path / "one", 1, 2, each=2)
    write_lines(tmp_path / "two", 1, 1, each=1)
    with shown(page, RunReader(tmp_path / "one"), RunReader(tmp_path / "two")) as tab:
        assert tab.status == "1–4 of 4"
        tab.focus(".viewer-open", 1)
        focused = tab.run("return document.activeElement.textContent")
        with (tmp_path / "one" / LINES).open("a") as file:
            file.write(json.dumps({"step": 3, "groups": [entry(80)]}) + "\n")
        tab.says("1–5 of 5")
        assert tab.run("return document.activeElement.textContent") == focused
        page.click("[name=follow]")
        tab.run("page.choose(2)")
        tab.says("1–2 of 2")
        assert tab.texts("td[data-column=Step]") == ["2", "2"]
        tab.run("page.choose(null)")
        tab.says("1–5 of 5")
        tab.run("page.run = 1")
        tab.says("1–1 of 1")


def test_what_is_missing_is_said(page: Page, tmp_path: Path) -> None:
    with shown(page, RunReader(tmp_path)) as tab:
        assert tab.status == "no group is as asked for"
        assert "groups.jsonl is missing" in tab.text(".viewer-missing")
        write_lines(tmp_path, 1, 1, each=1)
        tab.says("1–1 of 1")
        tab.run("document.querySelector('.viewer-open').click()")
        alert = ".viewer p[role=alert]:not(:empty)"
        page.until(lambda: tab.text(alert), "why it is not shown")
        assert "the group is known, but not in full: the run directory has no groups in full" in tab.text(alert)
        (complaint,) = page.errors()
        assert "404" in complaint
        tab.push("Close")
        assert tab.texts(alert) == []


@pytest.mark.parametrize("width", [360, 1600])
def test_the_tab_is_never_wider_than_the_screen(page: Page, tmp_path: Path, width: int) -> None:
    record(tmp_path, [[recorded(written([HOSTILE, "x" * 500, "1 2 3"], tmp_path), 0.05)]])
    with shown(page, RunReader(tmp_path), width=width) as tab:
        tab.open()
        wide, there = tab.run("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= there
