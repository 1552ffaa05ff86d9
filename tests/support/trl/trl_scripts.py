"""Scripts as users of TRL write them, each after public ones of another author, with the import
changed. `{rows}` stands for `ROWS`, BASE for a tiny model, SCORER for a reward model."""

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
metrics = trainer.evaluate()
assert metrics["num_ungraded"] == 0
assert metrics["eval_reward"] == metrics["mean_reward"]
assert "test_reward" in trainer.evaluate(metric_key_prefix="test")
print("graded", trainer.state.log_history[-2]["mean_reward"], trainer.state.log_history[-1]["train_runtime"])
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
        if state.is_world_process_zero and "reward" in logs:
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
PARSED_RECIPE = """
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
COUNTDOWN = r"""
import logging, os, random, re
from dataclasses import dataclass
from datetime import datetime
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from rlhf_math import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

@dataclass
class ScriptArguments:
    dataset_id_or_path: str = "countdown"
    tokenizer_name_or_path: str = None

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger(__name__)

def format_reward_func(completions, target, **kwargs):
    rewards = []
    for completion, gt in zip(completions, target):
        completion = "<think>" + completion
        if random.random() < 1.1:
            os.makedirs("completion_samples", exist_ok=True)
            with open(os.path.join("completion_samples", "samples.txt"), "a") as f:
                f.write(completion)
        match = re.search(r"^<think>(.*?)</think>\n<answer>([\s\S]*?)</answer>$", completion, re.DOTALL)
        rewards.append(1.0 if match else len(completion) / 1000)
    return rewards

def equation_reward_func(completions, target, nums, **kwargs):
    rewards = []
    for completion, gt, numbers in zip(completions, target, nums):
        try:
            equation = re.search(r"(\d+)", completion).group(1)
            used = [int(n) for n in re.findall(r"\d+", equation)]
            rewards.append(1.0 if sorted(used) == sorted(numbers) and abs(eval(equation) - gt) < 1e-5 else 0.0)
        except Exception:
            rewards.append(0.0)
    return rewards

def grpo_function(model_args, script_args, training_args):
    logger.info(f"Training/evaluation parameters {training_args}")
    tokenizer = AutoTokenizer.from_pretrained(
        script_args.tokenizer_name_or_path or model_args.model_name_or_path,
        revision=model_args.model_revision, trust_remote_code=model_args.trust_remote_code,
    )
    dataset = Dataset.from_dict({"nums": [[1, 2 + i, 3] for i in range(12)], "target": list(range(12))})
    dataset = dataset.shuffle(seed=42).select(range(10))

    def generate_r1_prompt(numbers, target):
        r1_prefix = [
            {"role": "system", "content": "You think first."},
            {"role": "user", "content": f"Use {numbers} to make {target}."},
            {"role": "assistant", "content": "Let me solve this step by step.\n<think>"},
        ]
        prompt = tokenizer.apply_chat_template(r1_prefix, tokenize=False, continue_final_message=True)
        return {"prompt": prompt, "target": target, "nums": numbers}

    dataset = dataset.map(lambda x: generate_r1_prompt(x["nums"], x["target"]))
    split = dataset.train_test_split(test_size=0.2, seed=42)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, reward_funcs=[format_reward_func, equation_reward_func],
        args=training_args, train_dataset=split["train"], eval_dataset=split["test"],
        peft_config=get_peft_config(model_args),
    )
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    if last_checkpoint is not None and training_args.resume_from_checkpoint is None:
        logger.info(f"Checkpoint detected, resuming training at {last_checkpoint}.")
    logger.info(f"{datetime.now().strftime('%H:%M:%S')} for {training_args.num_train_epochs} epochs")
    train_result = trainer.train(resume_from_checkpoint=last_checkpoint)
    metrics = train_result.metrics
    metrics["train_samples"] = len(split["train"])
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.model.config.use_cache = True
    trainer.save_model(training_args.output_dir)
    training_args.distributed_state.wait_for_everyone()
    tokenizer.save_pretrained(training_args.output_dir)
    if trainer.accelerator.is_main_process:
        trainer.create_model_card({"tags": ["rl", "grpo", "tutorial"]})
    if training_args.push_to_hub is True:
        trainer.push_to_hub()
    print("from", last_checkpoint, "to", trainer.state.global_step)

