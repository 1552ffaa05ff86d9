"""The settings that `rlhf sft` reads, and its defaults."""

from common.settings.config import SettingsSubset, names

_SECTIONS = ("model", "lora", "data", "optimizer", "parallel", "checkpoint", "trackers")
_UNREAD = (
    "model.reference",
    "lora.publish",
    "parallel.offload_reference",
    "data.port",
    "data.curriculum",
    "data.columns",
    "data.task_field",
)
_READ = (
    "seed",
    "state_dir",
    "sampling.system_prompt",
    "sampling.chat_template_kwargs",
    "sampling.prefill",
    "sampling.stop_token_ids",
    "evaluation.every",
    "evaluation.samples",
    "limits.lost_after_s",
)
# Settings of `trainer` that it reads.
_TRAINER = (
    "device",
    "num_epochs",
    "batch_size",
    "max_steps",
    "micro_batch_tokens",
    "micro_batch_size",
    "packing",
    "activation_checkpointing",
    "compile",
    "run_dir",
)


def _in_sections(name: str) -> bool:
    return name.partition(".")[0] in _SECTIONS and name not in _UNREAD


SFT_SETTINGS = SettingsSubset(
    about="Supervised fine-tuning (SFT): the model learns the answers in data.answer_field, or the "
    "assistant's messages in data.messages_field (docs/how-to/sft.md).",
    does="rlhf sft learns from given answers and generates none",
    reads=[
        *_READ,
        *filter(_in_sections, names()),
        *(f"trainer.{name}" for name in _TRAINER),
    ],
    defaults={
        "trainer.run_dir": "runs/sft",
        "optimizer.learning_rate": 2e-5,
        "optimizer.lr_schedule": "cosine",
        "trainer.batch_size": 32,
    },
    meanings={
        "data.num_samples": "Number of training examples to use, chosen by the seed. Unset: all.",
        "data.prompt_field": "Column of the prompt, a text or a list of messages.",
        "data.answer_field": "Column of the answer, all of which is learned: a text or a list of "
        "messages.",
        "data.messages_field": "Column of a chat, instead of `prompt_field` and `answer_field`. "
        "Every message of the assistant is learned, its tool calls included; a column `tools` has "
        "the tools.",
        "trainer.num_epochs": "Passes over the training examples; not read with `max_steps`.",
        "trainer.batch_size": "Examples per step.",
        "evaluation.every": "Steps between evaluations on held-out examples. 0: only before and "
        "after training.",
        "evaluation.samples": "Held-out examples per evaluation. 0: no evaluation.",
    },
)
