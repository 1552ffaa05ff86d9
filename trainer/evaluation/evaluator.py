"""Evaluates the weights that the engines serve, on held-out problems."""

import math
import secrets
from itertools import chain
from statistics import mean, pstdev

from common.clients.reward import RewardClient
from common.clients.rollout import GenerationFailed
from common.process import progress
from common.process.loop_thread import LoopThread
from common.prompts.prompter import Prompter
from common.settings.config import Config
from common.wire.schemas import Episode, Prompt, RewardResult
from trainer.evaluation.evaluation import PASS_K, Answer, Evaluation, pass_at_k
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

        The first n answers to a problem count for the accuracy, and for the first `pass_samples`
        problems k more for pass@k. Without verdicts there is only a mean reward. Raises
        ServiceError when an answer or a grade is missing: an evaluation is complete or it fails.
        """
        if not self._held_out:
            return None
        own = self._config.evaluation
        graded = self._loop.call(self._graded_problems(pass_samples))

        verified = self._verdicts.of(result.verified for _, result in chain.from_iterable(graded))
        answers: list[Answer] = []
        shares: list[float] = []
        rewards: list[float] = []
        passed: list[float] = []
        for prompt, of_problem in zip(self._held_out, graded, strict=True):
            counted = [result for _, result in of_problem[: own.n]]
            for_pass = [result for _, result in of_problem[own.n :]]
            # No reward is None here: `_graded_problems` raises for an answer without one.
            rewards += [result.reward or 0.0 for result in counted]
            # In a run with verdicts, too, a single answer may come without one.
            has_verdicts = verified and all(result.verified for _, result in of_problem)
            if has_verdicts:
                shares.append(mean(result.correct for result in counted))
            if has_verdicts and for_pass:
                right = sum(result.correct for result in for_pass)
                passed.append(pass_at_k(PASS_K, right, PASS_K))
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
        self.last = Evaluation(
            step=step,
            accuracy=mean(shares) if shares else None,
            standard_error=pstdev(shares) / math.sqrt(len(shares)) if shares else None,
            num_samples=len(answers),
            pass_at_k=mean(passed) if passed else None,
            k=PASS_K,
            answers=answers,
            mean_reward=mean(rewards),
            verified=verified,
            n=own.n,
            temperature=own.temperature,
            trained_on=sum(self._trained.contain(self._held_out)),
        )
        return self.last

    async def _graded_problems(self, pass_samples: int) -> list[_Graded]:
        """Returns the graded answers to every problem, in order.

        Raises GenerationFailed when a grade is missing.
        """
        own = self._config.evaluation
        greedy = own.temperature == 0
        generator = TokenGenerator(self._services.rollout, self._prompter, self._config)

        async def graded(index: int, prompt: Prompt) -> _Graded:
            # A greedy answer comes beside the samples; it must not count for pass@k.
            samples = 0 if greedy else own.n
            if index < pass_samples:
                samples += PASS_K
            if self._services.environment is not None:
                return await self._graded_episodes(prompt, index, samples=samples, greedy=greedy)
            return await graded_answers(
                generator,
                self._services.reward,
                prompt,
                index=index,
                samples=samples,
                greedy=greedy,
            )

        work = [graded(index, prompt) for index, prompt in enumerate(self._held_out)]
        problems = await together(work, done=progress.moved)
        for prompt, of_problem in zip(self._held_out, problems, strict=True):
            for _, result in of_problem:
                if result.reward is None:
                    raise GenerationFailed(
                        f"an answer could not be graded: {result.reason or result.status}",
                        field="prompt_id",
                        value=prompt.id,
                        remedy="correct the reward function; reward.function_timeout_s limits a "
                        "call of it",
                        code="not_graded",
                    )
        return problems

    async def _graded_episodes(
        self, prompt: Prompt, index: int, *, samples: int, greedy: bool
    ) -> _Graded:
        """Returns a greedy episode of a problem, if `greedy`, and `samples` sampled ones, as
        answers with grades.
        """
        graded: _Graded = []
        for n, is_greedy in ((int(greedy), True), (samples, False)):
            if n == 0:
                continue
            request = episode_request(
                self._config,
                prompt,
                request_id=f"evaluation-{secrets.token_hex(8)}",
                n=n,
                position=SEED_OFFSET + index,
                temperature=sampling_of(self._config, is_greedy)["temperature"],
            )
            request.sampling.max_new_tokens = longest_answer(self._config)
            for episode in await play(self._services, request):
                graded.append(await _graded_episode(self._services, prompt, episode))
        return graded


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
