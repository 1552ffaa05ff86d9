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
PARSED = """
import logging
from dataclasses import dataclass, field
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from rlhf_math import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from rlhf_math.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward
{rows}
logger = logging.getLogger(__name__)

@dataclass
class GRPOScriptArguments(ScriptArguments):
    reward_funcs: list[str] = field(default_factory=lambda: ["accuracy", "format"])

REWARDS = {"accuracy": accuracy_reward, "format": think_format_reward, "length": get_soft_overlong_punishment(16, 8)}

class Progress(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        print("epoch", state.epoch)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            print("reward", logs["reward"])

def main(script_args, training_args, model_args):
    logger.setLevel(training_args.get_process_log_level())
    print("device", training_args.device, training_args.n_gpu, training_args.fp16, training_args.beta)
    training_args.model_init_kwargs = dict(revision=None, attn_implementation=model_args.attn_implementation)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dataset = Dataset.from_list(rows).train_test_split(test_size=2, seed=0)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[REWARDS[name] for name in script_args.reward_funcs],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
        callbacks=[Progress()],
        processing_class=tokenizer,
    )
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.save_model(training_args.output_dir)
    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(dataset["test"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    print("finished", training_args.seed, result.training_loss)

if __name__ == "__main__":
    parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
"""
RECIPE = """
# Model arguments
model_name_or_path: BASE
torch_dtype: bfloat16
attn_implementation: sdpa
use_peft: true
lora_r: 4
# Script arguments
dataset_name: coins
reward_funcs: [accuracy, format, length]
# Trainer arguments
do_eval: true
eval_strategy: steps
eval_steps: 1
learning_rate: 2.0e-5
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
log_level: info
logging_first_step: true
logging_steps: 5
logging_strategy: steps
max_prompt_length: 256
max_completion_length: 16
num_generations: 4
num_train_epochs: 1
output_dir: data/run
overwrite_output_dir: true
per_device_eval_batch_size: 4
per_device_train_batch_size: 12
push_to_hub: false
report_to: []
reward_weights: [1.0, 1.0, 1.0]
save_strategy: "no"
seed: 7
warmup_ratio: 0.1
use_vllm: false
"""
WRAPPED = """
import re, sys
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlhf_math import GRPOConfig, GRPOTrainer
{rows}
model_id = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(model_id, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype="auto", device_map=None)
lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
model = get_peft_model(model, lora)
model.print_trainable_parameters()

def xmlcount_reward_func(completions, **kwargs) -> list[float]:
    return [completion[0]["content"].count("#") * 0.125 for completion in completions]

def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    found = [re.findall(r"-?\\d+", response) for response in responses]
    print("-" * 20, f"Question: {prompts[0][-1]['content']}", f"Answer: {answer[0]}")
    return [2.0 if numbers and numbers[-1] == truth else 0.0 for numbers, truth in zip(found, answer)]

config = GRPOConfig(output_dir="outputs", learning_rate=5e-6, optim="adamw_8bit", num_train_epochs=0.5,
                    per_device_train_batch_size=8, num_generations=4, max_completion_length=16, save_steps=0.5,
                    eval_strategy="epoch", fp16=False, logging_steps=1, report_to="none", remove_unused_columns=False)
trainer = GRPOTrainer(model=model, processing_class=tokenizer, args=config, train_dataset=rows,
                      eval_dataset=rows[:2], reward_funcs=[xmlcount_reward_func, correctness_reward_func])
trainer.train()
trainer.model.save_pretrained("lora")
tokenizer.save_pretrained("lora")
print("steps", trainer.state.global_step)
"""
STREAMED = """
import asyncio, sys
from datasets import IterableDataset
from transformers import EarlyStoppingCallback, PrinterCallback
from rlhf_math import RLOOConfig, RLOOTrainer
{rows}
def texts():
    while True:
        for row in rows:
            yield {"prompt": row["prompt"][0]["content"] + " ####", "answer": row["answer"]}

async def distance(prompts, completions, answer, log_metric=None, **kwargs):
    await asyncio.sleep(0)
    found = [completion.strip().split(" ")[0] for completion in completions]
    log_metric("numbers", sum(word.isdigit() for word in found) / len(found))
    return [-abs(int(word) - int(truth)) / 10 if word.isdigit() else -1.0 for word, truth in zip(found, answer)]

args = RLOOConfig(output_dir="rloo", max_steps=2, per_device_train_batch_size=4, num_generations=2, beta=0.05,
                  max_completion_length=6, temperature=0.9, logging_steps=1, report_to=["tensorboard"],
                  run_name="rloo-coins", dataloader_num_workers=2, seed=1, disable_tqdm=True)
trainer = RLOOTrainer(model=sys.argv[1], reward_funcs=distance, args=args,
                      train_dataset=IterableDataset.from_generator(texts))
trainer.add_callback(PrinterCallback())
trainer.train(resume_from_checkpoint=None)
trainer.save_model()
history = [log for log in trainer.state.log_history if "reward" in log]
print("logged", len(history), history[0]["logged"]["numbers"] >= 0)
"""
SCRIPTS = {
    "alarm": (ALARM, "graded "),
    "saved": (SAVED, "saved True"),
    "parsed": (PARSED, "finished 9 "),
    "wrapped": (WRAPPED, "steps 2"),
    "streamed": (STREAMED, "logged 2 True"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_trl_runs_to_its_end(name: str, tmp_path: Path, base_model: Path) -> None:
    script, said = SCRIPTS[name]
    base = str(base_model.resolve())
    (tmp_path / "script.py").write_text(script.replace("{rows}", ROWS))
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("BASE", base))
    words = ["--config", "recipe.yaml", "--seed", "9"] if name == "parsed" else [base]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
    }
    done = subprocess.run(
        [sys.executable, "script.py", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert said in done.stdout
