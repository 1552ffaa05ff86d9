"""What a run keeps beside its steps: the problems that a program gave it, and texts of groups."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError
from common.settings.config import Config
from common.wire.schemas import Prompt
from trainer.observe.alarms import refused_calls
from trainer.observe.catalogue import ALARMS, FAULTS, Fault
from trainer.observe.group_files import CompletionText, GroupTexts, _mean
from trainer.observe.jsonl import JsonlReader, parsed
from trainer.observe.problems import Problems, keep_problems, kept_problems
from trainer.observe.run_log import _trained


def test_the_given_problems_come_back_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    assert kept_problems(tmp_path) is None
    problems = Problems(
        train=[
            Prompt(id="a", prompt="1 + 1?", ground_truth="2"),
            Prompt(id="b", prompt="é", ground_truth=""),
        ],
        held_out=[Prompt(id="c", prompt="2?", ground_truth="2")],
    )
    keep_problems(tmp_path, problems)
    assert kept_problems(tmp_path) == problems
    [path] = tmp_path.iterdir()
    assert json.loads(path.read_bytes())["held_out"][0]["id"] == "c"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=path.name):
        kept_problems(tmp_path)


def test_lines_of_a_file_that_has_gone_are_gone(tmp_path: Path) -> None:
    """A file that never was is no change."""
    path = tmp_path / "lines.jsonl"
    reader = JsonlReader(path, parsed)
    assert not reader.replaced()
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert [line["step"] for line in reader.read()] == [1, 2]
    assert not reader.replaced()
    path.unlink()
    assert reader.replaced()
    assert not reader.replaced()
    path.write_text('{"step": 5}\n')
    assert [line["step"] for line in reader.read()] == [5]


@pytest.mark.parametrize("of_batch", [True, False])
def test_logprobs_are_recorded_as_they_were_before_the_update(of_batch: bool) -> None:
    """Only a batch of one mini-batch leaves them to the update."""
    before: Any = [object(), object()]
    after: Any = [object(), object()]
    batch: Any = SimpleNamespace(
        advantages=["a", "b"],
        old_logprobs=before if of_batch else None,
        rows=[0, 1],
        groups=[SimpleNamespace(group="g", weight=1.0, reused=False)],
        parts=[slice(0, 2)],
    )
    [recorded] = _trained(batch, SimpleNamespace(logprobs=after))  # type: ignore[arg-type]
    assert recorded.logprobs == (before if of_batch else after)
    assert list(recorded.advantages) == ["a", "b"]


def test_refused_calls_raise_an_alarm_from_their_limit_on() -> None:
    limit = int(ALARMS["refused_calls"].limit)
    for rewards in ([0.0], [0.0, 1.0]):
        assert refused_calls(limit - 1, "why", rewards, Config()) == {}
        assert "why" in refused_calls(limit, "why", rewards, Config())["refused_calls"]


@pytest.mark.parametrize("seed", range(20))
def test_an_episode_has_one_answer_and_a_completion_without_one_is_its_own(seed: int) -> None:
    draws = random.Random(seed)
    episodes = [draws.choice([None, 0, 1, 2]) for _ in range(8)]
    texts = GroupTexts(completions=[CompletionText(episode=each) for each in episodes])
    expected = [
        index
        for index, episode in enumerate(episodes)
        if episode is None or episode not in episodes[:index]
    ]
    assert texts.answers == expected
    tokens = [draws.randrange(1 << 20) for _ in range(5)]
    texts.prompt_token_ids = np.array(tokens, "<i4").tobytes()
    assert texts.prompt_tokens == tokens


def test_the_mean_of_numbers_that_are_not_finite_is_unknown() -> None:
    ones = np.array([1.0, 2.0], np.float32)
    other = np.array([6.0], np.float32)
    assert _mean([ones, other]) == 3.0
    for wrong in (np.nan, np.inf):
        assert _mean([ones, np.array([wrong], np.float32)]) is None
    assert _mean([]) is None
    assert _mean([np.array([1 / 3], np.float64)]) == 0.333333


def test_every_fault_is_in_the_catalogue_with_what_names_it() -> None:
    before = len(FAULTS)
    try:
        fault = Fault("A new one", "do this", codes=("a", "b"), foreign_text="x+")
        assert FAULTS[before:] == [fault]
        assert (str(fault), fault.remedy) == ("A new one", "do this")
        assert (fault.codes, fault.foreign_text) == (("a", "b"), "x+")
        assert (Fault("Another", "y").codes, FAULTS[-1].foreign_text) == ((), "")
    finally:
        del FAULTS[before:]
