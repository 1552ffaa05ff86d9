"""The settings of every example are valid, and its page has the command that uses them."""

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from common.prompts.prompter import PromptStyle, prompt_text
from common.settings.config import load
from common.settings.sections import DataSection
from services.data.loaders import load_split
from services.reward.functions import CodeRewardFunction
from tests.support.paths import ROOT

FOLDERS = sorted(path.parent for path in (ROOT / "examples").glob("*/README.md"))
SETTINGS = sorted((ROOT / "examples").glob("*/*.yaml"))


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_example_exists_with_settings() -> None:
    assert {folder.name for folder in FOLDERS} == {
        "gsm8k_gpu",
        "real_model",
        "own_reward",
        "ppo_critic",
        "lora",
        "code_rewards",
        "tool_calculator",
        "coding_agent",
        "search_agent",
    }
    assert {path.parent for path in SETTINGS} == set(FOLDERS)


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.parent.name)
def test_the_settings_are_valid_and_named_in_the_command(path: Path) -> None:
    load(["--config", str(path)], {})
    page = (path.parent / "README.md").read_text(encoding="utf-8")
    assert f"RUN_CONFIG={path.relative_to(ROOT)}" in page


@pytest.mark.parametrize("name", ["own_reward", "code_rewards"])
def test_the_problems_can_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (settings,) = (ROOT / "examples" / name).glob("*.yaml")
    section: DataSection = load(["--config", str(settings)], {}).data
    assert load_split(section, "train", 0)
    assert load_split(section, "eval", 0)


def test_the_problems_of_the_real_model_hold_out_what_they_say(tmp_path: Path) -> None:
    from examples.real_model.problems import SIZES, main

    main(tmp_path)
    rows = {name: json_lines(tmp_path / f"{name}.jsonl") for name in SIZES}
    assert {name: len(found) for name, found in rows.items()} == SIZES
    done = {name: {row["calculation"] for row in found} for name, found in rows.items()}
    assert not done["test"] & done["train"]
    for row in chain.from_iterable(rows.values()):
        assert eval(row["calculation"]) == int(row["answer"])  # noqa: S307
    settings = ROOT / "examples" / "real_model" / "grpo.yaml"
    config = load(["--config", str(settings), "--data.source", str(tmp_path)], {})
    text = prompt_text(load_split(config.data, "eval", 0)[0], PromptStyle.of(config), None)
    assert text.endswith(f"\n\nQuestion: {rows['test'][0]['question']}\nAnswer:")


@pytest.mark.integration
def test_the_custom_reward_prefers_short_right_answers() -> None:
    from examples.own_reward.brief import Brief

    chats = [
        [{"role": "assistant", "content": text}] for text in ("#### 3", "1+2=3. #### 3", "#### 4")
    ]
    brief = Brief()
    short, long, wrong = brief(chats, ground_truth=["3", "3", "3"])
    brief.math.close()
    assert 1 > short > long > 0 > wrong


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_every_reference_solution_passes_its_cases() -> None:
    rows = json_lines(ROOT / "examples" / "code_rewards" / "problems.jsonl")
    chats = [
        [{"role": "assistant", "content": f"```python\n{row['reference']}\n```"}] for row in rows
    ]
    rewards = CodeRewardFunction()(chats, test_cases=[row["test_cases"] for row in rows])
    assert rewards == [1.0] * len(rows)