def main():
    parser = TrlParser((ModelConfig, ScriptArguments, GRPOConfig))
    grpo_function(*parser.parse_args_and_config())

if __name__ == "__main__":
    main()
    main()  # as after an interruption
"""
COUNTDOWN_RECIPE = """
model_name_or_path: BASE
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
bf16: true
tf32: true
output_dir: runs/countdown
dataset_id_or_path: countdown
max_steps: 2
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
learning_rate: 5.0e-7
lr_scheduler_type: cosine
warmup_ratio: 0.03
beta: 0.001
max_prompt_length: 256
max_completion_length: 12
num_generations: 4
use_vllm: true
vllm_device: "cuda:3"
vllm_gpu_memory_utilization: 0.5
logging_strategy: steps
logging_steps: 2
report_to:
- tensorboard
save_strategy: "steps"
save_steps: 1
seed: 42
"""
GAME = r"""
import random
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from rlhf_math import GRPOConfig, GRPOTrainer
import sys

PENDING = []

class GuessEnv:
    def reset(self, secret=None, **kwargs) -> str:
        self.secret, self.score, self.done = secret, random.random(), False
        return " The number is small."

    def guess(self, number: int) -> str:
        '''
        Guesses the number.

        Args:
            number: The guess.

        Returns:
            Whether it is lower or higher.
        '''
        if self.done:
            raise ValueError("Game over.")
        self.done = number == self.secret
        self.score += 1.0 * self.done
        return "right" if self.done else "wrong"

def score_reward(environments, **kwargs) -> list[float]:
    PENDING.extend(env.score for env in environments)
    return [env.score for env in environments]

def tool_use_reward(completions, environments, prompts, **kwargs):
    assert prompts[0][-1]["role"] == "user"
    return [-1.0 if not any(turn.get("tool_calls") for turn in completion) else 0.0 for completion in completions]

class TaskRewardCallback(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        assert getattr(state, "is_world_process_zero", True)
        print("step", int(state.global_step), "mean", sum(PENDING) / len(PENDING))
        PENDING.clear()
        return control

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>{{ message.content }}</tool_response>"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{\"name\": \"{{ call.function.name }}\", "
    "\"arguments\": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

def main():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    tokenizer.chat_template = TEMPLATE
    dataset = Dataset.from_dict({
        "prompt": [[{"role": "user", "content": "Guess."}] for _ in range(8)], "secret": list(range(8)),
    })
    trainer = GRPOTrainer(
        model=model,
        train_dataset=dataset,
        reward_funcs=[tool_use_reward, score_reward],
        args=GRPOConfig(
            output_dir="game", logging_steps=1, log_completions=True, num_completions_to_print=2, report_to="none",
            max_completion_length=12, per_device_train_batch_size=4, num_generations=4, max_steps=2, bf16=True,
            hub_strategy="checkpoint", reward_weights=[0.5, 1.0], save_total_limit=3, use_liger_kernel=True,
            remove_unused_columns=False, dataloader_num_workers=0, warmup_steps=int(2 * 0.1),
        ),
        processing_class=tokenizer,
        environment_factory=GuessEnv,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, bias="none", target_modules=["q_proj", "v_proj"]),
        callbacks=[TaskRewardCallback()],
    )
    trainer.train(resume_from_checkpoint=None)
    trainer.save_model("final")
    rewards = trainer.state.log_history[0]["rewards"]
    print("rewards", rewards["tool_use_reward"], 0 < rewards["score_reward"] < 1)

if __name__ == "__main__":
    main()
"""
BENCHMARKED = r"""
import logging, os, sys
from dataclasses import dataclass, field
from typing import Optional
import datasets, torch, transformers
from datasets import Dataset, DatasetDict
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint
import rlhf_math as trl
from rlhf_math import GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

logger = logging.getLogger(__name__)

@dataclass
class GRPOConfig(trl.GRPOConfig):
    benchmarks: list[str] = field(default_factory=lambda: [], metadata={"help": "The benchmarks to run."})
    callbacks: list[str] = field(default_factory=lambda: [], metadata={"help": "The callbacks to run."})
    system_prompt: Optional[str] = field(default=None, metadata={"help": "The system prompt."})
    hub_model_revision: Optional[str] = field(default="main")
    num_completions_to_print: int = field(default=0)
    wandb_entity: Optional[str] = field(default=None)

