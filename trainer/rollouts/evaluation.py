"""Evaluation: accuracy of greedy or sampled answers, and pass@k of sampled ones."""

import asyncio
import math
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from statistics import mean, pstdev
from typing import Any, Protocol, TypeVar

from common.clients.reward import RewardClient
from common.clients.rollout import GenerationFailed, RolloutClient
from common.errors import ConfigError, InvalidInput
from common.process.loop_thread import LoopThread
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config
from common.settings.sections import SamplingSection
from common.wire.schemas import Prompt, RewardResult
from trainer.rollouts.episodes import answer_of, episode_request, play
from trainer.rollouts.requests import GeneratedAnswer, reward_items, sampling_seed
from trainer.rollouts.services import Services

_T = TypeVar("_T")
SEED_OFFSET = 1 << 20
"""Separates the seeds of evaluation from those of training."""


@dataclass(frozen=True)
class Answer:
    """The first answer to a held-out problem."""

    prompt_id: str
    prompt: str
    ground_truth: str
    response: str
    correct: bool | None
    """None when the rewards are not verdicts."""
    reward: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation."""

    step: int
    accuracy: float | None
    """Share of correct answers to the held-out problems; None when the rewards are not verdicts
    (`verified`)."""
    standard_error: float | None
    """Standard error of the accuracy: the standard deviation of the problems' shares over √(number
    of problems)."""
    num_samples: int
    pass_at_k: float | None
    """Share of problems with at least one correct answer among k sampled ones; None when it was not
    measured."""
    k: int
    answers: list[Answer]
    mean_reward: float = 0.0
    """Mean reward of the answers."""
    verified: bool = True
    """Whether the rewards are verdicts on correctness."""
    n: int = 1
    """Number of answers per problem."""
    temperature: float = 0.0
    """Sampling temperature of these answers; 0 for greedy ones."""

    def summary(self) -> dict[str, Any]:
        """Returns all fields but the answers."""
        return {key: value for key, value in asdict(self).items() if key != "answers"}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the unbiased pass@k of one problem (Chen et al. 2021, arXiv:2107.03374, eq. 1): 1 −
    C(n−c, k) / C(n, k).

    Raises ValueError for fewer than k samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct among {samples} samples is not defined")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of all requests of an evaluation."""

    style: PromptStyle
    max_new_tokens: int
    temperature: float
    """Temperature of the sampled answers."""
    seed: int
    timeout_s: float
    """Limit of one request, retries included."""
    cuts: Mapping[str, Any] = field(default_factory=dict)
    """Settings that truncate the sampling distribution of sampled answers, by SGLang's names."""
    sampling: SamplingSection = field(default_factory=SamplingSection)
    """What ends an answer."""
    slots: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)
    """A semaphore that limits the requests in flight."""


class Generator(Protocol):
    """Generates answers to problems."""

    async def generate(
        self, prompt: Prompt, index: int, n: int, greedy: bool
    ) -> list[GeneratedAnswer]:
        """Returns n answers to the problem at `index` of the data set. Raises ServiceError when one
        is missing.
        """


