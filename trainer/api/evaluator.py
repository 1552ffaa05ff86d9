"""`ModelEvaluator`: accuracy of a model on a data set, with uncertainty."""

import asyncio
import logging
from collections.abc import Sequence
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
from common.settings.sections import EvaluationSection, RewardSection
from common.wire.schemas import Prompt
from learning.device import DeviceKind
from services.reward.app import create_reward_app
from services.reward.functions import RewardFunction
from services.reward.functions.base import check_positive
from services.reward.functions.composite import weights_of
from trainer.api.datasets import as_prompts, as_rewards
from trainer.api.refusals import Given, with_names
from trainer.evaluation.evaluator import graded_answers
from trainer.evaluation.generation import Generator, together
from trainer.evaluation.generators import local_generator, openai_generator, sglang_generator
from trainer.evaluation.results import EvaluationResults, leak, results_of
from trainer.observe.run_dir import progress_bar
from trainer.policy.trained_prompts import TrainedPrompts

_log = logging.getLogger(__name__)
# Settings that an evaluation reads besides those of `sampling`.
_READ = ("data.prompt_template", "model.chat_template", "model.trust_remote_code")


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
        timeout_s: limit of one request in seconds, retries included. An engine that generates and
            reports its load (SGLang's `/v1/loads`) may take longer.
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
        settings: Given = MappingProxyType({}),
    ) -> None:
        self.model = str(model)
        self._served = self.model.startswith(("http://", "https://"))
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
        check_positive(concurrency=concurrency)
        own = {
            "sampling.system_prompt": system_prompt,
            "sampling.max_new_tokens": max_new_tokens,
            "sampling.temperature": temperature,
            "limits.service_timeout_s": timeout_s,
            "seed": seed,
            "rollout.device": device,
            "model.dtype": dtype,
            "model.name": str(tokenizer or model),
        }
        self._config = _config(own, settings)
        if self._served and tokenizer is None:
            _refuse_unsent(self._config, settings)
        self._concurrency = concurrency
        self._progress = progress
        self._has_tokenizer = tokenizer is not None
        self._model_id = model_id
        self._api_key = api_key

    @classmethod
    def of_run(cls, model: str | Path, config: Config, progress: bool) -> "ModelEvaluator":
        """Returns an evaluator of a local model with the settings of its run."""
        made = cls(model, progress=progress)
        named = config.model.model_copy(update={"name": str(model)})
        made._config = _sampling_as_in_training(config.model_copy(update={"model": named}))
        return made

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

        Warnings say how many of the problems the model was trained on, and whether it was trained
        on prompts of another form (another system prompt), as far as its directory tells.

        Raises ConfigError for an empty data set or a model that does not load, Unreachable when a
        server does not respond, and another ServiceError when any answer is missing.
        """
        check_positive(k=k)
        prompts = as_prompts(dataset, "dataset")
        rewards = as_rewards(reward_fn)
        section = RewardSection().for_objects(weights_of(rewards, reward_weights, "reward_weights"))
        trained_on = None
        if not self._served:
            trained = TrainedPrompts.of(self.model)
            changes = trained.other_style(PromptStyle.of(self._config))
            if changes:
                _log.warning("%s: trained on prompts of another form: %s", self.model, changes)
            trained_on = trained.contain(prompts)
        text = leak(trained_on)
        if text:
            _log.warning("%s: %s", self.model, text)

        with LoopThread() as loop:  # also inside a running event loop (a notebook)
            results = loop.call(self._evaluate(prompts, rewards, k, section))
        results["trained_on"] = trained_on
        return results

    async def _evaluate(
        self, prompts: list[Prompt], rewards: list[RewardFunction], k: int, section: RewardSection
    ) -> EvaluationResults:
        samples = k if k > 1 else 0
        app = create_reward_app(section, functions=rewards)
        bar = progress_bar("evaluating", Console(stderr=True), hidden=not self._progress)
        async with (
            app.router.lifespan_context(app),
            RewardClient(
                "reward functions", "http://in-process", transport=httpx.ASGITransport(app)
            ) as reward,
            self._generator(prompts) as generator,
        ):
            reward.gets_tokens = True
            with bar:
                task = bar.add_task("evaluating", total=len(prompts))
                work = [
                    graded_answers(generator, reward, prompt, index=i, samples=samples)
                    for i, prompt in enumerate(prompts)
                ]
                answers = await together(work, lambda: bar.advance(task))
            gives_verdicts = await reward.gives_verdicts()
        return results_of(self.model, prompts, answers, k=k, gives_verdicts=gives_verdicts)

    def _generator(self, prompts: Sequence[Prompt]) -> AbstractAsyncContextManager[Generator]:
        slots = asyncio.Semaphore(self._concurrency)
        config = self._config
        if not self._served:
            return local_generator(config, prompts, slots)
        if self._has_tokenizer:
            return sglang_generator(self.model, config, self._api_key, slots=slots)
        return openai_generator(
            self.model, config, self._api_key, slots=slots, model_id=self._model_id
        )


def _config(own: Given, settings: Given) -> Config:
    """Returns the settings of an evaluation. Raises ConfigError for a setting that is wrong or not
    read.
    """
    for name, value in settings.items():
        of_sampling = name.startswith("sampling.") and name != "sampling.group_size"
        if name in own or not (name in _READ or of_sampling):
            remedy = f"give {', '.join(_READ)} or settings of sampling"
            if name in own:
                remedy = f"give the argument {name.partition('.')[2]} instead"
            raise ConfigError(
                "an evaluation does not read this setting",
                field="settings",
                value={name: value},
                remedy=remedy,
            )
    # Room for any answer; the model's own context decides once it is loaded.
    context = {"rollout.max_context_tokens": own["sampling.max_new_tokens"] + 2}
    try:
        config = from_mapping({"rollout.engine": "embedded", **context, **own, **settings})
    except ConfigError as error:
        raise with_names(error, {name: name.partition(".")[2] for name in own}) from None
    return _sampling_as_in_training(config)


def _sampling_as_in_training(config: Config) -> Config:
    """Returns the settings; the samples of an evaluation are truncated as those of training
    (`top_p`, `top_k`, `min_p`).
    """
    sampling = config.sampling
    bounds = EvaluationSection(top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)
    return config.model_copy(update={"evaluation": bounds})


def _refuse_unsent(config: Config, settings: Given) -> None:
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