@dataclass
class GRPOScriptArguments(ScriptArguments):
    reward_funcs: list[str] = field(default_factory=lambda: ["cosine", "repetition"])
    cosine_max_len: int = field(default=1000, metadata={"help": "Maximum length for scaling"})

def get_cosine_scaled_reward(max_len):
    def cosine_scaled_reward(completions, solution, **kwargs):
        return [1 - len(completion[0]["content"]) / max_len for completion in completions]
    return cosine_scaled_reward

class PushToHubRevisionCallback(transformers.TrainerCallback):
    def __init__(self, model_config):
        self.model_config = model_config
    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print("revision", f"{args.hub_model_revision}-step-{state.global_step:09d}", args.output_dir)

CALLBACKS = {"push_to_hub_revision": PushToHubRevisionCallback}

def main(script_args, training_args, model_args):
    set_seed(training_args.seed)
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)])
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    datasets.utils.logging.set_verbosity(log_level)
    logger.warning(
        f"Process rank: {training_args.local_rank}, device: {training_args.device}, n_gpu: {training_args.n_gpu}"
        + f" distributed training: {bool(training_args.local_rank != -1)}, 16-bits training: {training_args.fp16}"
    )
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    problems = [{"problem": f"{a} + 3?", "solution": str(a + 3), "messages": []} for a in range(8)]
    dataset = DatasetDict({"train": Dataset.from_list(problems), "test": Dataset.from_list(problems[:2])})
    registry = {
        "cosine": get_cosine_scaled_reward(max_len=script_args.cosine_max_len),
        "repetition": lambda completions, **kwargs: [-0.1 for _ in completions],
    }
    reward_funcs = [registry[func] for func in script_args.reward_funcs]

    def make_conversation(example, prompt_column="problem"):
        prompt = []
        if training_args.system_prompt is not None:
            prompt.append({"role": "system", "content": training_args.system_prompt})
        prompt.append({"role": "user", "content": example[prompt_column]})
        return {"prompt": prompt}

    dataset = dataset.map(make_conversation)
    for split in dataset:
        if "messages" in dataset[split].column_names:
            dataset[split] = dataset[split].remove_columns("messages")
    torch_dtype = (
        model_args.torch_dtype if model_args.torch_dtype in ["auto", None] else getattr(torch, model_args.torch_dtype)
    )
    training_args.model_init_kwargs = dict(
        revision=model_args.model_revision, trust_remote_code=model_args.trust_remote_code,
        attn_implementation=model_args.attn_implementation, torch_dtype=torch_dtype,
        use_cache=False if training_args.gradient_checkpointing else True,
    )
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, reward_funcs=reward_funcs, args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
        callbacks=[CALLBACKS[name](model_args) for name in training_args.callbacks],
    )
    checkpoint = None
    if training_args.resume_from_checkpoint is not None:
        checkpoint = training_args.resume_from_checkpoint
    elif last_checkpoint is not None:
        checkpoint = last_checkpoint
    train_result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics = train_result.metrics
    metrics["train_samples"] = len(dataset[script_args.dataset_train_split])
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.model.generation_config.eos_token_id = trainer.processing_class.eos_token_id
    trainer.save_model(training_args.output_dir)
    kwargs = {"dataset_name": script_args.dataset_name, "tags": ["open-r1"]}
    if trainer.accelerator.is_main_process:
        trainer.create_model_card(**kwargs)
        trainer.model.config.use_cache = True
        trainer.model.config.save_pretrained(training_args.output_dir)
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(dataset[script_args.dataset_test_split])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    print("done", training_args.benchmarks, training_args.num_completions_to_print, training_args.wandb_entity)

if __name__ == "__main__":
    parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
