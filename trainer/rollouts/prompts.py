"""Problems as the model and the graders get them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.schemas import Completion, Prompt, RewardItem

if TYPE_CHECKING:
    from trainer.rollouts.evaluation import GeneratedAnswer


@dataclass
class Prompter:
    """Turns a problem into token ids: the only place where prompts are tokenised."""

    tokenizer: Any
    system_prompt: str
    stop_token_ids: list[int]

    def __post_init__(self) -> None:
        """Raises ConfigError for a system prompt that nothing would put before the problems."""
        if self.system_prompt and not self.tokenizer.chat_template:
            raise ConfigError(
                "the model has no chat template, in which a system prompt would stand",
                field="sampling.system_prompt",
                value=self.system_prompt,
                remedy="leave it out and put the text into the problems, or take an instruct model",
            )

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Applies the model's chat template, if it has one. Raises ConfigError for a chat when it has none."""
        return self.all_token_ids([prompt])[0]

    def all_token_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Returns `token_ids` of several prompts: one call of the tokenizer costs hardly more than that of one prompt."""
        texts = [self._text(prompt) for prompt in prompts]
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=not self.tokenizer.chat_template).input_ids
        return ids

    def _text(self, prompt: Prompt) -> str:
        if self.tokenizer.chat_template:
            chat = conversation(prompt, self.system_prompt)
            return str(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        if prompt.chat:
            raise ConfigError(
                "a problem is a chat, but the model has no chat template",
                field="model.name",
                value=self.tokenizer.name_or_path,
                remedy="take an instruct model, or give problems as text",
            )
        return prompt.prompt


def conversation(prompt: Prompt, system_prompt: str) -> list[dict[str, str]]:
    """Returns the messages that the model continues."""
    chat = prompt.chat or [{"role": "user", "content": prompt.prompt}]
    if not system_prompt or chat[0]["role"] == "system":
        return chat
    return [{"role": "system", "content": system_prompt}, *chat]


def reward_items(prompt: Prompt, completions: "Sequence[Completion | GeneratedAnswer]") -> list[RewardItem]:
    """Returns the reward-server's input for completions of one prompt."""
    return [
        RewardItem(
            prompt=prompt.prompt,
            response=completion.text,
            ground_truth=prompt.ground_truth,
            finish_reason=completion.finish_reason,
            task=prompt.task,
            columns=prompt.columns,
        )
        for completion in completions
    ]


def sampling_seed(seed: int, position: int) -> int:
    """Returns the sampling seed of the group at `position` of the stream, different for every run seed; fits in 31 bits."""
    return (seed * 0x9E3779B1 + position * 0x85EBCA6B + 1) & 0x7FFFFFFF
