"""Training on episodes in one process: embedded engine, gateway, the unsandboxed environments
below, real updates."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from common.errors import ConfigError, InvalidInput, ServiceError
from common.settings.config import Config, from_mapping
from common.wire import codec
from common.wire.schemas import Group, Groups, Prompt
from learning.ranks import Ranks
from services.reward.functions.text import LengthPenaltyFunction
from tests.support.batches.groups import batch_of, make_group, prepared, whole, with_algorithm
from tests.support.environments.own_environments import Insists, Moody, TwiceUnlucky, Unlucky
from tests.support.errors import raises
from tests.support.runs.small_run import small_run
from trainer.dashboard.group_detail import group_detail
from trainer.dashboard.group_index import GroupIndex
from trainer.dashboard.runs import RunReader
from trainer.observe.problems import Problems
from trainer.observe.run_dir import read_lines
from trainer.policy.policy import Policy
from trainer.start.in_process import train_in_process

pytestmark = pytest.mark.integration


@pytest.fixture
def small(base_model: Path, tmp_path: Path) -> Config:
    """Settings of a run of a model that ends its answers."""
    return small_run(base_model, tmp_path)


def episodes_of(config: Config, environment: type) -> Config:
    config = config.model_copy(deep=True)
    config.environment.name = f"python:{environment.__module__}:{environment.__name__}"
    config.environment.turns, config.sampling.max_new_tokens, config.sampling.group_size = 4, 60, 4
    config.trainer.batch_size, config.trainer.max_steps, config.evaluation.samples = 2, 2, 2
    config.evaluation.pass_samples, config.rollout.max_context_tokens = 0, 512
    return config


def train(config: Config, count: int = 8) -> list[dict[str, Any]]:
    made = [
        Prompt(id=str(i), prompt=f"How many apples are {i} and 1?", ground_truth=str(i))
        for i in range(count + 2)
    ]
    problems = Problems(made[:count], made[count:])
    train_in_process(
        config, Console(quiet=True), problems=problems, rewards=[LengthPenaltyFunction()]
    )
    assert config.trainer.run_dir is not None
    return read_lines(config.trainer.run_dir / "metrics.jsonl")


def test_every_trained_token_has_the_log_probability_that_the_engine_sampled_it_with(
    small: Config, tmp_path: Path
) -> None:
    records = train(episodes_of(small, Insists))
    assert len(records) == 2
    for record in records:
        assert record["update"]["trained_tokens"] > 0
        assert record["update"]["delta_logprob"] < 1e-6, (
            "the trainer reads other tokens than the engine sampled"
        )
        assert record["dropped"] == {}
    run_dir = tmp_path / "run"
    index = GroupIndex(run_dir)
    rows = [
        index.find(entry["id"])
        for line in read_lines(run_dir / "groups.jsonl")
        for entry in line["groups"]
    ]
    shown = [
        group_detail(run_dir, row, ServiceError("no texts")) for row in rows if row is not None
    ]
    completions = [completion for group in shown for completion in group["completions"]]
    assert len(completions) == 2 * 2 * 4
    for completion in completions:
        unknown = [number is None for number in completion["logprobs"]]
        assert any(unknown), "what the environment said has no log-probability"
        assert completion["text"].count("Are you sure?") == 2
        assert completion["advantage"] is not None


def with_episodes(rewards: list[float], sequences: list[int]) -> Group:
    """Returns a group of episodes with these numbers of sequences."""
    rng = np.random.default_rng(3)
    numbers = [number for number, count in enumerate(sequences) for _ in range(count)]
    group = make_group(rng, [rewards[number] for number in numbers])
    for completion, number in zip(group.completions, numbers, strict=True):
        length = len(completion.token_ids)
        completion.episode = number
        completion.mask = np.array([1, *rng.integers(0, 2, length - 2), 1], np.int32)
        completion.prompt_ids = rng.integers(3, 300, int(rng.integers(2, 6))).astype(np.int32)
    return group


def test_advantages_belong_to_episodes_and_reach_all_their_sequences(config: Config) -> None:
    rewards = [1.0, 0.0, 0.0, 0.5]
    split, one = with_episodes(rewards, [1, 3, 2, 1]), make_group(np.random.default_rng(5), rewards)
    batches = [whole([group], with_algorithm(config, name="grpo")) for group in (split, one)]
    expected = [float(advantages[0]) for advantages in batches[1].advantages or []]
    for completion, advantages in zip(split.completions, batches[0].advantages or [], strict=True):
        assert completion.mask is not None
        assert len(advantages) == completion.mask.sum()
        assert (advantages == np.float32(expected[completion.episode or 0])).all()


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "gspo", "dapo", "dr_grpo", "cispo"])
def test_a_masked_token_is_only_context(config: Config, algorithm: str) -> None:
    """A row whose mask leaves only a suffix equals that suffix after a longer prompt."""
    config = with_algorithm(config, name=algorithm)
    groups = [
        make_group(np.random.default_rng(i), [1.0, 0.0, 0.5, 0.0], position=i) for i in range(2)
    ]
    masked = codec.decode_groups(codec.encode_groups(groups))
    for group, other in zip(groups, masked, strict=True):
        for plain, completion in zip(group.completions, other.completions, strict=True):
            context = np.array([7, 8, 9], np.int32)
            plain.prompt_ids = np.concatenate([group.prompt_token_ids, context])
            completion.token_ids = np.concatenate([context, completion.token_ids])
            completion.logprobs = np.concatenate([np.zeros(3, np.float32), completion.logprobs])
            completion.mask = np.array([0] * 3 + [1] * len(plain.token_ids), np.int32)
            completion.weight_versions = [(0, 0, len(completion.token_ids))]
    found = []
    for each in (groups, masked):
        policy = Policy(config, Ranks())
        policy.total_steps = 10
        update = policy.update(prepared(policy, each))
        weights = np.concatenate([tensor.float().numpy().ravel() for _, tensor in policy.weights()])
        metrics = update.metrics
        found.append(
            (
                metrics.trained_tokens,
                metrics.loss,
                metrics.grad_norm,
                metrics.delta_logprob,
                weights,
            )
        )
    (tokens, *numbers, weights), (other_tokens, *others, other_weights) = found
    assert (
        tokens
        == other_tokens
        == sum(len(c.token_ids) for group in groups for c in group.completions)
    )
    np.testing.assert_allclose(numbers, others, rtol=1e-4, atol=1e-6)
    assert np.abs(weights - other_weights).mean() < 1e-6, (
        "AdamW turns the last bits of a gradient near 0 into a step"
    )


def test_a_batch_of_episodes_has_all_their_sequences(config: Config) -> None:
    groups = [with_episodes([1.0, 0.0], [2, 1]), with_episodes([0.0, 1.0], [1, 1])]
    batch = batch_of(groups, config)
    assert [row.episode for row in batch.rows] == [0, 0, 1, 2, 3]
    assert batch.parts == [slice(0, 3), slice(3, 5)]
    assert batch.lengths == [
        int(c.mask.sum()) for g in groups for c in g.completions if c.mask is not None
    ]
    unequal = [with_episodes([1.0, 0.0, 0.0], [1, 2, 1]), *groups]
    with raises(ConfigError, field="sampling.group_size"):
        batch_of(unequal, config)
    config.environment.name = "python"
    batch = batch_of(unequal, config)
    assert [row.episode for row in batch.rows] == [0, 1, 1, 2, 3, 3, 4, 5, 6]
    assert batch.parts == [slice(0, 4), slice(4, 7), slice(7, 9)]


def test_an_environment_that_fails_drops_its_group_with_the_reason(small: Config) -> None:
    config = episodes_of(small, Moody)
    config.evaluation.samples, config.trainer.num_epochs = 0, 1
    records = train(config)
    assert set(records[-1]["dropped"]) == {"episode"}
    assert [record["update"]["trained_tokens"] > 0 for record in records] == [True, True]


@pytest.mark.parametrize("min_episodes", [None, 3])
def test_a_lost_episode_costs_one_episode_not_its_group(
    small: Config, min_episodes: int | None, tmp_path: Path
) -> None:
    """Another one is played in its place, or the group is trained without it."""
    config = episodes_of(small, Unlucky)
    config.evaluation.samples, config.trainer.num_epochs = 0, 1
    config.environment.min_episodes, config.data.curriculum = min_episodes, "difficulty"
    config.replay.reuse_ratio = 0.5
    config.trainer.max_staleness = 0
    Unlucky.known.clear()
    records = train(config)
    assert len(Unlucky.known) == 2, "every group lost one"
    assert [record["dropped"] for record in records] == [{}, {}]
    assert [record["update"]["trained_tokens"] > 0 for record in records] == [True, True]
    assert [record["lost_episodes"] for record in records] == [{"error": 1}, {"error": 1}]

    run_dir = tmp_path / "run"
    entries = [entry for line in read_lines(run_dir / "groups.jsonl") for entry in line["groups"]]
    assert [entry["reused"] for entry in entries] == [False, False, True]
    index = GroupIndex(run_dir)
    for entry in entries:
        row = index.find(entry["id"])
        assert row is not None
        shown = group_detail(run_dir, row, ServiceError("no texts"))
        assert len(entry["rewards"]) == len(shown["completions"]) == (min_episodes or 4)
        if min_episodes is None:
            assert (entry["marks"], shown["lost_episodes"]) == ([], [])
        else:
            assert entry["marks"] == ["lost"]
            (lost,) = shown["lost_episodes"]
            assert lost.startswith("error: ")
            assert "its machine is gone" in lost


def test_too_few_whole_episodes_are_no_group(small: Config) -> None:
    """Two of four are lost, and so are those that are played in their place."""
    config = episodes_of(small, TwiceUnlucky)
    config.evaluation.samples, config.trainer.num_epochs = 0, 1
    config.environment.min_episodes = 3
    config.trainer.max_steps = 1
    TwiceUnlucky.begun.clear()
    (record,) = train(config)
    assert record["dropped"] == {"episode": 2}, "every group failed once"
    assert record["lost_episodes"] == {"error": 8}
    assert record["update"]["trained_tokens"] > 0


ASKS_FOR_TWO = """
import json, os, sys, urllib.error, urllib.request