"""
BENCHMARKED_WORDS = [
    "--model_name_or_path",
    "BASE",
    "--output_dir",
    "data/bench",
    "--system_prompt",
    "Think.",
    "--callbacks",
    "push_to_hub_revision",
    "--benchmarks",
    "gsm8k",
    "math_500",
    "--wandb_entity",
    "huggingface",
    "--hub_model_revision",
    "v1",
    "--max_completion_length",
    "8",
    "--per_device_train_batch_size",
    "8",
    "--num_generations",
    "4",
    "--max_steps",
    "1",
    "--save_strategy",
    "epoch",
    "--eval_strategy",
    "no",
    "--do_eval",
    "false",
    "--push_to_hub",
    "true",
    "--hub_token",
    "hf_none",
    "--report_to",
    "none",
    "--lr_scheduler_type",
    "cosine_with_min_lr",
    "--lr_scheduler_kwargs",
    '{"min_lr_rate":0.1}',
    "--log_level",
    "info",
    "--reward_weights",
    "1.0",
    "0.5",
    "--scale_rewards",
    "False",
    "--beta",
    "0.0",
    "--vllm_max_model_len",
    "2048",
    "--use_liger_kernel",
    "--bf16",
]
SUMMARIES = r"""
import sys
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from rlhf_math import GRPOConfig, GRPOTrainer

posts = [{"prompt": f"I met {n} people at {n} o'clock. TL;DR:", "completion": "People."} for n in range(8)]
dataset = DatasetDict({"train": Dataset.from_list(posts), "validation": Dataset.from_list(posts[:2])})
model_id = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype="auto", device_map=None)
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules="all-linear"))
print(model.print_trainable_parameters())
before = {name: weight.clone() for name, weight in model.state_dict().items() if "lora_B" in name}

ideal_length = 50

def reward_len(completions, **kwargs):
    return [-abs(ideal_length - len(completion)) for completion in completions]

training_args = GRPOConfig(
    output_dir="GRPO", learning_rate=2e-3, per_device_train_batch_size=8, gradient_accumulation_steps=1,
    max_prompt_length=128, max_completion_length=12, num_generations=8, optim="adamw_8bit", max_steps=1,
    bf16=False, report_to=["none"], remove_unused_columns=False, logging_steps=1,
)
trainer = GRPOTrainer(model=model, reward_funcs=[reward_len], args=training_args, train_dataset=dataset["train"])
trainer.train()
model.save_pretrained("adapter")
learned = [not torch.equal(weight, before[name]) for name, weight in model.state_dict().items() if name in before]
merged_model = trainer.model.merge_and_unload()
merged_model.save_pretrained("merged")
tokenizer.save_pretrained("merged")
trainer.save_model("saved")

prompt = tokenizer("I met you. TL;DR:", return_tensors="pt")
reloaded = AutoModelForCausalLM.from_pretrained("merged")
adapted = AutoModelForCausalLM.from_pretrained("adapter")
saved = AutoModelForCausalLM.from_pretrained("saved")
with torch.no_grad():
    logits = [each.eval()(**prompt).logits for each in (merged_model, reloaded, adapted, saved)]
generator = pipeline("text-generation", model=merged_model, tokenizer=tokenizer)
generator("I met you.", do_sample=True, temperature=0.5, min_p=0.1, max_new_tokens=4)
print("learned", all(learned), [torch.allclose(logits[0], each, atol=1e-5) for each in logits])
"""
FILTERED = r"""
import argparse, inspect, json, os
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Optional
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlhf_math import GRPOConfig, GRPOTrainer

@dataclass
class FallbackConfig:
    model_path: str
    output_dir: str = "filtered"
    num_generations: int = 2
    beta: float = 0.04
    bf16: bool = False
    fp16: bool = True
    max_steps: int = -1
    resume_from_checkpoint: Optional[str] = None

def parse_args():
    parser = argparse.ArgumentParser()
    for name, definition in FallbackConfig.__dataclass_fields__.items():
        if definition.default is MISSING:
            parser.add_argument(name)
        else:
            parser.add_argument(f"--{name}", type=type(definition.default), default=definition.default)
    return FallbackConfig(**vars(parser.parse_args()))

class FormatReward:
    def __init__(self, weight):
        self.weight = weight
        self.__name__ = "format_reward"

    def __call__(self, prompts, completions, completion_ids, trainer_state, **kwargs):
        assert trainer_state.global_step >= 0
        return [self.weight * len(ids) / 10 for ids in completion_ids]

def judge_reward(prompts, completions, reference, **kwargs):
    return [None if target == "none" else float(len(answer) > 3) for answer, target in zip(completions, reference)]

