"""A user of TRL runs scripts from its documentation with the import changed, each as one
process."""

import json
from pathlib import Path

import pytest

from tests.support.browser.browser import Page
from tests.support.runs.journey import Journey

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = """
import re

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trainer import GRPOConfig, GRPOTrainer

dataset = Dataset.from_list([
    {
        "prompt": [{"role": "user", "content": f"What is {n} + {n % 3}?"}],
        "solution": str(n + n % 3),
        "task": ("math", "code")[n % 2],
    }
    for n in range(32)
])


def accuracy(completions, solution, task, **kwargs):
    found = [re.findall(r"-?[0-9]+", completion[0]["content"]) for completion in completions]
    return [float(each[-1:] == [truth]) if kind == "math" else None for each, truth, kind in zip(found, solution, task)]


async def brevity(completions, completion_ids, trainer_state, log_metric=None, **kwargs):
    log_metric("tokens", sum(map(len, completion_ids)) / len(completion_ids))
    return [1 - len(ids) / 16 for ids in completion_ids]


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= 2:
            control.should_training_stop = True


model = AutoModelForCausalLM.from_pretrained(MODEL)
training_args = GRPOConfig(
    output_dir="out",
    learning_rate=1e-3,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=16,
    max_steps=5,
    beta=0.04,
    epsilon_high=0.28,
    loss_type="dr_grpo",
    scale_rewards=False,
    reward_weights=[1.0, 0.5],
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    gradient_checkpointing=True,
    use_cpu=True,
    bf16=False,
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=[accuracy, brevity],
    args=training_args,
    train_dataset=dataset,
    eval_dataset={"small": dataset.select(range(4))},
    processing_class=AutoTokenizer.from_pretrained(MODEL),
    callbacks=[Stop()],
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
result = trainer.train()
trainer.save_model("model")
print("steps", result.global_step, trainer.state.global_step, sorted(result.metrics))
"""


def test_the_script_of_a_user_of_trl_runs_with_another_import(
    base_model: Path, tmp_path: Path, page: Page
) -> None:
    journey = Journey("user of TRL", tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.replace("MODEL)", f"{str(base_model.resolve())!r})"))
    with journey.part("runs a script with another import"):
        printed = journey.run(".venv/bin/python train.py")
    assert "steps 2 2" in printed
    assert "eval_small_reward" in printed
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [sorted(line["rewards"]) for line in lines] == [["accuracy", "brevity"]] * 2
    assert lines[0]["logged"]["tokens"] > 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["algorithm"]
    assert {
        name: config[name]
        for name in ("aggregation", "advantage", "clip_high", "kl_coef", "kl_estimator")
    } == {
        **{
            "aggregation": "constant",
            "advantage": "group_centred",
            "clip_high": 0.28,
            "kl_coef": 0.04,
        },
        "kl_estimator": "k2",
    }
    assert "| `lora.rank` | `8` |" in (tmp_path / "model" / "README.md").read_text()
    with journey.part("reads the completions"), journey.dashboard(tmp_path / "out") as url:
        page.open(f"{url}#rollouts", 1400)
        page.until(lambda: page.count(".viewer-open"), "the groups")
        page.click(".viewer-open")
        page.until(lambda: page.count(".reader-card"), "a completion")
        assert page.errors() == []
        page.driver.get("about:blank")
    with journey.part("loads the result with transformers"):
        code = "import transformers; transformers.AutoModelForCausalLM.from_pretrained('model')"
        journey.run(f'.venv/bin/python -c "{code}"')