task = json.load(sys.stdin)
call = {"model": "policy", "messages": task["messages"], "n": 2}
for n in (2, 1):
    body = json.dumps(call | {"n": n}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    headers["content-type"] = "application/json"
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
    except urllib.error.HTTPError as error:
        assert error.code == 422
with open(os.environ["EPISODE_REWARD_FILE"], "w") as file:
    json.dump(0, file)
"""


def test_refused_calls_are_told_within_the_first_step(
    small: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "asks_for_two.py"
    program.write_text(ASKS_FOR_TWO)
    config = episodes_of(small, Insists)
    config.environment.name = f"agent:{sys.executable} {program}"
    config.evaluation.samples, config.trainer.max_steps, config.trainer.batch_size = 0, 1, 1
    caplog.set_level("INFO", "run")
    (record,) = train(config)
    assert (record["refused_calls"], record["reward"]) == (4, 0.0)
    told = (
        "all rewards are 0, and 4 calls of the model were refused: "
        "n: a call returns exactly one answer; make one call for each answer"
    )
    assert record["alarms"]["refused_calls"] == told
    assert f"alarm: {told}" in caplog.text
    (line,) = [each.message for each in caplog.records if each.message.startswith("step ")]
    assert line.endswith("refused 4")
    assert "refused_calls" in [
        each.name for each in RunReader(tmp_path / "run").diagnosis().findings
    ]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"mask": [1]}, "completions[0].mask"),
    "all masked": ({"mask": [0, 0, 0]}, "completions[0].mask"),
    "no mark": ({"mask": [0, 2, 1]}, "completions[0].mask"),
    "no prompt": ({"prompt_ids": []}, "completions[0].prompt_ids"),
    "turn": ({"turns": [{"start": 2, "end": 4}]}, "completions[0].turns[0]"),
    "episode": ({"episode": 1}, "completions"),
}


@pytest.mark.parametrize("kind", BAD)
def test_sequences_that_contradict_themselves_are_refused(kind: str) -> None:
    change, field = BAD[kind]
    completion = {"token_ids": [5, 6, 7], "logprobs": [-1.0, -1.0, -1.0], "finish_reason": "stop"}
    completion |= {"weight_versions": [[0, 0, 3]], **change}
    group = {"id": "g", "prompt_token_ids": [1], "completions": [completion]}
    with pytest.raises(InvalidInput) as caught:
        codec.from_plain({"groups": [group]}, Groups)
    assert caught.value.field == f"groups[0].{field}"


def test_a_group_of_episodes_survives_the_wire() -> None:
    group = with_episodes([1.0, 0.0], [2, 1])
    group.lost_episodes = ["died: its machine is gone"]
    (back,) = codec.decode_groups(codec.encode_groups([group]))
    assert codec.encode(back) == codec.encode(group)
    assert [answer.episode for answer in back.answers] == [0, 1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a critic": ({"algorithm.name": "ppo"}, "single completions"),
    "overlong": ({"algorithm.overlong_buffer": 5}, "overlong_buffer"),
    "truncated sampling": (
        {"sampling.top_p": 0.9, "rollout.engine": "embedded"},
        "sampling.top_p is set but not read, since it applies to single",
    ),
    "prefill": (
        {"sampling.prefill": "<think>"},
        "sampling.prefill is set but not read, since it applies to single",
    ),
    "truncated evaluation": (
        {"evaluation.top_k": 5},
        "evaluation.top_k is set but not read, since it applies to single",
    ),
    "prompt template": (
        {"data.prompt_template": "{question} Answer:"},
        "data.prompt_template is set but not read, since it applies to single",
    ),
    "more than a group": (
        {"environment.min_episodes": 9},
        "environment.min_episodes 9 is more than sampling.group_size 8",
    ),
    "a program's tools": (
        {"environment.name": "agent:true", "environment.tool_timeout_s": 5},
        "environment.tool_timeout_s 5 cannot end the tools of a program",
    ),
    "a group of one": ({"environment.min_episodes": 1}, "environment.min_episodes"),
    "unread": (
        {"environment.name": "", "environment.turns": 3},
        "environment.turns is set but not read",
    ),
    "unknown": ({"environment.name": "gym:CartPole"}, "there is no environment"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_settings_that_episodes_cannot_have_are_refused(kind: str) -> None:
    change, reason = REFUSED[kind]
    with pytest.raises(ConfigError, match=reason):
        from_mapping({"environment.name": "python"} | change)


def test_an_environment_that_cannot_be_imported_ends_the_run_at_its_start(small: Config) -> None:
    config = episodes_of(small, Insists)
    config.environment.name = "python:no_such_package:Class"
    with raises(ServiceError, field="environment.name", value="no_such_package:Class"):
        train(config)
