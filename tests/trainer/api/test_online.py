"""Every field of TrainerConfig has its effect: real runs of one or two steps on the built-in
task."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from common.errors import ConfigError
from common.wire.schemas import Prompt
from services.data.tiny import problems
from tests.support.errors import raises
from trainer import OnlineRLTrainer, RewardFunction, TrainerConfig, TrainResult
from trainer.algorithms.batch import MicroBatch
from trainer.policy.policy import Policy

pytestmark = pytest.mark.integration

Run = Callable[..., TrainResult]


class Checksum(RewardFunction):
    """Gives any two texts different rewards, so no group has equal rewards and no gradient is 0."""

    name = "checksum"

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [
            zlib.crc32(completion[-1]["content"].encode()) / 2**32 for completion in completions
        ]


def tiny(count: int, split: Any = "train") -> list[Prompt]:
    """Problems of the built-in task."""
    made = zip(range(count), problems(split), strict=False)
    return [
        Prompt(id=f"{split}-{i}", prompt=p.question, ground_truth=str(p.answer)) for i, p in made
    ]


@pytest.fixture(scope="module")
def run(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains two steps on two problems × four answers, with `changes`. Caches runs by their
    changes, unless `fresh`."""
    done: dict[str, TrainResult] = {}

    def make(
        held_out: list[Prompt] | None = None, fresh: bool = False, **changes: Any
    ) -> TrainResult:
        name = repr((held_out, sorted(changes.items())))
        if fresh or name not in done:
            done[name] = train(held_out, changes)
        return done[name]

    def train(held_out: list[Prompt] | None, changes: dict[str, Any]) -> TrainResult:
        fields = {
            "model_name_or_path": str(base_model),
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "learning_rate": 1e-3,
            "max_new_tokens": 24,
            "max_steps": 2,
            "kl_coef": 0,
            "output_dir": tmp_path_factory.mktemp("run"),
            "verbose": False,
        }
        return OnlineRLTrainer(
            TrainerConfig(**fields | changes), Checksum(), tiny(8), held_out
        ).train()

    return make


def update(result: TrainResult, name: str) -> list[float]:
    return [line["update"][name] for line in result.history]


def samples(result: TrainResult) -> list[dict[str, Any]]:
    """The group shown for every step."""
    return [
        json.loads(line) for line in (result.output_dir / "samples.jsonl").read_text().splitlines()
    ]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(directory / "model.safetensors"))


def distance(result: TrainResult, base: Path) -> float:
    """Returns how far the weights have moved."""
    old, new = weights(base), weights(result.checkpoint)
    return sum(float((new[name] - old[name]).norm()) for name in new)


def test_trainer_type(run: Run) -> None:
    grpo, rloo, ppo = (run(trainer_type=kind, max_steps=1) for kind in ("grpo", "rloo", "ppo"))
    assert update(grpo, "grad_norm") != update(
        rloo, "grad_norm"
    )  # equal answers, different advantages
    assert [result.history[0]["critic"] is not None for result in (grpo, rloo, ppo)] == [
        False,
        False,
        True,
    ]
    assert update(ppo, "updates") == [4]  # two passes with two mini-batches each
    assert update(grpo, "updates") == [1]


def test_model_name_or_path(run: Run, policy_dir: Path, base_model: Path) -> None:
    other = run(model_name_or_path=str(policy_dir), max_steps=1)
    assert json.loads((other.checkpoint / "config.json").read_text()) == json.loads(
        (policy_dir / "config.json").read_text()
    )
    assert {name: tensor.shape for name, tensor in weights(other.checkpoint).items()} != {
        name: tensor.shape for name, tensor in weights(base_model).items()
    }


def test_ref_model_name_or_path_and_kl_coef(run: Run, base_model: Path) -> None:
    first = run()  # kl_coef 0: no reference model
    assert update(first, "kl_reference") == [0, 0]
    own = run(kl_coef=0.5)
    assert update(own, "kl_reference")[0] == pytest.approx(0, abs=1e-6)
    assert update(own, "kl_reference")[1] > 1e-4
    other = run(kl_coef=0.5, ref_model_name_or_path=str(first.checkpoint))
    assert update(other, "kl_reference")[0] > 1e-4
    strong = run(kl_coef=5.0, ref_model_name_or_path=str(first.checkpoint))
    assert update(strong, "kl_reference")[0] == pytest.approx(update(other, "kl_reference")[0])
    assert update(strong, "loss")[0] > update(other, "loss")[0] + 1e-4


