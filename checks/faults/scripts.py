"""Faults that a newcomer's script makes: what it gives, and where it writes."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from checks.faults.fault import fault
from checks.faults.lab import Chat, Lab, texts
from checks.faults.rewards import Scores, correctness, right
from trainer.api.evaluator import ModelEvaluator
from trainer.api.online import OnlineRLTrainer
from trainer.api.settings import TrainerConfig

# ------------------------------------------------------------ models and tokenizers


@fault(
    "a chat model is given as the reward model, so its head is random",
    r"reward[ _]model",
    r"head|score\.weight",
    r"random|lack|missing",
    reported="https://github.com/OpenRLHF/OpenRLHF/issues/180",
)
def script_chat_model_rewards(lab: Lab) -> None:
    lab.strike()
    lab.script(str(lab.model))


@fault(
    "the files of the evaluated model lack a layer, which is random",
    r"layers\.1",
    r"random|lack|missing",
    reported="https://github.com/deepspeedai/DeepSpeedExamples/issues/627",
)
def script_model_lacks_layer(lab: Lab) -> None:
    model = lab.directory / "model"
    shutil.copytree(lab.model, model)
    tensors = load_file(lab.model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    lab.strike()
    _evaluate(lab, model)


@fault(
    "the tokenizer has tokens that the model was not resized for",
    r"tokenizer",
    r"token",
    r"resize|more tokens|vocabulary",
    reported="https://github.com/hiyouga/LlamaFactory/pull/8823",
)
def script_tokens_added(lab: Lab) -> None:
    tokenizer = AutoTokenizer.from_pretrained(lab.model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    lab.strike()
    config = _config(lab, system_prompt="Begin with <think>.")
    reward = correctness(lab, lambda scores: scores)
    trainer = OnlineRLTrainer(config, reward, lab.rows(), processing_class=tokenizer)
    trainer.train()


@fault(
    "the model is evaluated with another system prompt than it was trained with",
    r"system_prompt",
    r"trained|was|other|differ",
    reported="https://github.com/huggingface/open-r1/issues/473",
)
def script_other_prompt_in_evaluation(lab: Lab) -> None:
    config = _config(lab, system_prompt="Answer with #### N.")
    trainer = OnlineRLTrainer(config, correctness(lab, lambda scores: scores), lab.rows())
    trainer.train()
    saved = trainer.save_model(lab.directory / "model")
    lab.strike()
    _evaluate(lab, saved)


# ------------------------------------------------------------ data and rewards


@fault(
    "the problems are chats written as text, as a CSV file has them",
    r"messages|chat",
    r"text",
    reported="https://github.com/transformerlab/transformerlab-api/pull/480",
)
def script_chats_as_text(lab: Lab) -> None:
    rows = [{**row, "prompt": str(row["prompt"])} for row in lab.rows()]
    lab.strike()
    lab.script(correctness(lab, lambda scores: scores), rows=rows)


@fault(
    "the reward function is for texts, and the data set has chats",
    r"messages|chats?",
    r"texts?",
    in_steps=True,
)
def script_reward_for_texts(lab: Lab) -> None:
    def short(completions: list[Any], **columns: Any) -> Scores:
        lab.strike()
        return [-abs(20 - len(completion)) for completion in completions]

    lab.script(short)


@fault(
    "a reward function changes its arguments in place",
    harmless=True,
    oracle=right,
)
def script_reward_changes_arguments(lab: Lab) -> None:
    def strips(completions: list[Chat], steps: list[list[str]], **columns: Any) -> Scores:
        lab.strike()
        for completion, each in zip(completions, steps, strict=True):
            completion[0]["content"] = ""
            each.pop()
        return [0.0] * len(completions)

    def last_step(completions: list[Chat], steps: list[list[str]], **columns: Any) -> Scores:
        pairs = zip(texts(completions), steps, strict=True)
        return [right(text, each.pop()) for text, each in pairs]

    rows = [{**row, "steps": ["so", row["ground_truth"]]} for row in lab.rows()]
    lab.script(strips, last_step, rows=rows, max_steps=4)


@fault(
    "the learning rate is a thousand times too low: the policy does not change",
    r"learning_rate",
    r"small|low|hardly|does not change",
    reported="https://github.com/dhcode-cpp/X-R1/issues/66",
    in_steps=True,
)
def script_rate_too_low(lab: Lab) -> None:
    lab.strike()
    lab.script(correctness(lab, lambda scores: scores), learning_rate=5e-9)


# ------------------------------------------------------------ standard output


@fault("nobody reads standard output any more (`| head`)", r"standard output|stdout", r"pipe|gone")
def script_output_unread(lab: Lab) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    sys.stdout = os.fdopen(writing, "w")
    lab.strike()
    lab.script(correctness(lab, lambda scores: scores), max_steps=3)


@fault("the disk behind standard output is full", r"standard output|stdout", r"space|full|no more")
def script_output_full(lab: Lab) -> None:
    sys.stdout = Path("/dev/full").open("w")  # noqa: SIM115
    lab.strike()
    lab.script(correctness(lab, lambda scores: scores), max_steps=3)


@fault("standard output cannot write every character", harmless=True)
def script_output_ascii(lab: Lab) -> None:
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="ascii")
    lab.strike()
    lab.script(correctness(lab, lambda scores: scores), max_steps=3)


def _config(lab: Lab, **fields: Any) -> TrainerConfig:
    """Returns the config of a short run of the built-in task."""
    return TrainerConfig(
        model_name_or_path=str(lab.model),
        output_dir=lab.run_dir,
        num_generations=8,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=1,
        max_steps=2,
        max_new_tokens=24,
        seed=lab.seed,
        **fields,
    )


def _evaluate(lab: Lab, model: Path) -> None:
    evaluator = ModelEvaluator(model, max_new_tokens=24, progress=False)
    evaluator.evaluate(lab.rows(16), correctness(lab, lambda scores: scores))
