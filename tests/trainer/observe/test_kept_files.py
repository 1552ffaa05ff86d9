"""What a run keeps beside its steps: the problems that a program gave it, and texts of groups."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError
from common.process.storage import StorageFailed
from common.settings.config import Config
from common.wire.schemas import Prompt
from tests.support.batches.groups import make_group
from tests.support.errors import raises
from trainer.observe.alarms import refused_calls
from trainer.observe.audit import AuditRecord
from trainer.observe.catalogue import ALARMS, FAULTS, Fault
from trainer.observe.duplicate_answers import duplicate_answers
from trainer.observe.group_files import CompletionText, GroupTexts, _mean
from trainer.observe.jsonl import JsonlReader, parsed
from trainer.observe.problems import Problems, keep_problems, kept_problems
from trainer.observe.run_dir import (
    append_line,
    changed,
    is_run,
    known_settings,
    read_settings,
    reward_names,
)
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
    with raises(ConfigError, field="trainer.run_dir", value=str(path)):
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


def test_a_damaged_line_of_the_audit_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for line in ("{}", '{"kind": "step", "step": "one"}', '{"kind": "other"}'):
        path.write_text(f"{line}\n")
        with raises(ConfigError, field="trainer.run_dir", value=str(path)):
            AuditRecord(tmp_path)
    path.write_text("")
    record = AuditRecord(tmp_path)
    assert record.last_step == 0
    assert record.weights_at(0) is None
    with pytest.raises(ConfigError) as refused:
        record.step(1)
    assert (refused.value.field, refused.value.value) == ("--step", "1")


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"[" * 99_999, b"\xff"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_settings(tmp_path)
    assert (refused.value.field, refused.value.value) == ("trainer.run_dir", str(path))
    assert ("is missing" in refused.value.message) == (content is None)
    assert known_settings(tmp_path) == {}
    assert not is_run(tmp_path)


def test_what_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.mkdir()
    with pytest.raises(StorageFailed) as failed:
        append_line(path, {"step": 1})
    assert (failed.value.field, failed.value.value) == ("trainer.run_dir", str(path))
    assert path.name in failed.value.message


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({}, ["math"]),
        ({"reward": {}}, ["math"]),
        ({"reward": {"functions": ["a", {"name": "b", "weight": 2}]}}, ["a", "b"]),
    ],
)
def test_reward_functions_are_named_as_the_settings_do(
    content: dict[str, Any], names: list[str]
) -> None:
    assert reward_names(content) == names


def test_settings_that_belong_to_a_run_are_no_change() -> None:
    before = {"state_dir": "a", "trainer.run_dir": "a", "trackers.run_name": "a", "seed": 1}
    assert changed(before, dict.fromkeys(before, "b")) == {"seed": "b"}
    assert changed(before, {"new": 1, "seed": 1}) == {}


@pytest.mark.parametrize("seed", range(10))
def test_equal_answers_are_as_surprising_as_they_are_improbable(seed: int) -> None:
    """A group of one answer, or of episodes, has nothing to compare."""
    draw = random.Random(seed)
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(draw.randint(1, 5)):
        group = make_group(rng, [0.0] * draw.randint(1, 5))
        for completion in group.completions[1:]:
            if draw.random() < 0.6:
                completion.token_ids = group.completions[0].token_ids
                completion.logprobs = group.completions[0].logprobs
        if draw.random() < 0.2:
            group.completions[0].episode = 0
        groups.append(group)
    compared = [
        group.completions
        for group in groups
        if len(group.completions) > 1 and group.completions[0].episode is None
    ]
    copies = []
    surprise = 0.0
    for answers in compared:
        texts = [answer.token_ids.tolist() for answer in answers]
        again = [answers[i] for i, text in enumerate(texts) if text in texts[:i]]
        nats = [-float(answer.logprobs.sum()) for answer in again]
        copies += nats
        are_all_equal = len(again) == len(answers) - 1
        chances = 1 if are_all_equal else len(answers)
        surprise += max(0.0, sum(nats) - len(nats) * math.log(chances) - math.log(len(compared)))
    found = duplicate_answers(groups)
    assert found.share == len(copies) / max(1, sum(len(answers) - 1 for answers in compared))
    assert found.surprise == pytest.approx(surprise)
    assert found.example == pytest.approx(math.exp(-max(copies, default=0.0)))


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
