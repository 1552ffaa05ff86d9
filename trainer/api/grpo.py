"""TRL's interface: `GRPOTrainer` and `GRPOConfig`, with TRL's arguments and defaults, on top of
`OnlineRLTrainer`.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from common.settings.algorithm import RECIPES, Recipe
from trainer.api.settings import TrainerConfig
from trainer.api.transformers_names import WithTransformersNames
from trainer.api.trl import of_trainer

_log = logging.getLogger(__name__)


class GRPOConfig(TrainerConfig):
    """`TrainerConfig` with the arguments and defaults of TRL's GRPOConfig
    (docs/how-to/from-trl.md).

    A GPU is used if there is one, in bfloat16, unless `use_cpu` is set. Without
    `eval_strategy="steps"` the model is evaluated only before and after training.
    """

    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    assumed: ClassVar[dict[str, Any]] = {"eval_strategy": "no"}
    loss_type: str | None = "dapo"
    num_generations: int = Field(8, ge=1)
    learning_rate: float = Field(1e-6, gt=0)
    num_train_epochs: float = Field(3, gt=0)
    gradient_accumulation_steps: int = Field(1, gt=0)
    max_new_tokens: int = Field(512, gt=0)
    kl_coef: float = Field(0.0, ge=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    save_steps: float | Literal["epoch"] = 500
    save_total_limit: int = Field(1_000_000, gt=0)
    seed: int = Field(42, ge=0)

    def get_process_log_level(self) -> int:
        """Returns the level that a script gives its loggers."""
        return logging.INFO

    @property
    def device(self) -> str:
        """The device of this process."""
        return "cuda" if self.use_gpu else "cpu"

    @property
    def n_gpu(self) -> int:
        """Number of GPUs that this process uses."""
        return int(self.use_gpu)

    def _defaults(self) -> dict[str, Any]:
        advantage = self.settings.get(
            "algorithm.advantage", RECIPES[self.trainer_type].get("advantage", "group_normalised")
        )
        compared = (
            {"algorithm.advantage_eps": 1e-4}
            if advantage in ("group_normalised", "reward_normalised")
            else {}
        )
        near = {"algorithm.kl_estimator": "k2"} if self.kl_coef else {}
        return super()._defaults() | {"trainer.adam_betas": self.betas} | compared | near

    @model_validator(mode="before")
    @classmethod
    def _as_trl(cls, data: Any) -> Any:
        """Chooses device and precision as TRL does."""
        if not isinstance(data, dict):
            return data
        if not {"use_gpu", "use_cpu"} & data.keys():
            import torch

            data = data | {"use_gpu": torch.cuda.is_available()}
        if data.get("use_gpu"):
            data = {"bf16": True} | data
        return data


class RLOOConfig(GRPOConfig):
    """The same for TRL's RLOOConfig, which uses leave-one-out advantages."""

    trainer_type: Recipe = "rloo"
    kl_coef: float = Field(0.05, ge=0)
    num_generations: int = Field(2, ge=1)


class GRPOTrainer(WithTransformersNames):
    """`OnlineRLTrainer` with the arguments of TRL's GRPOTrainer; unsupported ones are refused with
    the reason.

    As in TRL, a text prompt is continued as it is; only chats use the model's chat template.
    """

    _config: type[GRPOConfig] = GRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TrainerConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        engine: str | Sequence[str] = "embedded",
    ) -> None:
        if eval_dataset is not None:
            _log.warning("eval_dataset is evaluated before and after training too")
        of_trainer(
            {
                "reward_processing_classes": reward_processing_classes,
                "quantization_config": quantization_config,
                "rollout_func": rollout_func,
            }
        )
        args = self._config() if args is None else args
        train_dataset, plain = _is_plain(train_dataset)
        templates = {"data.prompt_template", "model.chat_template", "environment.name"}
        if plain and not (environment_factory or tools or templates & args.settings.keys()):
            args = args.model_copy(
                update={"settings": args.settings | {"data.prompt_template": "{question}"}}
            )
            args.model_fields_set.add("settings")
        super().__init__(
            args,
            reward_funcs,
            train_dataset,
            eval_dataset,
            model=model,
            processing_class=processing_class,
            peft_config=peft_config,
            callbacks=callbacks or (),
            optimizers=optimizers,
            engine=engine,
            environment_factory=environment_factory,
            tools=tools,
        )


class RLOOTrainer(GRPOTrainer):
    """The same for TRL's RLOOTrainer."""

    _config = RLOOConfig


def _is_plain(dataset: Any) -> tuple[Any, bool]:
    """Returns the data set, with no row consumed, and whether the prompt of its first row is a
    text.
    """
    if dataset is None or isinstance(dataset, str | Mapping) or not hasattr(dataset, "__iter__"):
        return dataset, False  # refused later, with the reason
    if hasattr(dataset, "iloc"):
        return dataset, len(dataset) > 0 and isinstance(dataset.iloc[0].get("prompt"), str)
    rows = iter(dataset)
    first = next(rows, None)
    plain = isinstance(first, Mapping) and isinstance(first.get("prompt"), str)
    if rows is dataset and first is not None:
        dataset = chain([first], rows)
    return dataset, plain
