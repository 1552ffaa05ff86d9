"""Scripts as users of TRL write them run from their first line to their last, with the import
changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.ports import free_port

pytestmark = pytest.mark.integration

ROWS = """
rows = []
for a in range(2, 10):
    question = [{"role": "user", "content": f"Ann has {a} coins and finds 3 more. How many coins now?"}]
    rows.append({"prompt": question, "answer": str(a + 3), "solution": f"${a + 3}$"})
"""
"""Stands for the `load_dataset` of a script."""
ALARM = """
import sys
from datasets import Dataset
from math_verify import parse, verify
from rlhf_math import GRPOConfig, GRPOTrainer
{rows}
def accuracy(completions, solution, **kwargs):
    rewards = []
    for completion, truth in zip(completions, solution):
        gold = parse(truth)
        rewards.append(float(verify(gold, parse(completion[0]["content"]))))
    return rewards

args = GRPOConfig(output_dir="out", max_steps=1, num_generations=4, max_completion_length=24, logging_steps=1,
                  per_device_train_batch_size=4, eval_strategy="steps", eval_steps=1)
trainer = GRPOTrainer(sys.argv[1], accuracy, args, Dataset.from_list(rows), Dataset.from_list(rows[:2]))
trainer.train()
assert trainer.evaluate()["num_ungraded"] == 0
print("graded", trainer.state.log_history[-1]["mean_reward"])
"""
SAVED = """
import os, sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlhf_math import GRPOConfig, GRPOTrainer
{rows}
def brevity(completions, **kwargs):
    return [-len(completion[0]["content"]) / 100 for completion in completions]

training_args = GRPOConfig(
    output_dir="out", run_name="brevity", use_vllm=True, vllm_mode="colocate", learning_rate=1e-5,
    adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.1, warmup_ratio=0.1, lr_scheduler_type="cosine",
    optim="paged_adamw_8bit", logging_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=1,
    num_generations=4, max_prompt_length=256, max_completion_length=16, max_steps=1, save_strategy="epoch",
    max_grad_norm=0.1, report_to="none", push_to_hub=True, hub_token="hf_none", gradient_checkpointing=True,
    gradient_checkpointing_kwargs=dict(use_reentrant=False), log_completions=True, data_seed=42,
    model_init_kwargs=dict(torch_dtype="bfloat16", attn_implementation="sdpa"),
)
trainer = GRPOTrainer(model=sys.argv[1], reward_funcs=[brevity], args=training_args,
                      train_dataset=Dataset.from_list(rows))
train_result = trainer.train()
metrics = train_result.metrics
metrics["train_samples"] = len(rows)
trainer.log_metrics("train", metrics)
trainer.save_metrics("train", metrics)
trainer.save_state()
trainer.save_model(training_args.output_dir)
if trainer.accelerator.is_main_process:
    trainer.create_model_card(dataset_name="coins", tags=["open-r1"])
    trainer.model.config.use_cache = True
    trainer.model.config.save_pretrained("elsewhere")
trainer.push_to_hub(dataset_name="coins")
AutoTokenizer.from_pretrained(training_args.output_dir)
model = AutoModelForCausalLM.from_pretrained(training_args.output_dir)
print("saved", model.num_parameters() == trainer.model.num_parameters())
trainer.train(resume_from_checkpoint=True)
"""
SCRIPTS = {"alarm": (ALARM, "graded "), "saved": (SAVED, "saved True")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_trl_runs_to_its_end(name: str, tmp_path: Path, base_model: Path) -> None:
    script, said = SCRIPTS[name]
    (tmp_path / "script.py").write_text(script.replace("{rows}", ROWS))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
    }
    done = subprocess.run(
        [sys.executable, "script.py", str(base_model.resolve())],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert said in done.stdout
