"""The whole loop over the real services and the real engine in one process."""

import io
import json
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from common.errors import ConfigError
from common.settings.config import Config
from common.wire.schemas import Group
from services.engine.graphs import StepGraphs
from services.engine.model import Model
from tests.support.errors import raises
from tests.support.runs.in_process import metrics, quiet, stored
from trainer import train_in_process
from trainer.algorithms.advantages import group_normalised
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.rollouts.collector import CollectFailed
from trainer.rollouts.priorities import load_priority
from trainer.run import Listener

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_a_run_is_repeatable_and_depends_on_the_seed(settings: Callable[..., Config]) -> None:
    first, second, other = settings(), settings(), settings("--seed", "1")
    for config in (first, second, other):
        train_in_process(config, quiet())
    for a, b in zip(stored(first), stored(second), strict=True):
        assert a.prompt_id == b.prompt_id
        assert [c.token_ids.tolist() for c in a.completions] == [
            c.token_ids.tolist() for c in b.completions
        ]
    for x, y in zip(metrics(first), metrics(second), strict=True):
        assert x["reward"] == y["reward"]
        assert x["update"] == pytest.approx(y["update"], abs=1e-4)
    assert [g.prompt_id for g in stored(other)] != [g.prompt_id for g in stored(first)]


def test_a_second_run_at_the_same_time_is_refused_and_ends_nothing(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    alone = settings("--trainer.max_steps", "2")
    train_in_process(alone, quiet())
    first = settings("--trainer.max_steps", "2", directory=tmp_path / "first")
    second = settings("--trainer.max_steps", "1", directory=tmp_path / "second")
    refused: list[BaseException | None] = []

    class StartsAnother(Listener):
        def on_event(self, run: Any, event: str, **about: Any) -> None:
            if event == "step_end":
                with ThreadPoolExecutor(1) as thread:
                    refused.append(thread.submit(train_in_process, second, quiet()).exception())

    train_in_process(first, quiet(), listener=StartsAnother())
    assert len(refused) == 2
    for error in refused:
        assert isinstance(error, ConfigError)
        assert "another run is training in this process" in str(error)
    # It drew no random number of the first run.
    for a, b in zip(metrics(alone), metrics(first), strict=True):
        assert a["reward"] == b["reward"]
        assert a["update"] == pytest.approx(b["update"], abs=1e-4)
    train_in_process(second, quiet())


def test_a_resumed_run_goes_on_as_an_unbroken_one(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    unbroken = settings("--trainer.max_steps", "4")
    train_in_process(unbroken, quiet())
    place = tmp_path / "broken"
    train_in_process(settings("--trainer.max_steps", "2", directory=place), quiet())
    resumed = settings("--trainer.max_steps", "4", directory=place)
    train_in_process(resumed, quiet())
    assert [line["step"] for line in metrics(resumed)] == [1, 2, 3, 4]
    for a, b in zip(metrics(unbroken), metrics(resumed), strict=True):
        assert a["reward"] == b["reward"]
        assert a["update"] == pytest.approx(b["update"], abs=1e-4)
    assert [g.position for g in stored(resumed)] == list(range(16))


@pytest.mark.slow
def test_a_resumed_run_with_a_curriculum_draws_the_prompts_of_an_unbroken_one(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    words = ("--data.curriculum", "difficulty", "--data.num_samples", "8", "--trainer.num_epochs", "3",
             "--reward.functions", '{"name": "math", "weight": 0.4}')  # fmt: skip  # a right answer has no reward above 0.5
    unbroken = settings(*words, "--trainer.max_steps", "6")
    train_in_process(unbroken, quiet())
    place = tmp_path / "broken"
    train_in_process(settings(*words, "--trainer.max_steps", "3", directory=place), quiet())
    resumed = settings(*words, "--trainer.max_steps", "6", directory=place)
    train_in_process(resumed, quiet())
    assert [g.prompt_id for g in stored(resumed)] == [g.prompt_id for g in stored(unbroken)]
    reports = []
    for config in (unbroken, resumed):
        with closing(sqlite3.connect(config.state_dir / "data" / "stream.db")) as db:
            reports.append(
                db.execute("SELECT position, body FROM reports ORDER BY serial").fetchall()
            )
    assert reports[0] == reports[1]
    assert [position for position, _ in reports[0]] == [4, 8, 12, 16, 20, 24]
    groups = stored(unbroken)[:4]
    rates = {g.prompt_id: sum(c.correct for c in g.completions) / 4 for g in groups}
    assert any(rates.values())
    assert sorted(rate for _, rate in json.loads(reports[0][0][1])) == sorted(rates.values())


def test_every_prompt_is_trained_on_once_and_on_policy(settings: Callable[..., Config]) -> None:
    config = settings()
    train_in_process(config, quiet())
    groups = stored(config)
    assert [group.position for group in groups] == list(range(12))
    assert len({group.prompt_id for group in groups}) == 12
    assert [group.weight_version for group in groups] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(line["staleness"] == 0 for line in metrics(config))
    assert all(line["update"]["delta_logprob"] < 1e-4 for line in metrics(config))


def test_an_engine_beside_a_trainer_that_computes_records_no_steps(
    settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matters on a GPU, where a thread must not wait for the device while another one records."""
    models: list[Model] = []

    class Recording(Model):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.graphs = StepGraphs(self._step, lambda step: step, self.device)
            models.append(self)

    monkeypatch.setattr("trainer.backends.embedded.Model", Recording)
    for staleness in (0, 1):
        train_in_process(
            settings("--trainer.max_staleness", str(staleness), "--trainer.max_steps", "1"), quiet()
        )
    assert [model.graphs is None for model in models] == [False, True]


@pytest.mark.parametrize("staleness", [1, 2])
def test_staleness_is_bounded(settings: Callable[..., Config], staleness: int) -> None:
    config = settings("--trainer.max_staleness", str(staleness), "--trainer.max_steps", "5")
    train_in_process(config, quiet())
    lines = metrics(config)
    assert len(lines) == 5
    assert 0 < max(line["staleness"] for line in lines) <= staleness
    assert len({group.prompt_id for group in stored(config)}) >= 20


def test_reused_groups_carry_importance_weights(
    settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[bool, float]] = []
    whole = Batch.of

    def recorded(groups: list[TrainingGroup], *more: Any) -> Batch:
        trained.extend((item.reused, item.weight) for item in groups)
        return whole(groups, *more)

    monkeypatch.setattr(Batch, "of", recorded)
    size = ("--trainer.batch_size", "8", "--trainer.max_steps", "4")
    reuse = (
        "--replay.reuse_ratio",
        "0.25",
        "--replay.priority",
        f"{__name__}:longest",
    )
    config = settings(*size, *reuse)
    train_in_process(config, quiet())
    useful = [
        not group.zero_variance for group in stored(config)
    ]  # of the six fresh groups of a step
    reused = [min(2, sum(useful[: 6 * step])) for step in range(4)]
    assert [line["reused_groups"] for line in metrics(config)] == reused
    assert [group.position for group in stored(config)] == list(range(24))
    with closing(sqlite3.connect(config.state_dir / "replay" / "replay.db")) as db:
        answers = [
            json.loads(answer)["weights"]
            for (answer,) in db.execute(
                "SELECT answer FROM answers WHERE call = 'sample' ORDER BY key"
            )
        ]
    weights = [weight for answer in answers for weight in answer]
    assert len({*weights}) > 1
    assert [weight for reused, weight in trained if reused] == pytest.approx(weights)
    assert {weight for reused, weight in trained if not reused} == {1.0}


def test_a_run_begins_with_the_warnings_about_its_settings(settings: Callable[..., Config]) -> None:
    console = Console(file=io.StringIO(), width=1000)
    train_in_process(
        settings(
            "--algorithm.kl_coef", "0.1", "--algorithm.kl_in", "reward", "--trainer.max_steps", "1"
        ),
        console,
    )
    assert isinstance(console.file, io.StringIO)
    assert (
        "warning: algorithm.kl_in reward with algorithm.advantage group_normalised"
        in console.file.getvalue()
    )


def test_experience_of_another_run_is_not_reused(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    state = ("--state_dir", str(tmp_path / "shared"), "--trainer.max_steps", "1")
    train_in_process(settings(*state), quiet())
    with raises(ConfigError, field="state_dir"):
        train_in_process(settings(*state, "--replay.reuse_ratio", "0.5"), quiet())


@pytest.mark.parametrize("priority", ["reward", f"{__name__}:longest"])
def test_every_priority_reuses_groups(settings: Callable[..., Config], priority: str) -> None:
    config = settings(
        "--replay.reuse_ratio", "0.5", "--trainer.max_steps", "3", "--replay.priority", priority
    )
    train_in_process(config, quiet())
    useful = [
        not group.zero_variance for group in stored(config)
    ]  # of the two fresh groups of a step
    assert any(useful[:4])
    assert [line["reused_groups"] for line in metrics(config)] == [
        0,
        min(2, sum(useful[:2])),
        min(2, sum(useful[:4])),
    ]
    with closing(sqlite3.connect(config.state_dir / "replay" / "replay.db")) as db:
        priorities = dict(db.execute("SELECT id, priority FROM groups"))
    expected = load_priority(priority)
    for group in stored(config):
        advantages = group_normalised(torch.from_numpy(group.rewards)[None]).flatten().tolist()
        assert priorities[group.id] == pytest.approx(expected(group, advantages))


def test_without_reuse_no_priorities_are_stored(settings: Callable[..., Config]) -> None:
    config = settings("--trainer.max_steps", "2")
    train_in_process(config, quiet())
    with closing(sqlite3.connect(config.state_dir / "replay" / "replay.db")) as db:
        priorities = {priority for (priority,) in db.execute("SELECT priority FROM groups")}
    # That of groups that got none: a mean advantage of these few answers is less.
    assert priorities == {1.0}


def longest(group: Group, advantages: Sequence[float]) -> float:
    """A custom priority."""
    return float(max(len(completion.token_ids) for completion in group.completions))


def test_ppo_learns_a_critic_and_resumes_with_it(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    words = [
        "--algorithm.name",
        "ppo",
        "--critic.learning_rate",
        "1e-3",
        "--critic.warmup_steps",
        "1",
    ]
    unbroken = settings(
        *words,
        "--trainer.max_steps",
        "4",
        "--sampling.group_size",
        "1",
        "--trainer.batch_size",
        "8",
    )
    train_in_process(unbroken, quiet())
    lines = metrics(unbroken)
    assert [line["update"]["updates"] for line in lines] == [
        0,
        4,
        4,
        4,
    ]  # only the critic learns at first
    assert lines[0]["critic"]["value_mean"] == 0
    assert lines[3]["critic"]["value_mean"] > 0
    place = tmp_path / "broken"
    for steps in ("2", "4"):
        resumed = settings(
            *(
                *words,
                "--trainer.max_steps",
                steps,
                "--sampling.group_size",
                "1",
                "--trainer.batch_size",
                "8",
            ),
            directory=place,
        )
        train_in_process(resumed, quiet())
    for a, b in zip(lines, metrics(resumed), strict=True):
        assert a["reward"] == b["reward"]
        assert a["critic"] == pytest.approx(b["critic"], abs=1e-4)
        assert a["update"] == pytest.approx(b["update"], abs=1e-3)
    assert (place / "checkpoints" / "step_000004" / "critic" / "config.json").exists()


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(
    settings: Callable[..., Config],
) -> None:
    config = settings("--algorithm.name", "dapo", "--trainer.max_steps", "2")
    train_in_process(config, quiet())
    lines = metrics(config)
    assert [line["zero_variance_groups"] for line in lines] == [0, 0]
    replaced = lines[-1]["dropped"].get("zero_variance", 0)
    assert len(stored(config)) == 8 + replaced
    assert [group.position for group in stored(config)] == list(range(8 + replaced))


def test_dynamic_sampling_stops_when_no_group_differs(settings: Callable[..., Config]) -> None:
    """One token is never enough for an answer, so every reward is 0."""
    words = (
        "--algorithm.name",
        "dapo",
        "--algorithm.dynamic_sampling_rounds",
        "2",
        "--sampling.max_new_tokens",
        "1",
    )
    with raises(CollectFailed, code="equal_rewards", value="2"):
        train_in_process(settings(*words), quiet())


def test_the_group_size_is_used(settings: Callable[..., Config]) -> None:
    config = settings("--sampling.group_size", "6", "--trainer.max_steps", "1")
    train_in_process(config, quiet())
    assert {len(group.completions) for group in stored(config)} == {6}


def test_a_batch_larger_than_the_data_is_refused(settings: Callable[..., Config]) -> None:
    config = settings("--data.num_samples", "3", "--trainer.num_epochs", "1")
    config.trainer.max_steps = None
    with raises(ConfigError, field="trainer.batch_size"):
        train_in_process(config, quiet())


def test_a_missing_model_is_refused(settings: Callable[..., Config], tmp_path: Path) -> None:
    with raises(ConfigError, field="model.name", value=str(tmp_path / "nothing-here")):
        train_in_process(settings("--model.name", str(tmp_path / "nothing-here")), quiet())