def test_num_generations(run: Run) -> None:
    assert [
        len(group["completions"]) for group in samples(run(num_generations=2, max_steps=1))
    ] == [2]
    assert [
        len(group["completions"]) for group in samples(run(num_generations=8, max_steps=1))
    ] == [8]


def test_learning_rate_warmup_ratio_and_lr_scheduler_type(run: Run) -> None:
    steps = {"max_steps": 4}
    assert update(run(learning_rate=1e-4, **steps), "learning_rate") == [1e-4] * 4
    assert update(run(warmup_ratio=0.5, **steps), "learning_rate") == pytest.approx(
        [5e-4, 1e-3, 1e-3, 1e-3]
    )
    assert update(run(lr_scheduler_type="linear", **steps), "learning_rate") == pytest.approx(
        [1e-3, 7.5e-4, 5e-4, 2.5e-4]
    )
    assert update(run(lr_scheduler_type="cosine", **steps), "learning_rate")[2] == pytest.approx(
        5e-4
    )


def test_critic_learning_rate(run: Run) -> None:
    """The value head starts at 0; how far it gets in one update depends on the rate."""
    slow, fast = (
        abs(run(trainer_type="ppo", critic_learning_rate=rate).history[1]["critic"]["value_mean"])
        for rate in (1e-6, 1e-2)
    )
    assert fast > 100 * slow > 0


def test_num_train_epochs_and_max_steps(run: Run) -> None:
    assert run(max_steps=None).global_step == 4  # 8 problems, 2 per step
    assert run(max_steps=None, num_train_epochs=2).global_step == 8
    assert run(max_steps=3).global_step == 3


@pytest.mark.parametrize(("size", "passes"), [(2, 4), (8, 1)])
def test_per_device_train_batch_size_and_gradient_accumulation_steps(
    run: Run, monkeypatch: pytest.MonkeyPatch, size: int, passes: int
) -> None:
    """Both take eight answers per step, in passes of at most `size`; the update is the same."""
    seen: list[int] = []
    backward = Policy._backward

    def counted(policy: Policy, micro: MicroBatch, **more: Any) -> torch.Tensor:
        seen.append(micro.row_count)
        return backward(policy, micro, **more)

    monkeypatch.setattr(Policy, "_backward", counted)
    result = run(
        per_device_train_batch_size=size,
        gradient_accumulation_steps=passes,
        max_steps=1,
        kl_coef=0.1,
    )
    assert seen == [size] * passes
    more = run(
        per_device_train_batch_size=size,
        gradient_accumulation_steps=2 * passes,
        max_steps=1,
        kl_coef=0.1,
    )
    assert seen[passes:] == [size] * 2 * passes
    assert sum(len(group["completions"]) for group in samples(more)) == 4
    assert result.history[0]["zero_variance_groups"] <= 2
    with raises(ConfigError, field="gradient_accumulation_steps"):
        run(
            per_device_train_batch_size=size, gradient_accumulation_steps=8 * passes, max_steps=None
        )


def test_max_prompt_length_and_max_new_tokens(run: Run, base_model: Path) -> None:
    assert run(max_new_tokens=3, max_steps=1).metrics["completion_tokens"] <= 3
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    longest = max(
        len(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p.prompt}], add_generation_prompt=True
            ).input_ids
        )
        for p in tiny(8)
    )
    run(max_prompt_length=longest, max_steps=1)
    with raises(ConfigError, field="max_prompt_length", value=str(longest - 1)) as refused:
        run(max_prompt_length=longest - 1)
    assert f"has {longest} tokens" in refused.value.message
    room = 512 - longest
    with raises(ConfigError, field="max_new_tokens", value=str(room + 1)) as refused:
        run(max_new_tokens=room + 1)
    assert f"lower it to {room}" in str(refused.value.remedy)
    with pytest.raises(ConfigError) as refused:
        run(system_prompt="1 + " * 300, max_prompt_length=4096)
    assert "context has only 512" in str(refused.value)
    assert refused.value.remedy == "use a model with a longer one, or leave the problem out"


def test_temperature(run: Run) -> None:
    cold, hot = (samples(run(temperature=value, max_steps=1)) for value in (0.01, 3.0))
    texts = [
        {completion["text"] for completion in groups[0]["completions"]} for groups in (cold, hot)
    ]
    assert len(texts[0]) == 1
    assert len(texts[1]) == 4