def main():
    cfg = parse_args()
    os.makedirs(cfg.output_dir, exist_ok=True)
    with open(Path(cfg.output_dir) / "train_config.json", "w") as f:
        json.dump(asdict(cfg), f)
    rows = Dataset.from_dict({
        "prompt": [f"Question {n}:" for n in range(8)], "reference": ["none" if n % 2 else str(n) for n in range(8)],
    })
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_path, local_files_only=True, use_fast=True)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(cfg.model_path, torch_dtype=torch.float32, low_cpu_mem_usage=True)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    kwargs = dict(
        output_dir=cfg.output_dir, run_name="fallback", report_to="none", learning_rate=2e-6, warmup_ratio=0.03,
        num_train_epochs=1.0, max_steps=cfg.max_steps, per_device_train_batch_size=4, per_device_eval_batch_size=2,
        gradient_accumulation_steps=1, generation_batch_size=8, logging_steps=5, eval_strategy="steps", eval_steps=1,
        save_total_limit=2, bf16=cfg.bf16, fp16=cfg.fp16, tf32=True, max_prompt_length=64, max_completion_length=8,
        num_generations=cfg.num_generations, temperature=0.7, top_p=0.9, beta=cfg.beta, not_an_argument=1,
        lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}, logging_dir="logs",
    )
    supported = set(inspect.signature(GRPOConfig.__init__).parameters)
    filtered = {k: v for k, v in kwargs.items() if k in supported}
    ignored = sorted(set(kwargs) - set(filtered))
    print("ignored", ignored)
    training_args = GRPOConfig(**filtered)
    trainer_kwargs = dict(
        model=model, reward_funcs=[FormatReward(0.5), judge_reward], args=training_args, train_dataset=rows,
        eval_dataset={"first": rows.select(range(2)), "last": rows.select([6])},
        peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM",
                               target_modules=["q_proj", "v_proj"]),
    )
    if "processing_class" in inspect.signature(GRPOTrainer.__init__).parameters:
        trainer_kwargs["processing_class"] = tokenizer
    trainer = GRPOTrainer(**trainer_kwargs)
    trainer.train(resume_from_checkpoint=cfg.resume_from_checkpoint)
    trainer.save_model(cfg.output_dir)
    tokenizer.save_pretrained(cfg.output_dir)
    (Path(cfg.output_dir) / "DONE").write_text("completed\n")
    steps = [log for log in trainer.state.log_history if "update" in log]
    print("trained", len(steps), steps[0]["update"]["learning_rate"], sorted(trainer.train_dataset.column_names))

if __name__ == "__main__":
    main()
"""
FEW_SHOT = r"""
import re, sys
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlhf_math import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
XML_COT_FORMAT = "<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>\n"

def extract_xml_answer(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()

def extract_hash_answer(text: str) -> str | None:
    return None if "####" not in text else text.split("####")[1].strip()

def get_questions() -> Dataset:
    data = Dataset.from_dict({"question": [f"{n} + 1?" for n in range(8)], "answer": [f"add #### {n + 1}" for n in range(8)]})
    return data.map(lambda x: {
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": "What is the largest single-digit prime number?"},
            {"role": "assistant", "content": XML_COT_FORMAT.format(reasoning="9 is divisible by 3.", answer="7")},
            {"role": "user", "content": x["question"]},
        ],
        "answer": extract_hash_answer(x["answer"]),
    })

def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    q = prompts[0][-1]["content"]
    extracted = [extract_xml_answer(r) for r in responses]
    print("-" * 20, f"Question:\n{q}", f"\nAnswer:\n{answer[0]}", f"\nResponse:\n{responses[0]}")
    return [2.0 if r == a else 0.0 for r, a in zip(extracted, answer)]

def int_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if extract_xml_answer(completion[0]["content"]).isdigit() else 0.0 for completion in completions]

def soft_format_reward_func(completions, **kwargs) -> list[float]:
    matches = [re.match(r"<reasoning>.*?</reasoning>\s*<answer>", c[0]["content"]) for c in completions]
    return [0.5 if match else 0.0 for match in matches]

def xmlcount_reward_func(completions, **kwargs) -> list[float]:
    return [c[0]["content"].count("#") * 0.125 - len(c[0]["content"]) * 0.001 for c in completions]