class TokenGenerator:
    """Generates through SGLang's `/generate`, tokens in and tokens out, exactly as in training.

    `context` limits the total tokens of a prompt and its answer; None leaves that to the server.
    """

    def __init__(
        self,
        client: RolloutClient,
        prompter: Prompter,
        settings: GenerationSettings,
        context: int | None,
    ) -> None:
        self._client, self._prompter, self._settings, self._context = (
            client,
            prompter,
            settings,
            context,
        )

    async def generate(
        self, prompt: Prompt, index: int, n: int, greedy: bool
    ) -> list[GeneratedAnswer]:
        settings, ids = self._settings, self._prompter.token_ids(prompt)
        async with settings.slots:
            answers = await self._client.answers(
                ids,
                n=n,
                max_new_tokens=min(settings.max_new_tokens, self._room(prompt, len(ids))),
                temperature=0.0 if greedy else settings.temperature,
                stop_token_ids=self._prompter.stop_token_ids,
                sampling_seed=sampling_seed(settings.seed, SEED_OFFSET + index),
                shape={**settings.sampling.ends(), **({} if greedy else settings.cuts)},
                pace=self._prompter.pace(settings.sampling),
                deadline_s=settings.timeout_s,
                logprobs=False,
            )
        found = []
        for answer in answers:
            try:
                text, meta = answer["text"], answer["meta_info"]
                finish, tokens = meta["finish_reason"]["type"], int(meta["completion_tokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise GenerationFailed(
                    f"this is not an answer of /generate: {error!r}", value=answer
                ) from None
            found.append(
                finished(
                    prompt,
                    self._prompter.style.prefill + text,
                    finish,
                    tokens,
                    answer.get("output_ids"),
                )
            )
        return found

    def _room(self, prompt: Prompt, length: int) -> int:
        if self._context is None:
            return self._settings.max_new_tokens
        if (room := self._context - length) < 1:
            raise ConfigError(
                f"the problem {prompt.id} has {length} tokens, and the model's context has only {self._context}",
                field="dataset",
                value=prompt.prompt,
                remedy="leave it out, or use a model with a longer context",
            )
        return room


def finished(
    prompt: Prompt,
    text: Any,
    finish: Any,
    tokens: int | None,
    token_ids: Sequence[int] | None = None,
) -> GeneratedAnswer:
    """Returns a complete answer. Raises GenerationFailed for an aborted or filtered one: it does
    not count as empty.
    """
    if finish not in ("stop", "length") or not isinstance(text, str):
        raise GenerationFailed(f"the answer to {prompt.id} ended with {finish}", value=text)
    return GeneratedAnswer(text, finish, tokens, token_ids)


async def together(
    work: Sequence[Coroutine[Any, Any, _T]], done: Callable[[], None] = lambda: None
) -> list[_T]:
    """Runs coroutines concurrently, with `done` after each; returns the results in order. Raises
    the first failure.
    """

    async def one(coroutine: Coroutine[Any, Any, _T]) -> _T:
        result = await coroutine
        done()
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(coroutine)) for coroutine in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def graded_answers(
    generator: Generator,
    reward: RewardClient,
    prompt: Prompt,
    index: int,
    samples: int,
    greedy: bool = True,
) -> list[tuple[GeneratedAnswer, RewardResult]]:
    """Returns a greedy answer to a problem, if `greedy`, and `samples` sampled ones, with their
    grades.
    """
    parts = [generator.generate(prompt, index, 1, greedy=True)] if greedy else []
    parts += [generator.generate(prompt, index, samples, greedy=False)] if samples else []
    written = [answer for part in await together(parts) for answer in part]
    graded = await reward.batch_reward(reward_items(prompt, written, reward.gets_tokens))
    return list(zip(written, graded.rewards, strict=True))


async def _graded_episodes(
    config: Config,
    services: Services,
    prompt: Prompt,
    index: int,
    samples: int,
    longest: int,
    temperature: float,
    greedy: bool,
) -> list[tuple[GeneratedAnswer, RewardResult]]:
    """Returns a greedy episode of a problem, if `greedy`, and `samples` sampled ones, as answers
    with grades.
    """
    found: list[tuple[GeneratedAnswer, RewardResult]] = []
    for n, heat in ((int(greedy), 0.0), (samples, temperature)):
        if not n:
            continue
        name = f"evaluation-{secrets.token_hex(8)}"
        request = episode_request(config, prompt, name, n, SEED_OFFSET + index, heat)
        request.sampling.max_new_tokens = longest
        for episode in await play(services, request):
            if episode.status != "ok":
                why = episode.detail or episode.stop_reason
                raise GenerationFailed(
                    f"an episode ended with {episode.status}: {why}",
                    field="prompt_id",
                    value=prompt.id,
                    remedy="look at the log of environment-server",
                    code="episode_failed",
                )
            answer = answer_of(episode)
            ids, reward = answer.token_ids, services.reward
            written = GeneratedAnswer(answer.text, answer.finish_reason, len(ids), ids.tolist())
            if episode.reward is None:
                (result,) = (
                    await reward.batch_reward(reward_items(prompt, [written], reward.gets_tokens))
                ).rewards
            else:
                result = RewardResult(
                    reward=answer.reward,
                    extracted_answer=answer.extracted_answer,
                    ground_truth=prompt.ground_truth,
                    correct=answer.correct,
                    status="ok",
                    components=answer.components,
                    verified=answer.verified,
                )
            found.append((written, result))
    return found