def test_system_prompt(run: Run) -> None:
    without, with_it = (
        samples(run(system_prompt=text, max_steps=1)) for text in ("", "Show your steps.")
    )
    assert len(with_it[0]["prompt_token_ids"]) > len(without[0]["prompt_token_ids"])


def test_a_chat_keeps_its_own_system_message(base_model: Path, tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Show your steps."},
        {"role": "user", "content": "1 and 2?"},
    ]
    rows = [{"prompt": chat, "answer": 3, "id": f"row-{i}"} for i in range(2)]
    config = TrainerConfig(
        model_name_or_path=str(base_model),
        gradient_accumulation_steps=1,
        max_new_tokens=4,
        system_prompt="Never seen.",
        output_dir=tmp_path,
        verbose=False,
    )
    (group,) = samples(OnlineRLTrainer(config, Checksum(), rows).train())
    read = AutoTokenizer.from_pretrained(base_model).decode(group["prompt_token_ids"])
    assert "Show your steps." in read
    assert "Never seen." not in read


def test_clip_range(run: Run) -> None:
    narrow, wide = (
        update(run(trainer_type="ppo", clip_range=value), "clip_fraction") for value in (0.001, 0.9)
    )
    assert sum(narrow) > sum(wide)


def test_weight_decay(run: Run) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    plain, decayed = (
        weights(run(weight_decay=value).checkpoint)[name].norm() for value in (0.0, 100.0)
    )
    assert float(decayed) < 0.9 * float(
        plain
    )  # each of two steps removes 1e-3 × 100 of every weight


def test_max_grad_norm(run: Run, base_model: Path) -> None:
    """When gradients are far below AdamW's epsilon, the weights hardly move."""
    free, held = run(max_steps=1), run(max_steps=1, max_grad_norm=1e-12)
    assert distance(held, base_model) < 0.1 * distance(free, base_model)


def test_seed(run: Run) -> None:
    first, again, other = run(), run(fresh=True), run(seed=1)
    assert [group["prompt"] for group in samples(first)] == [
        group["prompt"] for group in samples(again)
    ]
    assert [line["reward"] for line in first.history] == [line["reward"] for line in again.history]
    assert [group["prompt"] for group in samples(first)] != [
        group["prompt"] for group in samples(other)
    ]


def test_save_steps_and_save_total_limit(run: Run) -> None:
    def kept(**changes: Any) -> list[str]:
        return sorted(
            path.name for path in (run(max_steps=4, **changes).output_dir / "checkpoints").iterdir()
        )

    assert kept(save_steps=0) == ["step_000004"]
    assert kept(save_steps=1, save_total_limit=9) == [f"step_00000{i}" for i in range(1, 5)]
    assert kept(save_steps=1, save_total_limit=2) == ["step_000003", "step_000004"]


def test_eval_steps(run: Run) -> None:
    held_out = tiny(4, "test")
    assert [line["step"] for line in run(held_out, max_steps=3).evaluations] == [0, 3]
    result = run(held_out, max_steps=3, eval_steps=1)
    assert [line["step"] for line in result.evaluations] == [0, 1, 2, 3]
    assert all(line["mean_reward"] > 0 for line in result.evaluations)
    assert "eval_accuracy" not in result.metrics, "the rewards are not verdicts"
    with raises(ConfigError, field="eval_steps"):
        run(eval_steps=1)


def test_verbose(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run(max_steps=1, fresh=True)
    assert capsys.readouterr().out == ""
    run(max_steps=1, verbose=True)
    assert "step    1/1  reward" in capsys.readouterr().out


def test_settings(run: Run) -> None:
    """Any other setting of the system takes effect, too."""
    result = run(
        settings={"optimizer.adam_betas": [0.8, 0.9], "algorithm.entropy_coef": 0.01}, max_steps=1
    )
    config = json.loads((result.output_dir / "config.json").read_text())
    assert (config["optimizer"]["adam_betas"], config["algorithm"]["entropy_coef"]) == (
        [0.8, 0.9],
        0.01,
    )
    assert update(result, "loss") != update(run(max_steps=1), "loss")


def test_use_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(ConfigError, field="use_gpu", value="True"):
        run(use_gpu=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (
        run(max_steps=1, fresh=True).global_step == 1
    )  # a GPU would be available, but none is requested
