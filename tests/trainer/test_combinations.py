"""Random combinations of settings: each is refused by the name of a setting it has, or trains, and
resumes."""

import json
import math
import random
from collections.abc import Callable
from typing import Literal, get_args, get_origin

import pytest

from common.errors import ConfigError
from common.settings.config import Config, names
from tests.support.runs.in_process import metrics, quiet
from trainer import train_in_process
from trainer.rollouts.collector import CollectFailed

pytestmark = [pytest.mark.slow, pytest.mark.integration]
SEEDS = 24
SECTIONS = ("algorithm", "lora", "sampling", "evaluation", "reward", "replay", "critic", "trainer")
ELSEWHERE = frozenset(
    # they need programs to grade, a teacher, or a compiler
    (
        "algorithm.name opd",
        "algorithm.advantage none",
        "trainer.compile",
    )
)
VALUES = {
    "algorithm.advantage_eps": (0.1,),
    "algorithm.clip_high": (0.05, 0.5),
    "algorithm.correction_cap": (1.01,),
    "algorithm.correction_floor": (0.7,),
    "algorithm.dual_clip": (1.5,),
    "algorithm.early_stop_kl": (1e-6, 0.1),
    "algorithm.entropy_coef": (0.01,),
    "algorithm.gae_lambda": (0.9,),
    "algorithm.geometric_high": (1.01,),
    "algorithm.geometric_low": (0.99,),
    "algorithm.kl_coef": (0.05,),
    "algorithm.kl_target": (0.01,),
    "algorithm.length_penalty": (0.2,),
    "algorithm.mini_batches": (2, 5),
    "algorithm.off_policy_delta": (0.001,),
    "algorithm.overlong_buffer": (8,),
    "algorithm.reference_refresh": (1,),
    "algorithm.update_epochs": (2,),
    "critic.warmup_steps": (1,),
    "evaluation.max_new_tokens": (10, 40),
    "evaluation.n": (2,),
    "evaluation.temperature": (0.8,),
    "evaluation.top_k": (5,),
    "evaluation.top_p": (0.9,),
    "lora.dropout": (0.1,),
    "lora.rank": (2,),
    "lora.target_modules": (["q_proj", "v_proj"],),
    "replay.capacity": (64,),
    "replay.max_reuse_staleness": (1,),
    "replay.max_times_sampled": (1, 3),
    "replay.priority": ("advantage", "reward"),
    "replay.reuse_ratio": (0.25, 0.5),
    "reward.functions": (
        ["math", "length"],
        ["repetition"],
        [{"name": "math", "weight": 0.4}],
        [{"name": "math", "weight": 2}, {"name": "length", "weight": 0.1, "hard_chars": 5000}],
    ),
    "sampling.group_size": (1, 2, 5),
    "sampling.max_new_tokens": (6, 24),
    "sampling.min_new_tokens": (2, 6),
    "sampling.min_p": (0.05,),
    "sampling.prefill": ("<think>",),
    "sampling.stop": (["+"], ["1"]),
    "sampling.stop_token_ids": ([5],),
    "sampling.system_prompt": ("Be brief.",),
    "sampling.temperature": (0.7, 1.3),
    "sampling.top_k": (5,),
    "sampling.top_p": (0.9,),
    "trainer.batch_size": (2, 3),
    "checkpoint.every": (0, 1),
    "evaluation.every": (1,),
    "evaluation.samples": (4,),
    "checkpoint.keep": (1,),
    "trainer.keep_groups_mb": (0,),
    "trainer.max_staleness": (1, 2),
    "trainer.micro_batch_size": (1, 3),
    "trainer.micro_batch_tokens": (64, 500),
    "parallel.shard_size": (1,),
    "optimizer.warmup_steps": (2,),
    "optimizer.weight_decay": (0.1,),
}


def choices() -> dict[str, list[str]]:
    """Returns the values to choose from for every setting: all those of a switch or a choice, and
    `VALUES`."""
    found = {name: [json.dumps(value) for value in values] for name, values in VALUES.items()}
    for name, field in names().items():
        kinds = [field.annotation, *get_args(field.annotation)]
        options = [
            str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)
        ]
        options += ["true", "false"] if bool in kinds else []
        options = [option for option in options if not {name, f"{name} {option}"} & ELSEWHERE]
        if (
            name.partition(".")[0] in SECTIONS
            and options
            and not name.endswith((".device", ".weight_sync", ".resume"))
        ):
            found[name] = options
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_combination_of_settings_is_refused_by_name_or_trains(
    settings: Callable[..., Config], seed: int
) -> None:
    chance, known = random.Random(seed), choices()
    chosen = {
        name: chance.choice(known[name])
        for name in chance.sample(sorted(known), chance.randint(6, 14))
    }

    def config(steps: int) -> Config:
        words = [word for name, value in chosen.items() for word in (f"--{name}", value.strip('"'))]
        return settings(
            *words,
            "--trainer.max_steps",
            str(steps),
            "--rollout.max_context_tokens",
            "160",
            directory=directory,
        )

    directory = settings().trainer.run_dir

    def trains(steps: int) -> bool:
        """Trains, and returns False when dynamic sampling ended the run, as it does when no answer
        is right."""
        try:
            train_in_process(config(steps), quiet())
        except CollectFailed as error:
            if error.field != "algorithm.dynamic_sampling_rounds":
                raise
            return False
        return True

    while True:
        try:
            ended_early = not trains(2)
            break
        except (
            ConfigError
        ) as error:  # without that setting, or one that asks for it, the others may fit
            named = [name for name in chosen if name in str(error)]
            if not named:
                raise
            del chosen[chance.choice(named)]
    if ended_early or not trains(3):
        return
    lines = metrics(config(3))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(value) for line in lines for value in line["update"].values())