async def evaluate(
    config: Config,
    services: Services,
    prompter: Prompter,
    prompts: Sequence[Prompt],
    step: int,
    pass_samples: int,
) -> Evaluation:
    """Measures accuracy on `prompts` with `config.evaluation`, and pass@k on the first
    `pass_samples` of them.

    Raises ServiceError when an answer or a grade is missing: an evaluation is complete or it fails.
    """
    if not prompts:
        raise InvalidInput(
            "there is nothing to evaluate on",
            field="trainer.eval_samples",
            remedy="give the data set a held-out split",
        )
    sampling, own, k = config.sampling, config.evaluation, config.trainer.eval_k
    greedy, n = own.temperature == 0, own.n
    longest, temperature = (
        own.max_new_tokens or sampling.max_new_tokens,
        own.temperature or sampling.temperature,
    )
    limits = (longest, temperature, config.seed, sampling.request_timeout_s, own.cuts(), sampling)
    samples = [(0 if greedy else n) + (k if i < pass_samples else 0) for i in range(len(prompts))]
    if services.environment is None:
        generator = TokenGenerator(
            services.rollout, prompter, GenerationSettings(prompter.style, *limits), None
        )
        work = [
            graded_answers(generator, services.reward, prompt, i, samples[i], greedy)
            for i, prompt in enumerate(prompts)
        ]
    else:
        episodes = (longest, temperature, greedy)
        work = [
            _graded_episodes(config, services, prompt, i, samples[i], *episodes)
            for i, prompt in enumerate(prompts)
        ]
    found, answers, shares = await together(work), list[Answer](), list[float]()
    verified = all(result.verified for graded in found for _, result in graded)
    for prompt, graded in zip(prompts, found, strict=True):
        for _, result in graded:
            if result.reward is None:
                raise GenerationFailed(
                    f"an answer could not be graded: {result.reason or result.status}",
                    field="prompt_id",
                    value=prompt.id,
                    remedy="look at the log of reward-server",
                    code="not_graded",
                )
        written, result = graded[0]
        correct = result.correct if verified else None
        reward = result.reward or 0.0
        answers.append(
            Answer(prompt.id, prompt.prompt, prompt.ground_truth, written.text, correct, reward)
        )
        shares.append(mean(result.correct for _, result in graded[:n]))
    accuracy = mean(shares)
    passed = [
        pass_at_k(k, sum(result.correct for _, result in graded[n:]), k)
        for graded in found[:pass_samples]
    ]
    return Evaluation(
        step=step,
        accuracy=accuracy if verified else None,
        standard_error=pstdev(shares) / math.sqrt(len(shares)) if verified else None,
        num_samples=len(answers),
        pass_at_k=sum(passed) / len(passed) if passed and verified else None,
        k=k,
        answers=answers,
        mean_reward=mean(result.reward or 0.0 for graded in found for _, result in graded[:n]),
        verified=verified,
        n=n,
        temperature=own.temperature,
    )


class Evaluator:
    """The evaluator of a rank above 0, which does nothing: rank 0 evaluates."""

    last: Evaluation | None = None
    has_problems = False
    """Whether there are held-out problems, so that `evaluate` evaluates."""

    def prepare(self) -> None:
        """Fetches the held-out problems."""

    def evaluate(self, step: int, pass_samples: int) -> Evaluation | None:
        """Evaluates the weights after `step` steps, which the engines serve.

        pass@k is measured on the first `pass_samples` problems. None on ranks above 0 and without
        held-out problems.
        """
        return None


class LeaderEvaluator(Evaluator):
    """Rank 0's evaluator, which uses the services of training."""

    def __init__(
        self, config: Config, services: Services, prompter: Prompter, loop: LoopThread
    ) -> None:
        self._config, self._services, self._prompter, self._loop = config, services, prompter, loop
        self._held_out: list[Prompt] = []

    def prepare(self) -> None:
        if count := self._config.trainer.eval_samples:
            self._held_out = self._loop.call(self._services.data.eval_prompts(count))
        self.has_problems = bool(self._held_out)

    def evaluate(self, step: int, pass_samples: int) -> Evaluation | None:
        """See `Evaluator`. Raises ServiceError when an answer or a grade is missing."""
        if not self._held_out:
            return None
        work = evaluate(
            self._config, self._services, self._prompter, self._held_out, step, pass_samples
        )
        self.last = self._loop.call(work)
        return self.last
