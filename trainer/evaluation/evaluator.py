"""Evaluates the weights that the engines serve, on held-out problems."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from statistics import mean, pstdev

from common.clients.reward import RewardClient
from common.clients.rollout import GenerationFailed
from common.process import progress
from common.process.loop_thread import LoopThread
from common.prompts.prompter import Prompter
from common.settings.config import Config
from common.wire.schemas import Episode, Prompt, RewardResult
from trainer.evaluation.evaluation import Answer, Evaluation, pass_at_k
from trainer.evaluation.generation import (
    SEED_OFFSET,
    Generator,
    TokenGenerator,
    longest_answer,
    sampling_of,
    together,
)
from trainer.evaluation.verdicts import Verdicts
from trainer.policy.trained_prompts import TrainedPrompts
from trainer.rollouts.episodes import answer_of, episode_request, play
from trainer.rollouts.requests import GeneratedAnswer, reward_items
from trainer.rollouts.services import Services

_Graded = list[tuple[GeneratedAnswer, RewardResult]]


class Evaluator:
    """Evaluates during a run, with the services of training. Only rank 0 has one."""

    last: Evaluation | None = None
    has_problems = False
    """Whether there are held-out problems, so that `evaluate` evaluates."""

    def __init__(
        self,
        config: Config,
        services: Services,
        prompter: Prompter,
        *,
        loop: LoopThread,
        verdicts: Verdicts,
        trained: TrainedPrompts,
    ) -> None:
        self._config = config
        self._trained = trained
        self._verdicts = verdicts
        self._services = services
        self._prompter = prompter
        self._loop = loop
        self._held_out: list[Prompt] = []

    def prepare(self) -> None:
        """Fetches the held-out problems."""
        count = self._config.evaluation.samples
        if count:
            self._held_out = self._loop.call(self._services.data.eval_prompts(count))
        self.has_problems = bool(self._held_out)

    def evaluate(self, step: int, pass_samples: int) -> Evaluation | None:
        """Evaluates the weights after `step` steps, which the engines serve; None without held-out
        problems.

        pass@k is measured on the first `pass_samples` problems. Raises ServiceError when an answer
        or a grade is missing.
        """
        if not self._held_out:
            return None
        found = self._loop.call(
            evaluate(
                self._config,
                self._services,
                self._prompter,
                prompts=self._held_out,
                step=step,
                pass_samples=pass_samples,
                verdicts=self._verdicts,
            )
        )
        self.last = replace(found, trained_on=sum(self._trained.contain(self._held_out)))
        return self.last


async def evaluate(
    config: Config,
    services: Services,
    prompter: Prompter,
    *,
    prompts: Sequence[Prompt],
    step: int,
    pass_samples: int,
    verdicts: Verdicts,
) -> Evaluation:
    """Measures accuracy on `prompts` with `config.evaluation`, and pass@k on the first
    `pass_samples` of them; only the mean reward if the rewards are not `verdicts`.

    Raises ServiceError when an answer or a grade is missing: an evaluation is complete or it fails.
    """
    own = config.evaluation
    k = config.evaluation.k
    graded = await _graded_problems(
        config, services, prompter, prompts=prompts, pass_samples=pass_samples
    )

    # The first n answers to a problem count for the accuracy, k more for pass@k.
    verified = verdicts.of(result.verified for _, result in chain.from_iterable(graded))
    answers: list[Answer] = []
    shares: list[float] = []
    rewards: list[float] = []
    passed: list[float] = []
    for prompt, of_problem in zip(prompts, graded, strict=True):
        counted = [result for _, result in of_problem[: own.n]]
        rewards += [result.reward or 0.0 for result in counted]
        has_verdicts = verified and all(result.verified for _, result in of_problem)
        if has_verdicts:
            shares.append(mean(result.correct for result in counted))
        if has_verdicts and len(of_problem) > own.n:
            passed.append(pass_at_k(k, sum(right.correct for _, right in of_problem[own.n :]), k))
        answers.append(
            Answer(
                prompt_id=prompt.id,
                prompt=prompt.prompt,
                ground_truth=prompt.ground_truth,
                response=of_problem[0][0].text,
                correct=counted[0].correct if has_verdicts else None,
                reward=counted[0].reward or 0.0,
            )
        )
    return Evaluation(
        step=step,
        accuracy=mean(shares) if shares else None,
        standard_error=pstdev(shares) / math.sqrt(len(shares)) if shares else None,
        num_samples=len(prompts),
        pass_at_k=mean(passed) if passed else None,
        k=k,
        answers=answers,
        mean_reward=mean(rewards),
        verified=verified,
        n=own.n,
        temperature=own.temperature,
    )


async def _graded_problems(
    config: Config,
    services: Services,
    prompter: Prompter,
    prompts: Sequence[Prompt],
    pass_samples: int,
) -> list[_Graded]:
    """Returns the graded answers to every problem, in order.

    Raises GenerationFailed when a grade is missing.
    """
    own = config.evaluation
    greedy = own.temperature == 0
    generator = TokenGenerator(services.rollout, prompter, config)

    async def graded(index: int, prompt: Prompt) -> _Graded:
        samples = 0 if greedy else own.n
        if index < pass_samples:
            samples += config.evaluation.k
        if services.environment is not None:
            return await _graded_episodes(
                config, services, prompt, index=index, samples=samples, greedy=greedy
            )
        return await graded_answers(
            generator, services.reward, prompt, index=index, samples=samples, greedy=greedy
        )

    work = [graded(index, prompt) for index, prompt in enumerate(prompts)]
    problems = await together(work, done=progress.moved)
    for prompt, of_problem in zip(prompts, problems, strict=True):
        for _, result in of_problem:
            if result.reward is None:
                raise GenerationFailed(
                    f"an answer could not be graded: {result.reason or result.status}",
                    field="prompt_id",
                    value=prompt.id,
                    remedy="correct the reward function; reward.function_timeout_s limits a call "
                    "of it",
                    code="not_graded",
                )
    return problems


async def graded_answers(
    generator: Generator,
    reward: RewardClient,
    prompt: Prompt,
    *,
    index: int,
    samples: int,
    greedy: bool = True,
) -> _Graded:
    """Returns a greedy answer to a problem, if `greedy`, and `samples` sampled ones, with their
    grades.
    """
    requests = []
    if greedy:
        requests.append(generator.generate(prompt, index, 1, greedy=True))
    if samples:
        requests.append(generator.generate(prompt, index, samples, greedy=False))
    answers = list(chain.from_iterable(await together(requests)))
    graded = await reward.batch_reward(reward_items(prompt, answers, reward.gets_tokens))
    return list(zip(answers, graded.rewards, strict=True))


async def _graded_episodes(
    config: Config,
    services: Services,
    prompt: Prompt,
    *,
    index: int,
    samples: int,
    greedy: bool,
) -> _Graded:
    """Returns a greedy episode of a problem, if `greedy`, and `samples` sampled ones, as answers
    with grades.
    """
    graded: _Graded = []
    for n, is_greedy in ((int(greedy), True), (samples, False)):
        if n == 0:
            continue
        request = episode_request(
            config,
            prompt,
            request_id=f"evaluation-{secrets.token_hex(8)}",
            n=n,
            position=SEED_OFFSET + index,
            temperature=sampling_of(config, is_greedy)["temperature"],
        )
        request.sampling.max_new_tokens = longest_answer(config)
        for episode in await play(services, request):
            graded.append(await _graded_episode(services, prompt, episode))
    return graded


async def _graded_episode(
    services: Services, prompt: Prompt, episode: Episode
) -> tuple[GeneratedAnswer, RewardResult]:
    """Returns the last answer of an episode with its grade, from the environment or, if that gave
    none, from the reward-server. Raises GenerationFailed for a failed episode.
    """
    if episode.status != "ok":
        raise GenerationFailed(
            f"an episode ended with {episode.status}: {episode.detail or episode.stop_reason}",
            field="prompt_id",
            value=prompt.id,
            remedy="correct the environment",
            code="episode_failed",
        )
    completion = answer_of(episode, services.environment_gives_verdicts)
    answer = GeneratedAnswer(
        text=completion.text,
        finish_reason=completion.finish_reason,
        tokens=len(completion.token_ids),
        token_ids=completion.token_ids.tolist(),
    )
    if episode.reward is None:
        items = reward_items(prompt, [answer], services.reward.gets_tokens)
        graded = await services.reward.batch_reward(items)
        return answer, graded.rewards[0]
    result = RewardResult(
        reward=completion.reward,
        extracted_answer=completion.extracted_answer,
        ground_truth=prompt.ground_truth,
        correct=completion.correct,
        status="ok",
        components=completion.components,
        verified=completion.verified,
    )
    return answer, result