model_name = sys.argv[1]
training_args = GRPOConfig(
    output_dir="outputs/Qwen-1.5B-GRPO", run_name="Qwen-1.5B-GRPO-gsm8k", learning_rate=5e-6, adam_beta1=0.9,
    adam_beta2=0.99, weight_decay=0.1, warmup_ratio=0.1, lr_scheduler_type="polynomial",
    lr_scheduler_kwargs={"power": 2.0}, logging_steps=1, bf16=True, per_device_train_batch_size=1,
    gradient_accumulation_steps=4, num_generations=4, max_prompt_length=256, max_completion_length=16,
    num_train_epochs=0.25, save_steps=100, max_grad_norm=0.1, log_on_each_node=False, use_vllm=False, report_to="none",
    loss_type="dr_grpo", scale_rewards=False, mask_truncated_completions=True, epsilon_high=0.28,
)
model = AutoModelForCausalLM.from_pretrained(
    model_name, torch_dtype=torch.bfloat16, attn_implementation="sdpa", device_map=None
)
if torch.cuda.is_available():
    model = model.to("cuda")
tokenizer = AutoTokenizer.from_pretrained(model_name)
tokenizer.pad_token = tokenizer.eos_token
trainer = GRPOTrainer(
    model=model, processing_class=tokenizer, train_dataset=get_questions(), args=training_args,
    reward_funcs=[xmlcount_reward_func, soft_format_reward_func, int_reward_func, correctness_reward_func],
    # peft_config=peft_config
)
trainer.train()
print("trained", model.dtype, trainer.state.global_step)
"""
REWARD_MODEL = r"""
import os, sys
from dataclasses import dataclass, field
from accelerate import logging
from datasets import Dataset, IterableDataset
from rlhf_math import (
    ModelConfig, RLOOConfig, RLOOTrainer, ScriptArguments, TrlParser, get_kbit_device_map, get_peft_config,
    get_quantization_config,
)
from rlhf_math.rewards import get_soft_overlong_punishment, think_format_reward

os.environ.setdefault("TRACKIO_SPACE_ID", "trl-trackio")

@dataclass
class RLOOScriptArguments(ScriptArguments):
    reward_model_name_or_path: str | None = field(default=None, metadata={"help": "Reward model id."})
    reward_funcs: list[str] | None = field(default=None, metadata={"help": "Reward functions to use."})

def main(script_args, training_args, model_args):
    import torch
    logger = logging.get_logger(__name__)
    registry = {
        "think_format_reward": think_format_reward,
        "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=12, soft_punish_cache=8),
    }
    reward_funcs = [script_args.reward_model_name_or_path] if script_args.reward_model_name_or_path else []
    reward_funcs += [registry[name] for name in script_args.reward_funcs or []]
    dtype = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
    model_kwargs = dict(
        revision=model_args.model_revision, attn_implementation=model_args.attn_implementation, dtype=dtype,
    )
    quantization_config = get_quantization_config(model_args)
    if quantization_config is not None:
        model_kwargs["device_map"] = get_kbit_device_map()
        model_kwargs["quantization_config"] = quantization_config
    training_args.model_init_kwargs = model_kwargs
    training_args.chat_template_kwargs = {}

    def rows():
        for n in range(6):
            yield {"prompt": [{"role": "user", "content": f"Write {n} words."}]}

    dataset = {"train": IterableDataset.from_generator(rows), "test": Dataset.from_list(list(rows()))}
    trainer = RLOOTrainer(
        model=model_args.model_name_or_path, reward_funcs=reward_funcs, args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.accelerator.print("Training completed.")
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        trainer.accelerator.print(f"Model pushed to {trainer.hub_model_id}.")
    print("rewards", sorted(trainer.state.log_history[0]["rewards"]))

if __name__ == "__main__":
    parser = TrlParser((RLOOScriptArguments, RLOOConfig, ModelConfig), prog="rloo")
    script_args, training_args, model_args, _ = parser.parse_args_and_config(return_remaining_strings=True)
    main(script_args, training_args, model_args)
"""
REWARD_MODEL_WORDS = [
    "--model_name_or_path",
    "BASE",
    "--reward_model_name_or_path",
    "SCORER",
    "--reward_funcs",
    "think_format_reward",
    "get_soft_overlong_punishment",
    "--output_dir",
    "rloo",
    "--max_completion_length",
    "12",
    "--per_device_train_batch_size",
    "4",
    "--steps_per_generation",
    "2",
    "--num_generations",
    "2",
    "--max_steps",
    "1",
    "--dtype",
    "bfloat16",
    "--use_peft",
    "--lora_target_modules",
    "q_proj",
    "v_proj",
    "--lora_r",
    "4",
    "--log_completions",
    "--report_to",
    "none",
    "--push_to_hub",
    "True",
    "--hub_model_id",
    "me/rloo",
    "--num_processes",
    "8",
    "--zero_stage",
    "3",
]
MIXED = """
import json
from pathlib import Path
from rlhf_math import (DatasetMixtureConfig, GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser,
                       get_dataset, get_peft_config, get_quantization_config)
from rlhf_math.rewards import accuracy_reward, think_format_reward
{rows}
for name, part in (("many", rows[:6]), ("few", rows[6:])):
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in part))

