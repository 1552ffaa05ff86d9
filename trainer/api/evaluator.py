"""`ModelEvaluator`: accuracy of a model on a data set, with uncertainty."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import httpx
from rich.console import Console

from common.clients.reward import RewardClient
from common.errors import ConfigError
from common.process.loop_thread import LoopThread
from common.prompts.prompter import PromptStyle
from common.settings.chat_templates import OWN
from common.settings.config import Config, from_mapping
from common.settings.sections import RewardSection
from common.wire.schemas import Prompt
from learning.device import DeviceKind, choose_device
from services.reward.app import create_reward_app
from services.reward.functions import RewardFunction
from trainer.api.datasets import as_prompts, as_rewards
from trainer.evaluation.evaluator import graded_answers
from trainer.evaluation.generation import GenerationSettings, Generator, together
from trainer.evaluation.generators import local_generator, openai_generator, sglang_generator
from trainer.evaluation.results import EvaluationResults, results_of
from trainer.observe.run_dir import progress_bar

_READ = ("data.prompt_template", "model.chat_template", "model.trust_remote_code")
"""Settings that an evaluation reads besides those of `sampling`."""


class ModelEvaluator:
    """Evaluates a model: a local directory, a name on the hub, or the URL of a server.

    The embedded engine runs a local model, as in in-process training. A server is called with
    OpenAI chat completions or, with a `tokenizer`, with SGLang's `/generate`, tokens in and out as
    in training.

    Args:
        model: directory, name, or `http://…`.
        system_prompt: system message before every problem.
        max_new_tokens: limit of an answer; the context of a local model may allow less.
        temperature: temperature of the k samples (`evaluate(…, k=8)`); the first answer to every
            problem is greedy.
        seed: seed of the samples.
        concurrency: requests in flight.
        timeout_s: limit of one request in seconds, retries included.
        device: of a local model; `auto` uses a GPU if there is one.
        dtype: precision of a local model on a GPU; a CPU computes in float32.
        tokenizer: tokenizer of the served model, a directory or a name on the hub; selects SGLang's
            native call.
        model_id: name of the model, on a server with several.
        api_key: bearer token for the server.
        progress: show a progress bar on the terminal.
        settings: other settings of the system by their names: `data.prompt_template`,
            `model.chat_template`, `model.trust_remote_code` and those of `sampling`.

    Raises ConfigError for arguments that conflict.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        system_prompt: str = "",
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        seed: int = 0,
        concurrency: int = 64,
        timeout_s: float = 600.0,
        device: DeviceKind = "auto",
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        tokenizer: str | Path | None = None,
        model_id: str | None = None,
        api_key: str | None = None,
        progress: bool = True,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.model = str(model)
        self._served = self.model.startswith(("http://", "https://"))
        positive = {
            "max_new_tokens": max_new_tokens,
            "concurrency": concurrency,
            "timeout_s": timeout_s,
        }
        for name, value in positive.items():
            if value <= 0:
                raise ConfigError("this is not above 0", field=name, value=value, remedy="raise it")
        if temperature <= 0:
            raise ConfigError(
                "samples at this temperature are all the same",
                field="temperature",
                value=temperature,
                remedy="set it above 0; the first answer to every problem is greedy anyway",
            )
        of_server = {"tokenizer": tokenizer, "model_id": model_id, "api_key": api_key}
        for name, setting in of_server.items():
            if setting is not None and not self._served:
                raise ConfigError(
                    f"a local model has no {name}",
                    field=name,
                    remedy="leave it out, or give a URL as the model",
                )
        if tokenizer is not None and model_id:
            raise ConfigError(
                "with a tokenizer, SGLang's native call cannot select a model_id",
                field="tokenizer",
                remedy="leave it out",
            )

        own = {
            "system_prompt": system_prompt,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "request_timeout_s": timeout_s,
        }
        config = _config(own, settings)
        if self._served and tokenizer is None:
            _refuse_unsent(config, settings)
        self._style = PromptStyle.of(config)
        self._sampling = config.sampling
        self._section = config.model
        self._seed = seed
        self._concurrency = concurrency
        self._progress = progress
        self._device = device
        self._dtype = dtype
        self._tokenizer = tokenizer
        self._model_id = model_id
        self._api_key = api_key

    def evaluate(
        self,
        dataset: Any,
        reward_fn: Any,
        k: int = 1,
        reward_weights: Sequence[float] | None = None,
    ) -> EvaluationResults:
        """Generates a greedy answer to every problem, and k samples when k is above 1, and grades
        them.

        Args:
            dataset: as for `OnlineRLTrainer`.
            reward_fn: grades the answers; as for `OnlineRLTrainer`.
            k: samples per problem for pass@k, avg@k and maj@k.
            reward_weights: weight of each of several reward functions; 1 each when None.

        Raises ConfigError for an empty data set or a model that does not load, Unreachable when a
        server does not respond, and another ServiceError when any answer is missing.
        """
        if k < 1:
            raise ConfigError(
                "this is not above 0",
                field="k",
                value=k,
                remedy="give 1, or as many samples as pass@k needs",
            )
        prompts = as_prompts(dataset, "dataset")
        rewards = as_rewards(reward_fn)
        weights = [1.0] * len(rewards) if reward_weights is None else list(reward_weights)
        if len(weights) != len(rewards):
            raise ConfigError(
                f"there are {len(rewards)} reward functions",
                field="reward_weights",
                value=weights,
                remedy="give one weight for each function",
            )
        names = [function.name for function in rewards]
        weight_by_name = dict(zip(names, weights, strict=True))
        section = RewardSection().for_objects(weight_by_name)
        with LoopThread() as loop:  # also inside a running event loop (a notebook)
            return loop.call(self._evaluate(prompts, rewards, k, section))

    async def _evaluate(
        self, prompts: list[Prompt], rewards: list[RewardFunction], k: int, section: RewardSection
    ) -> EvaluationResults:
        sampling = self._sampling
        settings = GenerationSettings(
            style=self._style,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=self._seed,
            timeout_s=sampling.request_timeout_s,
            cuts=sampling.truncation(),
            sampling=sampling,
            slots=asyncio.Semaphore(self._concurrency),
        )
        samples = k if k > 1 else 0
        app = create_reward_app(section, functions=rewards)
        bar = progress_bar("evaluating", Console(stderr=True), hidden=not self._progress)
        async with (
            app.router.lifespan_context(app),
            RewardClient(
                "reward functions", "http://in-process", transport=httpx.ASGITransport(app)
            ) as reward,
            self._generator(prompts, settings) as generator,
        ):
            reward.gets_tokens = True
            with bar:
                task = bar.add_task("evaluating", total=len(prompts))
                work = [
                    graded_answers(generator, reward, prompt, index=i, samples=samples)
                    for i, prompt in enumerate(prompts)
                ]
                answers = await together(work, lambda: bar.advance(task))
        return results_of(self.model, prompts, answers, k)

    def _generator(
        self, prompts: Sequence[Prompt], settings: GenerationSettings
    ) -> AbstractAsyncContextManager[Generator]:
        if not self._served:
            section = self._section.model_copy(update={"name": self.model})
            device = choose_device(self._device, "device")
            return local_generator(section, prompts, settings, device=device, dtype=self._dtype)
        if self._tokenizer is not None:
            section = self._section.model_copy(update={"name": str(self._tokenizer)})
            return sglang_generator(self.model, section, self._api_key, settings=settings)
        return openai_generator(self.model, self._model_id, self._api_key, settings=settings)


