"""Trainer and engine in turn (`rollout.colocate`): each frees its memory for the other, and the run
is the same."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from common.errors import ConfigError
from common.settings.config import Config, load
from learning.parking import Resident
from learning.ranks import Ranks
from services.engine.engine import Engine
from services.engine.scheduler import Scheduler
from tests.support.errors import raises
from tests.support.paths import ROOT
from trainer import train_in_process
from trainer.algorithms.batch import Batch
from trainer.observe.run_dir import read_lines
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.weights.gpu_lease import EngineMemory, GpuLease

Settings = Callable[..., Config]


@pytest.fixture
def settings(base_model: Path, tmp_path: Path) -> Settings:
    """Makes the settings of a run of three small steps, with an evaluation and a checkpoint in
    between."""

    def make(name: str, *more: str) -> Config:
        words = [
            *(
                "--config",
                str(ROOT / "jobgroup/configs/tiny-cpu.yaml"),
                "--model.name",
                str(base_model),
            ),
            *(
                "--trainer.run_dir",
                str(tmp_path / name),
                "--state_dir",
                str(tmp_path / f"{name}-state"),
            ),
            *(
                "--trainer.batch_size",
                "2",
                "--trainer.max_steps",
                "3",
                "--sampling.group_size",
                "4",
            ),
            *(
                "--evaluation.samples",
                "2",
                "--evaluation.every",
                "2",
                "--evaluation.pass_samples",
                "0",
            ),
            *(
                "--checkpoint.every",
                "2",
                "--optimizer.warmup_steps",
                "0",
                "--reward.workers",
                "1",
            ),
            # Else completions decoded together change each other's last bits, and time decides
            # which ones are.
            *("--reproducible", "true"),
            *(
                "--trainer.max_staleness",
                "0",
                "--optimizer.learning_rate",
                "1e-3",
                "--sampling.max_new_tokens",
                "16",
            ),
        ]
        return load([*words, *more], {})

    return make


class Watched:
    """Checks both sides whenever one of them computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resident: Callable[[], Sequence[Resident]] = list
        self.schedulers = list[Scheduler]()
        self.steps = self.updates = 0
        begin, build, update, step = (
            GpuLease.__init__,
            Engine.__init__,
            Policy.update,
            Scheduler.step,
        )

        def watched_lease(
            lease: GpuLease,
            ranks: Ranks,
            resident: Callable[[], Sequence[Resident]],
            engines: EngineMemory | None,
            *,
            shared: bool,
        ) -> None:
            begin(lease, ranks, lambda: self.resizable(resident()), engines, shared=shared)
            self.resident = resident

        def watched_step(scheduler: Scheduler, admit: bool) -> None:
            self.steps += 1
            held = [
                each for each in self.parameters(self.resident()) if each.untyped_storage().nbytes()
            ]
            assert not held, "the trainer holds memory during generation"
            assert not scheduler.released
            step(scheduler, admit)

        def watched_engine(engine: Engine, *arguments: Any, **options: Any) -> None:
            build(engine, *arguments, **options)
            self.schedulers.append(engine.scheduler)

        def watched_update(policy: Policy, batch: Batch) -> PolicyUpdate:
            self.updates += 1
            assert {"kv_cache"} <= self.schedulers[0].released.keys(), (
                "the engine holds memory during the update"
            )
            assert all(
                parameter.untyped_storage().nbytes() for parameter in policy.model.parameters()
            )
            return update(policy, batch)

        monkeypatch.setattr(GpuLease, "__init__", watched_lease)
        monkeypatch.setattr(Engine, "__init__", watched_engine)
        monkeypatch.setattr(Scheduler, "step", watched_step)
        monkeypatch.setattr(Policy, "update", watched_update)

    def resizable(self, resident: Sequence[Resident]) -> Sequence[Resident]:
        """Copies parameters that a CPU maps from a file into memory of their own, as on a GPU."""
        for parameter in self.parameters(resident):
            if not parameter.untyped_storage().resizable():
                parameter.data = parameter.data.clone()
        return resident

    def parameters(self, resident: Sequence[Resident]) -> list[nn.Parameter]:
        return [
            parameter
            for modules, _ in resident
            for module in modules
            for parameter in module.parameters()
        ]


def _result(config: Config) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    saved = train_in_process(config, Console(quiet=True))
    assert config.trainer.run_dir is not None
    lines = read_lines(config.trainer.run_dir / "metrics.jsonl")
    return load_file(next(saved.glob("*model.safetensors"))), lines


@pytest.mark.integration
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("--algorithm.name", "ppo", "--algorithm.kl_coef", "0.01"),
        pytest.param(("--lora.rank", "4"), marks=pytest.mark.slow),
        pytest.param(("--lora.rank", "4", "--lora.publish", "merged"), marks=pytest.mark.slow),
    ],
    ids=["plain", "critic-and-reference", "adapter", "merged"],
)
def test_a_colocated_run_equals_a_separate_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    apart, lines = _result(settings("apart", *more))
    watched = Watched(monkeypatch)
    together, same = _result(settings("together", "--rollout.colocate", "true", *more))
    assert watched.updates == 3
    assert watched.steps > 30
    assert apart.keys() == together.keys()
    assert all(torch.equal(apart[name], together[name]) for name in apart)
    assert [line["reward"] for line in lines] == [line["reward"] for line in same]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--trainer.max_staleness", "1"), "trainer.max_staleness"),
        (("--trainer.weight_sync", "distributed"), "trainer.weight_sync"),
        (("--rollout.engine", "sglang", "--rollout.device", "cpu"), "rollout.device"),
    ],
)
def test_settings_that_cannot_take_turns_are_refused(words: tuple[str, ...], field: str) -> None:
    with raises(ConfigError, field=field):
        load(["--rollout.colocate", "true", *words], {})