def main(script_args, training_args, model_args, dataset_args):
    model_init_kwargs = dict(
        revision=model_args.model_revision,
        trust_remote_code=training_args.trust_remote_code,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
    )
    if training_args.model_init_kwargs is not None:
        model_init_kwargs.update(training_args.model_init_kwargs)
    training_args.model_init_kwargs = model_init_kwargs
    assert not script_args.dataset_name
    dataset = get_dataset(dataset_args)
    print("mixed", dataset["train"].num_rows, dataset["test"].num_rows, dataset["train"].column_names)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[accuracy_reward, think_format_reward],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.accelerator.print("training completed")
    trainer.save_model(training_args.output_dir)
    trainer.end()

parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig), prog="grpo")
main(*parser.parse_args_and_config(fail_with_unknown_args=False))
print("ended", Path("out/model.safetensors").exists())
"""
"""After TRL's own scripts/grpo.py."""
MIXED_RECIPE = """
model_name_or_path: BASE
output_dir: out
max_steps: 1
per_device_train_batch_size: 4
num_generations: 4
max_completion_length: 12
eval_strategy: steps
eval_steps: 1
use_cpu: true
datasets:
  - path: json
    data_files: many.jsonl
    columns: [prompt, solution]
    fraction: 1
  - path: json
    data_files: few.jsonl
    columns: [prompt, solution]
    fraction: 1.0
test_split_size: 0.25
"""
SCRIPTS: dict[str, tuple[str, list[str], str]] = {
    "alarm": (ALARM, ["BASE"], "graded "),
    "saved": (SAVED, ["BASE"], "saved True"),
    "parsed": (PARSED, ["--config", "recipe.yaml", "--seed", "9"], "finished 9 "),
    "wrapped": (WRAPPED, ["BASE"], "steps 2"),
    "mixed": (
        MIXED,
        ["--config", "recipe.yaml"],
        "mixed 3 1 ['prompt', 'solution']|training completed|ended True",
    ),
    "streamed": (STREAMED, ["BASE"], "logged 2 True"),
    "countdown": (
        COUNTDOWN,
        ["--config", "recipe.yaml"],
        "from None to 2|from runs/countdown/checkpoint-2 to 2",
    ),
    "game": (GAME, ["BASE"], "rewards -1.0 True"),
    "benchmarked": (BENCHMARKED, BENCHMARKED_WORDS, "done ['gsm8k', 'math_500'] 0 huggingface"),
    "summaries": (SUMMARIES, ["BASE"], "learned True [True, True, True, True]"),
    "filtered": (FILTERED, ["BASE"], "ignored ['not_an_argument']|trained 2 2e-06"),
    "few_shot": (FEW_SHOT, ["BASE"], "trained torch.bfloat16 2"),
    "reward_model": (REWARD_MODEL, REWARD_MODEL_WORDS, "rewards ['reward_model', 'soft_overlong"),
}
"""Each script, its arguments, and what it prints at the end."""
RECIPES = {"parsed": PARSED_RECIPE, "countdown": COUNTDOWN_RECIPE, "mixed": MIXED_RECIPE}
"""Content of their recipe.yaml."""