def is_read(setting: str) -> bool:
    """Returns whether an evaluation reads a setting of the system."""
    return setting in _READ or (
        setting.startswith("sampling.") and setting != "sampling.group_size"
    )


def _config(own: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """Returns the settings of an evaluation. Raises ConfigError for a setting that is wrong or not
    read.
    """
    mapped = {f"sampling.{name}": value for name, value in own.items()}
    for name, value in settings.items():
        if name in mapped:
            raise ConfigError(
                "this setting has its own argument",
                field="settings",
                value={name: value},
                remedy=f"give the argument {name.partition('.')[2]} instead",
            )
        if not is_read(name):
            raise ConfigError(
                "an evaluation does not read this setting",
                field="settings",
                value={name: value},
                remedy=f"give {', '.join(_READ)} or settings of sampling",
            )
    mapped["rollout.engine"] = "embedded"
    # Room for any answer; the model's own context decides once it is loaded.
    mapped["rollout.max_context_tokens"] = own["max_new_tokens"] + 1
    return from_mapping({**mapped, **settings})


def _refuse_unsent(config: Config, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings that cannot be sent to a server that makes the prompts
    itself.
    """
    for name in settings:
        unsent = (name == "model.chat_template" and config.model.chat_template != OWN) or (
            name == "sampling.prefill" and PromptStyle.of(config).chat is not False
        )
        if unsent:
            raise ConfigError(
                "this setting cannot be sent to a server that tokenises the problems itself",
                field="settings",
                value={name: settings[name]},
                remedy="give the tokenizer of its model; the evaluator then sends tokens",
            )
